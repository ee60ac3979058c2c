"""The board on which ranks post where they are: one background thread that owns a store client."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from zcompile import compat
from zcompile.runtime.ranks.process import has_ended

TICK = 0.5  # seconds between two looks at the store of an idle rank
FAST_TICK = 0.0005  # seconds between the first looks while a vote is open; doubles up to SLOW_TICK
SLOW_TICK = 0.05


@dataclass(frozen=True)
class Position:
    """Where one rank is."""

    rank: int
    state: str  # "running", "confirming" (a call), "comparing" (a text), "waiting" (for a collective), "closed"
    text: str  # the same for people, after the word "rank 3"
    calls: int  # how many calls of the model this rank has begun, without one that it still confirms
    kind: str
    digest: str
    topic: str  # the vote that it waits for
    started: int  # how many collectives it has started
    needs: int  # the number of the collective that it waits for
    change: int  # grows whenever any of the above changes
    raised: str  # an exception that left the latest call
    roll: int  # the roll call that this answers
    process: str  # where it runs


@dataclass(frozen=True)
class Failure:
    """Why a rank ended: the first one posted counts for all."""

    rank: int
    kind: str  # name of a RankError class
    body: str


class Vote:
    """All ranks post a digest for a topic; ``done`` is set when every rank is known to agree, or any two to disagree."""

    def __init__(self, topic: str, digest: str) -> None:
        self.topic = topic
        self.digest = digest
        self.order = 0  # this rank was the n-th to post
        self.verdict = ""  # "same" | "different"
        self.done = threading.Event()
        self.previous: tuple[str, ...] = ()  # the keys of the vote before it, on which all ranks have acted


class Request:
    """Something for the thread to do with the store."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.act = act
        self.result: Any = None
        self.done = threading.Event()


class Owner(Protocol):
    """What the board asks of the agreement that it belongs to, always from the board's thread."""

    def position(self, roll: int) -> Position: ...
    def on_failure(self, failure: Failure) -> None: ...
    def on_tick(self, now: float) -> None: ...


