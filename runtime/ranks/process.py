"""Whether the process of another rank has ended: to be seen at once where it is on this host."""

from __future__ import annotations

import os
from pathlib import Path

#: the kernel's flag of a task that is ending: a process on a GPU may take seconds for the rest
PF_EXITING = 0x4


def identity() -> str:
    """This process, in words that others on its host can look up; empty where there is no such way."""
    try:
        _, _, started = _stat(os.getpid())
        return f"{_host()} {os.getpid()} {started}"
    except OSError:
        return ""


def is_here(other: str) -> bool:
    """Whether a process is one of this host, so that ``has_ended`` says more than False."""
    try:
        return bool(other) and other.rsplit(" ", 2)[0] == _host()
    except OSError:
        return False


def has_ended(other: str) -> bool:
    """Whether a process is known to have ended. False when it lives, is stopped, or cannot be seen from here."""
    try:
        host, pid, started = other.rsplit(" ", 2)
        if host != _host():
            return False
        os.kill(int(pid), 0)
        state, flags, began = _stat(int(pid))
    except ProcessLookupError:
        return True
    except (OSError, ValueError):
        return False
    return state in "ZX" or bool(flags & PF_EXITING) or began != started


def _host() -> str:
    """The running kernel and the namespace in which process numbers count."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, int, str]:
    """State, flags and start time of a process; the name before them may hold anything (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[6]), fields[19]
