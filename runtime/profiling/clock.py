"""Moments of the host and of the device on one axis of time, in microseconds, without waiting for the device while it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

#: a moment that the device reaches so soon after the host asked for it found an idle device (launch latency, and the error of
#: bringing both clocks together)
AT_ONCE_US = 30.0

#: the same as a share of how long the device may have been idle: it wakes more slowly from a long pause, and its clock and that of
#: the host drift apart (measured on an H200: 75 us and 600 us in 200 ms)
AT_ONCE_SHARE = 0.02


def host_us() -> float:
    """Now, on the host."""
    return time.perf_counter_ns() * 1e-3


class Mark:
    """One moment: when the host came by, and when the device did.

    Attributes:
        host_us: on the host's clock.
        given_us: when the device had been told.
        device_us: on the same axis; the host's own where nothing else is known.
    """

    __slots__ = ("device_us", "event", "given_us", "host_us")

    def __init__(self, at_us: float) -> None:
        self.host_us = self.given_us = self.device_us = at_us
        self.event: Any = None

    def is_idle(self, behind_us: float) -> bool:
        """Whether the device had nothing left to do here: on the CPU, which is the host, always.

        Args:
            behind_us: how long after what the device is known to have done before.
        """
        return self.device_us - self.given_us < max(AT_ONCE_US, AT_ONCE_SHARE * behind_us)


class HostClock:
    """For the CPU: the host computes."""

    on_host = True

    def begin(self) -> None:
        """Get ready; may wait for the device."""

    def end(self) -> None:
        """No mark comes behind this; may wait for the device."""

    def mark(self) -> Mark:
        """Here and now."""
        return Mark(host_us())

    def follow(self, lane: str, works: Sequence[Any]) -> Mark | None:
        """The end of collectives, if the device can tell; else they are to be asked with ``is_done``."""
        return None

    def read(self, marks: Iterable[Mark]) -> None:
        """Find out when the device came by marks that lie before the end."""


class DeviceClock:
    """For a GPU: CUDA events on the current stream.

    Collectives run in streams that are not ours (NCCL's, the lanes of the copy engines). Their ends are seen by a stream of the
    clock for each lane, which waits for them and then records an event: the stream that computes does not wait.
    """

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._anchors: list[tuple[float, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Bring both clocks together; waits for the device."""
        self._anchors = [self._anchor()]

    def end(self) -> None:
        """Bring them together again, as one may go faster than the other; waits for the device."""
        self._anchors.append(self._anchor())

    def _anchor(self) -> tuple[float, torch.cuda.Event]:
        """A moment on both clocks."""
        torch.cuda.synchronize(self._device)
        before, event = host_us(), self._event()
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        return (before + host_us()) / 2, event

    def mark(self) -> Mark:
        """Here in the current stream."""
        mark = Mark(host_us())
        mark.event = self._event()
        mark.event.record(torch.cuda.current_stream(self._device))
        mark.given_us = host_us()
        return mark

    def follow(self, lane: str, works: Sequence[Any]) -> Mark | None:
        """The end of collectives of one lane, which end in the order of their start."""
        if lane not in self._lanes:
            self._lanes[lane] = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._lanes[lane]):
            with contextlib.suppress(RuntimeError):  # whoever needs the results waits too, and says what is wrong
                for work in works:
                    work.wait()
            return self.mark()

    def read(self, marks: Iterable[Mark]) -> None:
        """Find out when the device came by marks that lie before the end."""
        (first_us, first), (last_us, last) = self._anchors
        rate = (last_us - first_us) / first.elapsed_time(
            last
        )  # microseconds of the host in a millisecond of the device
        for mark in marks:
            if mark.event is not None:
                mark.device_us = first_us + rate * first.elapsed_time(mark.event)
                mark.event = None

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> HostClock | DeviceClock:
    """The clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def is_done(works: Sequence[Any]) -> bool:
    """Whether collectives have ended; asks, and does not wait."""
    return all(work.is_completed() for work in works)
