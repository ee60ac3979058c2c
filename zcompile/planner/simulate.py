"""What a scheduled step would take on a machine: a timeline of its streams, its memory over time, and what no schedule can beat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import networkx as nx

from zcompile.ir.graph import Step
from zcompile.offloading import Offloading
from zcompile.planner.engine import Run, steady_run
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs, step_jobs
from zcompile.planner.jobs import COMPUTE, CPU, IN, OUT, STREAMS, Job
from zcompile.planner.window import MicroBatch
from zcompile.runtime.replay.pace import HOST_BOUND

#: what the host takes to replay a step, of what it takes to issue it: 6.3 of 24.0 ms, measured at 0.19B on two H200
REPLAY_SHARE = 0.26


@dataclass(frozen=True)
class Event:
    """One job on the timeline.

    Attributes:
        name: of its node.
        stream: ``compute``, ``group`` (NCCL), ``gathers`` or ``reductions`` (copy engines), ``offloads`` or ``reloads`` (to the host
            and from it), or ``cpu``.
        start_us: from the start of the step.
        end_us: from the start of the step.
        kind: ``region``, ``cast``, ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``offload``, ``reload``, ``accumulate`` (a window's
            gradients) or ``optimizer``.
        bytes: of a copy, of a collective's full side, or what a region moves.
        phase: ``forward``, ``backward`` or ``optimizer``.
        slack_us: how much later it could end without making the step longer.
        work_us: what the device works for it; less than from start to end where the host issues it kernel by kernel.
    """

    name: str
    stream: str
    start_us: float
    end_us: float
    kind: str
    bytes: int
    phase: str
    slack_us: float
    work_us: float


@dataclass(frozen=True)
class Bounds:
    """What the step takes at least, in microseconds.

    Attributes:
        compute_us: computation and the update alone.
        communication_us: the busiest stream of collectives alone.
        critical_path_us: the longest chain of jobs that read each other's results, on a machine with as many streams as needed.
        host_us: issuing everything.
        processors_us: what the processors update.
        transfers_us: the busier way of copies to the host or from it, alone.
    """

    compute_us: float
    communication_us: float
    critical_path_us: float
    host_us: float
    processors_us: float = 0.0
    transfers_us: float = 0.0

    @property
    def step_us(self) -> float:
        """The largest of them."""
        return max(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        events: in the order of issue.
        step_us: one step of many that follow each other.
        forward_us: to the end of the forward's last job.
        backward_us: from there to the end of the backward's.
        optimizer_us: from there to the end.
        moving_us: while collectives, or copies to the host or from it, run.
        exposed_us: of it, while no computation does.
        bounds: what no schedule of this step can beat.
        critical_path: names of the jobs on the longest chain of waits, those of streams included.
        replayed: forward and backward are CUDA graphs, as the runtime makes them where the device would wait for the host.
    """

    events: tuple[Event, ...]
    step_us: float
    forward_us: float
    backward_us: float
    optimizer_us: float
    moving_us: float
    exposed_us: float
    bounds: Bounds
    critical_path: tuple[str, ...]
    replayed: bool = False

    @property
    def gap(self) -> float:
        """By which share of the bound the step is longer than it."""
        return self.step_us / self.bounds.step_us - 1 if self.bounds.step_us else 0.0

    def busy_us(self, stream: str) -> float:
        """How long a stream works."""
        return sum(e.end_us - e.start_us for e in self.events if e.stream == stream)


def simulate(
    step: Step,
    hardware: Hardware,
    world_size: int,
    *,
    region_us: Mapping[str, float] | None = None,
    offloading: Offloading | None = None,
    costs: Costs | None = None,
    cuda_graphs: bool | None = None,
    micro_batch: MicroBatch | None = None,
) -> Timeline:
    """Simulate one training step of one rank; all ranks are taken to be alike.

    Args:
        step: scheduled and outlined, for ``world_size`` ranks.
        hardware: the machine.
        world_size: ranks.
        region_us: measured device times of regions by name; the others are computed.
        offloading: what is on the host beside values that the graphs move there.
        costs: shared between simulations of one model on one machine, so that each region is looked at once.
        cuda_graphs: as in ``zcompile.compile``.
        micro_batch: whose graphs the step has, in a window; None: it is complete in itself.

    Raises:
        PlanError: the step was scheduled for another number of ranks, or is not outlined.
    """
    costs = costs or Costs(hardware, dict(region_us or {}))
    jobs = step_jobs(step, costs, world_size, offloading=offloading, micro_batch=micro_batch)
    issued = timeline(jobs)
    moves = offloading is not None and offloading.moves_in_steps
    if cuda_graphs is False or moves or not can_replay(step, hardware):
        return issued
    if cuda_graphs is None and issued.bounds.host_us < HOST_BOUND * issued.step_us:
        return issued
    return replace(timeline(replayed(jobs)), replayed=True)


