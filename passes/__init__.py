"""Every pass by name, and the pipelines built from them."""

from __future__ import annotations

from typing import Any

from zcompile.passes.cleanup import Cleanup
from zcompile.passes.memory.recompute_params import RecomputeParams
from zcompile.passes.schedule.bucket import Bucket
from zcompile.passes.schedule.prefetch import Prefetch
from zcompile.passes.zero.outline import Outline
from zcompile.passes.zero.plan_units import PlanUnits
from zcompile.passes.zero.reduce import Reduce
from zcompile.passes.zero.shard import Shard
from zcompile.passes.zero.unshard import Unshard
from zcompile.pipeline import Pass, Pipeline

#: every pass that a spec can name, in the order of the default pipeline
PASSES: tuple[type[Pass[Any]], ...] = (RecomputeParams, PlanUnits, Shard, Unshard, Reduce, Outline, Bucket, Prefetch, Cleanup)

KNOWN: dict[str, type[Pass[Any]]] = {p.name: p for p in PASSES}


def parse(spec: str) -> Pipeline:
    """Read a pipeline spec such as ``plan-units,shard{stage=3 size=2},unshard{stage=3}``.

    Raises:
        PipelineError: an unknown pass or option, or text that is not a spec.
    """
    return Pipeline.parse(spec, KNOWN)
