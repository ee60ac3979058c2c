"""Offloading in plans: bytes on the host, copies on the timeline beside computation, where an update runs, advice."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import CASES
from zcompile.errors import ConfigError, PlanError
from zcompile.offloading import Activations, Moments, Offloading, Parameters
from zcompile.planner.hardware import Hardware, Link, hardware
from zcompile.planner.hosted import step_of
from zcompile.planner.simulate import Timeline, simulate
from zcompile.planner.trace import Traced, trace

WORLD = 2


def machine(bytes_per_s: float = 55e9, **changes: Any) -> Hardware:
    """An H200 whose host issues at once and whose device is slow enough for a small model to keep it busy."""
    known = hardware("h200")
    host = dataclasses.replace(known.host, kernel_us=0, region_us=0, collective_us=0, copied_tensor_us=0, step_us=0)
    changes = {"host_link": Link(0.0, bytes_per_s), "shared_host_link": None, **changes}
    return dataclasses.replace(known, host=host, **changes)


@pytest.fixture(scope="module")
def traced() -> Traced:
    case = CASES["llama"]
    return trace(case.build(), case.data(0, 0), world_size=WORLD, offload="activations{mib=0}")


def overlap_us(line: Timeline, stream: str) -> float:
    """How long a stream works while computation does."""
    return sum(
        max(0.0, min(a.end_us, b.end_us) - max(a.start_us, b.start_us))
        for a in line.events
        if a.stream == stream
        for b in line.events
        if b.stream == "compute"
    )


def test_copies_overlap_with_computation() -> None:
    """On a slow link on which the copies of each way take a seventh of the computation, they take no time of their own."""
    case = CASES["deep"]
    traced = trace(case.build(), case.data(0, 0), world_size=WORLD, offload="activations{mib=0}")
    offloaded = traced.history["offload"].stats["bytes offloaded"]
    without = simulate(traced.at(offload=None).step, machine(), WORLD)
    line = simulate(traced.step, machine(offloaded / (without.bounds.compute_us / 7) * 1e6), WORLD)
    for stream in ("offloads", "reloads"):
        assert line.busy_us(stream) == pytest.approx(without.bounds.compute_us / 7, rel=1e-6)
        assert overlap_us(line, stream) > 0.98 * line.busy_us(stream)
    assert line.step_us == pytest.approx(without.step_us, rel=1e-3)


def test_a_slow_link_sets_the_pace(traced: Traced) -> None:
    """Computation waits for values that come late, and no value is used before it is there."""
    line = simulate(traced.step, machine(1e6), WORLD)
    copies = line.busy_us("offloads") + line.busy_us("reloads")
    assert line.step_us > 0.9 * copies > 10 * line.bounds.compute_us
    slower = simulate(traced.step, machine(5e5), WORLD)
    assert slower.step_us == pytest.approx(2 * line.step_us, rel=0.05)
    assert line.exposed_us > 0.8 * line.step_us


def test_the_lookahead_hides_more(traced: Traced) -> None:
    link = machine(2e9)
    steps = [
        simulate(traced.at(offload=f"activations{{mib=0 lookahead={n}}}").step, link, WORLD).step_us for n in (0, 1)
    ]
    assert steps[1] < steps[0]


def test_states_pass_through_the_device_beside_each_other(traced: Traced) -> None:
    """Chunks come, are updated and go at the same time; the first come while backward runs."""
    step = traced.at(offload=None).step
    params = sum(event.bytes for event in simulate(step, machine(), WORLD).events if event.kind == "optimizer") / 28
    chunk_mib = params * 4 / 10 / 2**20
    offloading = Offloading(optimizer=Moments("device", chunk_mib))
    link = machine(1e9)
    line = simulate(step, link, WORLD, offloading=offloading)
    both = 8 * params / link.host_link.bytes_per_s * 1e6
    assert line.busy_us("reloads") == pytest.approx(both, rel=1e-3) == line.busy_us("offloads")
    assert both < line.optimizer_us < 1.5 * both, "both ways at once"
    first = next(event for event in line.events if event.stream == "reloads")
    assert first.start_us < line.forward_us + line.backward_us
    processors = simulate(step, link, WORLD, offloading=Offloading(optimizer=Moments("cpu", chunk_mib)))
    assert processors.busy_us("cpu") == pytest.approx(28 * params / link.host_bytes_per_s * 1e6, rel=1e-3)
    assert processors.busy_us("reloads") == pytest.approx(both / 2, rel=1e-3)


def test_ranks_of_a_host_share_its_memory() -> None:
    """All ranks pass their states at the same time, each with less than one alone."""
    case = CASES["llama"]
    slower = machine(1e9, shared_host_link=Link(0.0, 0.5e9))
    times = []
    for world in (1, WORLD):
        step = trace(case.build(), case.data(0, 0), world_size=world).step
        line = simulate(step, slower, world, offloading=Offloading(optimizer=Moments("device", 0.01)))
        times.append(line.busy_us("reloads") * world)
    assert times[1] == pytest.approx(2 * times[0], rel=0.02)  # padded rows
    assert machine(1e9).shared(WORLD) == machine(1e9)
    with pytest.raises(PlanError, match=r"has shared_host_link.bytes_per_s 0; it must be positive"):
        machine(1e9, shared_host_link=Link(1.0, 0.0))


def test_parameters_come_before_their_gathers_and_gradients_go(traced: Traced) -> None:
    step = traced.at(offload=None).step
    line = simulate(step, machine(), WORLD, offloading=Offloading(parameters=Parameters()))
    ends = {event.name: event.end_us for event in line.events}
    gathers = [event for event in line.events if event.kind == "all_gather"]
    assert gathers and all(ends[f"{event.name}_upload"] <= event.start_us for event in gathers)
    gradients = sum(event.bytes for event in line.events if event.name.endswith("_to_host"))
    assert gradients > 0
    assert line.bounds.processors_us > 0


def test_where_an_update_runs() -> None:
    """What moves least wins: the states' way on a fast link, the processors where these have the memory bandwidth."""
    states = Offloading(optimizer=Moments())
    assert step_of(states, hardware("h200")) == "device"
    assert step_of(Offloading(optimizer=Moments("cpu")), hardware("h200")) == "cpu"
    assert step_of(Offloading(optimizer=Moments(), parameters=Parameters()), hardware("h200")) == "in place"


