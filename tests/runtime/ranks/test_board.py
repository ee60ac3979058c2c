"""The board by itself. What ranks do with it: test_agreement.py."""

from __future__ import annotations

import json
from dataclasses import asdict

from torch.distributed import HashStore, PrefixStore

from zcompile.runtime.ranks.board import Board, Failure, Position
from zcompile.runtime.ranks.process import identity


class Owner:
    """Takes what it is told."""

    def position(self, roll: int) -> Position:
        return position(0)

    def on_failure(self, failure: Failure) -> None: ...

    def on_tick(self, now: float) -> None: ...


def position(rank: int, process: str = "", state: str = "running") -> Position:
    return Position(rank, state, "", 0, "", "", "", 0, 0, 0, "", 0, process)


def test_the_host_stays_for_those_who_have_not_read_and_will() -> None:
    """Not for one that has left, nor for one whose process has ended."""
    store, owner = PrefixStore("test", HashStore()), Owner()
    board = Board(store, 0, 4, owner, "test")
    host = identity().rsplit(" ", 2)[0]
    posted = [
        position(1, f"{host} {2**31 - 1} 1"),
        position(2, identity(), state="closed"),
        position(3, identity()),
    ]
    try:
        assert board.ask(lambda _: board.still_reads()), "nobody has come yet"
        for each in posted:
            store.set(f"position/{each.rank}", json.dumps(asdict(each)))
        assert board.ask(lambda _: board.still_reads()), "rank 3"
        store.set("seen/3", "")
        assert board.ask(lambda _: board.still_reads()) is False
    finally:
        board.stop(timeout=5.0)
