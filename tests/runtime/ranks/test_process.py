"""Whether a process of this host has ended."""

from __future__ import annotations

import pytest

from tests.runtime.ranks.conftest import Other
from zcompile.runtime.ranks import process
from zcompile.runtime.ranks.process import has_ended, identity, is_here


def test_a_process_that_runs(other: Other) -> None:
    for name in (identity(), other.name):
        assert is_here(name) and not has_ended(name)


def test_one_that_was_killed_also_before_its_parent_asks(other: Other) -> None:
    name = other.name
    other.process.kill()
    while process._stat(other.process.pid)[0] != "Z":
        pass
    assert has_ended(name)
    other.process.wait()
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
