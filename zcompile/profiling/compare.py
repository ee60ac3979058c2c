"""A measured step beside a planned one: kind by kind, and the regions and collectives that differ most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from zcompile.errors import PlanError
from zcompile.planner.jobs import COMPUTE
from zcompile.planner.simulate import Event
from zcompile.profiling.measured import COPIES, EXPOSED, HOST, OPTIMIZER, OTHER, TRANSFERS, Span

if TYPE_CHECKING:
    from zcompile.planner.plan import Plan
    from zcompile.profiling.profile import Profile

#: how many names are shown
MOST = 5

_MOVED = ("all_gather", "reduce_scatter", "all_reduce", "offload", "reload")


@dataclass(frozen=True)
class Row:
    """Microseconds of a step: what a plan says, and what was measured. None: it says nothing about that."""

    name: str
    predicted_us: float | None
    measured_us: float


@dataclass(frozen=True)
class Comparison:
    """A profile beside a plan.

    Attributes:
        rows: by kind; a plan without a window counts one micro-batch, which is multiplied with those of a measured step.
        names: by phase and node, what both have.
        num_events: regions and collectives of the plan.
        num_spans: those of a measured step.
        micro_batches: of a measured step.
    """

    rows: tuple[Row, ...]
    names: tuple[Row, ...]
    num_events: int
    num_spans: int
    micro_batches: int

    def row(self, name: str) -> Row:
        """A row by its name."""
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        lines = [_text("ms of a step", "predicted", "measured", "ratio"), *map(_row_text, self.rows)]
        lines.append(f"{len(self.names)} regions and collectives have a name in both, of {self.num_events} planned and "
                     f"{self.num_spans} measured")  # fmt: skip
        if self.names:
            lines += ["", "most apart:", *map(_row_text, self._apart())]
        return "\n".join(lines)

    def _apart(self) -> list[Row]:
        return sorted(self.names, key=lambda row: -abs(row.measured_us - (row.predicted_us or 0.0)))[:MOST]


def compare(profile: Profile, plan: Plan) -> Comparison:
    """A profile beside a plan.

    Raises:
        PlanError: the plan is of a window, and steps were measured that have other numbers of micro-batches.
    """
    steps, last = profile.steps, plan.timeline
    shares = profile.shares
    batches = max(1, round(sum(step.micro_batches for step in steps) / len(steps)))
    parts = [(batches, last)]
    if plan.window is not None:
        if batches != plan.window.steps:
            raise PlanError(
                f"plan is of windows of {plan.window.steps} micro-batches and {batches} were measured in a step; plan with "
                f"gradient_accumulation_steps={batches}"
            )
        parts = [(batch.count, batch.timeline) for batch in plan.course.micro_batches]
    predicted: defaultdict[str, float] = defaultdict(float)
    for count, line in parts:
        for kind, us in _by_kind_and_name(line.events)[0].items():
            predicted[kind] += us if kind == "optimizer" else count * us
    _, by_name = _by_kind_and_name(event for _, line in parts for event in line.events)
    measured, found = _by_kind_and_name([span for step in steps for span in step.spans if _is_named(span)])
    measured = {kind: us / len(steps) for kind, us in measured.items()}
    rows = [Row("regions", predicted["region"], measured["region"])]
    rows += [Row(op, predicted[op], measured[op]) for op in _MOVED if predicted[op] or measured[op]]
    rows += [
        Row(COPIES, predicted["cast"], shares[COPIES]),
        Row(OPTIMIZER, predicted["optimizer"], shares[OPTIMIZER]),
        Row(EXPOSED, sum(count * line.exposed_us for count, line in parts), shares[EXPOSED] + shares[TRANSFERS]),
        Row(HOST, None, shares[HOST]),
        Row(OTHER, None, shares[OTHER]),
        Row(
            "step",
            sum(count * (line.step_us - line.optimizer_us) for count, line in parts) + last.optimizer_us,
            profile.step_us,
        ),
    ]
    both = [Row(name, mean(us), mean(found[name])) for name, us in by_name.items() if name in found]
    return Comparison(tuple(rows), tuple(both), len(by_name), len(found), batches)


def _by_kind_and_name(whats: Iterable[Event | Span]) -> tuple[dict[str, float], dict[str, list[float]]]:
    kinds: dict[str, float] = dict.fromkeys(("region", "cast", "optimizer", *_MOVED), 0.0)
    names: dict[str, list[float]] = {}
    for what in whats:
        us = what.end_us - what.start_us
        kinds[what.kind] = kinds.get(what.kind, 0.0) + us
        if _is_named(what):
            names.setdefault(f"{what.phase} {what.name}", []).append(us)
    return kinds, names


def _is_named(what: Event | Span) -> bool:
    """Regions, and collectives and copies in their own streams."""
    return what.kind == "region" if what.stream == COMPUTE else what.kind in _MOVED


def _row_text(row: Row) -> str:
    if row.predicted_us is None:
        return _text(row.name, "", f"{row.measured_us / 1000:.3f}", "")
    ratio = f"{row.measured_us / row.predicted_us:.2f}" if row.predicted_us else ""
    return _text(row.name, f"{row.predicted_us / 1000:.3f}", f"{row.measured_us / 1000:.3f}", ratio)


def _text(name: str, *cells: str) -> str:
    return (f"{name:34}" + "".join(f"{cell:>12}" for cell in cells)).rstrip()
