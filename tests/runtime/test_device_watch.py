"""What a device was given to do and has not done yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from zcompile.runtime.device_watch import DeviceWatch
from zcompile.runtime.ranks.agreement import Agreement


@dataclass(eq=False)
class Work:
    """Says that it is done when it has ended, or when its connection broke; nothing on a device that has failed."""

    ended: bool = False
    broken: bool = False
    failed: bool = False
    ending: Ending = field(init=False)

    def __post_init__(self) -> None:
        self.ending = Ending(self)

    def is_completed(self) -> bool:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.ended or self.broken


@dataclass(eq=False)
class Ending:
    """The device's own word."""

    work: Work

    def is_completed(self) -> bool:
        return self.work.ended


@pytest.fixture
def watch() -> DeviceWatch:
    return DeviceWatch(Agreement(None, 0, 2), lambda work: work.ending)


def test_a_collective_is_waited_for_until_it_ends(watch: DeviceWatch) -> None:
    assert watch.oldest() is None
    first, second = Work(), Work()
    watch.newest = (7, first, "all_gather of a")
    wait = watch.oldest()
    assert wait is not None and (wait.needs, wait.description) == (7, "all_gather of a (or one before it)")
    watch.newest = (8, second, "all_gather of b")
    assert watch.oldest() is wait, "the first one watched has not ended"
    first.ended = True
    following = watch.oldest()
    assert following is not None and following.needs == 8
    second.ended = True
    assert watch.oldest() is None and watch.newest is None


def test_a_work_whose_connection_broke_has_not_ended(watch: DeviceWatch) -> None:
    """NCCL says that it is done; the device, and whoever waits for the device, stands still."""
    work = Work(broken=True)
    watch.newest = (3, work, "all_reduce of the norm")
    wait = watch.oldest()
    assert wait is not None and wait.needs == 3
    assert watch.oldest() is wait and watch.newest is not None
    work.ended = True  # the group was aborted
    assert watch.oldest() is None


def test_one_that_breaks_while_it_is_watched(watch: DeviceWatch) -> None:
    work = Work()
    watch.newest = (3, work, "all_reduce of the norm")
    wait = watch.oldest()
    work.broken = True
    assert wait is not None and watch.oldest() is wait
    work.ended = True
    assert watch.oldest() is None


def test_a_device_that_failed_does_not_end_the_watch(watch: DeviceWatch) -> None:
    """Its thread lives on, which tells the other ranks what the training thread raises."""
    watch.newest = (3, Work(failed=True), "all_gather of a")
    wait = watch.oldest()
    assert wait is not None and watch.oldest() is wait
