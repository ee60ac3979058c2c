"""Full parameters that stay gathered from one micro-batch of a declared window to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zcompile.errors import ShardingError
from zcompile.program import TensorType
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.sharding.shards import Contents

#: windows in which sums of shards are compared: so many first ones, and one of so many later
FIRST_WINDOWS, FEW_WINDOWS = 3, 64


class Held:
    """Full parameters that a backward left, in the hands of a forward.

    Attributes:
        values: by name.
    """

    def __init__(self, buffers: Buffers, values: dict[str, Tensor] | None = None, lent: bool = False) -> None:
        self.values = values or {}
        self._buffers = buffers
        self._lent = lent

    def own(self) -> dict[str, Tensor]:
        """The values for a forward that gives them back: copies of what a recording has lent. They are not held here any more."""
        values, self.values = self.values, {}
        return {name: self._buffers.take_copy(t) for name, t in values.items()} if self._lent else values

    def give(self) -> None:
        """Give them back."""
        if not self._lent:
            self._buffers.give(list(self.values.values()))
        self.values = {}


class Holding:
    """What a backward leaves for the next forward, as long as nothing wrote to the shards since it was gathered.

    Whether something is held depends on the order of forwards, backwards and writes alone, so that the ranks agree; one that
    alone has written announces other collectives than the rest, and all end with an error.

    A write that torch does not count shows in the sums of shards alone. To take them reads all shards, so it is done in the first
    windows, where a loop that writes so does it already, and in few of those that follow. They are compared on the device, without
    waiting for it; what came of it is asked at the end of the window, behind the issue of its last backward, before anyone can use
    gradients.

    Args:
        buffers: where the values come from.
        agreement: is told of a window that ends with an error.

    Attributes:
        looks: whether sums are to be compared in this window.
    """

    def __init__(self, buffers: Buffers, agreement: Agreement) -> None:
        self._buffers = buffers
        self._agreement = agreement
        self.looks = True
        self._windows = 0
        self._is_used = False
        self._values: dict[str, Tensor] = {}
        self._lent = False
        self._contents = Contents()
        self._stale: Tensor | None = None
        self._answer: Tensor | None = None  # the same on the host, once `_answered` has passed
        self._answered: torch.cuda.Event | None = None

    def __len__(self) -> int:
        return len(self._values)

    def put(self, values: dict[str, Tensor], contents: Contents, *, lent: bool) -> None:
        """Hold values by name.

        Args:
            values: of ``buffers``, or ``lent`` by a recording, to which their memory belongs.
            contents: what ``shards.contents`` was when they were gathered.
            lent: see ``values``.
        """
        assert not self._values, "a backward leaves values while others are held"
        self._values, self._lent, self._contents, self._is_used = values, lent, contents, True

    def take(self, types: Mapping[str, TensorType], contents: Contents) -> Held:
        """The values for a forward, which are not held any more; none if it takes others, or shards were written since.

        Args:
            types: what the forward takes.
            contents: what ``shards.contents`` is now.
        """
        if not self._values:
            return Held(self._buffers)
        found = {name: TensorType(tuple(t.shape), t.dtype) for name, t in self._values.items()}
        if found != types or contents.counts != self._contents.counts:
            self.drop()
            return Held(self._buffers)
        self._compare(contents)
        values, self._values = self._values, {}
        return Held(self._buffers, values, self._lent)

    def _compare(self, contents: Contents) -> None:
        now, before = contents.sums, self._contents.sums
        if now is None or before is None:
            return
        stale = (now != before).any()
        self._stale = stale if self._stale is None else self._stale | stale
        self._answer = self._stale.to("cpu", non_blocking=True)
        if stale.is_cuda:
            self._answered = torch.cuda.Event()
            self._answered.record(torch.cuda.current_stream(stale.device))

    def end(self) -> None:
        """Give everything back: the window ends.

        Raises:
            ShardingError: a forward of this window computed with weights that had been written to unseen.
        """
        self.drop()
        self._windows, self._is_used = self._windows + self._is_used, False
        self.looks = self._windows < FIRST_WINDOWS or self._windows % FEW_WINDOWS == 0
        answer, self._stale, self._answer = self._answer, None, None
        if answer is not None and self._answered is not None:
            self._answered.synchronize()
        if answer is not None and answer.item():
            error = ShardingError(
                "parameters were written inside an accumulation window in a way that torch does not count (through .data, or by "
                "torch._foreach_*), and a forward of the window used the values from before; write to the parameter itself "
                "(with torch.no_grad(): p.copy_(value)), begin a window with model.zero_grad() after such a write, or pass "
                'policy="prefetch,hold{units=0 first=0}"'
            )
            self._agreement.raised(error)
            raise error

    def drop(self) -> None:
        """Give everything back."""
        values, self._values = self._values, {}
        Held(self._buffers, values, self._lent).give()
