"""Advice comes when its numbers say so and not a little before, with the numbers in it."""

from __future__ import annotations

import pytest

from zcompile.config import Config
from zcompile.profiling.advice import BUSY_SHARE, EXPOSED_SHARE, HOST_SHARE, MEMORY_SHARE, Advice, advise
from zcompile.profiling.measured import COMPUTATION, EXPOSED, HOST, OTHER, SHARES, MeasuredStep, Span
from zcompile.report import DeviceMemory

GIB = 2**30


def step(exposed: float, host: float, phase: str = "forward") -> MeasuredStep:
    """A step of 10 ms with these shares; the rest is computation."""
    us = 1e4
    shares = dict.fromkeys(SHARES, 0.0) | {
        EXPOSED: exposed * us,
        HOST: host * us,
        COMPUTATION: (1 - exposed - host) * us,
    }
    spans = (
        Span("w", "compute", 0, 0.75 * exposed * us, "wait", "forward", 0, "all_gather of layers.1", EXPOSED),
        Span("w", "compute", 0, 0.25 * exposed * us, "wait", "forward", 0, "all_gather of layers.2", EXPOSED),
        Span("gap", "compute", 0, host * us, "gap", phase, 0, "gap", HOST),
    )
    return MeasuredStep(0.0, us, shares, spans, 1)


def about(*steps: MeasuredStep, config: Config | None = None, replays: bool = False) -> dict[str, Advice]:
    return {a.about: a for a in advise(steps, config or Config(), None, replays=replays)}


def test_nothing_stands_out() -> None:
    assert about(step(0.1, 0.05)) == {}


@pytest.mark.parametrize("beyond", [-0.01, 0.01])
def test_exposed_communication(beyond: float) -> None:
    found = about(step(EXPOSED_SHARE + beyond, 0.0))
    assert ("communication" in found) == (beyond > 0) and "host" not in found
    if beyond > 0:
        advice = found["communication"]
        assert advice.share == pytest.approx(EXPOSED_SHARE + beyond) and advice.limit == EXPOSED_SHARE
        assert "31% of the step (3.10 ms of 10.00 ms), most for 'all_gather of layers.1' (2.33 ms)" in advice.text
        for change in ("bucket{mib=256}", "no_sync()", "precision='bf16'", "keep{units=4}"):
            assert change in advice.text
    half = about(step(0.9, 0.0), config=Config(precision="bf16", stage=2)).get("communication")
    assert half is not None and "reduce_dtype='bf16'" in half.text and "keep{" not in half.text


def test_shares_are_means_over_steps() -> None:
    assert "communication" in about(step(0.5, 0.0), step(0.2, 0.0))
    assert "communication" not in about(step(0.5, 0.0), step(0.05, 0.0))


@pytest.mark.parametrize(
    ("exposed", "host", "comes"), [(0.0, 0.31, True), (0.0, 0.29, False), (0.25, 0.11, True), (0.25, 0.09, False)]
)
def test_the_host_is_late(exposed: float, host: float, comes: bool) -> None:
    assert comes == (1 - exposed - host < BUSY_SHARE and host > HOST_SHARE)
    found = about(step(exposed, host))
    assert ("host" in found) == comes
    if comes:
        assert f"waits for the host {host:.0%}" in found["host"].text and "in the forward" in found["host"].text
        assert "cuda_graphs=True" in found["host"].text and "inductor" not in found["host"].text


def test_what_helps_a_late_host() -> None:
    eager = about(step(0.0, 0.5), config=Config(backend="eager"))["host"].text
    assert "backend='inductor'" in eager
    replayed = about(step(0.0, 0.5), replays=True)["host"].text
    assert "cuda_graphs" not in replayed and "replayed ones" in replayed
    between = about(step(0.0, 0.5, "between"))["host"].text
    assert "between the programs (5.00 ms)" in between and "loading data" in between


def test_other_work_of_the_device_is_work() -> None:
    busy = step(0.0, 0.5)
    shares = busy.shares | {HOST: 0.25 * 1e4, OTHER: 0.25 * 1e4}
    assert about(MeasuredStep(0.0, 1e4, shares, busy.spans, 1)) == {}


@pytest.mark.parametrize("beyond", [-0.01, 0.01])
def test_memory_that_is_left(beyond: float) -> None:
    used = DeviceMemory(int((MEMORY_SHARE + beyond - 0.1) * 100 * GIB), 99 * GIB, 10 * GIB)
    config = Config(recompute="full")
    found = advise([step(0.0, 0.0)], config, used, total_bytes=100 * GIB, world_size=2)
    assert [a.about for a in found] == ["memory"] * (beyond < 0)
    if beyond < 0:
        text = str(found[0])
        assert text.startswith(
            "memory: 79% of the device is used at the peak (79.0 of 100.0 GiB); there is room for a larger micro-batch"
        )
        assert "keep{units=4}" in text and "recompute" in text
