"""``zcompile.plan``: what training a model would take, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcompile import passes
from zcompile.config import Config, dtype_name, names_tuple, outputs_tuple
from zcompile.modules import check_modules
from zcompile.pipeline import StepPass
from zcompile.planner.hardware import Hardware
from zcompile.planner.hardware import hardware as find_hardware
from zcompile.planner.plan import Plan
from zcompile.planner.request import Request
from zcompile.profiling.profile import Profile


def plan(
    model: nn.Module,
    example_inputs: Any,
    *,
    world_size: int,
    stage: int | None = None,
    precision: str | torch.dtype | None = None,
    hardware: str | Path | Hardware = "h200",
    policy: str | StepPass | Sequence[StepPass] | None = None,
    recompute: str | None = None,
    loss_chunk: str | None = None,
    offload: str | Sequence[str] | None = None,
    memory_budget: str | float | None = None,
    gradient_accumulation_steps: int = 1,
    accumulate_dtype: str | torch.dtype | None = None,
    optimizer: str = "adamw",
    backend: str = "inductor",
    reduce_dtype: str | torch.dtype | None = None,
    ignore: str | Iterable[str] = (),
    keep_fp32: str | Iterable[str] = (),
    differentiable: Sequence[str | int] | None = None,
    verify: str = "fast",
    advise: bool = True,
    measured: Profile | Mapping[str, float] | None = None,
) -> Plan:
    """What training a model would take on each of ``world_size`` ranks: memory at every moment, time, what limits it.

    From the graphs that ``compile`` would run, captured on fake CPU tensors: no GPU, no process group, and no memory for a model
    that was built on ``meta``. ``print`` shows the plan; ``to_html``, ``to_json`` and ``to_trace`` write it.

    Args:
        model: a plain module, on any device; it is not changed.
        example_inputs: one rank's micro-batch: a tuple of positional arguments, a mapping of keyword arguments, or one tensor. Only
            shapes and dtypes count: tensors may be on ``meta``.
        world_size: ranks.
        stage: as in ``compile``, as are ``precision``, ``policy``, ``recompute``, ``loss_chunk``, ``offload``, ``backend``,
            ``reduce_dtype``, ``ignore``, ``keep_fp32``, ``differentiable`` and ``verify``. None: 3, or what a budget comes to.
        memory_budget: as in ``compile``, or a share of the machine's device; ``stage`` is chosen too, and parameters may go to the
            host. ``plan.decision`` holds the combinations that were planned. There is no further advice then.
        gradient_accumulation_steps: the declared window of micro-batches, as in ``compile``, as is ``accumulate_dtype``: memory with
            what they leave to each other, and the time from one update to the next, in which each of them has ``example_inputs``.
            ``plan.course`` holds the first, one of those between, and the last.
        hardware: the machine: a known name, the path of a JSON file, or a description.
        optimizer: ``adamw``, ``adam``, ``lion``, ``momentum`` (SGD with it) or ``sgd``.
        advise: also plan changes that could make it fit or go faster; at most about 20 seconds more.
        measured: what ``model.profile()`` measured, or its ``region_times()``: device times of regions instead of computed ones.
            Regions that it does not have are computed and scaled as the others turned out.

    Raises:
        ConfigError: options that have no meaning.
        PlanError: hardware, an optimizer or a size that is unknown or has no meaning.
        BudgetError: nothing keeps ``memory_budget``; says what would fit.
        CaptureError: the model cannot be captured.
    """
    check_modules(model)
    policy_spec, own_policy = passes.read_policy(policy)
    config = Config.choosing(
        memory_budget,
        stage=stage,
        policy=policy_spec,
        own_policy=own_policy,
        recompute=recompute,
        loss_chunk=loss_chunk,
        offload=offload,
        gradient_accumulation_steps=gradient_accumulation_steps,
        accumulate_dtype=dtype_name(accumulate_dtype),
        precision=dtype_name(precision),
        reduce_dtype=dtype_name(reduce_dtype),
        backend=backend,
        ignore=names_tuple("ignore", ignore),
        keep_fp32=names_tuple("keep_fp32", keep_fp32),
        differentiable=outputs_tuple(differentiable),
        verify=verify,
    )
    times = measured.region_times() if isinstance(measured, Profile) else measured
    request = Request(type(model).__name__, model, example_inputs, find_hardware(hardware), optimizer, measured=times)
    return request.plan(config, world_size, advise=advise)
