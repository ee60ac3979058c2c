"""What all ranks of one compiled model agree on: texts, the order of their calls, and that none of them is lost."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from zcompile import errors
from zcompile.errors import RankError, RankMismatchError, RankTimeoutError
from zcompile.runtime.board import Board, Failure, Position, Request, Vote
from zcompile.runtime.history import Call, History
from zcompile.runtime.judge import ADVICE, Judge, Wait, first_difference, name_ranks

PATIENCE = 1.5  # seconds of waiting before a rank asks where the others are
SLICE = 0.2  # seconds that one try to finish a wait may block
STORE_SILENCE = 15.0  # seconds without an answer of the store after which its host counts as gone
LOST_CONNECTION = 25.0  # seconds to find out which rank broke a connection
DETAILS = 10.0  # seconds to collect the texts that differ
FAREWELL = 5.0  # seconds that the host of the store stays for others to read why it ended


class Sequence(Protocol):
    """The collectives of one graph in order: op, axis, dtype, sizes, parameter names; the same text on every rank."""

    @property
    def digest(self) -> str: ...
    @property
    def lines(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TextSequence:
    """A sequence given as lines."""

    lines: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, *lines: str) -> TextSequence:
        return cls(lines, hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16])


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
        self._recent: deque[str] = deque(maxlen=512)  # what the latest collectives were
        self._change = 0
        self._wait: Wait | None = None
        self._raised = ""
        self._topics: dict[str, int] = {}
        self._closed = False
        self._device_waits: list[Callable[[], Wait | None]] = []
        self._on_break: list[Callable[[], None]] = []
        self._board: Board | None = None
        if store is not None and world_size > 1:
            self._judge = Judge(rank, world_size)
            self._board = Board(store, rank, world_size, self, name)
            self._board.submit(lambda _: self._post_position())
            _watch_exit(self)

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
        self._agree(
            f"compare/{topic}/{use}", lines, "comparing", topic, f"compares {topic}", f"ranks disagree about {topic}"
        )

    def event(self, kind: str, sequence: Sequence) -> None:
        """Announce a call and its collectives, before any of them starts.

        Args:
            kind: such as ``"forward (train)"``; shown in errors.
            sequence: its collectives.

        Raises:
            RankMismatchError: the ranks make different calls.
            RankError: as for ``compare``; also whatever ended this agreement earlier.
        """
        if self._error is not None:
            self._raise()
        call = (kind, sequence.digest)
        self._calls += 1
        self._change += 1
        self._raised = ""
        if self._history.follow(call):
            self._call = call
            return
        if self._board is None:
            self._call = call
            self._history.record(call)
            return
        self._lines.setdefault(call, tuple(sequence.lines))
        if self._history.prediction() != call:
            number, previous = self._calls, self._call
            self._call = call
            lines = (f"call {number}: {kind}", *sequence.lines)
            text = f"waits to confirm call {number} as {kind}"
            try:
                self._agree(
                    f"call/{number}", lines, "confirming", f"call {number}", text, f"ranks disagree about call {number}"
                )
            except BaseException:
                self._call = previous
                raise
        self._call = call
        self._history.record(call)

    def raised(self, error: BaseException) -> None:
        """Note that the user's code raised in the current call. Others end with it only if they wait and nothing follows."""
        self._raised = _describe(error)
        self._change += 1

    def check(self) -> None:
        """Raise what ended this agreement, if something did."""
        if self._error is not None:
            self._raise()

    # Waiting. ---------------------------------------------------------------------------------------------------------

    def started(self, description: str) -> int:
        """Count a collective that is being started; returns its number."""
        if self._error is not None:
            self._raise()
        self._started += 1
        self._recent.append(description)
        return self._started

    def poll(self, description: str, ready: Callable[[float], bool], *, needs: int = 0) -> None:
        """Call ``ready(seconds)`` until it returns True, while watching the other ranks.

        Args:
            description: what is waited for, such as ``"all_gather of layers.3"``.
            ready: tries to finish within the given seconds.
            needs: the collective's number, of ``started``.
        """
        if self._board is None:
            while not ready(SLICE):
                pass
            return
        if self._error is not None:
            self._raise()
        if ready(SLICE):
            return
        self._wait_until(Wait("waiting", description, f"waits {self._where()}for {description}", needs=needs), ready)

    @contextlib.contextmanager
    def waiting(self, description: str) -> Iterator[None]:
        """Watch the other ranks while the body blocks on its own; a verdict is raised afterwards (and aborts device work)."""
        if self._board is None:
            yield
            return
        if self._error is not None:
            self._raise()
        self._enter(Wait("waiting", description, f"waits {self._where()}for {description}", needs=self._started))
        try:
            yield
        finally:
            self._leave()
        if self._error is not None:
            self._raise()

    def watch_device(self, oldest: Callable[[], Wait | None], on_break: Callable[[], None]) -> None:
        """Watch collectives that no thread of the host waits for.

        Args:
            oldest: the oldest unfinished one, None if all are done; asked from the board's thread.
            on_break: ends them; called once from the thread that breaks the agreement.
        """
        self._device_waits.append(oldest)
        self._on_break.append(on_break)

    def device_wait(self, description: str, needs: int, since: float) -> Wait:
        """A wait of the device for collective ``needs``, for ``watch_device``."""
        return Wait("waiting", description, f"waits {self._where()}for {description}", needs=needs, since=since)

    def explain(self, error: Exception, description: str) -> RankError:
        """A connection broke: find out which rank ended (up to 25 s), break the agreement and return what to raise."""
        if self._board is None:
            return RankError(f"[rank {self.rank} of {self.world_size}] {description} failed: {_describe(error)}")
        text = f"lost a connection {self._where()}in {description}"
        wait = Wait("waiting", description, text, needs=self._started, urgent=True)
        self._enter(wait)
        deadline = time.monotonic() + LOST_CONNECTION
        while self._error is None and not self._board.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        self._leave()
        if self._board.lost and self._error is None:
            self._break(RankError, f"{self._host()} is gone: rank {self.rank} {text} ({_describe(error)})", post=False)
        self._break(RankError, f"rank {self.rank} {text}: {_describe(error)}")
        return self._copy()

    # Ending. ----------------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on. Their waits end with the reason."""
        if self._error is None:
            self._break(RankError, f"rank {self.rank} failed {self._where()}with {_describe(error)}")

    def close(self) -> None:
        """Leave: tell the others, end the thread. Harmless when called twice."""
        board = self._board
        if board is None or self._closed:
            return
        self._closed = True
        self._change += 1
        board.submit(lambda _: board.post_position())
        if self._error is not None and board.host == "rank 0" and self.rank == 0:
            self._stay_for_readers(board)
        board.stop(timeout=2.0)

    def _stay_for_readers(self, board: Board) -> None:
        """The store ends with this process: let the others read why."""
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and not board.lost:
            request = board.submit(lambda store: store.add("seen", 0))
            if request.done.wait(1.0) and request.result >= self.world_size:
                break
            time.sleep(0.1)

    # The board's owner: called from its thread. -----------------------------------------------------------------------

    def position(self, roll: int) -> Position:
        wait = self._wait or self._oldest_device_wait()
        state, text = (
            "running",
            f"runs its own code after {self._name_call()}" if self._calls else "has made no call yet",
        )
        topic, needs = "", 0
        if self._closed:
            state, text = "closed", f"has left after {self._name_call()}" if self._calls else "has left without a call"
        elif wait is not None:
            state, text, topic, needs = wait.state, wait.text, wait.topic, wait.needs
        kind, digest = self._call
        return Position(
            self.rank,
            state,
            text,
            self._calls,
            kind,
            digest,
            topic,
            self._started,
            needs,
            self._change,
            self._raised,
            roll,
        )

    def on_failure(self, failure: Failure) -> None:
        if self._error is None:
            kind = getattr(errors, failure.kind, RankError)
            self._break(kind, failure.body, post=False)

    def on_tick(self, now: float) -> None:
        board, wait = self._board, self._wait or self._oldest_device_wait()
        if board is None or wait is None or self._error is not None:
            return
        waited = now - wait.since
        if waited < PATIENCE and not wait.urgent:
            return
        verdict = self._judge.look(board, wait, self.position(0), now)
        if verdict is not None:
            kind, body = verdict.kind, verdict.body
            other = self._lines.get((verdict.other.kind, verdict.other.digest)) if verdict.other else None
            if wait.state == "confirming" and other is not None:
                body += first_difference(self.rank, self._lines[self._call], verdict.rank, other)
            self._break(kind, body)
        elif wait is not self._wait and waited > self.timeout:  # nobody on the host waits: the thread gives up
            self._break(RankTimeoutError, self._timeout_body(wait, self._judge.latest))

    # Inside. ----------------------------------------------------------------------------------------------------------

    def _agree(self, topic: str, lines: tuple[str, ...], state: str, name: str, text: str, headline: str) -> None:
        """Vote on ``lines``; raise on every rank with the first difference."""
        if self._error is not None:
            self._raise()
        assert self._board is not None
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        vote = self._board.vote(topic, digest)
        self._wait_until(Wait(state, f"all ranks to agree on {name}", text, topic=topic, vote=vote), vote.done.wait)
        if vote.verdict != "same":
            body = self._difference(vote, lines, headline)
            if self._error is None:
                self._break(RankMismatchError, body)
            self._raise()

    def _difference(self, vote: Vote, lines: tuple[str, ...], headline: str) -> str:
        """Fetch the texts of a failed vote and name the first difference between rank 0 and the first that differs."""
        board = self._board
        assert board is not None
        me = f"{vote.topic}/text/{self.rank}"
        board.submit(lambda store: store.set(me, vote.digest + "\n" + "\n".join(lines)))
        texts: dict[int, tuple[str, tuple[str, ...]]] = {self.rank: (vote.digest, lines)}
        deadline = time.monotonic() + DETAILS
        while time.monotonic() < deadline and not board.lost:
            for rank in [r for r in range(self.world_size) if r not in texts]:
                request = self._ask(
                    lambda store, key=f"{vote.topic}/text/{rank}": store.get(key) if store.check([key]) else None
                )
                if request is not None and request.result is not None:
                    digest, *theirs = request.result.decode().split("\n")
                    texts[rank] = (digest, tuple(theirs))
            if len(texts) == self.world_size or (self._error is not None and 0 in texts):
                break
            time.sleep(0.05)
        base = min(texts)
        differ = sorted(r for r, (digest, _) in texts.items() if digest != texts[base][0])
        if not differ:
            return f"{headline}: another rank gave a different text"
        more = f" ({name_ranks(differ)} differ from rank {base})" if len(differ) > 1 else ""
        advice = f"; {ADVICE}" if vote.topic.startswith("call/") else ""
        return headline + first_difference(differ[0], texts[differ[0]][1], base, texts[base][1]) + more + advice

    def _ask(self, act: Callable[[Any], Any]) -> Request | None:
        """Run ``act`` in the board's thread; None if the store does not answer."""
        assert self._board is not None
        request = self._board.submit(act)
        deadline = time.monotonic() + 5.0
        while not request.done.wait(0.1):
            if self._board.lost or time.monotonic() > deadline:
                return None
        return request

    def _wait_until(self, wait: Wait, ready: Callable[[float], bool], limit: float | None = None) -> None:
        limit = self.timeout if limit is None else limit
        deadline = wait.since + limit
        self._enter(wait)
        try:
            while not ready(min(SLICE, limit)):
                if self._error is not None:
                    self._raise()
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
            self._break(RankError, f"{self._host()} is gone: rank {self.rank} {wait.text} ({board.lost})", post=False)
            self._raise()
        silence = now - max(board.last_tick, wait.since)
        if silence > STORE_SILENCE:
            body = f"{self._host()} has not answered for {silence:.0f} s: rank {self.rank} {wait.text}"
            self._break(RankError, body, post=False)
            self._raise()

    def _host(self) -> str:
        host = self._board.host if self._board is not None else ""
        return f"{host}, which hosts the store," if host else "the store"

    def _give_up(self, wait: Wait, ready: Callable[[float], bool]) -> None:
        """The timeout has passed: find out who is missing and raise."""
        assert self._board is not None
        board, positions = self._board, self._judge.latest
        called = self._ask(lambda _: board.call_roll())
        deadline = time.monotonic() + 3.0
        while called is not None and time.monotonic() < deadline:
            if ready(0.1):
                return
            if self._error is not None:
                self._raise()
            answers = self._ask(lambda _: board.read(called.result))
            positions = answers.result if answers is not None and answers.result is not None else positions
            if len(positions) == self.world_size:
                break
        self._break(RankTimeoutError, self._timeout_body(wait, positions))
        self._raise()

    def _timeout_body(self, wait: Wait, positions: dict[int, Position]) -> str:
        arrived = [r for r, p in sorted(positions.items()) if r != self.rank and wait.has_come(p)]
        missing = [r for r in range(self.world_size) if r != self.rank and r not in arrived]
        where = "; ".join(
            f"rank {r} {positions[r].text}" if r in positions else f"rank {r} does not answer" for r in missing[:4]
        )
        late = f"missing: {name_ranks(missing)} ({where})" if missing else "no rank is missing"
        return (
            f"rank {self.rank} waited {time.monotonic() - wait.since:.0f} s {self._where()}for {wait.description}: "
            f"arrived: {name_ranks([*arrived, self.rank])}; {late}; find out why, or pass a longer timeout"
        )

    def _oldest_device_wait(self) -> Wait | None:
        if self._error is not None:  # what was in flight has been ended
            return None
        waits = [w for w in (oldest() for oldest in self._device_waits) if w is not None]
        return min(waits, key=lambda w: w.since, default=None)

    def _name_call(self) -> str:
        return f"call {self._calls}, {self._call[0]}"

    def _where(self) -> str:
        return f"in {self._name_call()}, " if self._calls else ""

    def _post_position(self) -> None:
        if self._board is not None:
            self._board.post_position()

    def _break(self, kind: type[RankError], body: str, *, post: bool = True) -> None:
        """End this agreement: the first reason counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = kind(f"[rank {self.rank} of {self.world_size}] {body}")
        board = self._board
        if board is not None and post:
            failure = Failure(self.rank, kind.__name__, body)
            board.submit(lambda _: board.post_failure(failure)).done.wait(0.0 if board.is_own_thread() else 2.0)
        for end in self._on_break:
            end()

    def _copy(self) -> RankError:
        assert self._error is not None
        return type(self._error)(*self._error.args)

    def _raise(self) -> None:
        raise self._copy()


def _sleep_only(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _describe(error: BaseException) -> str:
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first[:500]}" if first else type(error).__name__


# The end of the process: a rank that dies by an exception, or just ends, says so. -----------------------------------------

_OPEN: weakref.WeakSet[Agreement] = weakref.WeakSet()
_PREVIOUS_HOOK: list[Any] = []


def _watch_exit(agreement: Agreement) -> None:
    """Have the process's end reach the board of ``agreement`` (held weakly)."""
    if not _PREVIOUS_HOOK:  # once a process: a later hook may call ours
        _PREVIOUS_HOOK.append(sys.excepthook)
        sys.excepthook = _report_exception
        atexit.register(_close_all)
    _OPEN.add(agreement)


def _report_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
    for agreement in list(_OPEN):
        agreement.fail(error)
    return _PREVIOUS_HOOK[0](kind, error, traceback)


def _close_all() -> None:
    for agreement in list(_OPEN):
        agreement.close()
