"""Checkpoints on disk: ``save_checkpoint`` and ``load_checkpoint``, at any world size and stage."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

import zcompile
from zcompile.errors import CheckpointError, ConfigError, StateError
from zcompile.module import CompiledModule
from zcompile.runtime import state
from zcompile.runtime.checkpoint import folder
from zcompile.runtime.checkpoint.folder import Manifest
from zcompile.runtime.checkpoint.pieces import Piece, empty_state, optimizer_pieces, own_part, parameter_pieces, staged
from zcompile.runtime.checkpoint.random_state import random_state, set_random_state
from zcompile.runtime.checkpoint.saving import Meeting, Saving, write
from zcompile.runtime.checkpoint.storage import Stored, pack, unsafe_types

log = logging.getLogger("zcompile")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside the state of the objects that were given.

    Attributes:
        step: the number that ``save_checkpoint`` was given.
        extra: rank 0's ``extra``, on every rank.
    """

    step: int
    extra: Any


def save_checkpoint(
    path: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
    step: int = 0,
    extra: Any = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint of a training run, from which it goes on bit for bit at the same world size. Collective.

    Each rank writes the shards that it holds; nothing is gathered. The checkpoint at ``path`` is replaced at one moment, when
    all of the new one is on the device: whatever dies before, the old one is there and loads. What a writer that died has
    left in ``path`` is removed by the next save there. Gradients are not saved: save between steps.

    Args:
        path: a folder, on a file system that all ranks share; made if it is not there.
        model: its parameters (the masters), saved buffers and extra state. Buffers that differ between ranks are saved for each.
        optimizer: over the model's parameters; its state is saved by parameter name, with the options of its groups.
        scaler: anything with ``state_dict`` and ``load_state_dict``; rank 0's is saved.
        scheduler: likewise.
        data: the position in the data, likewise; each rank's is saved where they differ.
        step: a number to find back, such as the count of optimizer steps.
        extra: anything that ``torch.save`` takes; rank 0's is saved. What is more than tensors, numbers, strings and containers
            loads only after ``torch.serialization.add_safe_globals``.
        asynchronous: copy the values to CPU memory, return, and write in a thread while training goes on.

    Returns:
        None; with ``asynchronous``, a handle with ``done()`` and ``result(timeout)``. An error comes from ``result``, or else
        from the next save. The process waits for the thread before it ends.

    Raises:
        CheckpointError: on every rank, when one could not write; the checkpoint that was at ``path`` is still there.
        StateError: a parameter without a value, or an optimizer whose state cannot be divided.
        RankError: another rank is gone, or makes another call.
    """
    helpers = {"scaler": scaler, "scheduler": scheduler, "data": data}
    path = Path(path)
    meeting = meeting_of(model, "save_checkpoint", path, "what was there before is still there")
    rank = meeting.agreement.rank
    own: _Own | None = None
    name = ""

    def prepare() -> dict[str, Any]:
        nonlocal own, name
        _check_helpers(helpers)
        own = _own(model, optimizer, data, asynchronous)
        own.blobs |= _shared_blobs(scaler, scheduler, extra) if rank == 0 else {}
        if rank == 0:
            name = folder.begin(path)
        return {"call": f"{path} at step {step}", "data": name, "digests": own.digests}

    try:
        answers = meeting.step("preparation", prepare)
        assert own is not None
        meeting.same(answers, "call")
    except CheckpointError:
        if name:
            folder.discard(path, name)
        raise
    differs = {key: [a["digests"][key] for a in answers] for key in own.digests}
    for key, digests in differs.items():
        if digests[rank] != digests[0]:
            own.blobs[f"{key}.{rank}"] = own.packed[key]
    manifest = dataclasses.replace(
        own.manifest,
        data=answers[0]["data"],
        step=step,
        helpers=[key for key, value in helpers.items() if value is not None],
        data_differs=len(set(differs["data"])) > 1,
    )
    meeting = dataclasses.replace(meeting, background=asynchronous)
    pieces, blobs = own.pieces, own.blobs
    if not asynchronous:
        write(meeting, path, manifest, pieces, blobs)
        return None
    model._checkpoints.pending = Saving(lambda: write(meeting, path, manifest, pieces, blobs))
    return model._checkpoints.pending


def load_checkpoint(
    path: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
) -> Loaded:
    """Load what ``save_checkpoint`` wrote, at any world size and stage, into a model that may be on ``meta``. Collective.

    Each rank reads the rows that it holds, at most one saved piece at a time beside the state itself. The state of random
    number generators is restored where the world size is the same and left alone otherwise. No code of the files is run:
    tensors and objects are loaded with ``torch.load(weights_only=True)``, the metadata with a list of allowed types.

    Args:
        path: as given to ``save_checkpoint``.
        model: of the same parameters and buffers.
        optimizer: over the same parameters, freshly built or not. None leaves a saved one out.
        scaler: as saved, like the next two; one that was saved and is not given is left out, with a warning.
        scheduler: after the optimizer, as it was built.
        data: ranks that were at different positions need the world size at which they were saved.

    Raises:
        CheckpointError: no complete checkpoint, or one that cannot be read, on every rank.
        StateError: of another model or optimizer, or without something that is given: names the first difference. Nothing was
            changed then.
        RankError: another rank is gone, or makes another call.
    """
    helpers = {"scaler": scaler, "scheduler": scheduler, "data": data}
    path = Path(path)
    meeting = meeting_of(model, "load_checkpoint", path, "nothing was changed")
    reading: _Reading | None = None

    def check() -> dict[str, Any]:
        nonlocal reading
        _check_helpers(helpers)
        reading = _Reading(path, model, optimizer, helpers)
        return {"data": reading.manifest.data}

    answers = meeting.step("check", check)
    assert reading is not None
    meeting.same(answers, "data")
    aftermath = "the model is partly overwritten; load again before training goes on"
    dataclasses.replace(meeting, aftermath=aftermath).step("reading", reading.fill)
    return Loaded(reading.manifest.step, reading.values["extra"])


# Saving. --------------------------------------------------------------------------------------------------------------


@dataclass
class _Own:
    """What this rank has to save.

    Attributes:
        manifest: without what only the call knows.
        pieces: that it writes, by name in the files.
        blobs: that it writes.
        packed: what it writes if rank 0's differs.
        digests: of what is packed.
    """

    manifest: Manifest
    pieces: dict[str, Piece]
    blobs: dict[str, bytes]
    packed: dict[str, bytes]
    digests: dict[str, str]


def _own(model: CompiledModule, optimizer: Optimizer | None, data: Any, asynchronous: bool) -> _Own:
    shards = model._session.runner.shards
    rank, size = shards.mesh.rank, shards.mesh.size
    buffers, extra_state = saved_buffers(model)
    unfilled = shards.unfilled() + [n for n, b in buffers.items() if b.is_meta]
    if unfilled:
        raise StateError(
            f"'{unfilled[0]}' has no value yet ({len(unfilled)} in all) and cannot be saved; fill it first"
        )
    pieces = {f"model.{name}": piece for name, piece in parameter_pieces(shards).items()}
    blobs = {f"random.{rank}": pack(random_state(shards.mesh.device))}
    saved_optimizer = None
    if optimizer is not None:
        states, numbers = optimizer_pieces(shards, optimizer)
        pieces |= {f"optimizer.{name}.{key}": piece for (name, key), piece in states.items()}
        dtypes: dict[str, dict[str, str]] = {}
        for (name, key), piece in states.items():
            dtypes.setdefault(name, {})[key] = dtype_name(piece.local.dtype)
        saved_optimizer = {"type": type(optimizer).__name__, "state": dtypes}
        if rank == 0:
            blobs["optimizer"] = pack(numbers)
    pieces = own_part(pieces, rank, size)
    packed = {
        "buffers": pack({"buffers": {n: b.cpu() for n, b in buffers.items()}, "extra_state": extra_state}),
        "data": pack(None if data is None else data.state_dict()),
    }
    if rank == 0:
        pieces |= {f"model.{name}": Piece.whole(buffer) for name, buffer in buffers.items()}
        blobs["data"], blobs["extra_state"] = packed["data"], pack(extra_state)
    manifest = Manifest(
        data="",
        step=0,
        world_size=size,
        stage=model._config.stage,
        versions={"zcompile": zcompile.__version__, "torch": str(torch.__version__)},
        parameters={
            name: {"names": list(spec.names), "shape": list(spec.shape), "dtype": dtype_name(spec.dtype)}
            for name, spec in shards.specs.items()
        },
        buffers={n: {"shape": list(b.shape), "dtype": dtype_name(b.dtype)} for n, b in buffers.items()},
        optimizer=saved_optimizer,
        helpers=[],
    )
    digests = {key: hashlib.sha256(blob).hexdigest() for key, blob in packed.items()}
    return _Own(manifest, staged(pieces) if asynchronous else pieces, blobs, packed, digests)


def _shared_blobs(scaler: Any, scheduler: Any, extra: Any) -> dict[str, bytes]:
    """What rank 0 saves for all."""
    blobs: dict[str, bytes] = {}
    for name, value in {"scaler": scaler, "scheduler": scheduler}.items():
        if value is not None:
            blobs[name] = pack(value.state_dict())
    blobs["extra"] = pack(extra)
    for name, blob in blobs.items():
        if types := unsafe_types(blob):
            log.warning(
                "%s holds %s: it will load only after torch.serialization.add_safe_globals([...])",
                name,
                ", ".join(types),
            )
    return blobs


# Loading. -------------------------------------------------------------------------------------------------------------


class _Reading:
    """A checkpoint that fits the model: everything about it is checked before anything is changed."""

    def __init__(
        self, path: Path, model: CompiledModule, optimizer: Optimizer | None, helpers: Mapping[str, Any]
    ) -> None:
        self._model, self._optimizer, self._helpers = model, optimizer, helpers
        self._shards = shards = model._session.runner.shards
        rank, size = shards.mesh.rank, shards.mesh.size
        self.manifest = manifest = folder.open_checkpoint(path)
        folder.check_files(path, manifest, rank, size)
        self._same_size = size == manifest.world_size
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
        if optimizer is not None:
            state.matching_groups(shards, optimizer, self.values["optimizer"]["param_groups"])

    def fill(self) -> None:
        """Overwrite everything that was given with what was saved."""
        model, shards, rank = self._model, self._shards, self._shards.mesh.rank
        device = shards.mesh.device
        own = parameter_pieces(shards)
        pieces = {f"model.{source}": own[name] for name, source in self._sources.items()}
        buffers = {
            name: torch.empty(entry["shape"], dtype=_dtype(entry["dtype"]), device=device)
            for name, entry in self.manifest.buffers.items()
        }
        pieces |= {f"model.{name}": Piece.whole(buffer) for name, buffer in buffers.items()}
        states: dict[str, dict[str, Tensor]] = {}
        if self._optimizer is not None and self.manifest.optimizer is not None:
            for source, dtypes in self.manifest.optimizer["state"].items():
                name = shards.names[shards.index(source)]
                for key, dtype in dtypes.items():
                    piece, tensor = empty_state(shards, name, _dtype(dtype))
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


# Both. ----------------------------------------------------------------------------------------------------------------


def meeting_of(model: CompiledModule, call: str, path: Path, aftermath: str) -> Meeting:
    """Where the ranks meet for one save, load or export. Collective."""
    checkpoints = model._checkpoints
    checkpoints.settle()
    model._announce(call)
    checkpoints.count += 1
    return Meeting(model._session.runner.agreement, f"{call}({str(path)!r})", str(checkpoints.count), aftermath)


def _check_helpers(helpers: Mapping[str, Any]) -> None:
    for name, value in helpers.items():
        if value is not None and not isinstance(value, Stateful):
            raise ConfigError(
                f"{name} is a {type(value).__name__} without state_dict and load_state_dict; give it both"
            )


def saved_buffers(model: CompiledModule) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The buffers that the model's state dict holds, and the extra state of its modules."""
    plain = model.original.state_dict()
    buffers = {n: b for n, b in model.original.named_buffers(remove_duplicate=False) if n in plain}
    return buffers, {n: value for n, value in plain.items() if n.rpartition(".")[2] == "_extra_state"}


def _check_shape(kind: str, name: str, shape: tuple[int, ...], saved: list[int]) -> None:
    if list(shape) != saved:
        raise StateError(
            f"{kind} '{name}' has shape {list(shape)} and the checkpoint has {saved}; load a checkpoint of the same model"
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"checkpoint has the dtype {name!r}, which this torch does not know")
    return dtype
