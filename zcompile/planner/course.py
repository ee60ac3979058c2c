"""The course of a training step: its micro-batches one after the other, each simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

from zcompile.ir.graph import Step
from zcompile.offloading import Offloading
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs
from zcompile.planner.simulate import Bounds, Timeline, simulate
from zcompile.planner.window import MIDDLE, Window, micro_batches


@dataclass(frozen=True)
class Timed:
    """Micro-batches of a step that run alike.

    Attributes:
        place: in the window: ``first``, ``middle`` or ``last``; empty where one is the whole step.
        count: how many they are.
        timeline: of one of them; that of the last ends with the update.
    """

    place: str
    count: int
    timeline: Timeline

    @property
    def title(self) -> str:
        """For people: ``first``, ``one of 6 between``, ``last``."""
        if self.place != MIDDLE:
            return self.place
        return "one between" if self.count == 1 else f"one of {self.count} between"


@dataclass(frozen=True)
class Course:
    """A training step from one update to the next: one micro-batch, or a window of them.

    Attributes:
        micro_batches: in their order, those that run alike once.
    """

    micro_batches: tuple[Timed, ...]

    @property
    def num_micro_batches(self) -> int:
        """Backward calls in the step."""
        return sum(batch.count for batch in self.micro_batches)

    @property
    def last(self) -> Timeline:
        """The micro-batch with the update: the whole step where there is no other."""
        return self.micro_batches[-1].timeline

    def total(self, of: Callable[[Timeline], float]) -> float:
        """A time of all micro-batches together, in microseconds."""
        return sum(batch.count * of(batch.timeline) for batch in self.micro_batches)

    @cached_property
    def step_us(self) -> float:
        """From one update to the next."""
        return self.total(lambda line: line.step_us)

    @cached_property
    def bounds(self) -> Bounds:
        """What the micro-batches take at least, one behind the other."""
        names = [f.name for f in fields(Bounds)]
        return Bounds(**{name: self.total(lambda line, name=name: getattr(line.bounds, name)) for name in names})

    @property
    def gap(self) -> float:
        """By which share of the bound the step is longer than it."""
        return self.step_us / self.bounds.step_us - 1 if self.bounds.step_us else 0.0

    @property
    def replayed(self) -> bool:
        """Whether all of it is CUDA graphs."""
        return all(batch.timeline.replayed for batch in self.micro_batches)

    def drawn(self) -> Iterator[tuple[float, Timed]]:
        """What pictures show, which is each kind of micro-batch once, with where it begins in microseconds."""
        start_us = 0.0
        for batch in self.micro_batches:
            yield start_us, batch
            start_us += batch.timeline.step_us

    @property
    def drawn_us(self) -> float:
        """How long what pictures show is."""
        return sum(batch.timeline.step_us for batch in self.micro_batches)


def simulate_course(
    step: Step,
    window: Window | None,
    hardware: Hardware,
    world_size: int,
    *,
    offloading: Offloading | None = None,
    costs: Costs | None = None,
    cuda_graphs: bool | None = None,
) -> Course:
    """Simulate a training step with all of its micro-batches.

    Args:
        step: scheduled and outlined, for ``world_size`` ranks.
        window: that is declared; None: a micro-batch is a step.
        hardware: the machine.
        world_size: ranks.
        offloading: what is on the host beside values that the graphs move there.
        costs: shared between simulations of one model on one machine.
        cuda_graphs: as in ``zcompile.compile``.

    Raises:
        PlanError: the step was scheduled for another number of ranks, or is not outlined.
    """
    costs = costs or Costs(hardware)
    timed = []
    for batch in micro_batches(step, window):
        timeline = simulate(
            batch.step,
            hardware,
            world_size,
            offloading=offloading,
            costs=costs,
            cuda_graphs=cuda_graphs,
            micro_batch=batch,
        )
        timed.append(Timed(batch.place, batch.count, timeline))
    return Course(tuple(timed))
