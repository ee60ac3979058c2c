"""Pace: the host's time to issue a step beside the device's to run it, on a clock of our own."""

from typing import Any

import pytest

from zcompile.runtime import pace as module
from zcompile.runtime.pace import IN_A_ROW, STEPS, Pace


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

    def step(self, pace: Pace, host: float, device: float, after: float = 0.0) -> bool:
        """A step of ``host`` seconds to issue and ``device`` to run, and what the loop does after it."""
        with pace.forward():
            self.now += host / 3
            self.device = max(self.device, self.now) + device / 3
        self.now += 0.001  # the loss
        with pace.backward():
            self.now += host * 2 / 3
            self.device = max(self.device, self.now - host / 3) + device * 2 / 3
        self.now += after
        return pace.is_host_bound()


@pytest.mark.parametrize(
    ("host", "device", "after", "is_slow"),
    [
        (0.030, 0.010, 0.0, True),
        (0.030, 0.010, 0.05, True),  # a loop that waits for the loss
        (0.010, 0.060, 0.0, False),  # the device is behind
        (0.010, 0.060, 0.1, False),
        (0.030, 0.060, 0.1, False),
    ],
)
def test_who_waits_for_whom(
    monkeypatch: pytest.MonkeyPatch, host: float, device: float, after: float, is_slow: bool
) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(clock.event)
    assert not pace.is_host_bound(), "nothing was measured"
    answers = [clock.step(pace, host, device, after) for _ in range(IN_A_ROW + 2)]
    assert answers == [False] * (IN_A_ROW - 1) + [is_slow] * 3


def test_one_slow_step_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace(clock.event)
    hosts = [0.03, 0.03, 0.001, 0.03, 0.03, 0.001] * 4
    assert not any(clock.step(pace, host, 0.01, 0.05) for host in hosts)
    assert pace.is_over and len(hosts) >= STEPS
