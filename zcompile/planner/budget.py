"""How much may be saved for backward, so that a step keeps a memory budget: found by scheduling it and looking at its peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zcompile.analysis.units import MIB
from zcompile.capture.joint import Captured
from zcompile.errors import ConfigError
from zcompile.passes.align import Align
from zcompile.passes.memory.recompute import Recompute
from zcompile.passes.memory.recompute_params import RecomputeParams
from zcompile.pipeline import Pipeline
from zcompile.placement import ParamSpec
from zcompile.planner.memory import Memory, Setup, by_category
from zcompile.planner.walk import predict
from zcompile.scheduled import schedule_step, split_step
from zcompile.verify.verifier import Verifier

#: most steps that are scheduled on the way, beside the cheapest and the smallest
TRIES = 3

GIB = 2**30


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
    smallest = trial(0.0)
    low, high = 0.0, float(cheapest.most_bytes)
    tried, guess = [smallest], high - (cheapest.peak_bytes - budget_bytes)
    for _ in range(TRIES):
        if not low + MIB / 1024 < guess < high:
            guess = (low + high) / 2
        one = trial(guess)
        tried.append(one)
        if one.peak_bytes <= budget_bytes:
            low = guess
        else:
            high = guess
        guess -= one.peak_bytes - budget_bytes
    fitting = [one for one in tried if one.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(one.peak_bytes for one in tried)
        raise ConfigError(
            f"recompute has a budget of {budget_bytes / GIB:.2f} GiB and the step's peak is {least / GIB:.2f} GiB with blocks computed "
            f"again ({cheapest.peak_bytes / GIB:.2f} without); use more ranks, a higher stage or a smaller micro-batch"
        )
    return max(fitting, key=lambda one: one.saved_bytes)


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
    """The most that tensors take, whoever allocates them: all but the reserve."""
    return max(m.num_bytes - by_category(m.during)["reserve"] for m in memory.moments)
