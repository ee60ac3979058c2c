"""Which process a rank looks after, and what it sees of its end."""

from __future__ import annotations

import pytest

from tests.runtime.ranks.conftest import Other
from zcompile.runtime.ranks import neighbour
from zcompile.runtime.ranks.board import Position
from zcompile.runtime.ranks.neighbour import Neighbour


class Posted:
    """What ranks have posted: where they run, and whether they have left."""

    def __init__(self, *processes: str | None) -> None:
        self.processes = list(processes)
        self.closed: set[int] = set()
        self.asked: list[int] = []

    def position_of(self, rank: int) -> Position | None:
        self.asked.append(rank)
        process = self.processes[rank]
        if process is None:
            return None
        state = "closed" if rank in self.closed else "running"
        return Position(rank, state, "", 0, "", "", "", 0, 0, 0, "", 0, process)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbour, "LAST_WORDS", 0.0)


def watched(rank: int, *hosts: str, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Whom a rank looks after, of ranks on hosts with these names."""
    monkeypatch.setattr(neighbour, "is_here", lambda process: process == hosts[rank])
    monkeypatch.setattr(neighbour, "has_ended", lambda process: True)
    return Neighbour(rank, len(hosts)).ended(Posted(*hosts))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aa", [1, 0]),
        ("aaaa", [1, 2, 3, 0]),
        ("aabb", [1, 0, 3, 2]),
        ("aaabbbb", [1, 2, 0, 4, 5, 6, 3]),
        ("ab", [None, None]),
        ("abb", [None, 2, 1]),
        ("abab", [None, None, None, None]),
    ],
)
def test_each_looks_after_the_next_of_its_host(
    hosts: str, expected: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [watched(rank, *hosts, monkeypatch=monkeypatch) for rank in range(len(hosts))] == expected


def test_an_end_without_a_word(other: Other) -> None:
    posted = Posted(None, None)
    mine = Neighbour(0, 2)
    assert mine.ended(posted) is None, "it has not come yet"
    posted.processes[1] = other.name
    assert mine.ended(posted) is None
    other.process.kill()
    other.process.wait()
    posted.asked.clear()
    assert mine.ended(posted) == 1
    assert mine.ended(posted) is None and posted.asked == [1], "it is said once"


def test_one_that_has_left_is_not_missed(other: Other) -> None:
    posted = Posted(None, other.name)
    mine = Neighbour(0, 2)
    assert mine.ended(posted) is None
    posted.asked.clear()
    assert mine.ended(posted) is None and not posted.asked, "a process that lives costs the store nothing"
    posted.closed.add(1)
    other.process.kill()
    other.process.wait()
    assert mine.ended(posted) is None
