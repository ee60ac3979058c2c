"""Flat memory for the shards of one model: where each lies, and which runs of it are contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from zcompile.placement import ParamSpec

#: every shard starts at a multiple of this (Inductor assumes 16, kernels like whole cache lines)
ALIGNMENT_BYTES = 256


class ArenaKey(NamedTuple):
    """What the shards of one arena have in common."""

    dtype: torch.dtype
    trainable: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{'' if self.trainable else ' frozen'}"


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

    Sharded parameters come first, in the model's order, then replicated ones, so that each kind is one run.

    Attributes:
        places: by parameter index; None for a parameter without elements.
        sizes: elements of each arena.
        sharded_sizes: of these, how many elements at the front belong to sharded parameters.
    """

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        places: list[Place | None] = [None] * len(specs)
        self.sizes: dict[ArenaKey, int] = {}
        self.sharded_sizes: dict[ArenaKey, int] = {}
        for index in sorted(
            range(len(specs)), key=lambda i: not specs[i].is_sharded
        ):  # stable: keeps the model's order
            spec = specs[index]
            numel = spec.padded_local_numel
            if numel == 0:
                continue
            key = ArenaKey(spec.dtype, spec.requires_grad)
            start = self.sizes.get(key, 0)
            extent = align(numel, spec.dtype)
            places[index] = Place(key, start, numel, extent)
            self.sizes[key] = start + extent
            self.sharded_sizes.setdefault(key, 0)
            if spec.is_sharded:
                self.sharded_sizes[key] = start + extent
        self.places: tuple[Place | None, ...] = tuple(places)

    def runs(self, indices: Iterable[int]) -> list[Run]:
        """The fewest runs that hold exactly these parameters; sharded and replicated ones never share a run."""
        runs: list[Run] = []
        present = [place for index in indices if (place := self.places[index]) is not None]
        for place in sorted(present, key=lambda p: (str(p.key), p.start)):
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
        return runs


def align(numel: int, dtype: torch.dtype) -> int:
    """``numel`` rounded up so that the next element is aligned."""
    unit = ALIGNMENT_BYTES // dtype.itemsize
    return -(-numel // unit) * unit


def allocate(sizes: Mapping[ArenaKey, int], device: torch.device) -> dict[ArenaKey, Tensor]:
    """One flat zero tensor for each arena, aligned."""
    return {key: aligned_zeros(size, key.dtype, device) for key, size in sizes.items()}


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros whose address is a multiple of the alignment."""
    memory = torch.zeros(numel * dtype.itemsize + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % ALIGNMENT_BYTES
    return memory[skip : skip + numel * dtype.itemsize].view(dtype)


def detached_view(view: Tensor) -> Tensor:
    """The same memory as a tensor whose storage starts at it and has exactly its size.

    Saving, pickling or copying a plain view takes the whole arena along, and some of them forget its offset.
    """
    if view.numel() == 0:
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    return from_dlpack(view)
