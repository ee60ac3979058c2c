"""Flat memory for the shards of one model: where each lies, and which runs of it are contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from zcompile.placement import ParamSpec

#: every shard starts at a multiple of this (Inductor assumes 16, kernels like whole cache lines)
ALIGNMENT_BYTES = 256

#: trainable shards are cut into chunks of at least this, because gradient memory comes and goes by the chunk: little beside
#: the activations of a model that has several, and enough that a kernel's launch is nothing beside reading it
CHUNK_BYTES = 128 << 20

#: but there are about this many chunks at most: each is one launch of the optimizer and one of the norm
MAX_CHUNKS = 16


class ArenaKey(NamedTuple):
    """What the shards of one arena have in common."""

    dtype: torch.dtype
    trainable: bool
    chunk: int = 0

    def __str__(self) -> str:
        kind = f"{str(self.dtype).removeprefix('torch.')}{'' if self.trainable else ' frozen'}"
        return f"{kind} {self.chunk}" if self.chunk else kind


class Place(NamedTuple):
    """Where one shard lies in its arena, in elements."""

    key: ArenaKey
    start: int
    numel: int  # the padded shard
    extent: int  # up to the next shard: numel rounded up to the alignment


class Run(NamedTuple):
    """A contiguous piece of one arena, in elements: whole shards and the holes between them."""

    key: ArenaKey
    start: int
    stop: int


class ArenaLayout:
    """Where each shard lies: equal on every rank.

    Sharded parameters come first, in the model's order, then replicated ones, so that each kind is one run in its arena.
    What is trainable is cut into chunks of whole parameters; a small model has one for each dtype.

    Attributes:
        places: by parameter index; None for a parameter without elements.
        sizes: elements of each arena.
        sharded_sizes: of these, how many elements at the front belong to sharded parameters.
        members: indices of the parameters in each arena, as they lie there.
    """

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index in sorted(
            range(len(specs)), key=lambda i: not specs[i].is_sharded
        ):  # stable: keeps the model's order
            if specs[index].padded_local_numel:
                kinds.setdefault((specs[index].dtype, specs[index].requires_grad), []).append(index)
        places: list[Place | None] = [None] * len(specs)
        self.sizes: dict[ArenaKey, int] = {}
        self.sharded_sizes: dict[ArenaKey, int] = {}
        self.members: dict[ArenaKey, list[int]] = {}
        for (dtype, trainable), indices in kinds.items():
            extents = [align(specs[i].padded_local_numel, dtype) for i in indices]
            chunks = _chunks([extent * dtype.itemsize for extent in extents]) if trainable else [0] * len(indices)
            for index, extent, chunk in zip(indices, extents, chunks, strict=True):
                key = ArenaKey(dtype, trainable, chunk)
                start = self.sizes.get(key, 0)
                places[index] = Place(key, start, specs[index].padded_local_numel, extent)
                self.sizes[key] = start + extent
                self.members.setdefault(key, []).append(index)
                self.sharded_sizes.setdefault(key, 0)
                if specs[index].is_sharded:
                    self.sharded_sizes[key] = start + extent
        self.places: tuple[Place | None, ...] = tuple(places)
        self._order = {
            key: number
            for number, key in enumerate(sorted(self.sizes, key=lambda k: (str(k._replace(chunk=0)), k.chunk)))
        }
        self._last_runs: tuple[list[int], list[Run]] = ([], [])

    def leading(self, share: float) -> frozenset[int]:
        """The first trainable parameters, as they lie, that have at least this share of the bytes of all."""
        trainable = [key for key in self.sizes if key.trainable]
        missing = share * sum(self.sizes[key] * key.dtype.itemsize for key in trainable)
        found: set[int] = set()
        for key in trainable:
            for index in self.members[key]:
                if missing <= 0:
                    return frozenset(found)
                place = self.places[index]
                assert place is not None, "members of arenas have places"
                missing -= place.extent * key.dtype.itemsize
                found.add(index)
        return frozenset(found)

    def runs(self, indices: Iterable[int]) -> list[Run]:
        """The fewest runs that hold exactly these parameters; sharded and replicated ones never share a run."""
        indices = list(indices)
        if indices == self._last_runs[0]:
            return self._last_runs[1]
        runs: list[Run] = []
        present = [place for index in indices if (place := self.places[index]) is not None]
        for place in sorted(present, key=lambda p: (self._order[p.key], p.start)):
            last = runs[-1] if runs else None
            if (
                last
                and last.key == place.key
                and last.stop == place.start
                and place.start != self.sharded_sizes[last.key]
            ):
                runs[-1] = last._replace(stop=place.start + place.extent)
            else:
                runs.append(Run(place.key, place.start, place.start + place.extent))
        self._last_runs = (indices, runs)
        return runs


def _chunks(sizes: Sequence[int]) -> list[int]:
    """The number of the chunk in which each shard goes, for sizes in bytes.

    Neighbours fill a chunk until it has its size; a shard that has as much alone is a chunk by itself, and the one that
    was being filled goes on behind it. So all but one have at least their size.
    """
    target = max(CHUNK_BYTES, -(-sum(sizes) // MAX_CHUNKS))
    chunks: list[int] = []
    count, filling, filled = 0, -1, target
    for size in sizes:
        if size >= target:
            chunks.append(count)
            count += 1
            continue
        if filled >= target:
            filling, filled, count = count, 0, count + 1
        chunks.append(filling)
        filled += size
    return chunks


def align(numel: int, dtype: torch.dtype) -> int:
    """``numel`` rounded up so that the next element is aligned."""
    unit = ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // unit) * unit


def allocate(sizes: Mapping[ArenaKey, int], device: torch.device) -> dict[ArenaKey, Tensor]:
    """One flat zero tensor for each arena, aligned."""
    return {key: aligned_zeros(size, key.dtype, device) for key, size in sizes.items()}


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros whose address is a multiple of the alignment."""
    return _aligned(torch.zeros(numel * dtype.itemsize + ALIGNMENT_BYTES, dtype=torch.uint8, device=device), dtype)


def aligned_empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of undefined contents whose address is a multiple of the alignment."""
    return _aligned(torch.empty(numel * dtype.itemsize + ALIGNMENT_BYTES, dtype=torch.uint8, device=device), dtype)


def _aligned(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """All but ``ALIGNMENT_BYTES`` of some bytes, from the first aligned one on."""
    skip = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[skip : skip + memory.numel() - ALIGNMENT_BYTES].view(dtype)


def detached_view(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage starts at it and has exactly its size.

    Saving, pickling or copying a plain view takes the whole arena along, and some of them forget its offset.
    """
    if view.numel() == 0:
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    return from_dlpack(to_dlpack(view))  # from_dlpack(view) asks the view about devices and streams first, for 6 us
