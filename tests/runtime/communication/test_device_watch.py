"""What a device was given to do and has not done yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch.distributed import HashStore, PrefixStore

from zcompile.errors import RankError
from zcompile.runtime.communication.device_watch import DeviceWatches
from zcompile.runtime.ranks import agreement as agreements
from zcompile.runtime.ranks import judge
from zcompile.runtime.ranks.agreement import Agreement


@dataclass(eq=False)
class Work:
    """Ends when it is told to; nobody can ask a device that has failed."""

    ended: bool = False
    failed: bool = False

    def is_completed(self) -> bool:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ended


@pytest.fixture
def watches() -> DeviceWatches:
    return DeviceWatches(Agreement(None, 0, 2), lambda: "")


def test_a_collective_is_waited_for_until_it_ends(watches: DeviceWatches) -> None:
    assert watches.oldest() is None
    first, second = Work(), Work()
    watches.note("group", 7, first, "all_gather of a")
    wait = watches.oldest()
    assert wait is not None and (wait.needs, wait.description) == (7, "all_gather of a (or one before it)")
    watches.note("group", 8, second, "all_gather of b")
    assert watches.oldest() is wait, "the first one watched has not ended"
    first.ended = True
    following = watches.oldest()
    assert following is not None and following.needs == 8
    second.ended = True
    assert watches.oldest() is None


def test_the_oldest_of_all_lanes_counts(watches: DeviceWatches) -> None:
    gather, reduction = Work(), Work()
    watches.note("reduce_scatter", 5, reduction, "reduce_scatter of a")
    watches.note("all_gather", 4, gather, "all_gather of b")
    wait = watches.oldest()
    assert wait is not None and wait.needs == 4
    gather.ended = True
    wait = watches.oldest()
    assert wait is not None and wait.needs == 5
    watches.clear()
    assert watches.oldest() is None


def test_a_device_that_failed_does_not_end_the_watch(watches: DeviceWatches) -> None:
    """Its thread lives on, which tells the other ranks what the training thread raises."""
    watches.note("group", 3, Work(failed=True), "all_gather of a")
    wait = watches.oldest()
    assert wait is not None and watches.oldest() is wait


@dataclass
class Connections:
    """Break when they are told to."""

    error: str = ""

    def broken(self) -> str:
        return self.error


def test_broken_connections_are_a_wait_though_every_collective_counts_as_done() -> None:
    connections = Connections()
    watches = DeviceWatches(Agreement(None, 0, 2), connections.broken)
    watches.note("group", 3, Work(ended=True), "all_gather of a")
    assert watches.oldest() is None
    connections.error = "COMM_ERROR"
    wait = watches.oldest()
    assert wait is not None and wait.urgent and "connections broke (COMM_ERROR)" in wait.text
    assert watches.oldest() is wait, "the judge knows a wait by its identity"


@pytest.fixture
def two() -> Iterator[list[Agreement]]:
    """Agreements of two ranks that have made a call, of which the first has lost its connections to the second."""
    store = HashStore()
    both = [Agreement(PrefixStore("test", store), rank, 2, timeout=60.0, name="test") for rank in range(2)]
    watches = DeviceWatches(both[0], lambda: "COMM_ERROR")
    both[0].watch_device(watches.oldest, lambda: None)
    yield both
    for agreement in both:
        agreement.close()


def end_of(agreement: Agreement, within: float) -> RankError:
    """What a rank that waits on its device is told."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            agreement.check()
        except RankError as error:
            return error
        time.sleep(0.05)
    raise AssertionError(f"nothing after {within} s")


def test_a_rank_that_does_not_answer_is_gone_sooner(two: list[Agreement], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts no process can be asked about, and NCCL's works say nothing."""
    monkeypatch.setattr(judge, "GONE_URGENT", 1.0)
    board = two[1].board
    assert board is not None
    board.stop(timeout=5.0)
    error = end_of(two[0], within=20.0)
    assert "rank 1 is gone: no sign of life" in str(error) and "connections broke (COMM_ERROR)" in str(error)


def test_broken_connections_end_ranks_that_are_all_there(two: list[Agreement], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "LOST_CONNECTION", 3.0)
    error = end_of(two[0], within=20.0)
    assert "no rank is known to have ended" in str(error)
    assert str(end_of(two[1], within=20.0)).removeprefix("[rank 1") == str(error).removeprefix("[rank 0")
