"""Watches what a device was given to do, without a word on the hot path."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.judge import Wait


class DeviceWatch:
    """Finds a collective on the device that does not end. The hot path only overwrites ``newest``.

    Collectives of one lane end in the order of their start, so it is enough to look at the newest now and then: when it
    ends, all before it have ended too. At most two works, and the buffers that they hold on to, are kept.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.newest: tuple[int, Any, str] | None = None
        self._agreement = agreement
        self._lock = threading.Lock()
        self._watched: tuple[int, Any, str] | None = None
        self._wait: Wait | None = None

    def oldest(self) -> Wait | None:
        """The wait for the watched collective, None if everything is done. Called from the board's thread."""
        with self._lock:
            if self._watched is not None and _has_ended(self._watched[1]):
                self._watched = self._wait = None
            if self._watched is None:
                newest = self.newest
                if newest is None or _has_ended(newest[1]):
                    if newest is self.newest:
                        self.newest = None
                    return None
                self._watched = newest
                description = f"{newest[2]} (or one before it)"
                self._wait = self._agreement.device_wait(description, newest[0], time.monotonic())
            return self._wait


def _has_ended(work: Any) -> bool:
    try:
        return work.is_completed()
    except RuntimeError:
        # of the device: whoever uses it is told so, and the thread that asks here has to tell the other ranks
        return False


class DeviceWatches:
    """What one model gave its device, lane by lane.

    Args:
        agreement: of the ranks.
        broken: says what broke the connections through which collectives go, "" while nothing did; waits for nothing.
    """

    def __init__(self, agreement: Agreement, broken: Callable[[], str]) -> None:
        self._agreement = agreement
        self._broken = broken
        self._broke: Wait | None = None
        self._lanes: dict[str, DeviceWatch] = {}

    def note(self, lane: str, number: int, work: Any, description: str) -> None:
        """A collective was given to the device: the ``number``-th of this rank."""
        watch = self._lanes.get(lane)
        if watch is None:
            watch = self._lanes[lane] = DeviceWatch(self._agreement)
        watch.newest = (number, work, description)

    def oldest(self) -> Wait | None:
        """What the device has waited for longest, or will wait for in vain. Called from the board's thread."""
        if self._broke is None and (error := self._broken()):
            text = f"collectives whose connections broke ({error})"
            self._broke = self._agreement.device_wait(text, self._agreement.started(0), time.monotonic(), urgent=True)
        if self._broke is not None:  # collectives may count as done then which the device still waits for
            return self._broke
        waits = [wait for watch in list(self._lanes.values()) if (wait := watch.oldest()) is not None]
        return min(waits, key=lambda wait: wait.needs, default=None)

    def clear(self) -> None:
        """Forget everything: watches hold works, and these the buffers that they wrote."""
        self._lanes.clear()
