"""A plan as data: a dictionary for JSON, points of memory over time, and a trace for Perfetto."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from zcompile.planner.memory import CATEGORIES, by_category

if TYPE_CHECKING:
    from zcompile.planner.course import Timed
    from zcompile.planner.plan import Plan
    from zcompile.planner.simulate import Event

#: of a timeline, what adds up over micro-batches
_TIMES = ("forward_us", "backward_us", "optimizer_us", "moving_us", "exposed_us")


class Point(NamedTuple):
    """Memory at one time.

    Attributes:
        time_us: from the start of the step; in a window, as pictures show it.
        name: what runs.
        categories: bytes by category, in the order of ``CATEGORIES``.
        place: of its micro-batch in a window.
    """

    time_us: float
    name: str
    categories: tuple[int, ...]
    place: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.categories)


def memory_points(plan: Plan) -> list[Point]:
    """Memory over time: moments of the schedule at the times of the simulated computation, in the order in which memory changes.

    Memory is taken and given back in the order of the computation's stream, so what happens between two regions is drawn where
    the first one ends. Of a window, each kind of micro-batch is there once, one behind the other.
    """
    times: dict[tuple[str, str, str], deque[tuple[float, float]]] = {}
    begins: dict[str, float] = {}
    for begin, batch in plan.course.drawn():
        begins[batch.place] = begin
        for event in batch.timeline.events:
            if event.kind in ("region", "optimizer", "accumulate"):
                key = (batch.place, event.phase, _work(event.kind, event.name))
                times.setdefault(key, deque()).append((begin + event.start_us, begin + event.end_us))
    points: list[Point] = []
    now = 0.0
    for moment in plan.memory.moments:
        place, name = moment.place, moment.name
        now = max(now, begins[place])
        during, after = (tuple(by_category(parts).values()) for parts in (moment.during, moment.after))
        if spans := times.get((place, moment.phase, _work(moment.kind, name))):
            start, end = spans.popleft()
            points += [Point(start, name, during, place), Point(end, name, during, place)]
            now = end
        points.append(Point(now, name, after, place))
    return points


def _work(kind: str, name: str) -> str:
    """What is the same for computation and for the moments in which it happens, in the same order."""
    return kind if kind in ("region", "optimizer") else name.replace("_", " ")


def drawn_events(plan: Plan) -> Iterator[tuple[Timed, Event]]:
    """The events of each kind of micro-batch at the times of ``memory_points``."""
    for begin, batch in plan.course.drawn():
        for event in batch.timeline.events:
            yield batch, replace(event, start_us=begin + event.start_us, end_us=begin + event.end_us)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Everything of a plan but its graphs, in types that JSON has."""
    config, course = plan.traced.config, plan.course
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
        "gradient_accumulation_steps": course.num_micro_batches,
        "accumulate_dtype": config.accumulate_dtype,
        "fits": plan.fits,
        "device_bytes": plan.device_bytes,
        "memory": plan.memory.to_dict(),
        "memory_over_time": [
            {
                "us": round(p.time_us, 3),
                "name": p.name,
                "micro_batch": p.place,
                **dict(zip(CATEGORIES, p.categories, strict=True)),
            }
            for p in memory_points(plan)
        ],
        "time": {
            "step_us": course.step_us,
            **{name: course.total(lambda line, name=name: getattr(line, name)) for name in _TIMES},
            "bounds": asdict(course.bounds),
            "gap": course.gap,
            "rows_per_s": plan.rows_per_s,
        },
        "micro_batches": [
            {
                "place": batch.place,
                "count": batch.count,
                "drawn_at_us": begin,
                "step_us": batch.timeline.step_us,
                **{name: getattr(batch.timeline, name) for name in _TIMES},
                "bounds": asdict(batch.timeline.bounds),
            }
            for begin, batch in course.drawn()
        ],
        "events": [{**asdict(event), "micro_batch": batch.place} for batch, event in drawn_events(plan)],
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
    slices = [
        Slice(
            e.name,
            e.stream,
            e.kind,
            e.start_us,
            e.end_us,
            {"phase": e.phase, "bytes": e.bytes, "slack_us": e.slack_us, "work_us": e.work_us}
            | ({"micro_batch": batch.place} if batch.place else {}),
        )
        for batch, e in drawn_events(plan)
    ]
    if plan.window is not None:
        slices += [
            Slice(
                batch.title,
                "micro-batches",
                "micro-batch",
                begin,
                begin + batch.timeline.step_us,
                {"count": batch.count},
            )
            for begin, batch in plan.course.drawn()
        ]
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
