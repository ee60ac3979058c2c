"""Agreement between ranks: each rank is a thread with an agreement of its own over a store in memory or in a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from zcompile.errors import RankError, RankMismatchError, RankTimeoutError
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.sequence import TextSequence

TRAIN = TextSequence.of("all_gather dp f32 [16, 8] layers.0.weight")
EVAL = TextSequence.of("all_gather dp f32 [16, 8] layers.0.weight", "all_gather dp f32 [8] layers.0.bias")


def run_ranks(
    world_size: int,
    body: Callable[[Agreement], Any],
    *,
    store: Callable[[int], Store] | None = None,
    timeout: float = 20.0,
    within: float = 25.0,
) -> list[Any]:
    """Run ``body`` on every rank; returns each rank's result or exception, and checks that all end in time."""
    shared = HashStore()
    results: list[Any] = [None] * world_size

    def rank_main(rank: int) -> None:
        own = PrefixStore("test", store(rank) if store is not None else shared)
        agreement = Agreement(own, rank, world_size, timeout=timeout, name="test")
        try:
            results[rank] = body(agreement)
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, RankError):
                agreement.raised(error)
        finally:
            agreement.close()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.1, within - (time.monotonic() - begin)))
    assert not any(thread.is_alive() for thread in threads), f"ranks still wait after {within} s; so far: {results}"
    return results


