"""Gradient norms and clipping over flat gradient memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zcompile import compat
from zcompile.errors import NonFiniteError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.adamw_update import KERNEL_DTYPES
from zcompile.runtime.sharding.arenas import ArenaKey
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards


@torch.no_grad()
def clip_grad_norm_(
    shards: ParameterShards,
    mesh: Mesh,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their total norm is at most ``max_norm``.

    The value of ``torch.nn.utils.clip_grad_norm_`` on the same DTensors, at one pass over flat memory and one
    collective of one number. Replicated parameters count once, padding never. Like torch's, gradients are always
    multiplied, by at most 1.

    Collective: every rank calls it, also one without gradients.

    Args:
        shards: the model's parameters; those whose ``.grad`` is None do not count.
        mesh: the mesh of the shards.
        max_norm: the bound.
        norm_type: the order p; ``inf`` is the largest magnitude.
        error_if_nonfinite: raise instead of scaling by a norm that is NaN or infinite (waits for the device).

    Returns:
        The total norm before clipping: no dimensions, float32 (float64 if a gradient is), on the mesh's device, the
        same bits on every rank. NaN and infinity anywhere propagate.

    Raises:
        ShardingError: a ``.grad`` that is placed differently from its parameter.
        NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is set. On every rank, with the same text; the
            gradients are as they were.
    """
    with mesh.raising():
        flat, single = split_gradients(shards)
    norm = _total_norm(shards, mesh, flat, single, float(norm_type))
    if error_if_nonfinite:
        (value,) = mesh.to_host(norm.reshape(1), "the gradient norm")
        if not math.isfinite(value):
            names = nonfinite_gradients(shards, mesh)
            raise NonFiniteError(
                f"total norm of order {norm_type} of the gradients is {value}, so they cannot be clipped: "
                f"{describe_nonfinite(names)}; pass error_if_nonfinite=False to scale by it anyway"
            )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    runs = shards.layout.runs(flat)
    arenas = shards.gradient_arenas()
    targets = [arenas[run.key][run.start : run.stop] for run in runs]
    targets += [local for index in single if (local := _local_grad(shards, index)).numel()]
    if targets:
        compat.foreach_mul(targets, factor.to(targets[0].device))
    # A NaN factor makes NaN of the zeros between gradients, and there it would outlive zero_grad(set_to_none=False).
    holes = [hole for key in {run.key for run in runs} for hole in shards.holes(key)]
    if holes:
        compat.foreach_zero(holes)
    return norm


def nonfinite_gradients(shards: ParameterShards, mesh: Mesh, indices: Iterable[int] | None = None) -> list[str]:
    """Of these parameters (None: all), those with a gradient that is not finite on some rank, in the model's order.

    Waits for the device. Collective.
    """
    bad = torch.zeros(len(shards.parameters), dtype=torch.float32, device=mesh.device)
    for index in range(len(shards.parameters)) if indices is None else indices:
        if shards.parameters[index].grad is not None:
            bad[index] = _local_grad(shards, index).isfinite().logical_not().any()
    if mesh.size > 1:
        mesh.collectives.all_reduce([bad], "max", "all_reduce of which gradients are finite").wait()
    flags = mesh.to_host(bad, "which gradients are finite")
    return [name for name, flag in zip(shards.names, flags, strict=True) if flag]


def describe_nonfinite(names: Sequence[str]) -> str:
    """Which gradients are not finite, for a message."""
    if not names:
        return "every gradient is finite"
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return f"the gradient of parameter {names[0]!r}{more} is not finite"


def split_gradients(shards: ParameterShards, indices: Iterable[int] | None = None) -> tuple[list[int], list[int]]:
    """Of these parameters (None: all), those whose gradient lies in an arena, and those with one of their own.

    Raises:
        ShardingError: a gradient that is placed differently from its parameter.
    """
    flat: list[int] = []
    single: list[int] = []
    for index in range(len(shards.parameters)) if indices is None else indices:
        grad = shards.parameters[index].grad
        if grad is None:
            continue
        if shards.gradients.is_flat(index, grad):
            flat.append(index)
        else:
            shards.gradients.checked(index, grad)
            single.append(index)
    return flat, single


