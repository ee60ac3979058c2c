"""A plan: the graphs that would run, what they take in memory and time on a machine, and what would change that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zcompile.capture.surroundings import collector_paused
from zcompile.capture.tree import flatten
from zcompile.ir.graph import Step
from zcompile.planner import states
from zcompile.planner.choice import Decision
from zcompile.planner.course import Course, simulate_course
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs
from zcompile.planner.memory import CATEGORIES, Memory, Setup, by_category
from zcompile.planner.simulate import Timeline
from zcompile.planner.symbols import size_symbols
from zcompile.planner.trace import Traced, as_call
from zcompile.planner.walk import predict
from zcompile.planner.window import Window

GIB = 2**30


@dataclass(frozen=True)
class Advice:
    """One change, planned again.

    Attributes:
        change: what to change, such as ``stage 3``.
        options: the arguments of ``zcompile.plan`` that differ.
        peak_bytes: the peak then.
        step_us: the step then, from one update to the next.
        rows_per_s: rows of all ranks in a second then.
        fits: whether it fits then.
    """

    change: str
    options: Mapping[str, Any]
    peak_bytes: int
    step_us: float
    rows_per_s: float
    fits: bool

    def __str__(self) -> str:
        fits = "" if self.fits else ", does not fit"
        return f"{self.change}: peak {self.peak_bytes / GIB:.1f} GiB{fits}, step {_ms(self.step_us)}, {self.rows_per_s:.1f} rows/s"


@dataclass(frozen=True)
class Plan:
    """What a training step of one rank takes.

    Attributes:
        model: its name.
        traced: graphs, parameters, options.
        hardware: the machine.
        memory: the anatomy of a rank's memory.
        course: the simulated step: one micro-batch, or those of a declared window.
        batch: rows of a rank's micro-batch; 0 when the inputs do not say.
        tokens: elements of the first integer input; 0 without one.
        notes: what a reader should know.
        advice: changes that make it fit, or go faster, best first.
        tried: every change that was planned.
        decision: what ``memory_budget`` came to; None without one.
    """

    model: str
    traced: Traced
    hardware: Hardware
    memory: Memory
    course: Course
    batch: int
    tokens: int
    notes: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    tried: tuple[Advice, ...] = field(default=(), repr=False)
    decision: Decision | None = None

    @property
    def step(self) -> Step:
        """The scheduled forward and backward graph: ``print(plan.step.backward)``."""
        return self.traced.step

    @property
    def window(self) -> Window | None:
        """The declared window of micro-batches; None: each is a step."""
        return Window.of(self.traced.config, self.traced.pipeline, self.world_size)

    @property
    def timeline(self) -> Timeline:
        """The simulated micro-batch with the update: the whole step where there is no window."""
        return self.course.last

    @property
    def step_us(self) -> float:
        """Microseconds from one update to the next: of all micro-batches of a window."""
        return self.course.step_us

    @property
    def world_size(self) -> int:
        return self.traced.world_size

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return self.hardware.device_memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory, and what is offloaded within the host's."""
        return self.memory.peak_bytes <= self.device_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether what is offloaded is within the host's memory for one device."""
        return self.memory.host_bytes <= self.hardware.host_memory_bytes

    @property
    def rows_per_s(self) -> float:
        """Rows of all ranks, and of all micro-batches of a window, in a second."""
        rows = self.batch * self.course.num_micro_batches * self.world_size
        return rows / (self.step_us * 1e-6) if self.step_us else 0.0

    @property
    def num_params(self) -> int:
        """Elements of the whole model, tied ones once."""
        return sum(spec.numel for spec in self.traced.specs)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs, in types that JSON has."""
        from zcompile.planner.export import plan_dict

        return plan_dict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """``to_dict`` as JSON; also written to a file when a path is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def to_html(self, path: str | Path) -> None:
        """Write one page without outside resources: memory over time, the streams, tables, and what to change."""
        from zcompile.planner.html import page

        Path(path).write_text(page(self))

    def to_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto: streams, and memory as counters."""
        from zcompile.planner.export import trace_events

        Path(path).write_text(json.dumps(trace_events(self)))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def make(
    name: str,
    traced: Traced,
    hardware: Hardware,
    example_inputs: Any,
    *,
    optimizer: str = "adamw",
    costs: Costs | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a traced step on a machine, without advice."""
    fused = traced.config.backend == "inductor"
    offloading = traced.config.offloading
    window = Window.of(traced.config, traced.pipeline, traced.world_size)
    setup = Setup.on(hardware, traced.world_size, optimizer=optimizer, fused=fused, offloading=offloading)
    batch, tokens = batch_of(example_inputs)
    symbols = size_symbols(batch, tokens // batch if batch else 0, traced.specs)
    with collector_paused():
        memory = predict(traced.step, traced.specs, replace(setup, symbols=symbols, window=window))
        course = simulate_course(traced.step, window, hardware, traced.world_size, offloading=offloading, costs=costs)
    notes = (*notes, *_padding_notes(traced), *_window_notes(traced, window))
    return Plan(name, traced, hardware, memory, course, batch, tokens, notes)


def batch_of(example_inputs: Any) -> tuple[int, int]:
    """Rows of a micro-batch (0 where inputs have different first sizes), and elements of the first integer input."""
    tensors, _, _ = flatten(as_call(example_inputs))
    rows = {t.shape[0] for t in tensors if t.dim()}
    integers = [t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.dim() > 1]
    return (rows.pop() if len(rows) == 1 else 0), (integers[0].numel() if integers else 0)


def _window_notes(traced: Traced, window: Window | None) -> list[str]:
    given = traced.config.accumulate_dtype
    if given is None or window is None or window.widens(traced.specs):
        return []
    return [f"accumulate_dtype={given!r} saves no rounding: gradients are added up in no less anyway"]


def _padding_notes(traced: Traced) -> list[str]:
    padded, whole = states.padded(traced.specs), states.replicated(traced.specs)
    notes = []
    if padded:
        extra = sum(s.padded_local_bytes * s.world_size - s.num_bytes for s in padded) // traced.world_size
        notes.append(
            f"{len(padded)} parameters do not divide by {traced.world_size} ranks, such as {padded[0].name} {list(padded[0].shape)}: "
            f"padded, {extra:,} bytes a rank"
        )
    if whole and traced.config.stage > 0:
        notes.append(
            f"{len(whole)} parameters are whole on every rank (too small to divide, or ignored), such as {whole[0].name} "
            f"{list(whole[0].shape)}: {sum(s.num_bytes for s in whole):,} bytes"
        )
    return notes


def limit(course: Course) -> str:
    """What limits a step, in words."""
    bounds = course.bounds
    moves = {"communication": bounds.communication_us, "copies": bounds.transfers_us}
    work = ["computation", *([name for name, us in moves.items() if us] or ["the host"])]
    sizes = {
        "computation": bounds.compute_us,
        "communication": bounds.communication_us,
        "copies to the host and from it": bounds.transfers_us,
        "the host, which issues the work": bounds.host_us,
        "the processors, which update what is on the host": bounds.processors_us,
        f"waits of {' and '.join(work)} for each other": bounds.critical_path_us,
    }
    *alone, waits = sizes
    most = max(alone, key=lambda name: sizes[name])
    return waits if course.step_us > 1.1 * sizes[most] else most


def _lines(plan: Plan) -> list[str]:
    config, course, memory = plan.traced.config, plan.course, plan.memory
    peak, bounds = memory.peak, course.bounds
    lines = [
        f"{plan.model}: {plan.num_params:,} parameters on {plan.world_size} x {plan.hardware.name}, stage {config.stage}, "
        f"precision {config.precision or 'of the model'}, policy {config.policy}"
        + (f", offload {config.offload}" if config.offload else "")
        + (f", {course.num_micro_batches} micro-batches an update" if plan.window is not None else "")
        + (f", added up in {config.accumulate_dtype}" if config.accumulate_dtype else ""),
        f"micro-batch: {plan.batch or 'unknown'} rows a rank" + (f", {plan.tokens:,} tokens" if plan.tokens else ""),
        "",
        f"{'memory of a rank, GiB':24}{'at the peak':>14}{'largest':>10}",
    ]
    at_peak = by_category(peak.during)
    for category in CATEGORIES:
        lines.append(f"{category:24}{at_peak[category] / GIB:>14.2f}{largest(memory, category) / GIB:>10.2f}")
    too_much = memory.peak_bytes - plan.device_bytes
    verdict = "fits" if too_much <= 0 else f"does not fit: {too_much / GIB:.2f} GiB too much"
    lines += [
        f"{'together':24}{memory.peak_bytes / GIB:>14.2f}  of {plan.device_bytes / GIB:.1f}: {verdict}",
        f"peak in {peak.phase}{f' of the {peak.place} micro-batch' * bool(peak.place)}, {peak.name}",
    ]
    if plan.decision is not None:
        counted = plan.decision.chosen.peak_bytes
        lines.append(
            f"{'of the budget':24}{counted / GIB:>14.2f}  of {plan.decision.budget_bytes / GIB:.1f}; beside it the reserve: context, gaps "
            "of the allocator"
        )
    if memory.host:
        on_host = "fits" if plan.fits_host else "does not fit"
        parts = ", ".join(f"{what} {num_bytes / GIB:.2f}" for what, num_bytes in memory.host.items())
        lines.append(
            f"{'on the host':24}{memory.host_bytes / GIB:>14.2f}  of {plan.hardware.host_memory_bytes / GIB:.1f}: {on_host}; {parts}"
        )
    if too_much > 0:
        most = sorted(CATEGORIES, key=lambda c: -at_peak[c])[:2]
        lines.append(f"most of it: {', '.join(f'{c} {at_peak[c] / GIB:.2f} GiB' for c in most)}")
    lines += [
        "",
        *([_window_line(course)] if plan.window is not None else []),
        f"step {_ms(course.step_us)}: forward {_ms(course.total(lambda line: line.forward_us))}, backward "
        f"{_ms(course.total(lambda line: line.backward_us))}, optimizer "
        f"{_ms(course.total(lambda line: line.optimizer_us))}; {plan.rows_per_s:.1f} rows/s"
        + (f", {plan.rows_per_s * plan.tokens / plan.batch:,.0f} tokens/s" if plan.tokens and plan.batch else ""),
        f"limited by {limit(course)}: computation {_ms(bounds.compute_us)}, communication"
        f"{' and copies to the host' * bool(bounds.transfers_us)} {_ms(course.total(lambda line: line.moving_us))} of which "
        f"{_ms(course.total(lambda line: line.exposed_us))} with computation idle, host {_ms(bounds.host_us)}{_replays(course)}",
    ]
    if plan.decision is not None:
        lines += ["", str(plan.decision)]
    if plan.notes:
        lines += ["", *(f"note: {note}" for note in plan.notes)]
    if plan.advice:
        lines += ["", "to make it fit:" if not plan.fits else "to make it faster or smaller:"]
        lines += [f"  {advice}" for advice in plan.advice]
    elif plan.tried:
        lines += ["", f"of {len(plan.tried)} changes that were planned none is better"]
    return lines


def _replays(course: Course) -> str:
    """How much of a step is CUDA graphs."""
    count = sum(batch.count for batch in course.micro_batches if batch.timeline.replayed)
    if count == course.num_micro_batches:
        return ", which replays CUDA graphs"
    return f", which replays {count} of {course.num_micro_batches} micro-batches as CUDA graphs" if count else ""


def _window_line(course: Course) -> str:
    """What the micro-batches of a window take."""
    first, *between, last = course.micro_batches
    parts = [f"the first {_ms(first.timeline.step_us)}"]
    parts += [f"{batch.count} between of {_ms(batch.timeline.step_us)}" for batch in between]
    parts += [f"the last {_ms(last.timeline.step_us)} with the update"]
    return f"window of {course.num_micro_batches} micro-batches: {', '.join(parts)}"


def largest(memory: Memory, category: str) -> int:
    """The most bytes of one category at any moment."""
    return max(by_category(moment.during)[category] for moment in memory.moments)


def _ms(us: float) -> str:
    return f"{us / 1000:.2f} ms"