def test_a_plan_shows_the_host_and_what_fits_there() -> None:
    case = CASES["llama"]
    options: dict[str, Any] = {"world_size": WORLD, "backend": "eager", "advise": False}
    plan = zcompile.plan(case.build(), case.data(0, 0), offload=["optimizer", "activations{mib=0}"], **options)
    assert set(plan.memory.host) == {"optimizer states", "activations"} and plan.fits_host
    assert "on the host" in str(plan) and "offload activations{mib=0}+optimizer" in str(plan)
    assert json.loads(plan.to_json())["memory"]["host_bytes"] == plan.memory.host_bytes > 0
    small = dataclasses.replace(hardware("h200"), host_memory_bytes=1000)
    assert not zcompile.plan(case.build(), case.data(0, 0), offload="optimizer", hardware=small, **options).fits


def test_advice_offloads_what_does_not_fit() -> None:
    """States alone are more than the device has."""
    case = CASES["llama"]
    plan = zcompile.plan(case.build(), case.data(0, 0), world_size=WORLD, advise=False)
    tight = dataclasses.replace(hardware("h200"), device_memory_bytes=plan.memory.peak_bytes - 1000)
    advised = zcompile.plan(case.build(), case.data(0, 0), world_size=WORLD, hardware=tight)
    tried = {advice.options.get("offload") for advice in advised.tried}
    assert {"activations", "optimizer", "activations+optimizer+parameters"} <= tried


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Offloading()),
        ("activations", Offloading(Activations())),
        ("optimizer{step=cpu chunk_mib=4} + parameters", Offloading(None, Moments("cpu", 4.0), Parameters())),
        ("optimizer{share=0.25}", Offloading(None, Moments(share=0.25), None)),
        ("optimizer{share=1e-05 chunk_mib=1e1}", Offloading(None, Moments("auto", 10, 1e-05), None)),
        (["parameters", "activations{lookahead=2 mib=0.5}"], Offloading(Activations(0.5, 2), None, Parameters())),
    ],
)
def test_the_option(given: Any, expected: Offloading) -> None:
    assert Offloading.parse(given) == expected
    assert Offloading.parse(str(expected) or None) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("weights", "offload names 'weights'; it must be one of activations, optimizer, parameters"),
        ("optimizer+optimizer", "offload names 'optimizer' twice"),
        ("activations{size=3}", "offload of activations has no option 'size'; its options are mib, lookahead"),
        ("parameters{mib=3}", r"offload of parameters has no option 'mib'; its options are \(none\)"),
        ("optimizer{step=gpu}", r"offload has optimizer{step} 'gpu'; it must be one of auto, device, cpu"),
        (
            "optimizer{chunk_mib=0}",
            r"offload has optimizer{chunk_mib} '0'; it must be a number that is at least 0.000976562",
        ),
        ("optimizer{share=0}", r"offload has optimizer{share} '0'; it must be a number above 0 that is at most 1"),
        ("optimizer{share=1.5}", r"offload has optimizer{share} '1.5'"),
        (
            "optimizer{share=0.5}+parameters",
            "offload keeps parameters on the host and 0.5 of their states on the device",
        ),
        ("activations{mib=-1}", r"offload has activations{mib} '-1'; it must be a number that is at least 0"),
        ("activations{lookahead=1.5}", r"offload has activations{lookahead} '1.5'"),
        (3, "offload is 3; it must be a string, or a list of strings"),
        ("", "offload names ''"),
    ],
)
def test_options_without_a_meaning(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zcompile.compile(torch.nn.Linear(2, 2), offload=given)


def test_a_pipeline_says_itself_what_it_offloads() -> None:
    with pytest.raises(ConfigError, match="pipeline and offload='activations' are both given"):
        zcompile.compile(torch.nn.Linear(2, 2), offload="activations", pipeline="plan-units")


def test_hardware_without_a_link_to_its_host() -> None:
    with pytest.raises(PlanError, match=r"has host_link.bytes_per_s 0; it must be positive"):
        dataclasses.replace(hardware("h200"), host_link=Link(1.0, 0.0))
