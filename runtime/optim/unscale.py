"""Dividing gradients by the loss scale and finding out, for all ranks at once, whether they are finite."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile import compat
from zcompile.errors import OptimizerError, RankMismatchError, ScalerError
from zcompile.runtime.optim.norm import nonfinite_gradients, split_gradients
from zcompile.runtime.optim.optimizer_guard import check_complete
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards, Slot


class Verdict(NamedTuple):
    """What the gradients of one optimizer are.

    Attributes:
        overflow: whether one is not finite on any rank.
        names: the parameters of such gradients.
        is_first: whether this is rank 0.
    """

    overflow: bool
    names: list[str]
    is_first: bool


class Members(NamedTuple):
    """An optimizer's parameters: of each compiled model by index, and all others with a name for messages."""

    managed: dict[ParameterShards, list[int]]
    plain: list[tuple[str, Tensor]]


@torch.no_grad()
def unscale(optimizer: Optimizer, scale: float) -> Verdict:
    """Divide an optimizer's gradients by ``scale`` in place, and check them. Waits for the device once. Collective.

    Raises:
        OptimizerError: a gradient is float16, which cannot hold it unscaled, or is not all in ``.grad`` yet.
        RankMismatchError: ranks have different scales, or do something else.
        ScalerError: no parameter has a gradient on any rank.
        ShardingError: a gradient is placed differently from its parameter.
    """
    members = _members(optimizer)
    meshes = [shards.mesh for shards in members.managed]
    for mesh in meshes:
        mesh.announce("GradScaler.unscale_")
    with contextlib.ExitStack() as stack:
        for mesh in meshes:
            stack.enter_context(mesh.raising())
        for shards in members.managed:
            check_complete(optimizer, shards)  # what comes to .grad later would stay scaled
        flags = _unscale(_pieces(members), scale)
    for mesh in meshes:
        if mesh.size > 1:
            flags = flags.to(mesh.device)
            mesh.collectives.all_reduce([flags], "max", "all_reduce of whether gradients are finite").wait()
    for group in _other_groups(members):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
    values = meshes[0].to_host(flags, "whether gradients are finite") if meshes else flags.tolist()
    overflow, is_any, largest, smallest = bool(values[0]), bool(values[1]), values[2], -values[3]
    if largest != smallest:
        raise RankMismatchError(
            f"ranks have loss scales from {smallest:g} to {largest:g}; create the scaler alike and load the same state on every rank"
        )
    if not is_any:
        raise ScalerError("no parameter of the optimizer has a gradient; call scaler.scale(loss).backward() first")
    names = _nonfinite(members) if overflow else []
    return Verdict(overflow, names, all(mesh.rank == 0 for mesh in meshes))


def _members(optimizer: Optimizer) -> Members:
    members = Members({}, [])
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            found = Slot.of(parameter)
            if found is not None:
                members.managed.setdefault(found[0], []).append(found[1])
            else:
                name = names[place] if place < len(names) else f"{place} of group {number}"
                members.plain.append((name, parameter))
    return members


def _unscale(pieces: list[Tensor], scale: float) -> Tensor:
    """Unscale memory in place.

    Returns:
        four numbers, whose maximum over ranks says all: whether something was not finite, whether there was something, the
        scale, and the scale negated.
    """
    numbers = torch.tensor([0.0, bool(pieces), scale, -scale, 1.0 / scale], dtype=torch.float32)
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for piece in pieces:
        kinds.setdefault((piece.device, piece.dtype), []).append(piece)
    flags = {device: numbers.to(device, non_blocking=True, copy=True) for device, _ in kinds}
    for (device, _), targets in kinds.items():
        compat.foreach_unscale(targets, flags[device][0], flags[device][4])
    first, *others = flags.values() or [numbers]
    for other in others:
        first[0].logical_or_(other[0].to(first.device))
    return first[:4]


def _pieces(members: Members) -> list[Tensor]:
    """The memory of the gradients on this rank, in as few tensors as there can be; of real dtypes.

    What lies between flat gradients is zero, and zeros are finite and stay zero.
    """
    pieces: list[Tensor] = []
    for shards, indices in members.managed.items():
        flat, single = split_gradients(shards, indices)
        arenas = shards.gradient_arenas()
        pieces += [arenas[run.key][run.start : run.stop] for run in shards.layout.runs(flat)]
        pieces += [_values(shards.parameters[index]) for index in single]
    for _, parameter in members.plain:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # indices that occur twice may overflow
            pieces.append(_values(parameter))
    pieces = [torch.view_as_real(piece) if piece.is_complex() else piece for piece in pieces]
    if any(piece.dtype is torch.float16 for piece in pieces):
        raise OptimizerError(
            "a gradient is float16, which cannot hold it unscaled; keep parameters in float32 and pass precision='fp16' to compile"
        )
    return pieces


def _values(parameter: Tensor) -> Tensor:
    """What this rank has of a gradient."""
    grad = parameter.grad
    assert grad is not None, "only parameters with a gradient are unscaled"
    return grad.values() if grad.is_sparse else local_of(grad)


def _other_groups(members: Members) -> list[dist.ProcessGroup]:
    """The process groups of DTensors that belong to no compiled model."""
    meshes = dict.fromkeys(parameter.device_mesh for _, parameter in members.plain if isinstance(parameter, DTensor))
    return [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]


def _nonfinite(members: Members) -> list[str]:
    """The parameters whose gradients are not finite: on any rank, those of no compiled model on this one. Collective."""
    names: list[str] = []
    for shards, indices in members.managed.items():
        names += nonfinite_gradients(shards, shards.mesh, indices)
    for name, parameter in members.plain:
        if parameter.grad is not None and not _values(parameter).isfinite().all():
            names.append(name)
    return names
