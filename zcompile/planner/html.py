"""A plan as one page that needs nothing else: pictures as inline SVG, tables, what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from zcompile.planner.course import Course
from zcompile.planner.export import Point, drawn_events, memory_points
from zcompile.planner.memory import CATEGORIES, CATEGORY_OF, by_category

if TYPE_CHECKING:
    from zcompile.planner.plan import Plan

GIB = 2**30

#: Okabe and Ito's colours, which people with any colour vision tell apart
COLORS = dict(zip(CATEGORIES, ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#999999"), strict=True))
KIND_COLORS = {
    "region": "#0072B2",
    "optimizer": "#009E73",
    "all_gather": "#E69F00",
    "reduce_scatter": "#D55E00",
    "all_reduce": "#D55E00",
    "cast": "#56B4E9",
    "accumulate": "#CC79A7",
}
OTHER_COLOR = "#666666"

WIDTH, LEFT, RIGHT = 960, 70, 20
MEMORY_HEIGHT, LANE_HEIGHT, BOTTOM, TOP = 280, 26, 26, 14

#: events and points beyond this many are drawn by what can be seen of them
MOST_POINTS = 4000

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 24px auto; padding: 0 16px; color: #222; background: #fff }
table { border-collapse: collapse; margin: 12px 0 } td, th { padding: 3px 12px; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } h2 { margin: 28px 0 6px; font-size: 18px } svg { max-width: 100%; height: auto }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 6px } .bad { color: #b00020; font-weight: 600 }
.good { color: #00703c; font-weight: 600 }
text { font: 11px system-ui, sans-serif; fill: #444 } code { background: #f3f3f3; padding: 1px 4px }
"""


def page(plan: Plan) -> str:
    """The page."""
    config = plan.traced.config
    title = f"{plan.model} on {plan.world_size} x {plan.hardware.name}, stage {config.stage}"
    over = (plan.memory.peak_bytes - plan.device_bytes) / GIB
    verdict = (
        '<span class="good">fits</span>'
        if plan.fits
        else f'<span class="bad">does not fit, {over:.2f} GiB too much</span>'
    )
    from zcompile.planner.plan import limit

    course = plan.course
    many = plan.window is not None
    span = f"window of {course.num_micro_batches} micro-batches" if many else "step"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{plan.num_params:,} parameters; precision {escape(config.precision or 'of the model')}; "
        f"micro-batch {plan.batch or 'unknown'}; policy <code>{escape(config.policy)}</code></p>",
        f"<p>Peak {plan.memory.peak_bytes / GIB:.2f} of {plan.device_bytes / GIB:.1f} GiB: {verdict}. "
        f"{span.capitalize()} {course.step_us / 1000:.2f} ms, {plan.rows_per_s:.1f} rows/s, limited by {escape(limit(course))}.</p>",
        f"<h2>Memory of a rank over {'a ' * many}{'one ' * (not many)}{span}</h2>",
        *([_drawn(course)] if many else []),
        legend((category, COLORS[category]) for category in CATEGORIES),
        memory_svg(memory_points(plan), course.drawn_us, plan.device_bytes, _begins(course)),
        "<h2>Streams</h2>",
        legend((k, KIND_COLORS.get(k, OTHER_COLOR)) for k in dict.fromkeys(e.kind for _, e in drawn_events(plan))),
        streams_svg(plan),
        "<h2>Memory by category</h2>",
        _memory_table(plan),
        "<h2>Time</h2>",
        _time_table(plan),
        "<h2>What to change</h2>",
        _advice_table(plan),
    ]
    if plan.notes:
        parts += ["<h2>Notes</h2><ul>", *(f"<li>{escape(note)}</li>" for note in plan.notes), "</ul>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


# Pictures. ------------------------------------------------------------------------------------------------------------


def memory_svg(
    points: Sequence[Point], end_us: float, limit_bytes: int, begins: Sequence[tuple[float, str]] = ()
) -> str:
    """Bytes by category, stacked, over time, with the device's memory as a line where it is in sight.

    Args:
        points: in the order of time.
        end_us: of the axis.
        limit_bytes: memory of the device.
        begins: where micro-batches begin, with what they are called.
    """
    most = max(p.num_bytes for p in points)
    top = max(most, limit_bytes) if most > limit_bytes / 3 else most
    top *= 1.05
    points = _thinned(points)

    def x(us: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * us / max(end_us, 1e-9)

    def y(num_bytes: float) -> float:
        return TOP + MEMORY_HEIGHT * (1 - num_bytes / max(top, 1))

    shapes = []
    below = [0] * len(points)
    for index, category in enumerate(CATEGORIES):
        above = [b + p.categories[index] for b, p in zip(below, points, strict=True)]
        if above != below:
            upper = [f"{x(p.time_us):.1f},{y(v):.1f}" for p, v in zip(points, above, strict=True)]
            lower = [f"{x(p.time_us):.1f},{y(v):.1f}" for p, v in zip(points, below, strict=True)]
            title = f"<title>{category}</title>"
            shapes.append(
                f'<polygon class="area" points="{" ".join([*upper, *reversed(lower)])}" fill="{COLORS[category]}" '
                f'stroke="none">{title}</polygon>'
            )
        below = above
    peak = max(points, key=lambda p: p.num_bytes)
    anchor = "end" if x(peak.time_us) > WIDTH * 0.6 else "start"
    shapes.append(
        f'<line x1="{x(peak.time_us):.1f}" x2="{x(peak.time_us):.1f}" y1="{y(0):.1f}" y2="{y(peak.num_bytes):.1f}" '
        'stroke="#000" stroke-dasharray="3 3"/>'
        f'<text x="{x(peak.time_us) + (-5 if anchor == "end" else 5):.1f}" y="{y(peak.num_bytes) - 3:.1f}" '
        f'text-anchor="{anchor}">peak {peak.num_bytes / GIB:.2f} GiB: {escape(peak.name)}</text>'
    )
    if limit_bytes <= top:
        shapes.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(limit_bytes):.1f}" y2="{y(limit_bytes):.1f}" stroke="#b00020"/>'
            f'<text x="{LEFT + 4}" y="{y(limit_bytes) - 4:.1f}" fill="#b00020">memory of the device</text>'
        )
    for value in _ticks(top / GIB):
        shapes.append(_label(LEFT - 6, y(value * GIB) + 4, f"{value:g} GiB", "end"))
    bottom = TOP + MEMORY_HEIGHT
    marks = [mark for begin, name in begins for mark in _mark(x(begin), name, bottom)]
    return _svg("memory", bottom + BOTTOM, [*shapes, *marks, *_time_axis(end_us, x, bottom)])


