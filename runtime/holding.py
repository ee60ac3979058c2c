"""Full parameters that stay gathered from one micro-batch of a declared window to the next."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zcompile.program import TensorType
from zcompile.runtime.buffers import Buffers


class Holding:
    """What a backward leaves for the next forward, as long as nothing wrote to the shards since it was gathered.

    Whether something is held depends on the order of forwards, backwards and writes alone, so that the ranks agree; one that
    alone has written announces other collectives than the rest, and all end with an error.

    Args:
        buffers: where the values come from.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._values: dict[str, Tensor] = {}
        self._written: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, values: dict[str, Tensor], written: tuple[int, ...]) -> None:
        """Hold values by name; ``written`` is what ``shards.written`` was when they were gathered."""
        assert not self._values, "a backward leaves values while others are held"
        self._values, self._written = values, written

    def take(self, types: Mapping[str, TensorType], written: tuple[int, ...]) -> dict[str, Tensor]:
        """The values for a forward, which are not held any more; none if it takes others, or shards were written since.

        Args:
            types: what the forward takes.
            written: what ``shards.written`` is now.
        """
        if not self._values:
            return {}
        found = {name: TensorType(tuple(t.shape), t.dtype) for name, t in self._values.items()}
        if found != types or written != self._written:
            self.drop()
            return {}
        values, self._values = self._values, {}
        return values

    def drop(self) -> None:
        """Give everything back."""
        self._buffers.give(list(self._values.values()))
        self._values = {}
