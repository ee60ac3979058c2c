"""Full tensors over a mesh: cut into shards, gathered from shards, broadcast from rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile.placement import ParamSpec
from zcompile.runtime.mesh import Mesh

#: full tensors of this many bytes are in flight at once
BATCH_BYTES = 256 << 20


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: a flat uint8 view, which every backend can move, whatever the dtype."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def cut(spec: ParamSpec, full: Tensor, rank: int) -> Tensor:
    """The logical part of ``full`` that ``rank`` holds: a view; ``full`` itself when replicated."""
    if spec.shard_dim is None:
        return full
    start, stop = spec.rows(rank)
    return full.narrow(spec.shard_dim, start, stop - start)


def logical(spec: ParamSpec, padded: Tensor, rank: int) -> Tensor:
    """A stored shard without its padding rows: a view."""
    if spec.shard_dim is None:
        return padded
    start, stop = spec.rows(rank)
    return padded.narrow(spec.shard_dim, 0, stop - start)


def write_shard(spec: ParamSpec, padded: Tensor, full: Tensor, rank: int) -> None:
    """Write ``rank``'s part of ``full`` into its stored shard, in place; padding rows become zero."""
    part = cut(spec, full, rank)
    if spec.shard_dim is None:
        padded.copy_(part)
        return
    num_rows = part.shape[spec.shard_dim]
    padded.narrow(spec.shard_dim, 0, num_rows).copy_(part)
    padded.narrow(spec.shard_dim, num_rows, spec.chunk - num_rows).zero_()


def pad(spec: ParamSpec, local: Tensor, rank: int) -> Tensor:
    """A logical local shard as it is stored: contiguous, with padding rows; maybe ``local`` itself."""
    if tuple(local.shape) == spec.padded_local_shape:
        return local.contiguous()
    padded = local.new_zeros(spec.padded_local_shape)
    assert spec.shard_dim is not None
    padded.narrow(spec.shard_dim, 0, local.shape[spec.shard_dim]).copy_(local)
    return padded


def assemble(spec: ParamSpec, gathered: Tensor) -> Tensor:
    """The full tensor from an all-gather of stored shards; contiguous, with a storage of exactly its size."""
    if spec.shard_dim is None:
        return gathered
    dim = spec.shard_dim
    if dim == 0:
        full = gathered.narrow(0, 0, spec.shape[0])
        return full.clone() if spec.is_padded else full
    blocks = gathered.view(spec.world_size, *spec.padded_local_shape).movedim(0, dim)
    rows = (*spec.shape[:dim], spec.world_size * spec.chunk, *spec.shape[dim + 1 :])
    return blocks.reshape(rows).narrow(dim, 0, spec.shape[dim]).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def gather(
    mesh: Mesh, items: Iterable[tuple[ParamSpec, Callable[[], Tensor]]], batch_bytes: int = BATCH_BYTES
) -> Iterator[Tensor]:
    """Yield the full tensor of each stored shard, on every rank; fresh memory that belongs to the caller.

    Collective: all ranks give the same specs in the same order. Gathers are started up to ``batch_bytes`` ahead.

    Args:
        mesh: where the shards live.
        items: spec and function that returns the padded shard (of the spec's shape, of any dtype); called once, in
            order.
        batch_bytes: bound on the memory of gathered tensors that were not yet yielded; one tensor may exceed it.
    """
    batch: list[tuple[ParamSpec, Tensor, dist.Work | None]] = []
    num_bytes = 0
    for spec, make in items:
        shard = make()
        size = shard.nbytes * (spec.world_size if spec.is_sharded else 1)
        if batch and num_bytes + size > batch_bytes:
            yield from _finish(batch)
            num_bytes = 0
        batch.append(_start(mesh, spec, shard))
        num_bytes += size
    yield from _finish(batch)


def _start(mesh: Mesh, spec: ParamSpec, shard: Tensor) -> tuple[ParamSpec, Tensor, dist.Work | None]:
    if not spec.is_sharded or mesh.size == 1:
        return spec, shard.detach().clone(memory_format=torch.contiguous_format), None
    out = shard.new_empty(spec.padded_full_shape)
    work = dist.all_gather_into_tensor(raw(out), raw(shard), group=mesh.group, async_op=True)
    return spec, out, work


def _finish(batch: list[tuple[ParamSpec, Tensor, dist.Work | None]]) -> Iterator[Tensor]:
    while batch:
        spec, out, work = batch.pop(0)
        if work is not None:
            work.wait()
        yield assemble(spec, out)


@torch.no_grad()
def broadcast(mesh: Mesh, tensors: Iterable[Tensor]) -> None:
    """Overwrite each tensor with rank 0's value, in place. Collective; nothing happens on a mesh of one rank."""
    if mesh.size == 1:
        return
    pending: list[tuple[Tensor, Tensor, dist.Work]] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        direct = tensor.is_contiguous() and tensor.device == mesh.device
        staged = tensor.detach() if direct else tensor.detach().to(mesh.device).contiguous()
        work = dist.broadcast(raw(staged), group=mesh.group, group_src=0, async_op=True)
        assert work is not None
        pending.append((tensor, staged, work))
    for tensor, staged, work in pending:
        work.wait()
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)