class CountingStore(Store):
    """Passes everything on and counts the operations that write or read a value."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner = inner
        self.count = 0

    def add(self, key: str, amount: int) -> int:
        self.count += 1
        return self.inner.add(key, amount)

    def set(self, key: str, value: Any) -> None:
        self.count += 1
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.count += 1
        return self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def has_extended_api(self) -> bool:
        return False


def test_one_rank_needs_nothing() -> None:
    agreement = Agreement(None, 0, 1)
    agreement.compare("parameters", "a")
    agreement.event("forward", TRAIN)
    agreement.event("forward", EVAL)
    agreement.raised(ValueError())
    agreement.fail(ValueError())
    agreement.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_same_texts_agree(kind: str, tmp_path: Path) -> None:
    def body(agreement: Agreement) -> str:
        for _ in range(3):
            agreement.compare("parameters", "a [4, 2] f32\nb [2] f32")
        return "agreed"

    store = (lambda rank: FileStore(str(tmp_path / "store"), 3)) if kind == "file" else None
    assert run_ranks(3, body, store=store) == ["agreed"] * 3


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_another_text_is_named_on_every_rank(kind: str, tmp_path: Path) -> None:
    def body(agreement: Agreement) -> None:
        agreement.compare("parameters", f"a [4, 2] f32\nb [{2 if agreement.rank != 1 else 5}] f32")

    store = (lambda rank: FileStore(str(tmp_path / "store"), 3)) if kind == "file" else None
    results = run_ranks(3, body, store=store, within=8.0)
    for rank, error in enumerate(results):
        assert type(error) is RankMismatchError
        assert str(error) == (
            f"[rank {rank} of 3] ranks disagree about parameters: rank 1 has 'b [5] f32' where rank 0 has 'b [2] f32' (line 2)"
        )


def test_a_missing_line_is_named() -> None:
    results = run_ranks(2, lambda a: a.compare("config", "stage 3" if a.rank else "stage 3\npolicy prefetch"))
    for error in results:
        assert "rank 1 has nothing where rank 0 has 'policy prefetch' (line 2)" in str(error)


@pytest.mark.slow
def test_an_absent_rank_is_named_after_the_timeout() -> None:
    def body(agreement: Agreement) -> None:
        if agreement.rank == 1:
            time.sleep(5.0)
        agreement.compare("parameters", "a")

    results = run_ranks(3, body, timeout=2.0, within=12.0)
    assert {type(e) for e in results} == {RankTimeoutError}
    for error in results:
        assert "compares parameters since" in str(error)
        assert "missing: rank 1 (rank 1 has made no call yet)" in str(error)


@pytest.mark.slow
def test_a_slow_rank_is_waited_for() -> None:
    def body(agreement: Agreement) -> str:
        if agreement.rank == 1:
            time.sleep(5.0)
        agreement.compare("parameters", "a")
        agreement.event("forward", TRAIN)
        return "agreed"

    assert run_ranks(2, body) == ["agreed"] * 2


@pytest.mark.slow
def test_a_rank_that_left_is_named() -> None:
    def body(agreement: Agreement) -> str:
        agreement.event("forward (train)", TRAIN)
        if agreement.rank == 0:
            agreement.compare("state", "a")
        return "left"

    results = run_ranks(2, body, within=10.0)
    assert type(results[0]) is RankError and results[1] == "left"
    assert "rank 1 has ended: rank 0 compares state; rank 1 has left after call 1, forward (train)" in str(results[0])


def test_the_failure_of_one_rank_ends_all() -> None:
    def body(agreement: Agreement) -> None:
        agreement.event("forward (train)", TRAIN)
        if agreement.rank == 2:
            agreement.fail(ValueError("bad batch"))
            return
        agreement.compare("state", "a")

    results = run_ranks(3, body, within=6.0)
    for rank in (0, 1):
        assert type(results[rank]) is RankError
        assert "rank 2 failed in call 1, forward (train), with ValueError: bad batch" in str(results[rank])


@pytest.mark.slow
def test_the_reason_is_told_before_what_is_in_flight_is_ended() -> None:
    """Ending may wait for a device that does not answer any more; nobody else would hear why then."""

    def body(agreement: Agreement) -> str:
        agreement.watch_device(lambda: None, lambda: time.sleep(15.0))
        if agreement.rank == 1:
            return "left"
        if agreement.rank == 0:
            agreement.compare("the options", "a")
        for _ in range(100):
            agreement.check()
            time.sleep(0.05)
        return "heard nothing"

    first, second, third = run_ranks(3, body)
    assert second == "left"
    assert isinstance(first, RankError) and "rank 1 has ended" in str(first)
    assert isinstance(third, RankError) and "rank 1 has ended" in str(third), third


def test_an_exception_that_nothing_follows_ends_those_who_wait() -> None:
    def body(agreement: Agreement) -> None:
        agreement.event("forward (train)", TRAIN)
        if agreement.rank == 1:
            agreement.raised(KeyError("labels"))
            time.sleep(12.0)
        else:
            agreement.compare("state", "a")

    results = run_ranks(2, body)
    assert type(results[0]) is RankError
    assert "rank 1 raised KeyError: 'labels' in its user's code and makes no further call" in str(results[0])


@pytest.mark.slow
def test_exceptions_that_all_ranks_raise_are_no_failure() -> None:
    def body(agreement: Agreement) -> str:
        for _ in range(3):
            agreement.event("forward (train)", TRAIN)
            agreement.raised(KeyError("labels"))
        time.sleep(1.0)
        agreement.compare("state", "a")
        return "agreed"

    assert run_ranks(2, body) == ["agreed"] * 2


def test_different_first_calls() -> None:
    def body(agreement: Agreement) -> None:
        if agreement.rank == 0:
            agreement.event("forward (train)", TRAIN)
        else:
            agreement.event("forward (eval)", EVAL)

    for error in run_ranks(2, body, within=6.0):
        assert type(error) is RankMismatchError
        assert "rank 1 has 'call 1: forward (eval)' where rank 0 has 'call 1: forward (train)'" in str(error)


@pytest.mark.slow
def test_a_rank_that_deviates_from_the_habit_is_found() -> None:
    def body(agreement: Agreement) -> None:
        for _ in range(3):
            agreement.event("forward (train)", TRAIN)
            agreement.poll("all_gather of layers.0", lambda s: True, needs=agreement.started())
        if agreement.rank == 1:
            agreement.event("forward (eval)", EVAL)
        else:
            agreement.event("forward (train)", TRAIN)
            number = agreement.started()
            agreement.poll("all_gather of layers.0", lambda s: bool(time.sleep(s)), needs=number)

    for rank, error in enumerate(run_ranks(2, body, within=10.0)):
        assert type(error) is RankMismatchError
        assert str(error).startswith(f"[rank {rank} of 2] ranks disagree about call 4: ")
        assert "rank 1 waits to confirm call 4 as forward (eval)" in str(error)
        assert "rank 0 waits in call 4, forward (train), for all_gather of layers.0" in str(error)


@pytest.mark.slow
def test_another_schedule_in_the_same_call_is_named() -> None:
    def body(agreement: Agreement) -> None:
        for _ in range(3):
            agreement.event("forward", TRAIN)
        agreement.event("forward", TRAIN if agreement.rank == 0 else EVAL)
        agreement.poll("all_gather", lambda s: bool(time.sleep(s)), needs=agreement.started())

    for error in run_ranks(2, body, within=10.0):
        assert type(error) is RankMismatchError
        assert "rank 1 has 'all_gather dp f32 [8] layers.0.bias' where rank 0 has nothing (line 2)" in str(error)


@pytest.mark.slow
def test_waits_for_each_other_in_different_places() -> None:
    def body(agreement: Agreement) -> None:
        agreement.event("forward", TRAIN)
        if agreement.rank == 0:
            agreement.compare("state of the optimizer", "a")
        else:
            agreement.poll("all_gather", lambda s: bool(time.sleep(s)), needs=agreement.started())

    for error in run_ranks(2, body):
        assert type(error) is RankMismatchError
        assert "ranks wait for each other" in str(error)
        assert "rank 0 compares state of the optimizer" in str(error)
        assert "rank 1 waits in call 1, forward, for all_gather" in str(error)


def test_a_broken_agreement_stays_broken() -> None:
    def body(agreement: Agreement) -> list[str]:
        texts = []
        for _ in range(3):
            with pytest.raises(RankMismatchError) as caught:
                agreement.compare("config", str(agreement.rank))
            texts.append(str(caught.value))
        with pytest.raises(RankMismatchError):
            agreement.event("forward", TRAIN)
        with pytest.raises(RankMismatchError):
            agreement.started()
        return texts

    for texts in run_ranks(2, body):
        assert len(set(texts)) == 1


def test_a_repeating_loop_makes_no_store_calls() -> None:
    stores = [CountingStore(inner) for inner in [HashStore()] * 2]
    pattern = [("forward", TRAIN), ("backward", EVAL)] * 3 + [("backward (last)", TRAIN), ("clip", EVAL)]

    def body(agreement: Agreement) -> int:
        for _ in range(20):
            for kind, sequence in pattern:
                agreement.event(kind, sequence)
        agreement.compare("learnt", "")
        before = stores[agreement.rank].count
        for _ in range(50):
            for kind, sequence in pattern:
                agreement.event(kind, sequence)
        return stores[agreement.rank].count - before

    counts = run_ranks(2, body, store=lambda rank: stores[rank])
    assert counts == [0, 0] or max(c if isinstance(c, int) else 99 for c in counts) <= 1  # the vote's own last look


def test_alternating_sequences_agree() -> None:
    def body(agreement: Agreement) -> str:
        for step in range(60):
            agreement.event("forward", EVAL if step % 7 == 0 else TRAIN)
            agreement.event("backward", TRAIN)
        return "agreed"

    assert run_ranks(2, body) == ["agreed"] * 2


def test_two_agreements_share_a_store() -> None:
    shared = HashStore()

    def body(agreement: Agreement) -> str:
        other = Agreement(PrefixStore("other", shared), agreement.rank, 2, timeout=10.0, name="other")
        other.compare("parameters", "b")
        agreement.compare("parameters", "a")
        other.close()
        agreement.compare("more", "a")
        return "agreed"

    assert run_ranks(2, body) == ["agreed"] * 2


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    assert run_ranks(2, lambda a: a.compare("x", "y")) == [None, None]
    assert threading.active_count() == before


def test_a_dropped_agreement_ends_its_thread() -> None:
    before = threading.active_count()
    agreement = Agreement(HashStore(), 0, 2)
    del agreement
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_silent_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.ranks.agreement.STORE_SILENCE", 2.0)

    class Silent(CountingStore):
        def add(self, key: str, amount: int) -> int:
            time.sleep(8.0)
            return 0

    agreement = Agreement(Silent(HashStore()), 0, 2, timeout=20.0)
    begin = time.monotonic()
    with pytest.raises(RankError, match="the store has not answered for"):
        agreement.compare("x", "y")
    assert time.monotonic() - begin < 6.0


@pytest.mark.slow
def test_timeouts_name_the_collective_and_who_arrived() -> None:
    def body(agreement: Agreement) -> None:
        agreement.event("forward", TRAIN)
        if agreement.rank != 2:
            number = agreement.started()
            agreement.poll("all_gather of layers.3", lambda s: bool(time.sleep(s)), needs=number)
        else:
            time.sleep(5.0)
            agreement.started()

    for error in run_ranks(3, body, timeout=2.0, within=12.0):
        assert type(error) is RankTimeoutError
        assert "in call 1, forward, for all_gather of layers.3 since" in str(error)
        assert "arrived: ranks 0, 1; missing: rank 2" in str(error)
        assert "rank 2 runs its own code after call 1, forward" in str(error)


def test_the_store_does_not_fill_up() -> None:
    """Calls that no history predicts, waits long enough to call the roll, and texts: the number of keys stays."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counts: list[int] = []

    def body(agreement: Agreement) -> None:
        for number in range(60):
            agreement.event(f"call of kind {number}", TextSequence.of(f"all_gather {number}"))
            agreement.compare("parameters", f"{number}")
            if number % 20 == 19:
                if agreement.rank == 1:
                    time.sleep(3.5)
                agreement.compare("a slow rank", "")
                if agreement.rank == 0:
                    counts.append(server.num_keys())

    assert run_ranks(2, body, store=lambda rank: TCPStore("127.0.0.1", server.port, None, False)) == [None, None]
    assert max(counts) <= 16 and max(counts) - min(counts) <= 3, counts
