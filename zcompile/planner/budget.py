"""How much may be saved for backward, so that a step keeps a memory budget: found by scheduling it and looking at its peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from zcompile.analysis.units import MIB
from zcompile.capture.joint import Captured
from zcompile.errors import ConfigError
from zcompile.passes.align import Align
from zcompile.passes.memory.recompute import Recompute
from zcompile.passes.memory.recompute_params import RecomputeParams
from zcompile.pipeline import Pipeline
from zcompile.placement import ParamSpec
from zcompile.planner.memory import Memory, Setup
from zcompile.planner.walk import predict
from zcompile.scheduled import schedule_step, split_step
from zcompile.verify.verifier import Verifier

#: most steps that are scheduled on the way, beside the cheapest and the smallest
TRIES = 3

#: a step that is so near to its budget is good enough
NEAR = 0.01

GIB = 2**30

#: parts of a rank's memory that no tensor takes
NO_TENSORS = ("context and libraries", "fragmentation")


@dataclass(frozen=True)
class Fit:
    """A pipeline that keeps a budget.

    Attributes:
        pipeline: with a ``recompute`` pass, if one is needed.
        peak_bytes: the predicted peak, without what the device's context and the allocator's gaps take.
        saved_bytes: what its blocks save for backward.
        most_bytes: what they would save at the least time.
    """

    pipeline: Pipeline
    peak_bytes: int
    saved_bytes: int
    most_bytes: int

    def __str__(self) -> str:
        return (
            f"predicted peak {self.peak_bytes / GIB:.2f} GiB; blocks save {self.saved_bytes / GIB:.2f} of "
            f"{self.most_bytes / GIB:.2f} GiB for backward"
        )


def fit(captured: Captured, pipeline: Pipeline, specs: Sequence[ParamSpec], setup: Setup, budget_bytes: int) -> Fit:
    """Let a step's blocks save as much as a budget allows, so that as little as possible is computed again.

    The peak mostly falls with what is saved, by at most as much: the first try takes away what is too much, others close in.

    Args:
        captured: of a step with a backward.
        pipeline: without a ``recompute`` pass.
        specs: how parameters are divided.
        setup: what memory depends on beside the graphs.
        budget_bytes: for all tensors of a rank.

    Raises:
        ConfigError: the budget is too small even if whole blocks are computed again; says what takes the memory.
    """
    trial = _trial(captured, pipeline, tuple(specs), setup)
    cheapest = trial(None)
    if cheapest.peak_bytes <= budget_bytes:
        return cheapest
    most, over = float(cheapest.most_bytes), cheapest.peak_bytes - budget_bytes
    tried = [trial(0.0), *close_in(trial, budget_bytes, low=0.0, high=most, guess=most - over)]
    fitting = [one for one in tried if one.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(one.peak_bytes for one in tried)
        raise ConfigError(
            f"recompute has a budget of {budget_bytes / GIB:.2f} GiB and the step's peak is {least / GIB:.2f} GiB with blocks computed "
            f"again ({cheapest.peak_bytes / GIB:.2f} without); use more ranks, a higher stage or a smaller micro-batch"
        )
    return max(fitting, key=lambda one: one.saved_bytes)


class Peaked(Protocol):
    """A step that was planned."""

    @property
    def peak_bytes(self) -> int: ...


T = TypeVar("T", bound=Peaked)


def close_in(trial: Callable[[float], T], budget_bytes: int, *, low: float, high: float, guess: float) -> list[T]:
    """Steps whose blocks save nearly as much as a budget allows, if one is found. The peak mostly rises with what is saved, as much.

    Args:
        trial: schedules a step whose blocks save at most so many bytes.
        budget_bytes: what the peak may be.
        low: bytes that fit.
        high: bytes that do not.
        guess: what to try first.
    """
    tried: list[T] = []
    for _ in range(TRIES):
        if not low + MIB / 1024 < guess < high:
            guess = (low + high) / 2
        one = trial(guess)
        tried.append(one)
        room = budget_bytes - one.peak_bytes
        if room >= 0:
            low = guess
        else:
            high = guess
        if 0 <= room < NEAR * budget_bytes:
            break
        guess += room
    return tried


def _trial(
    captured: Captured, pipeline: Pipeline, specs: tuple[ParamSpec, ...], setup: Setup
) -> Callable[[float | None], Fit]:
    unchecked = Verifier("off")  # the pipeline that is chosen is verified when it runs

    def trial(saved_bytes: float | None) -> Fit:
        if saved_bytes is None:
            mode = Recompute(mode="budget", mib=float(2**40))
        else:
            mode = Recompute(mode="budget", mib=saved_bytes / MIB) if saved_bytes else Recompute()
        chosen = with_recompute(pipeline, mode)
        scheduled = schedule_step(split_step(captured, chosen, unchecked), chosen, unchecked)
        stats = scheduled.history["recompute"].stats
        return Fit(
            chosen if saved_bytes is not None else pipeline,
            tensor_bytes(predict(scheduled.step, specs, setup)),
            stats["bytes"],
            stats["bytes at the least time"],
        )

    return trial


def with_recompute(pipeline: Pipeline, mode: Recompute) -> Pipeline:
    """A pipeline with this pass where it belongs: before others tag what is to be computed again."""
    passes = list(pipeline.passes)
    place = next((i for i, p in enumerate(passes) if isinstance(p, (Align, RecomputeParams))), 0)
    return replace(pipeline, passes=(*passes[:place], mode, *passes[place:]))


def tensor_bytes(memory: Memory) -> int:
    """The most that tensors take, whoever allocates them: all but the device's context and the gaps between allocations."""
    return max(sum(size for part, size in m.during.items() if part not in NO_TENSORS) for m in memory.moments)
