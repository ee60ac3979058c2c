"""Finds out whether the host issues a step more slowly than the device runs it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

#: of a step's time on the device, how much of it the host takes to issue it, when the host is what it waits for: with a little
#: less, a replay would be no faster (measured: 58.7 ms replayed, 58.9 issued at about 0.9) and holds memory
HOST_BOUND = 0.95

#: steps in a row that must say so: one alone may have had a pause of the collector in it
IN_A_ROW = 3

#: steps that are measured; a model that was not host-bound by then never is
STEPS = 20


class _Measured:
    """One step: events of the device around its forward and around its backward, and what the host took to issue both.

    What the host does between them is no part of it: a replay would not shorten that.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Any, Any]] = []
        self.behind = False
        self.host_ms = 0.0

    def waited_for_the_host(self) -> bool:
        """Whether it did, and ended when another step has been issued: else the device is behind the host."""
        done = not self.behind and self.spans[-1][1].query()
        return done and self.host_ms >= HOST_BOUND * sum(begin.elapsed_time(end) for begin, end in self.spans)


class Pace:
    """Measures the first steps that a model issues.

    Args:
        event: makes an event of the device, with ``record``, ``query`` and ``elapsed_time`` (milliseconds), as torch's.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._latest: _Measured | None = None
        self._before: _Measured | None = None
        self._steps = 0
        self._slow = 0

    @property
    def is_over(self) -> bool:
        """Whether enough steps were measured."""
        return self._steps >= STEPS

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The body issues a forward."""
        step = self._latest = _Measured()
        with self._issuing(step):
            yield
        # with so much left of what came before, such as states that stream through it, it is the host that waits, for room in its
        # queue
        step.behind = not step.spans[0][0].query()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The body issues the backward of the latest forward."""
        with contextlib.nullcontext() if self._latest is None else self._issuing(self._latest):
            yield

    @contextlib.contextmanager
    def _issuing(self, step: _Measured) -> Iterator[None]:
        begin, end = self._event(), self._event()
        start = time.perf_counter()
        begin.record()
        yield
        end.record()
        step.host_ms += (time.perf_counter() - start) * 1e3
        step.spans.append((begin, end))

    def is_host_bound(self) -> bool:
        """Whether the latest steps waited for the host. Asked before each forward; never waits for the device.

        A step counts one step later: the forward of the next micro-batch comes right behind a backward, whose last kernels run then
        however slow the host is.
        """
        step, self._latest = self._latest, None
        if step is None or len(step.spans) < 2:
            return False
        step, self._before = self._before, step
        if step is None:
            return False
        self._steps += 1
        self._slow = self._slow + 1 if step.waited_for_the_host() else 0
        return self._slow >= IN_A_ROW
