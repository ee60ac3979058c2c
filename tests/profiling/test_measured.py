"""Accounts of steps whose moments are made up, as a GPU would have them: who waits for whom is known exactly."""

from __future__ import annotations

from typing import Any

import pytest

from zcompile.profiling.measured import (
    COMPUTATION,
    COPIES,
    EVALUATION,
    EXPOSED,
    HOST,
    OPTIMIZER,
    OTHER,
    TRANSFERS,
    MeasuredStep,
    measured,
)
from zcompile.runtime.profiling.clock import AT_ONCE_US, Mark
from zcompile.runtime.profiling.watched import Flight, Piece, RawStep, Run

STEP: Any = type("Step", (), {"label": "eval"})()


def mark(device_us: float, host_us: float = 0.0) -> Mark:
    """A moment that the host passed at ``host_us``, by default long before the device."""
    made = Mark(host_us)
    made.device_us = device_us
    return made


def idle(us: float) -> Mark:
    """A moment at which the device had nothing left to do."""
    return mark(us, us - AT_ONCE_US / 2)


def account(*parts: Any, end: Mark, begin: float = 1000.0) -> MeasuredStep:
    step = measured(RawStep(mark(begin), end, list(parts)), on_host=False)
    assert sum(step.shares.values()) == pytest.approx(step.step_us)
    return step


def run(
    begin: Mark, end: Mark, pieces: list[Piece], flights: dict[int, Flight] | None = None, phase: str = "forward"
) -> Run:
    return Run(phase, STEP, begin, end, pieces, flights or {}, True)


def test_a_wait_is_exposed_until_the_collective_ends() -> None:
    flights = {0: Flight("group", mark(1010), mark(1100)), 1: Flight("all_gather", mark(1012), mark(1130))}
    pieces = [
        Piece("g0", "all_gather", "first", mark(1000), mark(1010), 0, 64),
        Piece("g1", "all_gather", "second", mark(1010), mark(1012), 1),
        Piece("w0", "wait", "first", mark(1012), idle(1105), 0),
        Piece("r0", "region", "forward_0 (a)", idle(1106), mark(1200)),
        Piece("w1", "wait", "second", mark(1200), mark(1201), 1),
        Piece("r1", "region", "forward_1", mark(1201), mark(1300)),
    ]
    step = account(run(mark(1000), mark(1300), pieces, flights), end=mark(1310))
    assert step.shares == {
        COMPUTATION: 94 + 99,
        COPIES: 12,
        TRANSFERS: 0,
        EXPOSED: 88,  # the second was there long before it was waited for
        OPTIMIZER: 0,
        OTHER: 10 + 1,
        HOST: 6,  # from the end of the collective until the region is there
        EVALUATION: 0,
    }
    group, lane = step.collectives()
    assert (group.stream, group.start_us, group.end_us, group.bytes) == ("group", 10, 100, 64)
    assert (lane.stream, lane.start_us, lane.end_us) == ("gathers", 12, 130)


def test_a_wait_for_copies_from_the_host_is_no_communication() -> None:
    pieces = [
        Piece("in", "reload", "reload 'x'", mark(1000), mark(1001), 0, 8),
        Piece("w", "wait", "reload 'x'", mark(1001), mark(1041), 0),
    ]
    step = account(run(mark(1000), mark(1041), pieces, {0: Flight("in", mark(1001), mark(1041))}), end=mark(1041))
    assert step.shares[TRANSFERS] == 40 and step.shares[EXPOSED] == 0
    assert [(s.stream, s.kind, s.us) for s in step.collectives()] == [("reloads", "reload", 40)]


def test_collectives_of_a_stream_follow_each_other() -> None:
    flights = {0: Flight("group", mark(1010), mark(1100)), 1: Flight("group", mark(1020), mark(1180))}
    pieces = [
        Piece("g0", "all_gather", "first", mark(1000), mark(1010), 0),
        Piece("g1", "all_gather", "second", mark(1010), mark(1020), 1),
        Piece("w0", "wait", "first", mark(1020), mark(1100), 0),
        Piece("w1", "wait", "second", mark(1100), mark(1180), 1),
    ]
    step = account(run(mark(1000), mark(1180), pieces, flights), end=mark(1180))
    assert [(s.start_us, s.end_us) for s in step.collectives()] == [(10, 100), (100, 180)]
    assert step.shares[EXPOSED] == 160


def test_gaps_are_the_hosts_where_the_device_is_idle_and_other_work_where_it_is_not() -> None:
    parts = [
        run(mark(1000), mark(1100), [Piece("r", "region", "forward_0", mark(1000), mark(1100))]),
        run(mark(1140), mark(1200), [Piece("r", "region", "backward_0", mark(1140), mark(1200))], phase="backward"),
        Piece("update", "optimizer", "AdamW", idle(1270), mark(1300)),
    ]
    step = account(*parts, end=idle(1500))
    assert step.shares[OTHER] == 40 and step.shares[HOST] == 70 + 200 and step.shares[OPTIMIZER] == 30
    assert step.micro_batches == 1
    assert [(s.kind, s.phase) for s in step.spans] == [
        ("region", "forward"),
        ("gap", "between"),
        ("region", "backward"),
        ("gap", "between"),
        ("optimizer", "optimizer"),
        ("gap", "between"),
    ]


def test_a_device_may_wake_slowly_from_a_long_pause() -> None:
    """The host told it so late that what it may still have had to do is little beside the gap."""
    region = Piece("r", "region", "forward_0", mark(1000), mark(1100))
    for told_us, share in ((200_000, HOST), (100_000, OTHER)):
        step = account(run(mark(1000), mark(1100), [region]), end=mark(201_100, told_us + 1_000))
        assert step.shares[share] == 200_000


def test_a_start_on_an_idle_device_is_the_hosts() -> None:
    flights = {0: Flight("group", idle(1065), mark(1100))}
    pieces = [
        Piece("g0", "all_gather", "first", idle(1000), idle(1065), 0),
        Piece("w0", "wait", "first", idle(1070), mark(1100), 0),
    ]
    step = account(run(mark(1000), mark(1100), pieces, flights), end=mark(1100))
    assert step.shares[HOST] == 65 + 5 and step.shares[EXPOSED] == 30 and step.shares[COPIES] == 0


def test_evaluation_is_apart_as_a_whole() -> None:
    pieces = [Piece("r", "region", "forward_0", mark(1010), mark(1040))]
    step = account(run(mark(1000), mark(1050), pieces, phase="evaluation"), end=mark(1050))
    assert step.shares[EVALUATION] == 50 and step.shares[COMPUTATION] == 0
    assert [s.label for s in step.spans] == ["evaluation (eval)"]


def test_moments_that_come_too_early_take_no_time() -> None:
    """The error of both clocks: a piece never begins before the one before it has ended."""
    pieces = [
        Piece("a", "region", "a", mark(1000), mark(1050)),
        Piece("b", "region", "b", mark(1049.5), mark(1049.8)),
        Piece("c", "region", "c", mark(1050), mark(1060)),
    ]
    step = account(run(mark(999), mark(1060), pieces), end=mark(1060))
    assert [s.us for s in step.spans] == [50, 0, 10] and step.shares[COMPUTATION] == 60
