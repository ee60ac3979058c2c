"""What all ranks of one compiled model agree on: texts, the order of their calls, and that none of them is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from zcompile import errors
from zcompile.errors import MeshError, RankError, RankMismatchError, RankTimeoutError
from zcompile.runtime.ranks import exits, process
from zcompile.runtime.ranks.board import Board, Failure, Position
from zcompile.runtime.ranks.history import Call, History
from zcompile.runtime.ranks.judge import ADVICE, Judge, Wait, first_difference
from zcompile.runtime.ranks.sequence import Sequence, TextSequence, digest_of
from zcompile.runtime.ranks.texts import describe, name_difference

PATIENCE = 1.5  # seconds of waiting before a rank asks where the others are
SLICE = 0.2  # seconds that one try to finish a wait may block
STORE_SILENCE = 15.0  # seconds without an answer of the store after which its host counts as gone
LOST_CONNECTION = 25.0  # seconds to find out which rank broke a connection
FAREWELL = 5.0  # seconds that the host of the store stays for others to read why it ended

__all__ = ["Agreement", "Sequence", "TextSequence"]


class Agreement:
    """Keeps the ranks of one compiled model in step: no wait is endless, and no rank starts a collective that others do not.

    Every group of collectives is announced as a call (``event``). Ranks share the history of calls, so each predicts the
    next one; a rank whose next call is the predicted one goes on without a word (under 1 us, no store traffic), one that
    deviates first asks all others over the store to deviate alike. So two ranks never have different collectives in
    flight, and a rank that deviates alone is found waiting while the others have passed.

    A rank that waits for more than a moment asks all ranks where they are and ends with an error if one failed, is gone,
    left, or waits for something that cannot come; a rank that is merely busy is waited for, up to ``timeout``. The first
    failure is posted, and every other rank ends with the same text, within a second or two where it waits. After that the
    agreement is broken: every later use raises the same error.

    With one rank, or no store, nothing is done.

    Args:
        store: keys of this model alone (TCPStore, FileStore or HashStore, in a PrefixStore).
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds that any wait may take.
        name: of the model, in thread names.

    Attributes:
        is_closed: whether this rank has left.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, timeout: float = 600.0, name: str = "model") -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.name = name
        self._error: RankError | None = None
        self._lock = threading.Lock()
        self._history = History()
        self._lines: dict[Call, tuple[str, ...]] = {}
        self._call: Call = ("", "")
        self._calls = 0
        self._started = 0
        self._change = 0
        self._wait: Wait | None = None
        self.beside: Wait | None = None  # of another thread than the training one, which ends it at the timeout
        self._raised = ""
        self._topics: dict[str, int] = {}
        self.is_closed = False
        self._process = process.identity()
        self._device_waits: list[Callable[[], Wait | None]] = []
        self._on_break: list[Callable[[], None]] = []
        self._board: Board | None = None
        if store is not None and world_size > 1:
            self._judge = Judge(rank, world_size)
            board = self._board = Board(store, rank, world_size, self, name)
            board.submit(lambda _: board.post_position())
            exits.watch_exit(self)

    @property
    def board(self) -> Board | None:
        """Where the ranks post; None with one rank, or without a store."""
        return self._board

    # Agreeing. --------------------------------------------------------------------------------------------------------

    def compare(self, topic: str, text: str) -> None:
        """Check that all ranks give the same ``text`` for ``topic``. Two store operations a rank when they do.

        Raises:
            RankMismatchError: on every rank, with the first line that differs.
            RankTimeoutError: a rank did not come within ``timeout``.
            RankError: a rank failed, is gone or left.
        """
        if self._board is None:
            return
        use = self._topics[topic] = self._topics.get(topic, 0) + 1
        lines = tuple(text.splitlines())
        key = f"compare/{topic}/{use}"
        wait = Wait("comparing", f"all ranks to agree on {topic}", f"compares {topic}", topic=key)
        self._agree(wait, lines, f"ranks disagree about {topic}")

    def event(self, kind: str, sequence: Sequence) -> None:
        """Announce a call and its collectives, before any of them starts.

        Args:
            kind: such as ``"forward (train)"``; shown in errors.
            sequence: its collectives.

        Raises:
            RankMismatchError: the ranks make different calls.
            RankError: as for ``compare``; also whatever ended this agreement earlier.
        """
        self.check()
        self.check_open()
        call = (kind, sequence.digest)
        if not self._history.follow(call):
            if self._board is not None:
                self._confirm(call, sequence)
            self._history.record(call)
        self._call = call
        self._calls += 1
        self._change += 1
        self._raised = ""

    def raised(self, error: BaseException) -> None:
        """Note that the user's code raised in the current call. Others end with it only if they wait and nothing follows."""
        self._raised = describe(error)
        self._change += 1

    def name_call(self) -> str:
        """The latest call, such as ``"call 7, forward (train)"``."""
        return f"call {self._calls}, {self._call[0]}"

    def check(self) -> None:
        """Raise what ended this agreement, if something did."""
        if self._error is not None:
            raise self._copy()

    def check_open(self) -> None:
        """Refuse, with a MeshError, a model that was ended."""
        if self.is_closed:
            raise MeshError("the model was ended by close or unwrap; compile the plain module again to go on")

    # Waiting. ---------------------------------------------------------------------------------------------------------

    def started(self, count: int = 1) -> int:
        """Count collectives that are being started; returns the number of the last."""
        self.check()
        self._started += count
        return self._started

    def poll(self, description: str, ready: Callable[[float], bool], *, needs: int = 0, topic: str = "") -> None:
        """Call ``ready(seconds)`` until it returns True, while watching the other ranks.

        Args:
            description: what is waited for, such as ``"all_gather of layers.3"``.
            ready: tries to finish within the given seconds.
            needs: the collective's number, of ``started``.
            topic: the vote that is waited for, instead of a collective.
        """
        if self._board is None:
            while not ready(SLICE):
                pass
            return
        self.check()
        if ready(SLICE):
            return
        text = f"waits {self._where()}for {description}"
        self._wait_until(Wait("waiting", description, text, topic=topic, needs=needs), ready)

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        """Watch the other ranks while the body blocks on its own; a verdict is raised afterwards (and aborts device work)."""
        if self._board is None:
            yield
            return
        self.check()
        self._enter(Wait("waiting", description, f"waits {self._where()}for {description}", needs=self._started))
        try:
            yield
        finally:
            self._leave()
        self.check()

    def watch_device(self, oldest: Callable[[], Wait | None], on_break: Callable[[], None]) -> None:
        """Watch collectives that no thread of the host waits for.

        Args:
            oldest: the oldest unfinished one, None if all are done; asked from the board's thread.
            on_break: ends them; called once from the thread that breaks the agreement.
        """
        self._device_waits.append(oldest)
        self._on_break.append(on_break)

    def device_wait(self, description: str, needs: int, since: float, *, urgent: bool = False) -> Wait:
        """A wait of the device for collective ``needs``, for ``watch_device``; ``urgent``: somebody has ended."""
        text = f"waits {self._where()}for {description}"
        return Wait("waiting", description, text, needs=needs, since=since, urgent=urgent)

    def explain(self, error: BaseException, description: str) -> RankError:
        """A connection broke: find out which rank ended (up to 25 s), break the agreement and return what to raise."""
        if self._board is None:
            return RankError(f"[rank {self.rank} of {self.world_size}] {description} failed: {describe(error)}")
        text = f"lost a connection {self._where()}in {description}"
        wait = Wait("waiting", description, text, needs=self._started, urgent=True)
        self._enter(wait)
        deadline = time.monotonic() + LOST_CONNECTION
        while self._error is None and not self._board.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        self._leave()
        if self._board.lost and self._error is None:
            self._break(
                RankError, f"{self._board.keeper} is gone: rank {self.rank} {text} ({describe(error)})", post=False
            )
        self._break(RankError, f"rank {self.rank} {text}: {describe(error)}")
        return self._copy()

    # Ending. ----------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, if there are any, that this one cannot go on. Their waits end with the reason."""
        if self._error is None and self._board is not None:
            self._break(RankError, f"rank {self.rank} failed {self._where()}with {describe(error)}")

    def close(self) -> None:
        """Leave: tell the others, end the thread. Harmless when called twice."""
        left, self.is_closed = self.is_closed, True
        if left or (board := self._board) is None:
            return
        self._change += 1
        board.submit(lambda _: board.post_position())
        if self._error is not None and board.host == "rank 0" and self.rank == 0:
            self._stay_for_readers(board)
        board.stop(timeout=2.0)

    def _stay_for_readers(self, board: Board) -> None:
        """The store ends with this process: let the others read why."""
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and not board.lost:
            request = board.submit(lambda _: board.still_reads())
            if request.done.wait(1.0) and not request.result:
                break
            time.sleep(0.1)

    # The board's owner: called from its thread. -----------------------------------------------------------------------

    def position(self, roll: int) -> Position:
        wait = self._wait or self._oldest_device_wait()
        calls, (kind, digest) = self._calls, self._call
        state, text, topic, needs = "running", self._own_code(), "", 0
        if self.is_closed:
            state, text = "closed", f"has left after {self.name_call()}" if calls else "has left without a call"
        elif wait is not None:
            state, text, topic, needs = wait.state, wait.text, wait.topic, wait.needs
            kind, digest = wait.call or (kind, digest)
        change, raised = self._change, self._raised
        return Position(
            self.rank, state, text, calls, kind, digest, topic, self._started, needs, change, raised, roll,
            self._process,
        )  # fmt: skip

    def on_failure(self, failure: Failure) -> None:
        if self._error is None:
            kind = getattr(errors, failure.kind, RankError)
            self._break(kind, failure.body, post=False)

    def on_tick(self, now: float) -> None:
        if (board := self._board) is None or self._error is not None:
            return
        verdict = self._judge.missing(board, lambda: wait.text if (wait := self._wait) else self._own_code())
        if verdict is not None:  # before the device is asked for waits: it may not answer any more
            board.read_failure()
            return self._break(verdict.kind, verdict.body)
        wait = self._wait or self._oldest_device_wait() or self.beside
        if wait is None or ((waited := now - wait.since) < PATIENCE and not wait.urgent):
            return
        verdict = self._judge.look(board, wait, self.position(0), now)
        if verdict is not None:
            board.read_failure()  # a reason that came meanwhile says more
            kind, body = verdict.kind, verdict.body
            other = self._lines.get((verdict.other.kind, verdict.other.digest)) if verdict.other else None
            if wait.call is not None and other is not None:
                body += first_difference(self.rank, self._lines[wait.call], verdict.rank, other)
            self._break(kind, body)
        elif waited > self.timeout and wait not in (self._wait, self.beside):  # nobody waits on the host: give up here
            self._break(RankTimeoutError, self._judge.name_missing(wait, self._judge.latest))
        elif waited > LOST_CONNECTION and wait.urgent and wait is not self._wait:
            self._break(RankError, f"rank {self.rank} {wait.text}, and no rank is known to have ended")

    # Inside. ----------------------------------------------------------------------------------------------------------

    def _confirm(self, call: Call, sequence: Sequence) -> None:
        """Unless the history implies ``call``, check that all ranks make it now."""
        self._lines.setdefault(call, tuple(sequence.lines))
        if self._history.prediction() == call:
            return
        number, text = self._calls + 1, f"waits to confirm call {self._calls + 1} as {call[0]}"
        wait = Wait("confirming", f"all ranks to agree on call {number}", text, topic=f"call/{number}", call=call)
        lines = (f"call {number}: {call[0]}", *sequence.lines)
        self._agree(wait, lines, f"ranks disagree about call {number}")

    def _agree(self, wait: Wait, lines: tuple[str, ...], headline: str) -> None:
        """Vote on ``lines``; raise on every rank with the first difference."""
        self.check()
        assert self._board is not None
        vote = wait.vote = self._board.vote(wait.topic, digest_of(lines))
        self._wait_until(wait, vote.done.wait)
        if vote.verdict != "same":
            body = name_difference(self._board, vote, lines, headline, lambda: self._error is not None)
            body += f"; {ADVICE}" if wait.state == "confirming" else ""
            self._break(RankMismatchError, body)
            raise self._copy()

    def _wait_until(self, wait: Wait, ready: Callable[[float], bool]) -> None:
        deadline = wait.since + self.timeout
        self._enter(wait)
        try:
            while not ready(min(SLICE, self.timeout)):
                self.check()
                self._check_store(wait)
                if time.monotonic() > deadline:
                    self._give_up(wait, ready)
                    return
        finally:
            self._leave()

    def _enter(self, wait: Wait) -> None:
        self._change += 1
        self._wait = wait

    def _leave(self) -> None:
        self._wait = None
        self._change += 1

    def _check_store(self, wait: Wait) -> None:
        """End a wait that cannot be watched any more because the store is gone or silent."""
        board = self._board
        assert board is not None
        now = time.monotonic()
        if now - wait.since < PATIENCE and not (board.lost and wait.topic):
            return
        if board.lost:
            self._break(RankError, f"{board.keeper} is gone: rank {self.rank} {wait.text} ({board.lost})", post=False)
            raise self._copy()
        silence = now - max(board.last_tick, wait.since)
        if silence > STORE_SILENCE:
            body = f"{board.keeper} has not answered for {silence:.0f} s: rank {self.rank} {wait.text}"
            self._break(RankError, body, post=False)
            raise self._copy()

    def _give_up(self, wait: Wait, ready: Callable[[float], bool]) -> None:
        """The timeout has passed: find out who is missing and raise."""
        assert self._board is not None
        board, positions = self._board, self._judge.latest
        called = board.ask(lambda _: board.call_roll())
        deadline = time.monotonic() + 3.0
        while called is not None and time.monotonic() < deadline:
            if ready(0.1):
                return
            self.check()
            positions = board.ask(lambda _: board.read(called)) or positions
            if len(positions) == self.world_size:
                break
        board.ask(lambda _: board.read_failure())  # the others may have given up first: then their reason is ours
        self._break(RankTimeoutError, self._judge.name_missing(wait, positions))
        raise self._copy()

    def _oldest_device_wait(self) -> Wait | None:
        if self._error is not None:  # what was in flight has been ended
            return None
        waits = [w for w in (oldest() for oldest in self._device_waits) if w is not None]
        return min(waits, key=lambda w: w.since, default=None)

    def _own_code(self) -> str:
        return f"runs its own code after {self.name_call()}" if self._calls else "has made no call yet"

    def _where(self) -> str:
        return f"in {self.name_call()}, " if self._calls else ""

    def _break(self, kind: type[RankError], body: str, *, post: bool = True) -> None:
        """End this agreement: the first reason counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = kind(f"[rank {self.rank} of {self.world_size}] {body}")
        exits.ranks_are_lost()
        board = self._board
        if board is not None and post:
            board.tell(Failure(self.rank, kind.__name__, body), within=2.0)
        for end in self._on_break:
            end()

    def _copy(self) -> RankError:
        assert self._error is not None
        return type(self._error)(*self._error.args)
