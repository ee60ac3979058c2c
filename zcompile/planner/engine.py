"""The discrete events of one step: jobs in streams, in order, with computation that slows down beside collectives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zcompile.planner.jobs import COMPUTE, STREAMS, Job

#: share of a step to which the lead of a slow host is found
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """When each job ran, in microseconds from where the device was free.

    Attributes:
        starts: of each job.
        ends: of each job.
        issued: when the host had issued each job.
        end_us: when the last job ended.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    issued: tuple[float, ...]
    end_us: float


def steady_run(jobs: Sequence[Job]) -> Run:
    """One step of many that follow each other without the host waiting for the device.

    When the host issues faster than the device works, it is ahead by so much that only the device counts. When it is slower,
    the step takes what the host takes: the run is the one that repeats itself then.
    """
    host_us = sum(job.host_us for job in jobs)
    ahead = run(jobs, math.inf)
    if ahead.end_us >= host_us:
        return ahead
    low, high = 0.0, host_us  # with a lead of a whole step everything is issued before it begins
    while high - low > host_us * _TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if run(jobs, middle).end_us > host_us else (low, middle)
    return dataclasses.replace(run(jobs, high), end_us=host_us)


def run(jobs: Sequence[Job], lead_us: float) -> Run:
    """Run jobs on a free device.

    Every job starts as early as it may: issued, behind the jobs of its stream before it, after those that it waits for. While
    collectives are under way, computation advances by ``1 / (1 + their slowdowns)`` of its speed; all jobs of a stream have the
    same slowdown.

    Shorter collectives never make a run longer. They start at points of the computation's progress, and what they wait for beside
    it, later computation waits for too. So when two runs have computed equally far, a stream of collectives that works in the one
    with the shorter ones works in the other as well, and the other computes no faster: it never gets ahead. A run takes no longer
    than its jobs one after the other, since two together advance by more than one alone.

    Args:
        jobs: in the order of issue.
        lead_us: how far the host is ahead of the device when the step begins.
    """
    num = len(jobs)
    issue_begins, issued = _issue(jobs, lead_us)
    queues = {stream: [i for i, job in enumerate(jobs) if job.stream == stream] for stream in STREAMS}
    heads = dict.fromkeys(STREAMS, 0)
    waits = [len(set(job.after) | set(job.needs)) for job in jobs]
    readers: list[list[int]] = [[] for _ in jobs]
    for index, job in enumerate(jobs):
        for before in set(job.after) | set(job.needs):
            readers[before].append(index)
    starts, ends = [math.nan] * num, [math.nan] * num
    left = [job.duration_us for job in jobs]
    active: dict[str, int] = {}
    now, done = 0.0, 0
    while done < num:
        for stream, queue in queues.items():
            if stream not in active and heads[stream] < len(queue):
                index = queue[heads[stream]]
                if waits[index] == 0 and issue_begins[index] <= now:
                    active[stream], starts[index] = index, now
        pace = 1.0 / (1.0 + sum(jobs[i].slowdown for s, i in active.items() if s != COMPUTE))
        moments = {s: _end(now, left[i], pace if s == COMPUTE else 1.0, issued[i]) for s, i in active.items()}
        pending = [queues[s][heads[s]] for s in STREAMS if s not in active and heads[s] < len(queues[s])]
        to_issue = [issue_begins[i] for i in pending if waits[i] == 0 and issue_begins[i] > now]
        then = min([*moments.values(), *to_issue])
        for stream, index in list(active.items()):
            if moments[stream] <= then:
                ends[index] = then
                del active[stream]
                heads[stream] += 1
                done += 1
                for reader in readers[index]:
                    waits[reader] -= 1
            else:
                left[index] = max(left[index] - (then - now) * (pace if stream == COMPUTE else 1.0), 0.0)
        now = then
    return Run(tuple(starts), tuple(ends), tuple(issued), now)


def _end(now: float, left: float, pace: float, issued: float) -> float:
    """When a job ends as things stand: its last kernel is not there before the host has issued it."""
    return max(now + left / pace, issued)


def _issue(jobs: Sequence[Job], lead_us: float) -> tuple[list[float], list[float]]:
    """When the host begins and ends to issue each job."""
    begins, ends = [], []
    now = -lead_us
    for job in jobs:
        begins.append(now)
        now += job.host_us
        ends.append(now)
    return begins, ends
