"""The end of the process: a rank that dies by an exception, or just ends, tells the others."""

from __future__ import annotations

import atexit
import sys
import weakref
from types import TracebackType
from typing import Any, Protocol


class Member(Protocol):
    """Something to tell of the end."""

    def fail(self, error: BaseException) -> None: ...
    def close(self) -> None: ...


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
_PREVIOUS_HOOK: list[Any] = []


def watch_exit(member: Member) -> None:
    """Have the process's end reach the board of ``member`` (held weakly)."""
    if not _PREVIOUS_HOOK:  # once a process: a later hook may call ours
        _PREVIOUS_HOOK.append(sys.excepthook)
        sys.excepthook = _report_exception
        atexit.register(_close_all)
    _OPEN.add(member)


def _report_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    for member in list(_OPEN):
        member.fail(error)
    return _PREVIOUS_HOOK[0](kind, error, traceback)


def _close_all() -> None:
    for member in list(_OPEN):
        member.close()