def _total_norm(shards: ParameterShards, mesh: Mesh, flat: list[int], single: list[int], order: float) -> Tensor:
    wide = any(shards.spec(i).dtype is torch.float64 for i in (*flat, *single))
    dtype = torch.float64 if wide else torch.float32
    if order == 0:
        return _num_nonzero(shards, mesh, sorted((*flat, *single))).to(dtype)
    if order < 0:  # padding would dominate: smallest magnitudes
        flat, single = [], sorted((*flat, *single))
    pieces = _pieces(shards, mesh, flat, single)
    if order == 2 and pieces and all(p.is_cuda and p.dtype in KERNEL_DTYPES for p in pieces):
        from zcompile.runtime.kernels.sumsq import sum_of_squares  # Triton is imported where it is used

        return _all_sum(mesh, sum_of_squares(pieces).total).sqrt().to(dtype)
    norms = torch.stack(compat.foreach_norm(pieces, order, dtype)).double() if pieces else None
    if math.isinf(order):
        neutral = 0.0 if order > 0 else math.inf
        local = _number(mesh, neutral) if norms is None else (norms.amax() if order > 0 else norms.amin())
        everyone = _all_gather_scalar(mesh, local.to(mesh.device))  # not an all-reduce: MAX loses NaN on some backends
        return (everyone.amax() if order > 0 else everyone.amin()).to(dtype)
    total = _number(mesh, 0.0) if norms is None else norms.pow(order).sum()  # float64: powers overflow late
    return _all_sum(mesh, total).pow(1.0 / order).to(dtype)


def _all_sum(mesh: Mesh, total: Tensor) -> Tensor:
    """The sum over ranks, on the mesh's device."""
    total = total.to(mesh.device)
    if mesh.size > 1:
        mesh.collectives.all_reduce([total], "sum", "all_reduce of the gradient norm").wait()
    return total


def _pieces(shards: ParameterShards, mesh: Mesh, flat: list[int], single: list[int]) -> list[Tensor]:
    """The local memory whose norms add up to the total: replicated gradients on rank 0 only."""
    arenas = shards.gradient_arenas()

    def counts(key: ArenaKey, start: int) -> bool:
        return mesh.rank == 0 or start < shards.layout.sharded_sizes[key]

    pieces = [arenas[run.key][run.start : run.stop] for run in shards.layout.runs(flat) if counts(run.key, run.start)]
    for index in single:
        if mesh.rank == 0 or shards.spec(index).is_sharded:
            local = _local_grad(shards, index)
            if local.numel():
                pieces.append(local)
    return pieces


def _num_nonzero(shards: ParameterShards, mesh: Mesh, indices: list[int]) -> Tensor:
    """torch's norm of order 0: how many gradients have a nonzero element."""
    counts = torch.zeros(len(shards.parameters), dtype=torch.float64, device=mesh.device)
    for index in indices:
        counts[index] = torch.count_nonzero(_local_grad(shards, index))
    if mesh.size > 1:
        mesh.collectives.all_reduce([counts], "sum", "all_reduce of the gradient norm").wait()
    return torch.count_nonzero(counts)


def _local_grad(shards: ParameterShards, index: int) -> Tensor:
    grad = shards.parameters[index].grad
    assert grad is not None
    return local_of(grad)


def _all_gather_scalar(mesh: Mesh, value: Tensor) -> Tensor:
    value = value.reshape(1)
    if mesh.size == 1:
        return value
    everyone = value.new_empty(mesh.size)
    mesh.collectives.all_gather([everyone], [value], "all_gather of the gradient norm").wait()
    return everyone


def _number(mesh: Mesh, value: float) -> Tensor:
    """A float64 number on the mesh's device."""
    return torch.full((), value, dtype=torch.float64, device=mesh.device)
