"""What would make a step fit or go faster: changes that are planned again, a bounded number of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from zcompile.capture.tree import build, flatten
from zcompile.config import RECOMPUTE
from zcompile.errors import ZCompileError
from zcompile.passes.memory.chunk_loss import LOGITS_RETURNED
from zcompile.planner.plan import Advice, Plan
from zcompile.planner.trace import as_call

#: seconds of computation of this process that planning changes may take, beside one that is under way: a busy machine gives no less
#: advice
BUDGET_S = 20.0

#: most changes that are shown
MOST = 6

#: a change is worth showing from this share on: of rows a second, or of memory
WORTH = 0.01
WORTH_MEMORY = 0.05

#: what may go to the host, that which costs least first
OFFLOADS = ("activations", "optimizer", "activations+optimizer+parameters")

#: makes a plan from the options that differ from the present one
Replan = Callable[[dict[str, Any]], Plan]


def advise(plan: Plan, replan: Replan, *, capture_s: float) -> Plan:
    """The plan with advice.

    Args:
        plan: without advice.
        replan: plans again with other options; ``example_inputs`` among them means another capture.
        capture_s: what a capture takes: one that would pass the budget is not made.
    """
    end = time.process_time() + BUDGET_S
    tried: list[Advice] = []
    skipped: list[str] = []
    for change, options in _changes(plan):
        if "world_size" in options and any(a.fits and "world_size" in a.options for a in tried):
            continue  # fewer ranks do
        captures = "example_inputs" in options
        # one at least: whose step does not fit gets an answer, however large it is
        if (tried or plan.fits) and time.process_time() + (capture_s if captures else 0) > end:
            skipped.append(change)
            continue
        try:
            other = replan(options)
        except ZCompileError:
            continue  # such as a policy that the model has too few units for
        options = {k: v for k, v in options.items() if k != "example_inputs"}
        if captures:
            options["micro_batch"] = other.batch
        tried.append(Advice(change, options, other.memory.peak_bytes, other.step_us, other.rows_per_s, other.fits))
    notes = plan.notes
    if skipped:
        notes = (*notes, f"not planned, for want of time: {', '.join(skipped)}")
    return replace(plan, notes=notes, tried=tuple(tried), advice=tuple(_best(plan, tried)))


def _best(plan: Plan, tried: list[Advice]) -> list[Advice]:
    """Those that are worth a change, best first."""
    fitting = [a for a in tried if a.fits]
    if not plan.fits:
        if not fitting:
            return sorted(tried, key=lambda a: a.peak_bytes)[:2]
        return sorted(fitting, key=lambda a: -a.rows_per_s / _ranks(plan, a))[:MOST]
    faster = [a for a in fitting if a.rows_per_s > plan.rows_per_s * (1 + WORTH)]
    smaller = [
        a
        for a in fitting
        if a.peak_bytes < plan.memory.peak_bytes * (1 - WORTH_MEMORY) and a.rows_per_s > plan.rows_per_s * (1 - WORTH)
    ]
    found = [*sorted(faster, key=lambda a: -a.rows_per_s), *(a for a in smaller if a not in faster)]
    return found[:MOST]


def _ranks(plan: Plan, advice: Advice) -> int:
    return advice.options.get("world_size", plan.world_size)


def _changes(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to try, in this order: to make a step fit, what saves most first, since time may end."""
    config, batch = plan.traced.config, plan.batch
    for stage in (3, 2, 1, 0):
        if stage != config.stage and plan.world_size > 1 and (not plan.fits) <= (stage > config.stage):
            yield f"stage {stage}", {"stage": stage}
    if plan.fits:
        yield from _policies(
            plan, "keep{units=2},prefetch{lookahead=2}", "bucket{mib=0},prefetch", "prefetch{lookahead=2}"
        )
        if batch:
            yield f"micro-batch {2 * batch}", {"example_inputs": 2 * batch}
        return
    for mode in RECOMPUTE if config.recompute is None else ():
        yield f"recompute='{mode}'", {"recompute": mode}
    if config.loss_chunk == "none":
        yield "loss_chunk='auto'", {"loss_chunk": "auto"}
    elif config.loss_chunk in (None, "auto") and any(
        LOGITS_RETURNED in what for e in plan.traced.history for what in e.stats
    ):
        yield "loss_chunk='256MiB', with None for logits", {"loss_chunk": "256MiB"}
    for kinds in OFFLOADS if config.offload is None else ():
        yield f"offload='{kinds}'", {"offload": kinds}
    for double in range(1, 5 if config.stage else 1):
        world = plan.world_size << double
        yield f"{world} ranks", {"world_size": world}
    if batch > 1:
        yield f"micro-batch {batch // 2}", {"example_inputs": batch // 2}
        if batch > 2:
            yield "micro-batch 1", {"example_inputs": 1}
    yield from _policies(plan, "keep{units=0},bucket{mib=0},prefetch", "none")


def _policies(plan: Plan, *policies: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for policy in policies:
        if plan.world_size > 1 and policy != plan.traced.config.policy:
            yield f"policy '{policy}'", {"policy": policy}


def with_batch(example_inputs: Any, rows: int) -> Any:
    """The same inputs with another number of rows, without memory; the first size of every tensor counts rows."""
    args, kwargs = as_call(example_inputs)
    tensors, structure, _ = flatten((args, kwargs))
    new = [
        torch.empty((rows, *t.shape[1:]) if t.dim() else t.shape, dtype=t.dtype, device="meta").requires_grad_(
            t.requires_grad
        )
        for t in tensors
    ]
    args, kwargs = build(structure, new)
    return kwargs or tuple(args)