class Board:
    """Posts and reads positions, failures and votes.

    Only the thread touches the store, through a client of its own, and only with operations that return at once
    (``add``, ``set``, ``check``, ``get`` of a key that is there): the caller's thread can always give up waiting.
    Nothing is left to pile up: a TCPStore's keys of a vote go with the next vote, those of a roll call when it is answered.
    A healthy run writes nothing: positions are posted only as the answer to a roll call, which a rank starts when it
    has waited for more than a moment. That keeps a FileStore, whose file grows with every write, small: about 500
    bytes a rank for each roll call, none otherwise.

    Args:
        store: all keys are this board's own (a PrefixStore per model).
        rank: this rank.
        world_size: number of ranks.
        owner: held weakly: the thread ends when it is gone.
        name: of the thread, for debuggers.
    """

    def __init__(self, store: Any, rank: int, world_size: int, owner: Owner, name: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.host = compat.store_host(store)
        self.failure: Failure | None = None
        self.lost = ""  # the error that ended the store connection
        self.last_tick = time.monotonic()
        self._store = compat.store_client(store)
        self._owner = weakref.ref(owner)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._votes: dict[str, Vote] = {}
        self._latest: dict[str, tuple[str, ...]] = {}  # by kind of vote
        self._roll = 0
        self._pause = TICK
        self._next_tick = 0.0
        self._tick = TICK * max(1.0, world_size / 512)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._requests), name=f"zcompile-board-{name}", daemon=True
        )
        self._thread.start()

    # The caller's side: never blocks.

    @property
    def keeper(self) -> str:
        """Who has the store, in words."""
        return f"{self.host}, which hosts the store," if self.host else "the store"

    def submit(self, act: Callable[[Any], Any]) -> Request:
        """Have the thread run ``act(store)`` soon; ``request.result`` holds the result once ``request.done``."""
        request = Request(act)
        self._requests.put(request)
        return request

    def ask(self, act: Callable[[Any], Any]) -> Any:
        """The result of ``act(store)``; None if the store does not answer within 5 s."""
        request = self.submit(act)
        deadline = time.monotonic() + 5.0
        while not request.done.wait(0.1):
            if self.lost or time.monotonic() > deadline:
                return None
        return request.result

    def vote(self, topic: str, digest: str) -> Vote:
        """Post ``digest`` for ``topic``: two store operations when all agree."""
        vote = Vote(topic, digest)
        family = topic.rpartition("/")[0]
        vote.previous = self._latest.get(family, ())
        self._latest[family] = (f"{topic}/{digest}", f"{topic}/count", f"{topic}/done")

        def post(store: Any) -> None:
            same = store.add(f"{topic}/{digest}", 1)
            vote.order = store.add(f"{topic}/count", 1)
            if same < vote.order:  # others may have posted between the two: count again
                same = store.add(f"{topic}/{digest}", 0)
            if same < vote.order:
                store.set(f"{topic}/done", "different")
            elif vote.order == self.world_size:
                store.set(f"{topic}/done", "same")
            self._votes[topic] = vote
            self._pause = FAST_TICK

        self.submit(post)
        return vote

    def publish(self, topic: str, text: str) -> Vote:
        """Post ``text`` for ``topic``: done when every rank has posted one. ``texts`` reads them."""
        vote = Vote(topic, "")

        def post(store: Any) -> None:
            store.set(f"{topic}/{self.rank}", text)
            vote.order = store.add(f"{topic}/count", 1)
            if vote.order == self.world_size:
                store.set(f"{topic}/done", "same")
            self._votes[topic] = vote
            self._pause = FAST_TICK

        self.submit(post)
        return vote

    def tell(self, failure: Failure, within: float) -> None:
        """Post a failure: when this returns the others can read it, unless the store takes longer than so many seconds."""
        if not self.is_own_thread():
            self.submit(lambda _: self.post_failure(failure)).done.wait(within)
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: its end is what the others see
            self.post_failure(failure)

    def stop(self, timeout: float) -> None:
        """End the thread after what was submitted before; waits for it at most ``timeout`` seconds."""
        self._requests.put(None)
        if not self.is_own_thread():
            self._thread.join(timeout)

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # The thread's side.

    def still_reads(self) -> bool:
        """Whether another rank has not read the failure, and is there to do so."""
        unread = [r for r in range(self.world_size) if r != self.rank and not self._store.check([f"seen/{r}"])]
        positions = [self.position_of(rank) for rank in unread]
        return any(p is None or not (p.state == "closed" or has_ended(p.process)) for p in positions)

    def call_roll(self) -> int:
        """Ask every rank to post its position; returns the number of this roll call."""
        self._store.set(f"roll/{self._roll + 1}", "")
        return self._roll + 1

    def end_roll(self, roll: int) -> None:
        """Every rank has answered ``roll``."""
        self._forget(f"roll/{roll}")

    def read(self, roll: int) -> dict[int, Position]:
        """The positions of the ranks that have answered ``roll``, or closed."""
        keys = [f"position/{rank}" for rank in range(self.world_size)]
        if self._store.check(keys) and self._store.has_extended_api():
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys if self._store.check([key])]
        positions = [Position(**json.loads(value)) for value in values]
        return {p.rank: p for p in positions if p.roll >= roll or p.state == "closed"}

    def position_of(self, rank: int) -> Position | None:
        """The latest position that a rank has posted; None before its first."""
        key = f"position/{rank}"
        return Position(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def texts(self, topic: str) -> list[str]:
        """What the ranks have published for ``topic``; once for each rank: the last one clears the board."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        values = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        if self._store.add(f"{topic}/read", 1) == self.world_size:
            for key in (*keys, f"{topic}/count", f"{topic}/done"):
                self._store.delete_key(key)
        return [value.decode() for value in values]

    def all_have_read(self, topic: str) -> bool:
        """Whether every rank has read what was published for ``topic``."""
        return self._store.add(f"{topic}/read", 0) >= self.world_size

    def decided(self, topic: str) -> bool:
        """Whether the vote on ``topic`` is over."""
        return self._store.check([f"{topic}/done"])

    def post_position(self) -> None:
        owner = self._owner()
        if owner is not None:
            self._store.set(f"position/{self.rank}", json.dumps(asdict(owner.position(self._roll))))

    def post_failure(self, failure: Failure) -> None:
        """The first failure of all ranks is kept; a later one changes nothing."""
        if self._store.add("failures", 1) == 1:
            self._store.set("failure", json.dumps(asdict(failure)))

    def read_failure(self) -> None:
        """Hand a posted failure to the owner. Its rank posts it before anything that follows from it."""
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure(**json.loads(self._store.get("failure")))
            self._store.set(f"seen/{self.rank}", "")
        owner = self._owner()
        if owner is not None and self.failure is not None:
            owner.on_failure(self.failure)

    def step(self, request: Request | None) -> bool:
        """One turn of the thread; False when it should end."""
        try:
            if request is not None:
                try:
                    request.result = request.act(self._store)
                finally:
                    request.done.set()
            self._count_votes()
            now = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + self._tick
                self._look(now)
                self.last_tick = time.monotonic()
            return True
        except Exception as error:  # the store is gone: its host ended
            self.lost = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return False

    def pause(self) -> float:
        """Seconds to sleep until the next turn."""
        return min(self._pause, max(0.0, self._next_tick - time.monotonic())) if not self._votes else self._pause

    def _count_votes(self) -> None:
        for topic, vote in list(self._votes.items()):
            if self._store.check([f"{topic}/done"]):
                vote.verdict = self._store.get(f"{topic}/done").decode()
                del self._votes[topic]
                vote.done.set()
                if (
                    vote.order == self.world_size and vote.verdict == "same"
                ):  # all are here, so all have read the one before
                    self._forget(*vote.previous)
        self._pause = min(self._pause * 2, SLOW_TICK) if self._votes else TICK

    def _forget(self, *keys: str) -> None:
        """Delete keys that no rank will ask for again. A FileStore only grows by that."""
        if self.host:
            for key in keys:
                self._store.delete_key(key)

    def _look(self, now: float) -> None:
        self.read_failure()
        called = self._roll
        while self._store.check([f"roll/{self._roll + 1}"]):
            self._roll += 1
        if self._roll != called:
            self.post_position()
        owner = self._owner()
        if owner is not None:
            owner.on_tick(now)


def _serve(board_ref: weakref.ref[Board], requests: queue.SimpleQueue[Request | None]) -> None:
    """The thread: holds the board weakly while it sleeps, so that a dropped board ends it."""
    pause = 0.0
    while True:
        request: Request | None = None
        if pause > 0 or not requests.empty():
            try:
                request = requests.get(timeout=pause)
                if request is None:
                    return
            except queue.Empty:
                pass
        board = board_ref()
        if board is None or not board.step(request):
            return
        pause = board.pause()
        del board
