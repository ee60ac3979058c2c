"""The end of the process: a rank that dies by an exception, or just ends, tells the others; and no end takes for ever."""

from __future__ import annotations

import atexit
import faulthandler
import sys
import threading
import time
import weakref
from types import TracebackType
from typing import Any, Protocol

from zcompile import compat

#: seconds for an ending process to go, after Python has, when ranks are lost: their connections and devices may hold it back
EXIT_SECONDS = 20.0

#: seconds between two signs of life of Python
SIGNS = EXIT_SECONDS / 10

STDERR = 2


class Member(Protocol):
    """Something to tell of the end."""

    def fail(self, error: BaseException) -> None: ...
    def explain(self, error: BaseException, description: str) -> BaseException: ...
    def close(self) -> None: ...


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_PREVIOUS_HOOK: list[Any] = []
_LOST = threading.Event()


def watch_exit(member: Member) -> None:
    """Have the process's end reach the board of ``member`` (held weakly)."""
    if not _PREVIOUS_HOOK:  # once a process: a later hook may call ours
        _PREVIOUS_HOOK.append(sys.excepthook)
        sys.excepthook = _report_exception
        atexit.register(_close_all)
    _OPEN.add(member)


def ranks_are_lost() -> None:
    """When this process ends later, nothing may hold it back: torch's groups have been seen to wait for a rank that is gone."""
    _LOST.set()


def _report_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    members = list(_OPEN)
    if members and compat.is_broken_collective(error):  # torch's own: it does not say which rank ended, nor why
        error.add_note(str(members[0].explain(error, "a collective outside of zcompile")))
    for member in members:
        member.fail(error)
    return _PREVIOUS_HOOK[0](kind, error, traceback)


def _close_all() -> None:
    for member in list(_OPEN):
        member.close()
    if _LOST.is_set():
        threading.Thread(target=_give_signs, name="zcompile-exit", daemon=True).start()


def _give_signs() -> None:
    """Put off the end as long as Python runs, that is whatever is done at exit; the timer is none of Python's threads, which end then."""
    while True:
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=STDERR)
        time.sleep(SIGNS)