def can_replay(step: Step, hardware: Hardware) -> bool:
    """Whether a step may be CUDA graphs on a machine, if nothing of it moves to the host and back."""
    return step.backward is not None and not hardware.host.blocks


def replayed(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs when the host issues forward and backward as a whole each: what that takes comes before the first."""
    phases = dict.fromkeys(job.phase for job in jobs if job.phase != "optimizer")
    whole = {p: REPLAY_SHARE * sum(job.host_us for job in jobs if job.phase == p) for p in phases}
    return [replace(job, host_us=whole.pop(job.phase, 0.0)) if job.phase in phases else job for job in jobs]


def timeline(jobs: Sequence[Job]) -> Timeline:
    """The timeline of jobs."""
    run = steady_run(jobs)
    slack = _slack(jobs, run)
    events = tuple(
        Event(j.name, j.stream, run.starts[i], run.ends[i], j.kind, j.num_bytes, j.phase, slack[i], j.duration_us)
        for i, j in enumerate(jobs)
    )
    ends = {j.phase: run.end_us for j in jobs[-1:]}  # the last phase has what is left when the host sets the pace
    for event in events:
        if event.phase != jobs[-1].phase:
            ends[event.phase] = max(ends.get(event.phase, 0.0), event.end_us)
    forward_us = ends.get("forward", 0.0)
    backward_us = max(ends.get("backward", 0.0), forward_us)
    moving_us, exposed_us = _moving(events)
    return Timeline(
        events=events,
        step_us=run.end_us,
        forward_us=forward_us,
        backward_us=backward_us - forward_us,
        optimizer_us=run.end_us - backward_us,
        moving_us=moving_us,
        exposed_us=exposed_us,
        bounds=bounds(jobs),
        critical_path=_critical_path(jobs, run),
    )


def bounds(jobs: Sequence[Job]) -> Bounds:
    """What jobs take at least, in whatever order they are issued."""
    of_stream = {s: sum(j.duration_us for j in jobs if j.stream == s) for s in STREAMS}
    longest: list[float] = []
    for job in jobs:
        longest.append(job.duration_us + max((longest[i] for i in job.needs), default=0.0))
    return Bounds(
        compute_us=of_stream[COMPUTE],
        communication_us=max(us for s, us in of_stream.items() if s not in (COMPUTE, IN, OUT, CPU)),
        critical_path_us=max(longest, default=0.0),
        host_us=sum(j.host_us for j in jobs),
        processors_us=of_stream[CPU],
        transfers_us=max(of_stream[IN], of_stream[OUT]),
    )


def _waits(jobs: Sequence[Job]) -> nx.DiGraph:
    """Who waits for whom, with the order of streams."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(jobs)))
    last: dict[str, int] = {}
    for index, job in enumerate(jobs):
        before = {*job.after, *job.needs}
        if job.stream in last:
            before.add(last[job.stream])
        graph.add_edges_from((b, index) for b in before)
        last[job.stream] = index
    return graph


def _slack(jobs: Sequence[Job], run: Run) -> list[float]:
    graph = _waits(jobs)
    latest = [run.end_us] * len(jobs)
    for index in reversed(range(len(jobs))):
        for reader in graph.successors(index):
            latest[index] = min(latest[index], latest[reader] - (run.ends[reader] - run.starts[reader]))
    return [max(late - end, 0.0) for late, end in zip(latest, run.ends, strict=True)]


def _critical_path(jobs: Sequence[Job], run: Run) -> tuple[str, ...]:
    graph = _waits(jobs)
    for _, reader, edge in graph.edges(data=True):
        edge["weight"] = run.ends[reader] - run.starts[reader]
    return tuple(jobs[i].name for i in nx.dag_longest_path(graph))


def _moving(events: Sequence[Event]) -> tuple[float, float]:
    """While something moves, and of that while nothing is computed."""
    marks: list[tuple[float, int, int]] = []
    for e in events:
        if e.stream != CPU:
            computes = int(e.stream == COMPUTE)
            marks += [(e.start_us, computes, 1 - computes), (e.end_us, -computes, computes - 1)]
    together = exposed = now = 0.0
    computing = moving = 0
    for moment, compute, move in sorted(marks):
        if moving:
            together += moment - now
            exposed += 0.0 if computing else moment - now
        computing, moving, now = computing + compute, moving + move, moment
    return together, exposed