def streams_svg(plan: Plan) -> str:
    """One lane a stream with its events, and one line where a phase ends."""
    events = [event for _, event in drawn_events(plan)]
    lanes = list(dict.fromkeys(e.stream for e in events))
    end_us = plan.course.drawn_us

    def x(us: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * us / max(end_us, 1e-9)

    shapes = []
    for lane, stream in enumerate(lanes):
        shapes.append(_label(LEFT - 6, TOP + lane * (LANE_HEIGHT + 6) + 17, stream, "end"))
    drawn: dict[str, float] = {}
    for e in events:
        width = x(e.end_us) - x(e.start_us)
        if len(events) > MOST_POINTS and width < 0.2 and x(e.start_us) - drawn.get(e.stream, -1.0) < 0.2:
            continue  # it would be under its neighbour
        drawn[e.stream] = x(e.end_us)
        lane = lanes.index(e.stream)
        text = f"{e.name} ({e.phase}): {(e.end_us - e.start_us):.0f} us, {e.bytes / 2**20:.1f} MiB"
        shapes.append(
            f'<rect class="event" x="{x(e.start_us):.2f}" y="{TOP + lane * (LANE_HEIGHT + 6)}" width="{max(width, 0.4):.2f}" '
            f'height="{LANE_HEIGHT}" fill="{KIND_COLORS.get(e.kind, OTHER_COLOR)}" stroke="#fff" stroke-width="0.3">'
            f"<title>{escape(text)}</title></rect>"
        )
    bottom = TOP + len(lanes) * (LANE_HEIGHT + 6)
    for begin, batch in plan.course.drawn():
        line = batch.timeline
        backward = begin + line.forward_us
        ends = [(begin, batch.place)] if plan.window is not None else []
        ends.append((backward, "backward"))
        if line.optimizer_us:
            ends.append((backward + line.backward_us, "optimizer"))
        shapes += [mark for end, name in ends for mark in _mark(x(end), name, bottom)]
    return _svg("streams", bottom + BOTTOM, [*shapes, *_time_axis(end_us, x, bottom)])


def _begins(course: Course) -> list[tuple[float, str]]:
    """Where the micro-batches of a window begin in pictures; empty where there is one."""
    return [(begin, batch.title) for begin, batch in course.drawn()] if course.num_micro_batches > 1 else []


def _drawn(course: Course) -> str:
    """Which micro-batches of a window pictures show."""
    first, *between, last = (batch.title for batch in course.micro_batches)
    return f"<p>Pictures show {', '.join([f'the {first} micro-batch', *between, f'the {last}'])}.</p>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names beside their colours."""
    return (
        "<p>"
        + " &nbsp; ".join(
            f'<span class="swatch" style="background:{color}"></span>{escape(name)}' for name, color in entries
        )
        + "</p>"
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most so many points, the largest of each run of neighbours."""
    step = math.ceil(len(points) / MOST_POINTS)
    if step <= 1:
        return points
    return [max(points[i : i + step], key=lambda p: p.num_bytes) for i in range(0, len(points), step)]


def _ticks(top: float) -> list[float]:
    """About five round numbers from 0 to ``top``."""
    if top <= 0:
        return [0.0]
    rough = top / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [size * i for i in range(int(top / size) + 1)]


def _time_axis(end_us: float, x: Callable[[float], float], y: float) -> list[str]:
    lines = [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888"/>']
    return lines + [_label(x(ms * 1000), y + 15, f"{ms:g} ms", "middle") for ms in _ticks(end_us / 1000)]


def _mark(x: float, name: str, bottom: float) -> list[str]:
    """A line where something begins."""
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="#000" stroke-dasharray="2 3"/>'
    at_end = x > WIDTH - 80
    return [line, _label(x - 3 if at_end else x + 3, TOP - 4, name, "end" if at_end else "start")]


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(name: str, height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg id="{name}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{name}">\n' + "\n".join(shapes) + "\n</svg>"
    )


# Tables. --------------------------------------------------------------------------------------------------------------


def _memory_table(plan: Plan) -> str:
    peak = plan.memory.peak.during
    sums = by_category(peak)
    rows = []
    for category in CATEGORIES:
        swatch = f'<span class="swatch" style="background:{COLORS[category]}"></span>'
        rows.append((f"{swatch}{category}", f"{sums[category] / GIB:.3f}", ""))
        rows += [
            (f"&nbsp; &nbsp; {escape(part)}", "", f"{num_bytes / GIB:.3f}")
            for part, num_bytes in peak.items()
            if CATEGORY_OF[part] == category and num_bytes
        ]
    rows.append(("together", f"{plan.memory.peak_bytes / GIB:.3f}", ""))
    formulas = [(escape(n), f"<code>{escape(str(f))}</code>") for n, f in plan.memory.formulas.items()]
    return (
        _table(("at the peak", "GiB", "of it"), rows)
        + "<p>Bytes for <code>W</code> ranks, parameters divided as they are here; <code>B</code> rows of <code>S</code> tokens:</p>"
        + _table(("", "formula"), formulas)
    )


def _time_table(plan: Plan) -> str:
    columns = {"ms": plan.course}
    if plan.window is not None:
        columns |= {batch.title: Course((replace(batch, count=1),)) for batch in plan.course.micro_batches}
    rows: dict[str, Callable[[Course], float]] = {
        "forward": lambda course: course.total(lambda line: line.forward_us),
        "backward": lambda course: course.total(lambda line: line.backward_us),
        "optimizer": lambda course: course.total(lambda line: line.optimizer_us),
        "step": lambda course: course.step_us,
        "communication": lambda course: course.total(lambda line: line.moving_us),
        "of it, while no computation runs": lambda course: course.total(lambda line: line.exposed_us),
        "computation alone": lambda course: course.bounds.compute_us,
        "communication alone": lambda course: course.bounds.communication_us,
        "copies to the host or from it alone": lambda course: course.bounds.transfers_us,
        "host alone": lambda course: course.bounds.host_us,
        "longest chain of dependent work": lambda course: course.bounds.critical_path_us,
    }
    cells = [(name, *(f"{of(course) / 1000:.3f}" for course in columns.values())) for name, of in rows.items()]
    return _table(("", *columns), cells)


def _advice_table(plan: Plan) -> str:
    if not plan.tried:
        return "<p>No changes were planned.</p>"
    rows = [
        (
            escape(a.change) + (" <b>(better)</b>" if a in plan.advice else ""),
            f"{a.peak_bytes / GIB:.2f}",
            "yes" if a.fits else "no",
            f"{a.step_us / 1000:.2f}",
            f"{a.rows_per_s:.1f}",
        )
        for a in [*plan.advice, *(a for a in plan.tried if a not in plan.advice)]
    ]
    now = (
        "as it is",
        f"{plan.memory.peak_bytes / GIB:.2f}",
        "yes" if plan.fits else "no",
        f"{plan.step_us / 1000:.2f}",
        f"{plan.rows_per_s:.1f}",
    )
    return _table(("change", "peak GiB", "fits", "step ms", "rows/s"), [now, *rows])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>{cells}</table>"
