"""A plan as data: a dictionary for JSON, points of memory over time, and a trace for Perfetto."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from zcompile.planner.memory import CATEGORIES, by_category

if TYPE_CHECKING:
    from zcompile.planner.plan import Plan


class Point(NamedTuple):
    """Memory at one time.

    Attributes:
        time_us: from the start of the step.
        name: what runs.
        categories: bytes by category, in the order of ``CATEGORIES``.
    """

    time_us: float
    name: str
    categories: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories)


def memory_points(plan: Plan) -> list[Point]:
    """Memory over time: moments of the schedule at the times of the simulated computation, in the order in which memory changes.

    Memory is taken and given back in the order of the computation's stream, so what happens between two regions is drawn where
    the first one ends.
    """
    times: dict[str, list[tuple[float, float]]] = {}
    for event in plan.timeline.events:
        if event.kind in ("region", "optimizer"):
            times.setdefault(event.phase, []).append((event.start_us, event.end_us))
    number: Counter[str] = Counter()
    points: list[Point] = []
    now = 0.0
    for moment in plan.memory.moments:
        during, after = (tuple(by_category(parts).values()) for parts in (moment.during, moment.after))
        if moment.kind in ("region", "optimizer"):
            start, end = times[moment.phase][number[moment.phase]]
            number[moment.phase] += 1
            points += [Point(start, moment.name, during), Point(end, moment.name, during)]
            now = end
        points.append(Point(now, moment.name, after))
    return points


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Everything of a plan but its graphs, in types that JSON has."""
    config, time = plan.traced.config, plan.timeline
    return {
        "model": plan.model,
        "parameters": plan.num_params,
        "world_size": plan.world_size,
        "hardware": plan.hardware.name,
        "stage": config.stage,
        "precision": config.precision,
        "policy": config.policy,
        "pipeline": str(plan.traced.pipeline),
        "micro_batch": plan.batch,
        "tokens": plan.tokens,
        "fits": plan.fits,
        "device_bytes": plan.device_bytes,
        "memory": plan.memory.to_dict(),
        "memory_over_time": [
            {"us": round(p.time_us, 3), "name": p.name, **dict(zip(CATEGORIES, p.categories, strict=True))}
            for p in memory_points(plan)
        ],
        "time": {
            "step_us": time.step_us,
            "forward_us": time.forward_us,
            "backward_us": time.backward_us,
            "optimizer_us": time.optimizer_us,
            "exposed_us": time.exposed_us,
            "bounds": asdict(time.bounds),
            "gap": time.gap,
            "rows_per_s": plan.rows_per_s,
        },
        "events": [asdict(event) for event in time.events],
        "notes": list(plan.notes),
        "advice": [_advice(a) for a in plan.advice],
        "tried": [_advice(a) for a in plan.tried],
        "decision": None if plan.decision is None else plan.decision.to_dict(),
    }


def _advice(advice: Any) -> dict[str, Any]:
    return {**asdict(advice), "options": dict(advice.options)}


class Slice(NamedTuple):
    """Something on a stream of a trace.

    Attributes:
        name: what is shown.
        stream: the row.
        kind: its category.
        start_us: from the begin of the trace.
        end_us: from the begin of the trace.
        args: what a click on it shows.
    """

    name: str
    stream: str
    kind: str
    start_us: float
    end_us: float
    args: dict[str, Any]


def trace_events(plan: Plan) -> dict[str, Any]:
    """A plan as ``chrome_trace``: one row a stream, memory by category as counters (MiB)."""
    slices = (
        Slice(
            e.name,
            e.stream,
            e.kind,
            e.start_us,
            e.end_us,
            {"phase": e.phase, "bytes": e.bytes, "slack_us": e.slack_us},
        )
        for e in plan.timeline.events
    )
    memory = (
        (point.time_us, {name: num_bytes / 2**20 for name, num_bytes in zip(CATEGORIES, point.categories, strict=True)})
        for point in memory_points(plan)
    )
    return chrome_trace(f"{plan.model}, one of {plan.world_size} ranks", slices, memory)


def chrome_trace(
    process: str, slices: Iterable[Slice], memory: Iterable[tuple[float, Mapping[str, float]]], rank: int = 0
) -> dict[str, Any]:
    """Events in the JSON format of Chrome's tracing, which Perfetto reads.

    Args:
        process: what the rows belong to.
        slices: what is on them.
        memory: counters in MiB by time.
        rank: traces of several ranks can be joined.
    """
    slices = list(slices)
    streams = list(dict.fromkeys(s.stream for s in slices))
    events: list[dict[str, Any]] = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": process}}]
    for thread, stream in enumerate(streams):
        events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": stream}})
    for s in slices:
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": streams.index(s.stream),
                "name": s.name,
                "cat": s.kind,
                "ts": s.start_us,
                "dur": s.end_us - s.start_us,
                "args": s.args,
            }
        )
    for time_us, mib in memory:
        events.append({"ph": "C", "pid": rank, "name": "memory, MiB", "ts": time_us, "args": dict(mib)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
