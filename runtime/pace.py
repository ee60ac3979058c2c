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


class Pace:
    """Measures the first steps that a model issues.

    Args:
        event: makes an event of the device, with ``record``, ``query`` and ``elapsed_time`` (milliseconds), as torch's.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._first: Any = None
        self._last: Any = None
        self._behind = False
        self._host_ms = 0.0
        self._steps = 0
        self._slow = 0

    @property
    def is_over(self) -> bool:
        """Whether enough steps were measured."""
        return self._steps >= STEPS

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The body issues a forward."""
        self._host_ms, self._first, self._last = 0.0, self._event(), None
        self._first.record()
        with self._issuing():
            yield
        # with so much left of what came before, such as states that stream through it, it is the host that waits, for room in its
        # queue
        self._behind = not self._first.query()

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """The body issues the backward of the latest forward."""
        with self._issuing():
            yield
        if self._first is not None:
            self._last = self._event()
            self._last.record()

    @contextlib.contextmanager
    def _issuing(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._host_ms += (time.perf_counter() - begin) * 1e3

    def is_host_bound(self) -> bool:
        """Whether the latest steps waited for the host. Asked before each forward; never waits for the device."""
        if self._last is None:
            return False
        self._steps += 1
        # a device that is not done with the step when the next one begins is behind the host
        done = not self._behind and self._last.query()
        slow = done and self._host_ms >= HOST_BOUND * self._first.elapsed_time(self._last)
        self._slow = self._slow + 1 if slow else 0
        self._first = self._last = None
        return self._slow >= IN_A_ROW
