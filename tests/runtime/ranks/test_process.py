"""Whether a process of this host has ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from zcompile.runtime.ranks import process
from zcompile.runtime.ranks.process import has_ended, identity, is_here

#: says who it is, and waits
PROGRAM = "from zcompile.runtime.ranks.process import identity; print(identity(), flush=True); input()"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        yield running
        running.kill()


def name_of(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def test_a_process_that_runs(other: subprocess.Popen[str]) -> None:
    for name in (identity(), name_of(other)):
        assert is_here(name) and not has_ended(name)


def test_one_that_was_killed_also_before_its_parent_asks(other: subprocess.Popen[str]) -> None:
    name = name_of(other)
    other.kill()
    while process._stat(other.pid)[0] != "Z":
        pass
    assert has_ended(name)
    other.wait()
    assert has_ended(name)


def test_one_that_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory on a device takes a while to go."""
    name = identity()
    state, flags, started = process._stat(int(name.split()[-2]))
    monkeypatch.setattr(process, "_stat", lambda _: (state, flags | process.PF_EXITING, started))
    assert has_ended(name)


def test_another_process_with_its_number() -> None:
    host, pid, started = identity().rsplit(" ", 2)
    assert has_ended(f"{host} {pid} {int(started) + 1}")


@pytest.mark.parametrize("name", ["", "nonsense", "another-boot pid:[1] 1 1"])
def test_what_cannot_be_seen_has_not_ended(name: str) -> None:
    assert not is_here(name) and not has_ended(name)
