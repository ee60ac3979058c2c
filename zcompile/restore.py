"""A checkpoint on its way into a model: checked whole before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.contents import dtype_of, saved_buffers
from zcompile.errors import StateError
from zcompile.module import CompiledModule
from zcompile.runtime.checkpoint.folder import Manifest
from zcompile.runtime.checkpoint.pieces import Piece, empty_state, parameter_pieces
from zcompile.runtime.checkpoint.random_state import set_random_state
from zcompile.runtime.checkpoint.storage import Stored
from zcompile.runtime.sharding import state

log = logging.getLogger("zcompile")


class Restore:
    """A checkpoint that fits what is given: it is checked when this is made, and loaded by ``fill``.

    Args:
        path: of the checkpoint.
        manifest: of the checkpoint.
        model: to be filled.
        optimizer: likewise, or None.
        helpers: ``scaler``, ``scheduler`` and ``data``, each of which may be None.

    Attributes:
        values: the objects in it.

    Raises:
        StateError: names the first thing that does not fit.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        model: CompiledModule,
        optimizer: Optimizer | None,
        helpers: Mapping[str, Any],
    ) -> None:
        self.manifest = manifest
        self._model, self._optimizer, self._helpers = model, optimizer, helpers
        self._shards = shards = model._session.runner.shards
        rank = shards.mesh.rank
        self._same_size = shards.mesh.size == manifest.world_size
        self._sources = self._match_parameters()
        self._match_buffers()
        self._match_helpers()
        self._stored = Stored(path / manifest.data)
        names = ["extra", "extra_state", *(n for n in ("scaler", "scheduler") if helpers[n] is not None)]
        names += ["optimizer"] if optimizer is not None else []
        if helpers["data"] is not None:
            names.append(f"data.{rank}" if f"data.{rank}" in self._stored.names else "data")
        names += [n for k in ("random", "buffers") if self._same_size and (n := f"{k}.{rank}") in self._stored.names]
        self.values = self._stored.read({}, names)
        _, extra_state = saved_buffers(model)
        if differs := sorted(self.values["extra_state"].keys() ^ extra_state.keys()):
            where = "the model" if differs[0] not in extra_state else "the checkpoint"
            raise StateError(f"'{differs[0]}' is not in {where}; load a checkpoint of the same model")
        if optimizer is not None:
            state.matching_groups(shards, optimizer, self.values["optimizer"]["param_groups"])

    def fill(self) -> None:
        """Overwrite everything that was given with what was saved."""
        model, shards, rank = self._model, self._shards, self._shards.mesh.rank
        device = shards.mesh.device
        own = parameter_pieces(shards)
        pieces = {f"model.{source}": own[name] for name, source in self._sources.items()}
        buffers = {
            name: torch.empty(entry["shape"], dtype=dtype_of(entry["dtype"]), device=device)
            for name, entry in self.manifest.buffers.items()
        }
        pieces |= {f"model.{name}": Piece.whole(buffer) for name, buffer in buffers.items()}
        states: dict[str, dict[str, Tensor]] = {}
        if self._optimizer is not None and self.manifest.optimizer is not None:
            for source, dtypes in self.manifest.optimizer["state"].items():
                name = shards.names[shards.index(source)]
                for key, dtype in dtypes.items():
                    piece, tensor = empty_state(shards, name, dtype_of(dtype))
                    pieces[f"optimizer.{source}.{key}"] = piece
                    states.setdefault(source, {})[key] = tensor
        self._stored.read(pieces)
        for name in shards.names:
            shards.mark_filled(name)
        mine = self.values.get(f"buffers.{rank}", {"buffers": {}, "extra_state": self.values["extra_state"]})
        model.load_buffers(buffers | mine["buffers"])
        for name, value in mine["extra_state"].items():
            model._load_extra_state(name, value)
        if self._optimizer is not None:
            saved = self.values["optimizer"]
            entries = {name: {**entry, **states.get(name, {})} for name, entry in saved["state"].items()}
            full = {"state": entries, "param_groups": saved["param_groups"]}
            state.load_full_optimizer_state_dict(shards, self._optimizer, full, placed=True)
        for name, helper in self._helpers.items():
            if helper is not None:
                helper.load_state_dict(self.values.get(f"{name}.{rank}", self.values.get(name)))
        if self._same_size:
            set_random_state(self.values[f"random.{rank}"], device)

    def _match_parameters(self) -> dict[str, str]:
        """By the model's name of each parameter, its name in the checkpoint."""
        saved = self.manifest.parameters
        of_alias = {alias: name for name, entry in saved.items() for alias in entry["names"]}
        sources: dict[str, str] = {}
        for name, spec in self._shards.specs.items():
            found = list(dict.fromkeys(of_alias[alias] for alias in spec.names if alias in of_alias))
            if not found:
                raise StateError(f"parameter '{name}' is not in the checkpoint; load a checkpoint of the same model")
            if len(found) > 1 or found[0] in sources.values():
                tied, where = (found, "the model") if len(found) > 1 else (saved[found[0]]["names"], "the checkpoint")
                raise StateError(
                    f"parameters {tied} are one in {where} and several in the other; tie the same weights as when it was saved"
                )
            _check_shape("parameter", name, spec.shape, saved[found[0]]["shape"])
            sources[name] = found[0]
        extra = [name for name in saved if name not in sources.values()]
        if extra:
            raise StateError(
                f"checkpoint has the parameter '{extra[0]}' ({len(extra)} in all), which the model does not have; "
                "load a checkpoint of the same model"
            )
        return sources

    def _match_buffers(self) -> None:
        buffers, _ = saved_buffers(self._model)
        saved = self.manifest.buffers
        for name, buffer in buffers.items():
            if name not in saved:
                raise StateError(f"buffer '{name}' is not in the checkpoint; load a checkpoint of the same model")
            _check_shape("buffer", name, tuple(buffer.shape), saved[name]["shape"])
        extra = [name for name in saved if name not in buffers]
        if extra:
            raise StateError(
                f"checkpoint has the buffer '{extra[0]}', which the model does not save; load a checkpoint of the same model"
            )

    def _match_helpers(self) -> None:
        """What was saved against what is given: too little is an error, too much is said."""
        manifest, optimizer = self.manifest, self._optimizer
        saved = [*(["optimizer"] if manifest.optimizer is not None else []), *manifest.helpers]
        given = {"optimizer": optimizer, **self._helpers}
        for name, value in given.items():
            if value is not None and name not in saved:
                raise StateError(f"{name} is given and the checkpoint has none; pass {name}=None")
        if optimizer is not None and manifest.optimizer is not None:
            kind = type(optimizer).__name__
            if kind != manifest.optimizer["type"]:
                raise StateError(
                    f"optimizer is {kind} and the checkpoint has the state of {manifest.optimizer['type']}; pass the same kind, "
                    "or optimizer=None"
                )
        if given["data"] is not None and manifest.data_differs and not self._same_size:
            raise StateError(
                f"data has a position for each of {manifest.world_size} ranks in the checkpoint and there are "
                f"{self._shards.mesh.size} ranks now; pass data=None and set the positions from step"
            )
        if self._shards.mesh.rank == 0:
            left = [name for name in saved if given[name] is None]
            if left:
                log.warning("the checkpoint has the state of %s, which was not given: left out", ", ".join(left))
            if not self._same_size:
                log.warning(
                    "the checkpoint was saved by %d ranks and %d load it: random number generators stay as they are",
                    manifest.world_size,
                    self._shards.mesh.size,
                )


def _check_shape(kind: str, name: str, shape: tuple[int, ...], saved: list[int]) -> None:
    if list(shape) != saved:
        raise StateError(
            f"{kind} '{name}' has shape {list(shape)} and the checkpoint has {saved}; load a checkpoint of the same model"
        )
