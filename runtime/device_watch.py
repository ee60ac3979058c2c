"""Watches what a device was given to do, without a word on the hot path."""

from __future__ import annotations

import threading
import time
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
            if self._watched is not None and self._watched[1].is_completed():
                self._watched = self._wait = None
            if self._watched is None:
                newest = self.newest
                if newest is None or newest[1].is_completed():
                    if newest is self.newest:
                        self.newest = None
                    return None
                self._watched = newest
                description = f"{newest[2]} (or one before it)"
                self._wait = self._agreement.device_wait(description, newest[0], time.monotonic())
            return self._wait
