"""Plans of windows of micro-batches: their time and memory, against the graphs that run, other plans, and what is written."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zcompile
from tests.captures import shared_captures
from tests.dist.models import Deep
from zcompile.__main__ import main
from zcompile.errors import PlanError
from zcompile.ir import meta
from zcompile.ir.graph import Grad
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Pipeline, Stats
from zcompile.planner import trace
from zcompile.planner.budget import tensor_bytes
from zcompile.planner.choice import Choice
from zcompile.planner.course import simulate_course
from zcompile.planner.hardware import Hardware, hardware
from zcompile.planner.memory import CATEGORIES
from zcompile.planner.plan import Plan
from zcompile.planner.simulate import simulate
from zcompile.profiling.compare import compare
from zcompile.profiling.measured import EXPOSED, OPTIMIZER, SHARES, MeasuredStep

WORLD, ROWS = 2, 4
MOVED = ("all_gather", "reduce_scatter", "all_reduce")
NOTHING_HELD = "hold{units=0 first=0},prefetch"


@pytest.fixture(scope="module", autouse=True)
def captures() -> Iterator[None]:
    with shared_captures(trace):
        yield


def machine() -> Hardware:
    """An H200 whose host issues at once, so that small models show what the device does."""
    known = hardware("h200")
    host = dataclasses.replace(known.host, kernel_us=0, region_us=0, collective_us=0, copied_tensor_us=0, step_us=0)
    return dataclasses.replace(known, host=host)


def example(micro_batch: int = ROWS) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Also the factory of the command line's test."""
    with torch.device("meta"):
        return Deep(3), {n: torch.empty(micro_batch, 6, dtype=torch.int64) for n in ("tokens", "labels")}


def make(steps: int = 1, **options: Any) -> Plan:
    arguments = {
        "world_size": WORLD,
        "advise": False,
        "hardware": machine(),
        "backend": "eager",
        "verify": "off",
        **options,
    }
    model, inputs = example(arguments.pop("rows", ROWS))
    model = model.to(arguments.pop("dtype", torch.float32))
    return zcompile.plan(model, inputs, gradient_accumulation_steps=steps, **arguments)


def kinds(plan: Plan, place: str) -> list[str]:
    """The collectives of one micro-batch in their order."""
    (line,) = (batch.timeline for batch in plan.course.micro_batches if batch.place == place)
    return [e.kind for e in line.events if e.kind in MOVED]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(5, stage=1, advise=True)


def test_a_window_of_one_is_no_window() -> None:
    assert make(1).to_dict() == make().to_dict()
    once = make()
    assert once.window is None and once.step_us == once.timeline.step_us and "window" not in str(once)
    assert [m.place for m in once.memory.moments] == [""] * len(once.memory.moments)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_longer_window_takes_more_micro_batches_between(stage: int) -> None:
    once, two, three, five = (make(n, stage=stage) for n in (1, 2, 3, 5))
    (first, between, last) = three.course.micro_batches
    assert [b.place for b in two.course.micro_batches] == ["first", "last"]
    assert three.step_us - two.step_us == pytest.approx(between.timeline.step_us, rel=1e-9)
    assert five.step_us - three.step_us == pytest.approx(2 * between.timeline.step_us, rel=1e-9)
    assert [b.count for b in five.course.micro_batches] == [1, 3, 1]
    assert [b.timeline.optimizer_us > 0 for b in (first, between, last)] == [False, False, True]
    assert five.rows_per_s == pytest.approx(5 * ROWS * WORLD / five.step_us * 1e6)
    assert five.memory.peak_bytes == three.memory.peak_bytes >= two.memory.peak_bytes >= once.memory.peak_bytes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("policy", ["prefetch", NOTHING_HELD])
