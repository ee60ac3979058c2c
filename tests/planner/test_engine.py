"""Simulated runs keep to what any run of the same jobs must keep to, whatever the schedule."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcompile.planner.engine import run, steady_run
from zcompile.planner.jobs import COMPUTE, CPU, STREAMS, Job
from zcompile.planner.simulate import bounds, timeline


def random_jobs(seed: int) -> list[Job]:
    """Jobs as the lowering of a scheduled graph gives them: starts, waits and computation in any order."""
    rng = random.Random(seed)
    lanes, jobs = [s for s in STREAMS if s != COMPUTE], []
    unwaited: list[int] = []
    waited: dict[int, None] = {}
    last_compute: tuple[int, ...] = ()
    slowdown = {lane: rng.choice([0, 0.1, 0.5, 2]) for lane in lanes}
    for number in range(rng.randint(1, 14)):
        us, host = rng.choice([0.0, 1.0, rng.uniform(0, 50)]), rng.choice([0.0, rng.uniform(0, 20)])
        kind = rng.random()
        if kind < 0.4:
            after = (*last_compute, *waited)
            needs = last_compute if rng.random() < 0.5 else ()
            lane = rng.choice(lanes)
            jobs.append(Job(f"c{number}", "all_gather", "forward", lane, us, host, after, needs, 1, slowdown[lane]))
            unwaited.append(len(jobs) - 1)
        elif kind < 0.6 and unwaited:
            waited[unwaited.pop(rng.randrange(len(unwaited)))] = None
        else:
            jobs.append(Job(f"r{number}", "region", "forward", COMPUTE, us, host, tuple(waited), tuple(waited)))
            last_compute = (len(jobs) - 1,)
            waited.clear()
    return jobs


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_bounds_hold_for_any_schedule(seed: int) -> None:
    jobs = random_jobs(seed)
    device_us, host_us = sum(j.duration_us for j in jobs), sum(j.host_us for j in jobs)
    ahead, idle, steady = run(jobs, math.inf), run(jobs, 0.0), steady_run(jobs)
    line = timeline(jobs)
    tolerance = 1e-6 * (1 + device_us + host_us)
    limit = bounds(jobs)
    assert max(limit.compute_us, limit.communication_us, limit.critical_path_us) <= ahead.end_us + tolerance
    assert ahead.end_us <= device_us + tolerance
    assert idle.end_us <= device_us + host_us + tolerance
    assert limit.step_us <= line.step_us + tolerance
    pace = max(ahead.end_us, host_us)  # the slower of the two sets it
    assert steady.end_us == pytest.approx(pace, abs=tolerance)
    assert line.exposed_us <= line.step_us - line.busy_us(COMPUTE) + tolerance
    others = [line.busy_us(stream) for stream in STREAMS if stream not in (COMPUTE, CPU)]
    assert line.exposed_us <= line.moving_us <= min(sum(others), line.step_us) + tolerance
    assert line.moving_us >= max(others) - tolerance
    assert all(0 <= e.work_us <= e.end_us - e.start_us + tolerance for e in line.events)
    for index, job in enumerate(jobs):
        for before in (*job.after, *job.needs):
            assert steady.ends[before] <= steady.starts[index] + tolerance
    for stream in STREAMS:
        own = [i for i, j in enumerate(jobs) if j.stream == stream]
        assert all(steady.ends[a] <= steady.starts[b] + tolerance for a, b in itertools.pairwise(own))
    assert host_us > ahead.end_us or not jobs or min(e.slack_us for e in line.events) < tolerance


@settings(max_examples=1000, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_faster_collectives_never_make_a_step_slower(seed: int, share: float) -> None:
    jobs = random_jobs(seed)
    rng = random.Random(seed + 1)
    faster = [
        j if j.stream == COMPUTE else dataclasses.replace(j, duration_us=j.duration_us * rng.choice([share, 1]))
        for j in jobs
    ]
    tolerance = 1e-6 * (1 + sum(j.duration_us + j.host_us for j in jobs))
    before, after = run(jobs, math.inf), run(faster, math.inf)
    assert after.end_us <= before.end_us + tolerance
    assert all(a <= b + tolerance for a, b in zip(after.ends, before.ends, strict=True))
    assert steady_run(faster).end_us <= steady_run(jobs).end_us + tolerance


def job(name: str, stream: str, us: float, *after: int, host: float = 0.0, slow: float = 0.0) -> Job:
    return Job(
        name, "region" if stream == COMPUTE else "all_gather", "forward", stream, us, host, after, after, 0, slow
    )


def test_computation_slows_down_beside_a_collective_and_only_there() -> None:
    """30 us of collective beside computation at half its speed leave 85 of 100 us to do."""
    found = run([job("g", "gathers", 30, slow=1.0), job("r", COMPUTE, 100)], math.inf)
    assert found.ends == (30, 115)


def test_two_collectives_in_two_streams_slow_down_together() -> None:
    jobs = [job("g", "gathers", 30, slow=0.5), job("h", "group", 10, slow=0.5), job("r", COMPUTE, 100)]
    found = run(jobs, math.inf)
    assert found.end_us == pytest.approx(30 + (100 - 10 / 2 - 20 / 1.5))


def test_a_wait_exposes_what_is_not_hidden() -> None:
    """gather 0-40, a 0-10, b behind both."""
    line = timeline([job("g", "gathers", 40), job("a", COMPUTE, 10), job("b", COMPUTE, 20, 0)])
    assert (line.step_us, line.exposed_us) == (60, 30)
    assert line.critical_path == ("g", "b")
    assert [e.slack_us for e in line.events] == [0, 30, 0]


def test_the_host_sets_the_pace_of_small_kernels() -> None:
    """50 us of host for 20 us of device: every step takes 50, and the device waits."""
    jobs = [job("a", COMPUTE, 10, host=25), job("b", COMPUTE, 10, host=25)]
    line = timeline(jobs)
    assert line.step_us == pytest.approx(50)
    assert line.bounds.host_us == 50
    assert line.exposed_us == 0


def test_a_region_does_not_end_before_its_last_kernel_is_issued() -> None:
    assert run([job("a", COMPUTE, 10, host=25)], 0.0).end_us == 25


def test_no_jobs_take_no_time() -> None:
    line = timeline([])
    assert (line.step_us, line.gap, line.events) == (0, 0, ())
