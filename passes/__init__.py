"""Every pass by name, and the pipelines built from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zcompile.analysis.units import MIB
from zcompile.config import Config
from zcompile.errors import ConfigError, PipelineError
from zcompile.passes.align import Align
from zcompile.passes.cleanup import Cleanup
from zcompile.passes.memory.chunk_loss import ChunkLoss
from zcompile.passes.memory.offload import Offload
from zcompile.passes.memory.recompute import Recompute
from zcompile.passes.memory.recompute_params import RecomputeParams
from zcompile.passes.precision import Precision
from zcompile.passes.schedule.bucket import Bucket
from zcompile.passes.schedule.hold import Hold
from zcompile.passes.schedule.keep import Keep
from zcompile.passes.schedule.prefetch import Prefetch
from zcompile.passes.zero.outline import Outline
from zcompile.passes.zero.plan_units import PlanUnits
from zcompile.passes.zero.reduce import Reduce
from zcompile.passes.zero.shard import Shard
from zcompile.passes.zero.unshard import Unshard
from zcompile.pipeline import Pass, Pipeline, StepPass

#: every pass that a spec can name, in the order of the default pipeline
PASSES: tuple[type[Pass[Any]], ...] = (
    ChunkLoss,
    Precision,
    Recompute,
    Align,
    RecomputeParams,
    PlanUnits,
    Shard,
    Unshard,
    Reduce,
    Outline,
    Keep,
    Hold,
    Bucket,
    Prefetch,
    Offload,
    Cleanup,
)

KNOWN: dict[str, type[Pass[Any]]] = {p.name: p for p in PASSES}


def parse(spec: str) -> Pipeline:
    """Read a pipeline spec such as ``plan-units,shard{stage=3 size=2},unshard{stage=3}``.

    Raises:
        PipelineError: an unknown pass or option, or text that is not a spec.
    """
    return Pipeline.parse(spec, KNOWN)


def schedule(policy: str, *, window: bool = False) -> tuple[Pass[Any], ...]:
    """The schedule passes of a policy spec, for a declared ``window`` of micro-batches or none.

    ``"none"`` moves nothing. Otherwise the spec lists schedule passes, such as ``"keep{units=2},prefetch{lookahead=2}"``.
    ``keep`` and ``bucket`` run with their defaults where it does not name them, ``keep{units=0}`` and ``bucket{mib=0}`` are
    none. ``keep`` runs first wherever it stands: the others schedule the gathers that it leaves. Behind it, and in a window
    only, ``hold`` lets stay what it keeps; ``hold{units=0 first=0}`` does not.

    Raises:
        PipelineError: an unknown pass, or one that does not schedule.
    """
    if policy == "none":
        return ()
    passes = parse(policy).passes
    for p in passes:
        if not isinstance(p, (Keep, Hold, Bucket, Prefetch)):
            raise PipelineError(
                f"policy '{policy}' names '{p.name}', which is no schedule pass; those are keep, hold, bucket, prefetch, or none"
            )
    keep = tuple(p for p in passes if isinstance(p, Keep)) or (Keep(),)
    hold = (tuple(p for p in passes if isinstance(p, Hold)) or (Hold(),)) if window else ()
    rest = tuple(p for p in passes if not isinstance(p, (Keep, Hold)))
    return (*keep, *hold, *rest) if any(isinstance(p, Bucket) for p in rest) else (*keep, *hold, Bucket(), *rest)


def read_policy(policy: str | StepPass | Sequence[StepPass] | None) -> tuple[str | None, tuple[StepPass, ...]]:
    """A policy as a configuration has it: its spec and, where that names passes of the user's own, the passes themselves.

    Raises:
        ConfigError: not a policy; or ``"auto"``, which is not one either.
    """
    if policy == "auto":
        raise ConfigError(
            "policy is 'auto'; pass memory_budget='80GiB', or 0.9 of a GPU, and leave policy out: then it is searched for. "
            "python -m zcompile policies --policies auto prints what is best on any number of ranks"
        )
    if policy is None or isinstance(policy, str):
        return policy, ()
    given: tuple[Any, ...] = tuple(policy) if isinstance(policy, Sequence) else (policy,)
    if not given or not all(isinstance(p, StepPass) for p in given):
        raise ConfigError(
            f"policy is {policy!r}; pass a spec such as 'keep{{units=2}},prefetch', a StepPass, or a list of them"
        )
    spec = ",".join(map(str, given))
    return spec, () if all(type(p) in (Keep, Hold, Bucket, Prefetch) for p in given) else given


def chunk_loss(config: Config, gpu: str) -> tuple[ChunkLoss, ...]:
    """The pass that computes losses in pieces, as ``loss_chunk`` says; with a size it takes any loss that is larger."""
    if config.loss_chunk == "none":
        return ()
    if config.loss_chunk is None:
        return (ChunkLoss(device=gpu),)
    size = config.loss_chunk_bytes
    return (ChunkLoss(),) if size is None else (ChunkLoss(mib=size / MIB, columns=0, drop=True, always=True),)


def default_pipeline(config: Config, *, size: int, axis: str = "dp", gpu: str = "cuda") -> Pipeline:
    """The passes that ``compile`` runs, top to bottom.

    Args:
        config: stage, policy, dtypes and patterns.
        size: ranks on the axis; 1 inserts nothing distributed.
        axis: name of the mesh axis.
        gpu: the type of device that the graph has where a GPU is to compute: ``cpu`` in a plan for one.
    """
    recompute = () if config.recompute_mode is None else (Recompute(mode=config.recompute_mode),)
    moved = config.offloading.activations
    offload = () if moved is None else (Offload(mib=moved.mib, lookahead=moved.lookahead),)
    precision = () if config.compute_spec is None else (Precision(dtype=config.compute_spec),)
    return Pipeline(
        (
            *chunk_loss(config, gpu),
            *precision,
            *recompute,
            Align(device=gpu),
            RecomputeParams(),
            PlanUnits(),
            Shard(stage=config.stage, size=size, axis=axis, ignore="|".join(config.ignore)),
            Unshard(stage=config.stage),
            Reduce(stage=config.stage, dtype=config.reduce_spec),
            Outline(),
            *(config.own_policy or schedule(config.policy, window=config.gradient_accumulation_steps > 1)),
            *offload,
            Cleanup(),
        )
    )
