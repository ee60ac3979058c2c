"""Pace: the host's time to issue a step beside the device's to run it, on a clock of our own."""

from typing import Any

import pytest

from zcompile.runtime.replay import pace as module
from zcompile.runtime.replay.pace import IN_A_ROW, STEPS, Pace


class Clock:
    """The host's clock, and a device that finishes at a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.device = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def event(self) -> Any:
        clock = self

        class Event:
            def record(self) -> None:
                self.at = clock.device = max(clock.now, clock.device)

            def query(self) -> bool:
                return self.at <= clock.now

            def elapsed_time(self, end: Any) -> float:
                return (end.at - self.at) * 1e3

        return Event()

    def issue(self, host: float, device: float, tail: float) -> None:
        """Something that takes so many seconds to issue, and so many on the device, which begins with its start and ends ``tail`` seconds
        behind its end, at least. The host issues no more than 0.1 seconds ahead."""
        begin = max(self.now, self.device)
        self.now = max(self.now + host, self.device - 0.1)
        self.device = max(begin + device, self.now + tail)

    def step(
        self,
        pace: Pace,
        host: float,
        device: float,
        after: float = 0.0,
        update: float = 0.0,
        tail: float = 0.0,
        loss: float = 0.001,
    ) -> bool:
        """A step of ``host`` seconds to issue and ``device`` to run, and what the loop does for its loss and after it.

        The device runs an update of so many seconds then.
        """
        with pace.forward():
            self.issue(host / 3, device / 3, 0.0)
        self.now += loss
        with pace.backward():
            self.issue(host * 2 / 3, device * 2 / 3, tail)
        self.now += after
        self.device = max(self.device, self.now) + update
        return pace.is_host_bound()


@pytest.mark.parametrize(
    ("host", "device", "after", "update", "is_slow"),
    [
        (0.030, 0.010, 0.0, 0.0, True),
        (0.030, 0.010, 0.05, 0.0, True),  # a loop that waits for the loss
        (0.030, 0.010, 0.0, 0.005, True),
        (0.010, 0.060, 0.0, 0.0, False),  # the device is behind
        (0.010, 0.060, 0.1, 0.0, False),
        (0.030, 0.060, 0.1, 0.0, False),
        (0.030, 0.060, 0.2, 0.7, False),  # the host waits in forward for an update of offloaded states
    ],
)
def test_who_waits_for_whom(
    monkeypatch: pytest.MonkeyPatch, host: float, device: float, after: float, update: float, is_slow: bool
) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(clock.event)
    assert not pace.is_host_bound(), "nothing was measured"
    answers = [clock.step(pace, host, device, after, update) for _ in range(IN_A_ROW + 3)]
    assert answers == [False] * IN_A_ROW + [is_slow] * 3


def test_the_end_of_a_backward_runs_when_the_next_forward_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As within a window: nothing lies between them for which the host would wait."""
    clock = Clock(monkeypatch)
    pace = Pace(clock.event)
    assert [clock.step(pace, 0.030, 0.010, tail=0.0002) for _ in range(IN_A_ROW + 2)][-2:] == [True, True]


def test_what_the_host_does_between_forward_and_backward_counts_for_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, is_slow in ((0.010, True), (0.040, False)):
        clock = Clock(monkeypatch)
        pace = Pace(clock.event)
        answers = [clock.step(pace, 0.030, device, loss=0.020) for _ in range(IN_A_ROW + 2)]
        assert answers[-2:] == [is_slow] * 2


def test_one_slow_step_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(clock.event)
    hosts = [0.03, 0.03, 0.001, 0.03, 0.03, 0.001] * 4
    assert not any(clock.step(pace, host, 0.01, 0.05) for host in hosts)
    assert pace.is_over and len(hosts) >= STEPS
