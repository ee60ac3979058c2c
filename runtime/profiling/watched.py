"""What was seen of a training step, before anyone makes sense of it: programs, their instructions, and the moments around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zcompile.program import StepProgram
from zcompile.runtime.profiling.clock import Mark


@dataclass
class Piece:
    """What the stream of computation was given between two moments.

    Attributes:
        name: of its node in the graph, as in plans.
        kind: ``region``, ``wait``, ``release``, ``optimizer``, ``reduction`` for one outside of programs, or what is started:
            ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``offload``, ``reload``.
        label: what it is about, for people.
        begin: before it.
        end: behind it.
        ticket: of a start and its wait.
        num_bytes: of a collective's full side.
    """

    name: str
    kind: str
    label: str
    begin: Mark
    end: Mark
    ticket: int = -1
    num_bytes: int = 0


@dataclass
class Flight:
    """A collective, or copies between device and host, under way: from ``begin``, at the earliest, to ``end``; None: nobody saw it
    end before its wait did."""

    lane: str
    begin: Mark
    end: Mark | None = None
    works: Sequence[Any] = ()


@dataclass
class Run:
    """One program that ran.

    Attributes:
        phase: ``forward``, ``backward`` or ``evaluation``, a forward without gradients.
        step: what it belongs to.
        begin: before the runtime prepared it.
        end: behind it.
        pieces: one for each instruction, in order.
        flights: collectives by ticket.
        complete: whether it came to its end.
    """

    phase: str
    step: StepProgram
    begin: Mark
    end: Mark
    pieces: list[Piece] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)
    complete: bool = False


@dataclass
class RawStep:
    """One training step: from its first forward to that of the next step.

    Attributes:
        begin: before its first forward.
        end: before that of the next.
        parts: programs, and what ran between them, in order.
        flaw: why its times mean nothing; empty: they do.
        memory: bytes alive behind each instruction, with its phase and label, where they were taken and not times.
        trained: whether it has had a backward.
        updated: whether an optimizer stepped since.
    """

    begin: Mark
    end: Mark
    parts: list[Run | Piece] = field(default_factory=list)
    flaw: str = ""
    memory: list[tuple[str, str, int]] = field(default_factory=list)
    trained: bool = False
    updated: bool = False

    def marks(self) -> Iterator[Mark]:
        """Every moment."""
        yield from (self.begin, self.end)
        for part in self.parts:
            yield from (part.begin, part.end)
            for piece in part.pieces if isinstance(part, Run) else ():
                yield from (piece.begin, piece.end)
            for flight in part.flights.values() if isinstance(part, Run) else ():
                yield flight.begin
                if flight.end is not None:
                    yield flight.end
