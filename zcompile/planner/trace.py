"""The graphs that a model would run at any world size, traced on fake CPU tensors: no storage, no GPU, no process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zcompile import compat, passes
from zcompile.capture.convert import ParamType
from zcompile.capture.joint import Call, Captured, capture
from zcompile.capture.surroundings import collector_paused, rng_untouched
from zcompile.capture.tree import flatten
from zcompile.config import Config
from zcompile.errors import PlanError
from zcompile.ir.graph import Step
from zcompile.parameters import compute_dtype, parameter_specs
from zcompile.pipeline import History, Pipeline
from zcompile.placement import ParamSpec
from zcompile.planner.unscheduled import Unscheduled, outline_step
from zcompile.scheduled import Splits, schedule_step
from zcompile.store import Store
from zcompile.verify.verifier import Verifier

_CPU = torch.device("cpu")

#: options that change what is captured; the others only change what the passes make of it
_CAPTURED = ("precision", "keep_fp32", "differentiable")


@dataclass(frozen=True)
class Traced:
    """A step as it would run on one of ``world_size`` ranks.

    Attributes:
        step: the scheduled forward and backward; tensors are fake and on the CPU, shapes and dtypes those of the run.
        specs: how each parameter is divided.
        config: the options.
        world_size: ranks on the axis.
        pipeline: the passes that ran.
        history: what they did.
        captured: the capture, which knows nothing of ranks: ``at`` shares it.
    """

    step: Step
    specs: tuple[ParamSpec, ...]
    config: Config
    world_size: int
    pipeline: Pipeline
    history: History
    captured: Captured
    _source: _Source = field(repr=False)

    def at(self, *, world_size: int | None = None, **options: Any) -> Traced:
        """The same capture for other ranks and options of ``Config``, such as ``stage`` and ``policy``.

        Raises:
            PlanError: an option that changes the capture itself.
            PipelineError, PassError, VerifyError: a policy that is unknown, or breaks the graph.
        """
        config = dataclasses.replace(self.config, **options)
        for name in _CAPTURED:
            if getattr(config, name) != getattr(self.config, name):
                raise PlanError(f"{name} changes what is captured; trace the model again with {name}={options[name]!r}")
        return self._source.schedule(config, self.world_size if world_size is None else world_size)

    def with_passes(self, config: Config, pipeline: Pipeline) -> Traced:
        """The same capture as these passes make it, which may be others than those that the options come to."""
        return self._source.schedule(config, self.world_size, pipeline)

    @property
    def gpu(self) -> str:
        """The type of device that the capture has where a GPU is to compute: ``cpu`` if it stands for one."""
        return self._source.gpu

    def unscheduled(self, world_size: int) -> Unscheduled:
        """The same capture for other ranks, with regions and collectives that no policy has moved yet."""
        return self._source.outline(self.config, world_size)


@dataclass(frozen=True)
class _Source:
    """One capture with what is made of it once: the split."""

    model: nn.Module
    splits: Splits
    gpu: str

    def schedule(self, config: Config, world_size: int, pipeline: Pipeline | None = None) -> Traced:
        check_world_size(world_size)
        pipeline = pipeline or passes.default_pipeline(config, size=world_size, gpu=self.gpu)
        with collector_paused():
            scheduled = schedule_step(self.splits.of(pipeline), pipeline, self.splits.verifier)
        specs = tuple(parameter_specs(self.model, config, world_size))
        return Traced(
            scheduled.step, specs, config, world_size, pipeline, scheduled.history, self.splits.captured, self
        )

    def outline(self, config: Config, world_size: int) -> Unscheduled:
        check_world_size(world_size)
        unmoved = dataclasses.replace(config, policy="none")
        pipeline = passes.default_pipeline(unmoved, size=world_size, gpu=self.gpu)
        with collector_paused():
            return outline_step(
                self.splits.of(pipeline),
                pipeline,
                parameter_specs(self.model, config, world_size),
                self.splits.verifier,
            )


def check_world_size(world_size: int) -> None:
    """Refuse less than one rank.

    Raises:
        PlanError: a world size that has no meaning.
    """
    if world_size < 1:
        raise PlanError(f"world size is {world_size}; it must be at least 1")


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    world_size: int,
    stage: int = 3,
    precision: str | None = None,
    policy: str = "prefetch",
    training: bool = True,
    **options: Any,
) -> Traced:
    """Capture a model on fake CPU tensors and schedule it for one of ``world_size`` ranks.

    Time and memory are linear in the nodes of the graph: 8B parameters in 32 layers or 70B in 80 fit a laptop, if the
    model itself was built on ``meta`` (or under a ``FakeTensorMode``), where it takes no memory.

    Args:
        model: a plain module on any device.
        example_inputs: what one rank's micro-batch looks like: a tuple of positional arguments, a mapping of keyword arguments,
            or one tensor. Only shapes, dtypes and Python values count, so tensors may be on ``meta``.
        world_size: ranks on the axis.
        stage: ZeRO stage, 0 to 3.
        precision: as in ``zcompile.compile``.
        policy: schedule passes, as in ``zcompile.compile``.
        training: whether gradients are recorded.
        options: further fields of ``Config``, such as ``reduce_dtype`` or ``ignore``.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: a world size that has no meaning.
    """
    config = Config(stage=stage, precision=precision, policy=policy, **options)
    return trace_with(model, example_inputs, config, world_size, training=training)


def trace_with(
    model: nn.Module,
    example_inputs: Any,
    config: Config,
    world_size: int,
    *,
    training: bool = True,
    for_gpu: bool = False,
) -> Traced:
    """``trace`` with the options in one value; ``for_gpu`` runs the passes as on a GPU, for which the CPU tensors stand."""
    check_world_size(world_size)
    args, kwargs = as_call(example_inputs)
    tensors, structure, _ = flatten((args, kwargs))
    call = Call(
        [_on_cpu(t) for t in tensors],
        structure,
        training,
        None,
        config.compute_dtype,
        config.differentiable,
    )
    specs = parameter_specs(model, config, 1)
    named = dict(model.named_parameters(remove_duplicate=False))
    params = {id(named[s.name]): ParamType(s.name, s.shape, compute_dtype(s, config), s.requires_grad) for s in specs}
    with rng_untouched(_CPU), collector_paused():
        captured = capture(model, call, params, _CPU, type(model).__name__.lower(), Store.from_environment())
    source = _Source(model, Splits(captured, Verifier(config.verify)), "cpu" if for_gpu else "cuda")
    return source.schedule(config, world_size)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a mapping is keywords, a tuple or list positions, else one argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same type without memory, on the CPU."""
    with compat.new_fake_mode():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    return fake.requires_grad_(tensor.requires_grad)
