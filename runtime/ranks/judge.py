"""Decides from the ranks' positions whether a wait can still end well."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from zcompile.errors import RankError, RankMismatchError
from zcompile.runtime.ranks.board import Board, Position, Vote
from zcompile.runtime.ranks.history import Call
from zcompile.runtime.ranks.neighbour import Neighbour
from zcompile.runtime.ranks.process import has_ended

ROLL_INTERVAL = 2.0  # seconds between two roll calls of a waiting rank
STEADY = 2.0  # seconds for which two ranks must stand still before they count as waiting for each other
RAISED = 4.0  # seconds in which a rank that raised an exception may go on
GONE = 20.0  # seconds without an answer to a roll call after which a rank is gone
GONE_URGENT = 8.0  # the same when a connection has broken
LOOKERS = 8  # in a large job, how many ranks of those that wait for a collective call the roll
ADVICE = "every rank must make the same calls of the model in the same order"


@dataclass(eq=False)
class Wait:
    """What this rank waits for."""

    state: str  # as in Position
    description: str  # "all_gather of layers.3"
    text: str  # "waits in call 7, forward (train), for all_gather of layers.3"
    topic: str = ""
    vote: Vote | None = None
    call: Call | None = None  # being confirmed
    needs: int = 0
    urgent: bool = False  # a connection broke: somebody has ended
    since: float = field(default_factory=time.monotonic)

    def has_come(self, other: Position) -> bool:
        """Whether ``other`` has done its part."""
        if self.topic:
            return other.topic == self.topic
        return other.started >= self.needs


@dataclass(frozen=True)
class Verdict:
    """Why a wait cannot end well."""

    kind: type[RankError]
    body: str
    rank: int
    other: Position | None = None  # where ``rank`` is, for a difference between two calls


class Judge:
    """Calls the roll for a rank that waits, and judges the answers. Used by the board's thread only."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.latest: dict[int, Position] = {}
        self._wait: Wait | None = None
        self._neighbour = Neighbour(rank, world_size)
        self._roll = 0  # being called; 0: none
        self._called = 0.0
        self._steady: dict[int, tuple[int, int, float, float]] = {}  # by rank: roll, change, since when, seen last

    def missing(self, board: Board, doing: Callable[[], str]) -> Verdict | None:
        """A verdict if the process that this rank looks after has ended without a word; ``doing`` says what this rank does then."""
        gone = self._neighbour.ended(board)
        return None if gone is None else Verdict(RankError, _gone([gone], self.rank, doing()), gone)

    def look(self, board: Board, wait: Wait, me: Position, now: float) -> Verdict | None:
        """One look at the others; a verdict if ``wait`` cannot end well."""
        if wait is not self._wait:
            self._wait, self._roll, self._called, self._steady = wait, 0, 0.0, {}
        if not self._calls_roll(wait):
            return None
        if self._roll == 0:
            if now - self._called < ROLL_INTERVAL:
                return None
            self._roll, self._called = board.call_roll(), now
            return None
        positions = board.read(self._roll)
        self.latest = positions
        silent = [r for r in range(self.world_size) if r not in positions and r != self.rank]
        limit = GONE_URGENT if wait.urgent else GONE
        for position in positions.values():
            self._note(position, now)
            verdict = self._judge(board, wait, me, position, now) if position.rank != self.rank else None
            if verdict is not None:
                return verdict
        if ended := _ended(board, self._roll, silent):
            return Verdict(RankError, _gone(ended, self.rank, wait.text), ended[0])
        if silent and now - self._called > limit:
            who = name_ranks(silent)
            verb = "is" if len(silent) == 1 else "are"
            body = (
                f"{who} {verb} gone: no sign of life for {now - self._called:.0f} s while rank {self.rank} {wait.text}"
            )
            return Verdict(RankError, body, silent[0])
        if not silent:
            board.end_roll(self._roll)
            self._roll = 0
        return None

    def name_missing(self, wait: Wait, positions: dict[int, Position]) -> str:
        """What to say when ``wait`` has taken too long: who arrived, and where the others are."""
        arrived = [r for r, p in sorted(positions.items()) if r != self.rank and wait.has_come(p)]
        missing = [r for r in range(self.world_size) if r != self.rank and r not in arrived]
        where = "; ".join(
            f"rank {r} {positions[r].text}" if r in positions else f"rank {r} does not answer" for r in missing[:4]
        )
        late = f"missing: {name_ranks(missing)} ({where})" if missing else "no rank is missing"
        return (
            f"rank {self.rank} {wait.text} since {time.monotonic() - wait.since:.0f} s: "
            f"arrived: {name_ranks([*arrived, self.rank])}; {late}; find out why, or pass a longer timeout"
        )

    def _note(self, position: Position, now: float) -> None:
        """Remember for how long answers to different roll calls have found a rank at the same place."""
        roll, change, since, _ = self._steady.get(position.rank, (-1, -1, now, now))
        if roll != position.roll:
            self._steady[position.rank] = (
                position.roll,
                position.change,
                since if change == position.change else now,
                now,
            )

    def _calls_roll(self, wait: Wait) -> bool:
        """In a large job a few ranks look for all: the first to come to a vote (they may be the ones that deviate), and some."""
        early = wait.vote is not None and 0 < wait.vote.order <= LOOKERS
        return early or wait.urgent or self.rank % max(1, self.world_size // LOOKERS) == 0

    def _judge(self, board: Board, wait: Wait, me: Position, other: Position, now: float) -> Verdict | None:
        _, _, since, seen = self._steady[other.rank]
        still = seen - since
        both = f"rank {self.rank} {wait.text}; rank {other.rank} {other.text}"
        if other.raised and still >= RAISED and not wait.has_come(other):
            body = f"rank {other.rank} raised {other.raised} in its user's code and makes no further call: {both}"
            return Verdict(RankError, body, other.rank)
        if other.state == "closed":
            if (wait.urgent or not wait.has_come(other)) and not (wait.topic and board.decided(wait.topic)):
                reason = f" after it raised {other.raised}" if other.raised else ""
                return Verdict(RankError, f"rank {other.rank} has ended{reason}: {both}", other.rank)
            return None
        if wait.state == "confirming" and other.calls > me.calls and not board.decided(wait.topic):
            here = other if other.calls == me.calls + 1 and other.state != "confirming" else None
            text = f"ranks disagree about call {me.calls + 1}: {both}; {ADVICE}"
            return Verdict(RankMismatchError, text, other.rank, here)
        if wait.topic and still >= STEADY and not board.decided(wait.topic):
            other_waits_for_vote = other.topic not in ("", wait.topic) and not board.decided(other.topic)
            if other_waits_for_vote or other.needs > me.started:
                return Verdict(RankMismatchError, f"ranks wait for each other: {both}; {ADVICE}", other.rank)
        return None


def _ended(board: Board, roll: int, silent: list[int]) -> list[int]:
    """Of the ranks that have not answered, those whose process is known to have ended without a word."""
    known = board.read(0) if silent else {}
    ended = [rank for rank in silent if rank in known and has_ended(known[rank].process)]
    answered = board.read(roll) if ended else {}  # their last word may have come while we looked
    return [rank for rank in ended if rank not in answered]


def _gone(ended: list[int], rank: int, text: str) -> str:
    verb, whose = ("is", "its process has") if len(ended) == 1 else ("are", "their processes have")
    return f"{name_ranks(ended)} {verb} gone: {whose} ended while rank {rank} {text}"


def first_difference(rank: int, lines: tuple[str, ...], base: int, base_lines: tuple[str, ...]) -> str:
    """The first line in which two ranks' texts differ, as the end of a sentence."""
    for number in range(max(len(lines), len(base_lines))):
        mine = repr(lines[number]) if number < len(lines) else "nothing"
        theirs = repr(base_lines[number]) if number < len(base_lines) else "nothing"
        if mine != theirs:
            return f": rank {rank} has {mine} where rank {base} has {theirs} (line {number + 1})"
    return ""


def name_ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2`` or, of many, the first few and a count."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
