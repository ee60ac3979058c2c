"""One measured step: its spans on the streams of the device, and where its time went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from zcompile.planner.jobs import COMPUTE, GATHERS, GROUP, IN, OUT, REDUCTIONS
from zcompile.program import StepProgram
from zcompile.runtime.profiling.clock import Mark
from zcompile.runtime.profiling.watched import Flight, Piece, RawStep, Run

#: where the time of a step goes: every moment of the stream of computation belongs to one of these
SHARES = {
    "computation": "regions",
    "collectives' copies": "casts and copies that start collectives, in the stream of computation",
    "waits for collectives": "exposed communication: computation stands still until a collective ends",
    "waits for copies": "computation stands still until values have come from the host's memory, or gone there",
    "optimizer": "from the begin of optimizer.step() to its end",
    "other work": "of the device, outside of the compiled programs: loss, clipping, copies of inputs",
    "waits for the host": "the device has nothing to do, as the host has not issued it yet",
    "evaluation": "forwards without gradients between the steps",
}
COMPUTATION, COPIES, EXPOSED, TRANSFERS, OPTIMIZER, OTHER, HOST, EVALUATION = SHARES

#: planning's names for the streams of collectives and copies
_STREAMS = {"group": GROUP, "all_gather": GATHERS, "reduce_scatter": REDUCTIONS, "out": OUT, "in": IN}


@dataclass(frozen=True)
class Span:
    """Something on the timeline of a step; ``name``, ``stream``, ``kind``, ``phase`` and ``bytes`` are those of a plan's events.

    Attributes:
        name: of its node in the graph.
        stream: ``compute``, or that of collectives.
        start_us: from the start of the step.
        end_us: from the start of the step.
        kind: ``region``, ``wait``, ``release``, ``optimizer``, ``reduction``, ``evaluation``, ``gap``, or that of a collective; in
            the stream of computation, what the collective's start does there.
        phase: ``forward``, ``backward``, ``optimizer``, ``evaluation``, or ``between`` programs.
        bytes: a collective's full side.
        label: what it is about, such as ``all_gather of layers.3``.
        share: to which of ``SHARES`` its time counts, in the stream of computation, whose spans leave no gap.
        issued_us: from when to when the host was busy with it; None where it was not.
        region: of a region: its step and its name in the graph.
    """

    name: str
    stream: str
    start_us: float
    end_us: float
    kind: str
    phase: str
    bytes: int = 0
    label: str = ""
    share: str = ""
    issued_us: tuple[float, float] | None = None
    region: tuple[StepProgram, str] | None = None

    @property
    def us(self) -> float:
        """Its length."""
        return self.end_us - self.start_us


@dataclass(frozen=True)
class MeasuredStep:
    """One training step.

    Attributes:
        begin_us: on the clock of the host.
        step_us: to the begin of the next.
        shares: microseconds by the names of ``SHARES``; they add up to ``step_us``.
        spans: by stream in order.
        micro_batches: backwards in it.
    """

    begin_us: float
    step_us: float
    shares: dict[str, float]
    spans: tuple[Span, ...]
    micro_batches: int

    def collectives(self) -> Iterator[Span]:
        """The collectives, each in its own stream."""
        return (span for span in self.spans if span.stream != COMPUTE)


def sums(spans: Iterable[Span], key: Callable[[Span], str]) -> dict[str, float]:
    """Microseconds of spans by what a key says of them, the most first."""
    found: dict[str, float] = {}
    for span in spans:
        found[key(span)] = found.get(key(span), 0.0) + span.us
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measured(raw: RawStep, *, on_host: bool) -> MeasuredStep:
    """The account of a step whose moments have been read.

    Args:
        raw: as it was watched.
        on_host: the host computes: then all time outside of programs and updates is the host's.
    """
    account = _Account(raw, on_host)
    for part in raw.parts:
        if isinstance(part, Piece):
            account.piece(part, "optimizer" if part.kind == "optimizer" else "backward")
        elif part.phase == "evaluation":
            account.evaluation(part)
        else:
            account.run(part)
    account.gap(raw.end, "between")
    step_us = raw.end.device_us - raw.begin.device_us
    backwards = sum(isinstance(part, Run) and part.phase == "backward" for part in raw.parts)
    return MeasuredStep(raw.begin.device_us, step_us, account.shares, tuple(account.spans), backwards)


class _Account:
    """Walks along the stream of computation and gives each moment to one share."""

    def __init__(self, raw: RawStep, on_host: bool) -> None:
        self.origin = raw.begin.device_us
        self.now = 0.0
        self.on_host = on_host
        self.shares = dict.fromkeys(SHARES, 0.0)
        self.spans: list[Span] = []
        self.busy_until: dict[str, float] = {}

    def at(self, mark: Mark) -> float:
        return max(mark.device_us - self.origin, 0.0)

    def gap(self, mark: Mark, phase: str) -> None:
        """What lies between the last piece and a moment: the device's other work if it still has some then, else idleness."""
        end = self.at(mark)
        if end > self.now:
            share = HOST if mark.is_idle(end - self.now) else OTHER
            self.add(Span("gap", COMPUTE, self.now, end, "gap", phase, label=f"{share} ({phase})", share=share))

    def add(self, span: Span) -> None:
        self.shares[span.share] += span.us
        self.spans.append(span)
        self.now = span.end_us

    def run(self, run: Run) -> None:
        """A program, instruction by instruction."""
        self.gap(run.begin, "between")
        waits = {piece.ticket: piece for piece in run.pieces if piece.kind == "wait"}
        for piece in run.pieces:
            flight = run.flights.get(piece.ticket)
            self.piece(piece, run.phase, flight, run.step, run.phase)
            if flight is not None and piece.kind != "wait":
                self.flight(piece, flight, waits[piece.ticket], run.phase)
        self.gap(run.end, run.phase)

    def piece(
        self,
        piece: Piece,
        phase: str,
        flight: Flight | None = None,
        step: StepProgram | None = None,
        before: str = "between",
    ) -> None:
        """A piece of a program, or of what runs outside."""
        self.gap(piece.begin, before)
        start = self.now
        end = max(self.at(piece.end), start)
        share = self._share(piece, flight, end - start)
        if piece.kind == "wait" and not self.on_host and flight is not None:
            arrives = start if flight.end is None else self.at(flight.end)
            end = min(end, max(start, arrives))  # what is behind that is not the collective's
        issued = (piece.begin.host_us - self.origin, piece.end.host_us - self.origin)
        region = (step, piece.label.split(" ")[0]) if piece.kind == "region" and step is not None else None
        self.add(Span(piece.name, COMPUTE, start, end, piece.kind, phase, 0, piece.label, share, issued, region))
        self.gap(piece.end, before)

    def _share(self, piece: Piece, flight: Flight | None, us: float) -> str:
        known = {"region": COMPUTATION, "optimizer": OPTIMIZER, "reduction": EXPOSED, "wait": EXPOSED}
        if piece.kind == "wait" and flight is not None and flight.lane in ("out", "in"):
            return TRANSFERS
        if piece.kind in known:
            return known[piece.kind]
        # a start: its copies and casts, or on an idle device the time that the host takes for it
        return COPIES if self.on_host or not piece.end.is_idle(us) else HOST

    def flight(self, piece: Piece, flight: Flight, wait: Piece, phase: str) -> None:
        """A collective in its stream, where it comes behind the one before it."""
        stream = _STREAMS.get(flight.lane, flight.lane)
        start = max(self.at(flight.begin), self.busy_until.get(stream, 0.0))
        end = max(start, self.at(flight.end or wait.end))
        self.busy_until[stream] = end
        self.spans.append(Span(piece.name, stream, start, end, piece.kind, phase, piece.num_bytes, piece.label))

    def evaluation(self, run: Run) -> None:
        """A forward without gradients, as a whole."""
        self.gap(run.begin, "between")
        end = max(self.at(run.end), self.now)
        label = f"evaluation ({run.step.label})"
        self.add(Span("evaluation", COMPUTE, self.now, end, "evaluation", "evaluation", 0, label, EVALUATION))
