"""The end of the process: a rank that dies by an exception, or just ends, tells the others."""

from __future__ import annotations

import atexit
import sys
import weakref
from types import TracebackType
from typing import Any, Protocol

from zcompile import compat


class Member(Protocol):
    """Something to tell of the end."""

    def fail(self, error: BaseException) -> None: ...
    def explain(self, error: BaseException, description: str) -> BaseException: ...
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
    members = list(_OPEN)
    if members and compat.is_broken_collective(error):  # torch's own: it does not say which rank ended, nor why
        error.add_note(str(members[0].explain(error, "a collective outside of zcompile")))
    for member in members:
        member.fail(error)
    return _PREVIOUS_HOOK[0](kind, error, traceback)


def _close_all() -> None:
    for member in list(_OPEN):
        member.close()
