"""Watches what a device was given to do, without a word on the hot path."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zcompile.runtime.peers import Copied
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.judge import Wait


class Ends(Protocol):
    """Something that ends on the device."""

    def is_completed(self) -> bool: ...


class DeviceWatch:
    """Finds a collective on the device that does not end. The hot path only overwrites ``newest``.

    Collectives of one lane end in the order of their start, so it is enough to look at the newest now and then: when it
    ends, all before it have ended too. At most two works, and the buffers that they hold on to, are kept.

    Args:
        agreement: gives waits their texts.
        ending: of a work that says it is done, something that is when the device says so. NCCL's works also say it when their
            connection broke, while the device still waits for them.
    """

    def __init__(self, agreement: Agreement, ending: Callable[[Any], Ends]) -> None:
        self.newest: tuple[int, Any, str] | None = None
        self._agreement = agreement
        self._ending = ending
        self._lock = threading.Lock()
        self._watched: tuple[int, Any, str] | None = None
        self._said: tuple[Any, Ends] | None = None
        self._wait: Wait | None = None

    def oldest(self) -> Wait | None:
        """The wait for the watched collective, None if everything is done. Called from the board's thread."""
        with self._lock:
            if self._watched is not None and self._has_ended(self._watched[1]):
                self._watched = self._wait = None
            if self._watched is None:
                newest = self.newest
                if newest is None or self._has_ended(newest[1]):
                    if newest is self.newest:
                        self.newest = None
                    return None
                self._watched = newest
                description = f"{newest[2]} (or one before it)"
                self._wait = self._agreement.device_wait(description, newest[0], time.monotonic())
            return self._wait

    def _has_ended(self, work: Any) -> bool:
        try:
            if not work.is_completed():
                return False
            if self._said is None or self._said[0] is not work:
                self._said = work, self._ending(work)
            if not self._said[1].is_completed():
                return False
        except (
            RuntimeError
        ):  # of the device: whoever uses it is told so, and the thread that asks here has to tell the other ranks
            return False
        self._said = None
        return True


class DeviceWatches:
    """What one model gave its device, lane by lane."""

    def __init__(self, agreement: Agreement, device: torch.device) -> None:
        self._agreement, self._device = agreement, device
        self._lanes: dict[str, DeviceWatch] = {}
        self._beside: torch.cuda.Stream | None = None

    def note(self, lane: str, number: int, work: Any, description: str) -> None:
        """A collective was given to the device: the ``number``-th of this rank."""
        watch = self._lanes.get(lane)
        if watch is None:
            watch = self._lanes[lane] = DeviceWatch(self._agreement, self._ending)
        watch.newest = (number, work, description)

    def oldest(self) -> Wait | None:
        """What the device has waited for longest. Called from the board's thread."""
        waits = [wait for watch in list(self._lanes.values()) if (wait := watch.oldest()) is not None]
        return min(waits, key=lambda wait: wait.needs, default=None)

    def clear(self) -> None:
        """Forget everything: watches hold works, and these the buffers that they wrote."""
        self._lanes.clear()

    def _ending(self, work: Any) -> Copied:
        """Where the device is behind a work."""
        if isinstance(work, Copied):
            return work
        if self._beside is None:
            self._beside = torch.cuda.Stream(
                self._device, priority=-2
            )  # of a priority of its own: nothing waits behind it
        with torch.cuda.stream(self._beside):
            work.synchronize()  # its wait would abort the group of one that failed, here, and raise
            return Copied.here()
