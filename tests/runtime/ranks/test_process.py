"""Whether another process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from zcompile.runtime.ranks.process import has_ended, identity

PROGRAM = "from zcompile.runtime.ranks.process import identity; print(identity(), flush=True); input()"


def wait_until(state: str, pid: int) -> None:
    """Until the kernel shows a process in a state."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == state:
                return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} is not {state}")


def test_a_process_lives_until_it_ends() -> None:
    assert not has_ended(identity())
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        other = child.stdout.readline().strip()
        assert f" {child.pid} " in other and not has_ended(other)
        host, pid, started = other.rsplit(" ", 2)
        assert has_ended(f"{host} {pid} {int(started) - 1}"), "the number was given to a later process"
        os.kill(child.pid, signal.SIGSTOP)
        wait_until("T", child.pid)
        assert not has_ended(other), "it may go on"
        child.kill()
        wait_until("Z", child.pid)
        assert has_ended(other), "its parent has not asked for it yet"
        child.wait()
        assert has_ended(other)
        assert not has_ended(f"another {pid} {started}"), "nothing is known of other hosts"
        assert not has_ended("")