def test_collectives_are_those_of_the_graphs_that_run(stage: int, policy: str) -> None:
    """The graphs of the runtime: backward without reductions is scheduled anew there, and held weights are taken from both."""
    found = make(3, stage=stage, policy=policy, precision="bf16")
    traced, window = found.traced, found.window
    assert window is not None and window.hold is not None
    passes = traced.pipeline.passes
    local = Pipeline(tuple(dataclasses.replace(p, local=stage < 2) if isinstance(p, Reduce) else p for p in passes))
    inside = traced.with_passes(traced.config, local).step.copy()
    step = inside.copy()
    window.hold.run(inside, Stats())
    whole = traced.step.copy()
    window.hold.run(whole, Stats())

    def collectives(forward: Any, backward: Any) -> list[str]:
        line = simulate(dataclasses.replace(step, forward=forward, backward=backward), machine(), WORLD)
        return [e.kind for e in line.events if e.kind in MOVED]

    assert kinds(found, "first") == collectives(traced.step.forward, inside.backward)
    assert kinds(found, "middle") == collectives(whole.forward, inside.backward)
    assert kinds(found, "last") == collectives(whole.forward, traced.step.backward)
    reduces = {"all_reduce", "reduce_scatter"} & {*kinds(found, "middle")}
    assert bool(reduces) == (stage >= 2) and {"all_reduce", "reduce_scatter"} & {*kinds(found, "last")}
    if stage < 2:
        moved = {b.place: b.timeline.bounds.communication_us for b in found.course.micro_batches}
        assert moved["middle"] < moved["last"]
        backward = inside.backward
        assert backward is not None
        full = sum(meta.num_bytes(meta.value(n)) for n, role in backward.outputs if isinstance(role, Grad))
        at_end = [m.after for m in found.memory.moments if m.name == "add local gradients"]
        assert [after["local gradients"] for after in at_end] == [full, full]


@pytest.mark.parametrize(("stage", "there"), [(1, "local gradients"), (3, "gradient shards")])
def test_gradients_are_added_up_in_time(stage: int, there: str) -> None:
    """Each kernel reads and writes what is added up: without that, micro-batches between take as much less as it moves."""
    found = make(4, stage=stage)
    lines = {b.place: b.timeline for b in found.course.micro_batches}
    moved = {place: sum(e.bytes for e in line.events if e.kind == "accumulate") for place, line in lines.items()}
    size = max(m.after.get(there, 0) for m in found.memory.moments)
    if stage == 1:
        assert moved == {"first": 2 * size, "middle": 3 * size, "last": 3 * size}
    else:
        assert moved == {"first": 0, "middle": 3 * size, "last": 3 * size}
    assert not any(e.kind == "accumulate" for e in make(stage=stage).timeline.events)


def test_gradients_on_the_host_are_added_up_by_the_processors() -> None:
    found = make(3, stage=3, offload="parameters")
    for batch in found.course.micro_batches:
        line = batch.timeline
        added = [e for e in line.events if e.kind == "accumulate"]
        assert [e.stream for e in added] == ["cpu"] * (batch.place != "first")
        assert all(
            e.start_us >= max(o.end_us for o in line.events if o.phase != "optimizer" and o is not e) for e in added
        )
        assert all(e.end_us - e.start_us == pytest.approx(e.bytes / machine().host_bytes_per_s * 1e6) for e in added)


def test_sums_that_are_wider_than_gradients_take_memory() -> None:
    """Beside ``.grad`` where shards are added up, in the place of full gradients where they wait."""
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    for stage, part in ((3, "gradient sums"), (1, "local gradients")):
        narrow, wide = (make(3, stage=stage, accumulate_dtype=d, **options) for d in (None, "fp32"))
        most = [max(m.after.get(part, 0) for m in p.memory.moments) for p in (narrow, wide)]
        shards = max(m.after["gradient shards"] for m in wide.memory.moments if m.phase == "optimizer")
        assert most == ([0, 2 * shards] if stage == 3 else [most[0], 2 * most[0]])
        assert not wide.memory.moments[-1].after.get(part)


def test_activations_on_the_host_are_those_of_one_micro_batch() -> None:
    options: dict[str, Any] = {"offload": "activations{mib=0}"}
    once, window = (make(n, **options).memory.host for n in (1, 3))
    assert window["activations"] == once["activations"] > 0


