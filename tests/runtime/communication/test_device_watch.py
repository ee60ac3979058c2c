"""What a device was given to do and has not done yet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zcompile.runtime.communication.device_watch import DeviceWatches
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
    return DeviceWatches(Agreement(None, 0, 2))


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
