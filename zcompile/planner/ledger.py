"""Memory without tensors: storages with those who hold them, and the buffers of gathered parameters."""

from __future__ import annotations

import math
from collections import Counter

import torch

from zcompile.program import TensorType


class Storage:
    """Memory with those who hold it: slots, the user, autograd."""

    __slots__ = ("holders", "num_bytes", "part", "shape")

    def __init__(self, part: str, num_bytes: int, shape: tuple[int, ...] = ()) -> None:
        self.part = part
        self.shape = shape
        self.num_bytes = num_bytes
        self.holders = 0


#: the part of a storage that is in the host's memory, which no moment of the device's counts
ON_HOST = "on the host"

Value = tuple[Storage, ...]


class Pool:
    """The buffers of gathered parameters, as ``runtime.buffers`` hands them out."""

    def __init__(self) -> None:
        self.live: Counter[TensorType] = Counter()
        self.most: Counter[TensorType] = Counter()
        self.live_bytes = 0
        self.params: Counter[tuple[str, torch.dtype]] = Counter()
        self.peak: tuple[int, Counter[tuple[str, torch.dtype]]] = (0, Counter())

    def take(self, kind: TensorType, name: str) -> None:
        self.live[kind] += 1
        self.most[kind] = max(self.most[kind], self.live[kind])
        self.live_bytes += type_bytes(kind)
        self.params[name, kind.dtype] += 1

    def give(self, kind: TensorType, name: str) -> None:
        self.live[kind] -= 1
        self.live_bytes -= type_bytes(kind)
        self.params[name, kind.dtype] -= 1

    def note_peak(self) -> None:
        if self.live_bytes > self.peak[0]:
            self.peak = (self.live_bytes, +self.params)

    @property
    def held_bytes(self) -> int:
        return sum(count * type_bytes(kind) for kind, count in self.most.items())


def type_bytes(kind: TensorType) -> int:
    """Bytes of a contiguous tensor of a type."""
    return math.prod(kind.shape) * kind.dtype.itemsize