# What is said. --------------------------------------------------------------------------------------------------------


def test_the_text_says_what_is_counted(plan: Plan) -> None:
    first, between, last = (f"{b.timeline.step_us / 1000:.2f} ms" for b in plan.course.micro_batches)
    lines = str(plan).splitlines()
    assert lines[0].endswith(", policy prefetch, 5 micro-batches an update")
    place = lines.index(
        f"window of 5 micro-batches: the first {first}, 3 between of {between}, the last {last} with the update"
    )
    assert lines[place + 1].startswith(f"step {plan.step_us / 1000:.2f} ms: forward ")
    assert f"{plan.rows_per_s:.1f} rows/s, {6 * plan.rows_per_s:,.0f} tokens/s" in lines[place + 1]
    peak = plan.memory.peak
    assert f"peak in {peak.phase} of the {peak.place} micro-batch, {peak.name}" in lines


def test_advice_is_of_windows(plan: Plan) -> None:
    advice = next(a for a in plan.tried if a.change == "stage 3")
    again = make(5, stage=3)
    assert (again.memory.peak_bytes, again.step_us, again.rows_per_s) == (
        advice.peak_bytes,
        advice.step_us,
        advice.rows_per_s,
    )


def test_what_is_held_and_what_is_replayed() -> None:
    """All micro-batches that wait for the host, whether they hold weights or not."""
    slow = hardware("h200")
    for options in ({}, {"policy": NOTHING_HELD}, {"accumulate_dtype": "fp32"}):
        for stage in (1, 3):
            plan = make(4, stage=stage, hardware=slow, **options)
            assert str(plan).count("which replays CUDA graphs\n") == 1
            issued = simulate_course(plan.traced.step, plan.window, slow, plan.world_size, cuda_graphs=False)
            assert plan.step_us < issued.step_us and not issued.replayed
    assert str(make(stage=3, hardware=slow)).count("which replays CUDA graphs\n") == 1


def test_a_dtype_that_adds_nothing_is_told() -> None:
    saves = "accumulate_dtype='fp32' saves no rounding"
    for stage in (1, 3):
        same = make(2, stage=stage, accumulate_dtype="fp32")
        assert any(saves in note for note in same.notes) and ", added up in fp32" in str(same).splitlines()[0]
        assert not any(
            saves in note for note in make(2, stage=stage, accumulate_dtype="fp32", dtype=torch.bfloat16).notes
        )


