"""Profiles of training loops: every instruction once and in order, every moment in one share, and the same bits as without."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import net
from tests.dist.pool import Pools
from tests.dist.test_replay import LOOPS, mine, plain, same, same_everywhere, twins
from tests.dist.training import LR, this_rank
from zcompile.errors import ConfigError, PlanError, ProfileError
from zcompile.planner.issue import Costs, step_jobs
from zcompile.profiling.measured import COMPUTATION, EVALUATION, EXPOSED, HOST, OPTIMIZER, SHARES, MeasuredStep

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

#: seconds that are added on purpose, and how much of them must be found again
PAUSE, FOUND = 0.05, 0.045


def compiled(**options: Any) -> tuple[Any, Any]:
    model = zcompile.compile(net(), **{"backend": "eager", "verify": "off", **options})
    return model, zcompile.optim.AdamW(model.parameters(), lr=LR)


def steps(model: Any, optimizer: Any, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        plain(model, optimizer, step)


def profiled(model: Any, optimizer: Any, count: int = 2) -> Any:
    """A profile of steps of a model that has run before."""
    steps(model, optimizer, 1)
    profile = model.profile(steps=count)
    steps(model, optimizer, count + 2)
    assert profile.done, profile.state
    return profile


def check_account(step: MeasuredStep) -> None:
    """The spans of the computing stream leave no moment out and have none twice; shares are their sums."""
    spans = [s for s in step.spans if s.stream == "compute"]
    now = 0.0
    for span in spans:
        assert span.start_us == now and span.end_us >= now, span
        now = span.end_us
    assert now == step.step_us
    for name in SHARES:
        assert step.shares[name] == pytest.approx(sum(s.us for s in spans if s.share == name), abs=1e-3), name
    assert sum(step.shares.values()) == pytest.approx(step.step_us, abs=1e-3)
    assert all(0 <= s.start_us <= s.end_us <= step.step_us for s in step.spans)


# Spans. ---------------------------------------------------------------------------------------------------------------


def covers(stage: int) -> None:
    model, optimizer = compiled(stage=stage)
    steps(model, optimizer, 1)
    profile = model.profile(steps=2)
    begins = []
    for step in range(5):
        begins.append(time.perf_counter())
        plain(model, optimizer, step)
        time.sleep(PAUSE)
    assert len(profile.steps) == 2 and profile.missing == 0
    program = model._session.latest.program
    for step in profile.steps:
        check_account(step)
        assert step.micro_batches == 1
        for phase, runnable in (("forward", program.forward), ("backward", program.backward)):
            nodes = runnable.program.nodes
            assert len(nodes) == len(runnable.program.instructions) > 4
            own = [s for s in step.spans if s.phase == phase and s.kind != "gap"]
            assert [s.name for s in own if s.stream == "compute"] == list(nodes)
            flights = [s for s in own if s.stream == "group"]
            starts = {
                s.name: s
                for s in own
                if s.stream == "compute" and s.kind in ("all_gather", "reduce_scatter", "all_reduce")
            }
            assert [s.name for s in flights] == list(starts) and flights
            waits = {s.label: s for s in own if s.kind == "wait"}
            for flight in flights:
                assert starts[flight.name].end_us <= flight.start_us + 1e-6 and flight.bytes > 0
                assert flight.end_us <= waits[flight.label].end_us + 1e-6, "a collective ends before its wait does"
        assert step.shares[COMPUTATION] > 0 and step.shares[OPTIMIZER] > 0 and step.shares[EVALUATION] == 0
    # the step that shows memory begins with the first call, those that are timed with the second
    walls = [1e6 * (b - a) for a, b in itertools.pairwise(begins[1:4])]
    for step, wall in zip(profile.steps, walls, strict=True):
        assert step.step_us == pytest.approx(wall, abs=0.4 * PAUSE * 1e6)
    instructions = [*program.forward.program.instructions, *program.backward.program.instructions]
    assert len(profile.memory) == len(instructions) and all(b > 0 for _, _, b in profile.memory)
    gathered = [b for _, label, b in profile.memory if label.startswith("all_gather")]
    assert not gathered or max(gathered) > min(b for _, _, b in profile.memory)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_instruction_is_one_span_in_order(ranks: Pools, stage: int) -> None:
    ranks(2, covers, stage=stage)


# What is slow. --------------------------------------------------------------------------------------------------------


class Late:
    """A collective that is there some time after its start, whatever the real one does."""

    lane = "group"

    def __init__(self, started: Any, seconds: float) -> None:
        self.started = started
        self.ready = time.perf_counter() + seconds
        self.works = (self,)

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.ready

    def wait(self) -> None:
        self.started.wait()
        time.sleep(max(0.0, self.ready - time.perf_counter()))


def finds_what_is_slow() -> None:
    model, optimizer = compiled(stage=3, policy="none")
    executor = model._session.runner.executor
    base = profiled(model, optimizer)

    own = executor.collectives.all_gather
    late = "all_gather of "

    def slow(outputs: Any, inputs: Any, description: str) -> Any:
        started = own(outputs, inputs, description)
        return Late(started, PAUSE) if description == first else started

    first = next(s.label for s in base.steps[0].spans if s.kind == "all_gather" and s.phase == "forward")
    assert first.startswith(late)
    calls = sum(s.label == first and s.stream == "group" for s in base.steps[0].spans)
    executor.collectives.all_gather = slow
    exposed = profiled(model, optimizer)
    del executor.collectives.all_gather
    for step in exposed.steps:
        check_account(step)
        assert step.shares[EXPOSED] >= calls * FOUND * 1e6, step.shares
        assert step.shares[HOST] + step.shares[COMPUTATION] < step.step_us - calls * FOUND * 1e6
        waits = {s.label: s.us for s in step.spans if s.kind == "wait" and s.phase == "forward"}
        assert max(waits, key=lambda label: waits[label]) == first
        flights = [s.us for s in step.spans if s.stream == "group" and s.label == first]
        assert len(flights) == calls and min(flights) >= FOUND * 1e6
    advice = {a.about: a for a in exposed.advice}
    assert first in str(advice["communication"]) and advice["communication"].share > 0.3

    # one rank computes longer: it is the slowest, and the other waits for it
    if this_rank() == 1:
        bodies = model._session.latest.program.forward.bodies
        name, body = next(iter(bodies.items()))
        bodies[name] = lambda args: (time.sleep(PAUSE), body(args))[1]
    uneven = profiled(model, optimizer)
    found = uneven.gather()
    assert len(found.shares) == 2 and found.slowest == 1 and found.spread > 0.3, str(found)
    assert found.shares[1][COMPUTATION] >= FOUND * 1e6 > found.shares[0][COMPUTATION]
    assert found.shares[0][EXPOSED] >= FOUND * 1e6 and "slowest: rank 1" in str(found)
    assert dict(found.shares[this_rank()]) == pytest.approx(uneven.shares)


def test_slow_collectives_and_slow_ranks_are_exposed_communication(ranks: Pools) -> None:
    ranks(2, finds_what_is_slow)


def sees_hidden_ones() -> None:
    """Collectives that are under way while a region takes long have ended before anyone waits for them."""
    model, optimizer = compiled(stage=3, policy="bucket{mib=0},prefetch")
    steps(model, optimizer, 1)
    bodies = model._session.latest.program.forward.bodies
    name, body = next(iter(bodies.items()))
    bodies[name] = lambda args: (time.sleep(PAUSE), body(args))[1]
    profile = profiled(model, optimizer)
    for step in profile.steps:
        long = next(s for s in step.spans if s.kind == "region" and s.us >= FOUND * 1e6)
        waits = {s.label: s for s in step.spans if s.kind == "wait" and s.phase == "forward"}
        beside = [
            s
            for s in step.collectives()
            if s.phase == "forward" and s.start_us <= long.start_us < waits[s.label].start_us
        ]
        assert beside, "something is gathered ahead"
        for span in beside:
            assert span.end_us <= waits[span.label].start_us


def test_hidden_collectives_end_before_their_waits(ranks: Pools) -> None:
    ranks(2, sees_hidden_ones)


def finds_pauses() -> None:
    model, optimizer = compiled(stage=2)
    steps(model, optimizer, 1)
    with torch.no_grad():
        model(mine(0))
    with model.profile(steps=2) as profile:
        for step in range(3):  # the first shows memory
            loss = model(mine(step))["loss"]
            if step == 2:
                time.sleep(PAUSE)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(mine(40 + step))
    one, two = profile.steps
    for step in (one, two):
        check_account(step)
        assert step.shares[EVALUATION] > 0
        assert [s.label for s in step.spans if s.phase == "evaluation"] == ["evaluation (train, no_grad)"]
    assert two.shares[HOST] >= FOUND * 1e6
    gap = max((s for s in two.spans if s.kind == "gap"), key=lambda s: s.us)
    assert gap.phase == "between" and gap.us >= FOUND * 1e6
    at = two.spans.index(gap)
    assert two.spans[at - 1].phase == "forward" or two.spans[at - 1].kind == "gap"
    assert "evaluation" in str(profile) and "between the programs" in str(profile)


def test_a_pause_of_the_host_is_a_gap(ranks: Pools) -> None:
    ranks(2, finds_pauses)


# Loops. ---------------------------------------------------------------------------------------------------------------

#: micro-batches of a step
COUNTS = {
    "plain": 1,
    "zero_before": 1,
    "zero_between": 1,
    "two_batches": 2,
    "local_batch": 2,
    "two_forwards": 2,
    "twice_through": 2,
    "with_eval": 1,
    "hooked": 1,
}


def keeps_bits(name: str, stage: int) -> None:
    """A replayed model under a profile, beside one that is neither."""
    loop, _ = LOOPS[name]
    models, optimizers, said = twins(stage)
    profile, before, during = None, 0, 0
    for step in range(10):
        if step == 4:
            before = models[0].report().replays
            profile = models[0].profile(steps=2)
        if step == 7:
            during = models[0].report().replays
        results = [loop(m, o, step) for m, o in zip(models, optimizers, strict=True)]
        same(*results, f"losses of step {step}")
        same_everywhere(models, f"after step {step}")
    assert profile is not None and profile.done, profile.state if profile else ""
    assert [s.micro_batches for s in profile.steps] == [COUNTS[name]] * 2
    for step in profile.steps:
        check_account(step)
    assert during == before, "nothing is replayed meanwhile"
    if before:
        assert models[0].report().replays > during, "and then it goes on"
        assert any("replayed" in note for note in profile.notes) and any("profiled" in reason for reason in said)
    runner = models[0]._session.runner
    assert not {"run_forward", "run_backward"} & set(vars(runner)) and runner.executor.observer is None
    assert "reduce_local" not in vars(runner.executor)


@pytest.mark.parametrize("name", COUNTS)
def test_loops_have_the_same_bits_under_a_profile(ranks: Pools, name: str) -> None:
    ranks(2, keeps_bits, name=name, stage=1 if name == "local_batch" else 3)


def windows() -> None:
    """A declared window, of which the last backward alone reduces, and one that ends early."""
    model, optimizer = compiled(stage=1, gradient_accumulation_steps=3)

    def step(number: int, count: int) -> None:
        for micro in range(count):
            model(mine(10 * number + micro))["loss"].backward()
        if count < 3:
            model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()

    step(0, 3)
    profile = model.profile(steps=2)
    for number, count in enumerate((3, 3, 2, 3), start=1):
        step(number, count)
    assert [s.micro_batches for s in profile.steps] == [3, 2]
    full, short = profile.steps
    for each in (full, short):
        check_account(each)
    assert sum(s.kind in ("reduce_scatter", "all_reduce") and s.stream == "group" for s in full.spans) > 0
    (reduction,) = (s for s in short.spans if s.kind == "reduction")
    assert reduction.share == EXPOSED and reduction.us > 0


def test_windows_are_steps(ranks: Pools) -> None:
    ranks(2, windows)


# When and how it ends. ------------------------------------------------------------------------------------------------


def ends() -> None:
    model, optimizer = compiled(stage=3)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ConfigError, match="steps; pass a whole number of at least 1"):
            model.profile(wrong)
    profile = model.profile(steps=2)
    assert (
        profile.state == "profile has 0 of 2 steps; missing: one that shows memory, 2 more and the forward after them"
    )
    assert str(profile) == profile.state and not profile.done and profile.missing == 2
    with pytest.raises(ProfileError, match=r"0 of 2 steps; missing: .*; run on, or call stop\(\) after a step"):
        profile.to_dict()
    with pytest.raises(ProfileError, match="another one of the same model is being taken"):
        model.profile()
    steps(model, optimizer, 3)  # compiles, shows memory, and one that is timed and not over yet
    assert "1 step left out: something ran for the first time" in profile.state and profile.missing == 2
    profile.stop()
    profile.stop()
    assert profile.done and len(profile.steps) == 1 and profile.missing == 1

    with pytest.raises(ProfileError, match=r"not done or has no steps \(2 of 2 ranks\)"):
        model.profile().gather()
    vars(model._session.runner)["run_forward"].__self__.stop()
    with model.profile(steps=5) as short:
        steps(model, optimizer, 3)
    assert short.done and len(short.steps) == 2 and "stopped after 2 of 5 steps" in str(short)


def test_when_a_profile_is_done(ranks: Pools) -> None:
    ranks(2, ends)


# What it gives. -------------------------------------------------------------------------------------------------------


def gives(folder: str) -> None:
    model, optimizer = compiled(stage=3)
    profile = profiled(model, optimizer)
    path = Path(folder) / f"rank{this_rank()}.json"
    profile.to_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(rows.values()) == {"compute", "group", "host", "steps"}
    shown = [e for e in events if e["ph"] == "X"]
    for name, span_kind in (("compute", "region"), ("group", "all_gather"), ("host", "region"), ("steps", "step")):
        found = [e for e in shown if rows[e["tid"]] == name and e["cat"] == span_kind]
        assert found and all(e["dur"] >= 0 and e["pid"] == this_rank() for e in found), name
    assert sum(e["ph"] == "C" for e in events) == len(profile.memory)
    data = json.loads(profile.to_json())
    assert (
        data["step_us"] == profile.step_us
        and len(data["steps"]) == 2
        and data["region_times"] == profile.region_times()
    )
    assert sum(data["shares_us"].values()) == pytest.approx(data["step_us"])
    text = str(profile)
    for word in ("computation", "waits for collectives", "together", "all_gather of ", "forward_0 (", "memory: "):
        assert word in text, word

    # measured times in plans
    times = profile.region_times()
    latest = model._session.latest.graphs
    regions = {**latest.forward.regions, **latest.backward.regions}
    assert len(times) == len(regions) == len({*latest.forward.regions, *latest.backward.regions})
    plan = zcompile.plan(net(), (mine(0),), world_size=2, advise=False, measured=profile)
    measured_us = sum(s.us for step in profile.steps for s in step.spans if s.kind == "region") / 2
    costs = Costs.measured_in(plan.step, plan.hardware, times)
    jobs = [j for j in step_jobs(plan.step, costs, 2) if j.kind == "region"]
    assert costs.scale > 0 and sum(j.duration_us for j in jobs) == pytest.approx(measured_us)
    alone = [e for e in plan.timeline.events if e.kind == "region"]
    assert sum(e.end_us - e.start_us for e in alone) >= 0.999 * measured_us
    computed = zcompile.plan(net(), (mine(0),), world_size=2, advise=False)
    assert plan.timeline.bounds.compute_us != computed.timeline.bounds.compute_us
    with pytest.raises(PlanError, match="none of them is in the step that is planned"):
        zcompile.plan(torch.nn.Linear(3, 3), (torch.ones(2, 3),), world_size=2, measured=times, advise=False)

    beside = profile.compare(plan)
    assert len(beside.names) == beside.num_events == beside.num_spans > 10, str(beside)
    assert beside.row("regions").measured_us == pytest.approx(measured_us)
    assert beside.row("regions").predicted_us == pytest.approx(sum(e.end_us - e.start_us for e in alone))
    assert (
        beside.row("step").measured_us == profile.step_us and beside.row(EXPOSED).measured_us == profile.shares[EXPOSED]
    )
    assert "most apart" in str(beside)


def test_traces_data_plans(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, gives, folder=str(tmp_path))
