"""Full tensors over a mesh: cut into shards, gathered from shards, broadcast from rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from zcompile.placement import ParamSpec
from zcompile.runtime.communication.mesh import Mesh

#: full tensors of this many bytes are in flight at once
BATCH_BYTES = 256 << 20


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

    Collective: all ranks give the same specs in the same order, and take all that is yielded.

    Args:
        mesh: where the shards live.
        items: spec and function that returns the padded shard (of the spec's shape, of any dtype); called once, in
            order.
        batch_bytes: bound on the memory of gathered tensors that were not yet yielded; one tensor may exceed it.
    """
    batch: list[tuple[ParamSpec, Tensor]] = []
    num_bytes = 0
    for spec, make in items:
        shard = make().to(mesh.device)
        size = shard.nbytes * (spec.world_size if spec.is_sharded else 1)
        if batch and num_bytes + size > batch_bytes:
            yield from _gather_batch(mesh, batch)
            batch, num_bytes = [], 0
        batch.append((spec, shard))
        num_bytes += size
    yield from _gather_batch(mesh, batch)


def _gather_batch(mesh: Mesh, batch: list[tuple[ParamSpec, Tensor]]) -> Iterator[Tensor]:
    """One coalesced all-gather; each result is let go when it is yielded."""
    results: list[Tensor | None] = []
    outputs: list[Tensor] = []
    inputs: list[Tensor] = []
    for spec, shard in batch:
        if not spec.is_sharded or mesh.size == 1:
            results.append(shard.detach().clone(memory_format=torch.contiguous_format))
        else:
            outputs.append(shard.new_empty(spec.padded_full_shape))
            results.append(outputs[-1])
            inputs.append(shard.detach())
    if outputs:
        mesh.collectives.all_gather(outputs, inputs, f"all_gather of full tensors from {batch[0][0].name!r} on").wait()
    specs = [spec for spec, _ in batch]
    del batch, outputs, inputs
    for position, spec in enumerate(specs):
        gathered, results[position] = results[position], None
        assert gathered is not None
        full = assemble(spec, gathered)
        del gathered
        yield full


@torch.no_grad()
def broadcast(mesh: Mesh, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Overwrite each tensor with rank ``root``'s value, in place. Collective; one rank alone does nothing."""
    if mesh.size == 1:
        return
    pairs: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        if tensor.numel():
            direct = tensor.is_contiguous() and tensor.device == mesh.device
            pairs.append((tensor, tensor.detach() if direct else tensor.detach().to(mesh.device).contiguous()))
    if not pairs:
        return
    mesh.collectives.broadcast([staged for _, staged in pairs], root, f"broadcast from rank {root}").wait()
    for tensor, staged in pairs:
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)


def broadcast_object(mesh: Mesh, value: Any, root: int = 0) -> Any:
    """Rank ``root``'s value, on every rank: a copy of anything that pickles. Collective; one rank alone gets its own."""
    if mesh.size == 1:
        return value
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) if mesh.rank == root else torch.empty(0)
    length = torch.tensor([data.numel()])
    broadcast(mesh, [length], root)
    if mesh.rank != root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast(mesh, [data], root)
    return value if mesh.rank == root else pickle.loads(bytes(data.tolist()))