@pytest.mark.parametrize(("steps", "stage"), [(2, 3), (5, 1)])
def test_pictures_show_each_kind_of_micro_batch(steps: int, stage: int, tmp_path: Path) -> None:
    found = make(steps, stage=stage)
    read = json.loads(found.to_json())
    assert read["gradient_accumulation_steps"] == steps
    batches = read["micro_batches"]
    assert sum(b["count"] * b["step_us"] for b in batches) == pytest.approx(read["time"]["step_us"])
    for name in ("forward_us", "backward_us", "optimizer_us", "exposed_us"):
        assert sum(b["count"] * b[name] for b in batches) == pytest.approx(read["time"][name])
    points = read["memory_over_time"]
    times = [point["us"] for point in points]
    assert times == sorted(times) and times[-1] <= found.course.drawn_us + 1
    largest = max(points, key=lambda point: sum(point[c] for c in CATEGORIES))
    assert sum(largest[c] for c in CATEGORIES) == found.memory.peak_bytes
    assert largest["micro_batch"] == read["memory"]["peak_at"]["micro_batch"] == found.memory.peak.place
    for batch in batches:
        begin, end = batch["drawn_at_us"], batch["drawn_at_us"] + batch["step_us"]
        for what, start in (("memory_over_time", "us"), ("events", "start_us")):
            inside = [each[start] for each in read[what] if each["micro_batch"] == batch["place"]]
            assert inside and begin - 1 <= min(inside) and max(inside) <= end + 1
    assert len(read["events"]) == sum(len(b.timeline.events) for b in found.course.micro_batches)

    found.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [e for e in events if e.get("cat") == "micro-batch"]
    assert [e["name"] for e in rows] == (["first", "last"] if steps == 2 else ["first", "one of 3 between", "last"])
    assert sum(e["ph"] == "X" for e in events) == len(read["events"]) + len(rows)

    found.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert f"Memory of a rank over a window of {steps} micro-batches" in text
    assert ("<p>Pictures show the first micro-batch, one of 3 between, the last.</p>" in text) == (steps == 5)
    pictures = {m.attrib["id"]: m for m in map(ET.fromstring, re.findall(r"<svg.*?</svg>", text, re.S))}
    svg = "{http://www.w3.org/2000/svg}"
    assert len(pictures["streams"].findall(f"{svg}rect")) == len(read["events"])
    said = [e.text for e in pictures["memory"].findall(f"{svg}text")]
    assert f"peak {found.memory.peak_bytes / 2**30:.2f} GiB: {found.memory.peak.name}" in said and "last" in said


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.planner.test_window:example", "--world-size", "2", "--no-advice"]
    window = ["--gradient-accumulation-steps", "4", "--accumulate-dtype", "fp32"]
    assert main([*arguments, "--stage", "1", "--micro-batch", str(ROWS), *window, "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    again = make(4, stage=1, accumulate_dtype=torch.float32, backend="inductor", hardware="h200")
    assert read["time"]["step_us"] == again.step_us and read["memory"]["peak_bytes"] == again.memory.peak_bytes
    assert main([*arguments, "--gradient-accumulation-steps", "0"]) == 1
    assert "error: gradient_accumulation_steps is 0; it must be at least 1" in capsys.readouterr().err


# What is chosen. ------------------------------------------------------------------------------------------------------


def test_a_budget_chooses_for_windows() -> None:
    """Each combination as a plan of its own says it, whatever stage the options had; times are of a micro-batch on average."""
    options: dict[str, Any] = {"recompute": "none", "loss_chunk": "none", "offload": "none"}
    found = make(3, memory_budget=1.0, **options)
    decision = found.decision
    assert decision is not None and {c.choice.stage for c in decision.tried} == {0, 3}
    assert found.step_us == pytest.approx(3 * decision.chosen.step_us)
    assert decision.micro_batches == json.loads(found.to_json())["decision"]["micro_batches"] == 3
    text = str(found)
    assert "     peak   ms each  fits  with" in text
    assert "ms each: of one of 3 micro-batches, with its share of the update" in text
    for candidate in decision.tried:
        choice = candidate.choice
        assert choice == Choice(choice.stage, choice.policy, None, "none", "")
        alone = make(3, stage=choice.stage, policy=choice.policy, loss_chunk="none")
        assert candidate.peak_bytes == tensor_bytes(alone.memory) + decision.beside_bytes, str(choice)
        assert candidate.step_us == pytest.approx(alone.step_us / 3), str(choice)


# Beside what was measured. --------------------------------------------------------------------------------------------


def test_a_profile_of_windows_is_compared_with_their_plan() -> None:
    found = make(3, stage=3)
    shares = dict.fromkeys(SHARES, 1.0)
    step = MeasuredStep(0.0, 1e4, shares, (), micro_batches=3)

    class Measured:
        steps = (step,)
        step_us = step.step_us

    Measured.shares = shares  # type: ignore[attr-defined]
    beside = compare(Measured, found)  # type: ignore[arg-type]
    assert beside.row("step").predicted_us == pytest.approx(found.step_us) and beside.micro_batches == 3
    assert beside.row(EXPOSED).predicted_us == pytest.approx(found.course.total(lambda line: line.exposed_us))
    assert beside.row(OPTIMIZER).predicted_us == pytest.approx(
        sum(e.end_us - e.start_us for e in found.timeline.events if e.kind == "optimizer")
    )
    with pytest.raises(PlanError, match="plan is of windows of 2 micro-batches and 3 were measured in a step"):
        compare(Measured, make(2, stage=3))  # type: ignore[arg-type]
