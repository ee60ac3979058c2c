"""What of the model's and the optimizer's tensors lies on this rank: the parts that a checkpoint is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.placement import ParamSpec
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding import state
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of one tensor, without padding.

    Attributes:
        local: the memory, on any device: read when saved, written when loaded.
        shape: of the full tensor.
        offsets: where the part begins in it.
        is_whole: every rank has all of it, so one of them saves it.
    """

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_whole: bool

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """A tensor that is the same on every rank."""
        return cls(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), True)

    @classmethod
    def of_parameter(cls, spec: ParamSpec, local: Tensor, rank: int) -> Piece:
        """A tensor that is placed as a parameter is."""
        offsets = [0] * len(spec.shape)
        if spec.shard_dim is not None:
            offsets[spec.shard_dim] = spec.rows(rank)[0]
        return cls(local.detach(), spec.shape, tuple(offsets), not spec.is_sharded)


def parameter_pieces(shards: ParameterShards) -> dict[str, Piece]:
    """The stored shard of every parameter, by canonical name: the memory itself."""
    rank = shards.mesh.rank
    return {
        name: Piece.of_parameter(spec, full_tensors.logical(spec, shards.local(name), rank), rank)
        for name, spec in shards.specs.items()
    }


def optimizer_pieces(
    shards: ParameterShards, optimizer: Optimizer
) -> tuple[dict[tuple[str, str], Piece], dict[str, Any]]:
    """An optimizer's state by parameter name: tensors that are placed as their parameter is, and everything else.

    Returns:
        The pieces by parameter and key; and ``{"state": {name: {key: number or 0-dim tensor}}, "param_groups": [...]}``, the
        same on every rank.

    Raises:
        StateError: the optimizer holds parameters of another model, or state whose placement is unknown.
    """
    names = state.parameter_names(shards, optimizer)
    pieces: dict[tuple[str, str], Piece] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        entry = optimizer.state.get(parameter)
        if not entry:
            continue
        numbers[name] = {}
        for key in sorted(entry, key=str):  # the same order on every rank, however the state came to be
            value = entry[key]
            if isinstance(value, Tensor) and value.dim():
                spec = state.check_placed(shards, name, key, value)
                pieces[name, key] = Piece.of_parameter(spec, local_of(value), shards.mesh.rank)
            else:
                numbers[name][key] = local_of(value).detach().cpu() if isinstance(value, Tensor) else value
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return pieces, {"state": numbers, "param_groups": groups}


def empty_state(shards: ParameterShards, name: str, dtype: torch.dtype) -> tuple[Piece, Tensor]:
    """Memory for one loaded state tensor of a parameter: the piece to fill, and the tensor as the optimizer holds it."""
    spec, mesh = shards.specs[name], shards.mesh
    device = torch.device("cpu") if shards.hosting.hosts_states(shards.index(name)) else mesh.device
    local = torch.empty(spec.local_shape(mesh.rank), dtype=dtype, device=device)
    return Piece.of_parameter(spec, local, mesh.rank), shards.as_seen(spec, local)


def own_part(pieces: Mapping[str, Piece], rank: int, size: int) -> dict[str, Piece]:
    """The pieces that ``rank`` saves: its parts of what is divided, and its share of what every rank has.

    Whole tensors go to the rank with the least to write so far, which all ranks find alike.
    """
    written = [0] * size
    mine: dict[str, Piece] = {}
    for name, piece in pieces.items():
        writer = rank
        if piece.is_whole:
            writer = written.index(min(written))
            written[writer] += piece.local.nbytes
        if writer == rank and (piece.is_whole or piece.local.numel()):
            mine[name] = piece
    return mine


def staged(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Copies in CPU memory, which training does not change any more."""
    return {name: dataclasses.replace(p, local=p.local.to("cpu", copy=True)) for name, p in pieces.items()}
