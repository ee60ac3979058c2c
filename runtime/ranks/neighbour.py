"""Looks after one more process of this host: an end without a word is seen at once there, also when nobody waits for it."""

from __future__ import annotations

import time
from typing import Protocol

from zcompile.runtime.ranks.board import Position
from zcompile.runtime.ranks.process import has_ended, is_here

LAST_WORDS = 0.2  # seconds in which the store has what an ended process has sent


class Positions(Protocol):
    """Where ranks are."""

    def position_of(self, rank: int) -> Position | None: ...


class Neighbour:
    """The process that one rank looks after: that of the next rank, and on the last rank of a host that of the first one there.

    So on each host somebody sees each process end, for the price of asking about one. Where the ranks of a host do not follow each
    other nobody looks, nor where it has one alone: who is gone there is found out by those who wait. Used by the board's thread only.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._watched: Position | None = None
        self._is_found = False

    def ended(self, board: Positions) -> int | None:
        """The rank, if its process has ended and it had not left before."""
        if not self._is_found:
            self._find(board)
        if self._watched is None or not has_ended(self._watched.process):
            return None
        time.sleep(LAST_WORDS)
        rank, self._watched = self._watched.rank, None
        last = board.position_of(rank)
        return None if last is not None and last.state == "closed" else rank

    def _find(self, board: Positions) -> None:
        """Find the process, once all have come who have to be asked."""
        follower = board.position_of((self._rank + 1) % self._world_size)
        if follower is None:
            return
        found = follower if is_here(follower.process) else None
        for step in range(1, self._world_size) if found is None else ():
            before = board.position_of((self._rank - step) % self._world_size)
            if before is None:
                return
            if not is_here(before.process):
                break
            found = before
        self._watched, self._is_found = found, True
