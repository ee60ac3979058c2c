"""Memory for gathered parameters: taken when a gather starts, given back at its release, and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile.program import TensorType


class Buffers:
    """Hands out contiguous buffers and takes them back.

    A buffer that was given back is used again for the next request of the same type, so nothing that still views it may be
    read: the verifier proves that, and ``poison`` shows it in tests.

    Attributes:
        live_bytes: bytes handed out now.
        peak_bytes: the most that ever were.
        poison: fill released floating buffers with NaN.
    """

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        self.device = device
        self.poison = poison
        self.live_bytes = 0
        self.peak_bytes = 0
        self._free: dict[TensorType, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers, handed out or not: what was taken once is never given back to the allocator."""
        return self.live_bytes + sum(t.nbytes for free in self._free.values() for t in free)

    def take(self, types: Sequence[TensorType]) -> list[Tensor]:
        """One buffer for each type, with undefined contents."""
        taken = []
        for kind in types:
            free = self._free.get(kind)
            if free:
                tensor = free.pop()
            else:
                tensor = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
            self.live_bytes += tensor.nbytes
            taken.append(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return taken

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, buffers are new ones, and all of them are forgotten in the end; what was free before is free memory."""
        self._free, live = {}, self.live_bytes
        try:
            yield
        finally:
            self._free, self.live_bytes = {}, live

    def take_copy(self, tensor: Tensor) -> Tensor:
        """A buffer with the contents of another."""
        (copy,) = self.take([TensorType(tuple(tensor.shape), tensor.dtype)])
        return copy.copy_(tensor)

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Take buffers back."""
        for tensor in tensors:
            if self.poison and tensor.is_floating_point():
                tensor.fill_(float("nan"))
            self.live_bytes -= tensor.nbytes
            self._free.setdefault(TensorType(tuple(tensor.shape), tensor.dtype), []).append(tensor)


def parts(buffer: Tensor, size: int) -> tuple[Tensor, ...]:
    """The flat memory of a buffer in ``size`` equal parts; made once a buffer."""
    attributes: Any = buffer.__dict__
    found = attributes.get("parts")
    if found is None or len(found) != size:
        # of an alias: views hold on to what they were made of, and a tensor that holds its own views is never freed
        found = attributes["parts"] = buffer.detach().view(size, -1).unbind()
    return found
