"""Builds what runs: a captured joint graph goes through its pipeline, is split, verified and lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from zcompile.capture.joint import Captured
from zcompile.errors import ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Grad, Graph, Region, Tangent
from zcompile.lower import interpret
from zcompile.lower.inductor import compile_region
from zcompile.lower.program import lower_program
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Dump, History, Pipeline
from zcompile.program import Runnable, StepProgram
from zcompile.scheduled import Graphs, PureStep, schedule_step, split_step
from zcompile.verify.ranks import collective_sequence
from zcompile.verify.verifier import Verifier

#: how a region becomes something that runs, by the name of the backend
BACKENDS: dict[str, Callable[[Region], Any]] = {
    "eager": lambda region: interpret.build(region.fx),
    "inductor": compile_region,
}


@dataclass(frozen=True)
class Built:
    """One captured step, ready to run."""

    captured: Captured
    graphs: Graphs
    history: History
    program: StepProgram


def build(
    captured: Captured, pipeline: Pipeline, verifier: Verifier, backend: str, *, label: str, dump: Dump | None = None
) -> Built:
    """Run the pipeline on a capture and lower the result.

    Args:
        captured: the joint graph and what is known about its outputs.
        pipeline: checked for order here.
        verifier: runs after every pass.
        backend: ``"eager"`` or ``"inductor"``.
        label: how the step is called in errors.
        dump: where to write the graphs after each pass.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    pure = split_step(captured, pipeline, verifier, dump)
    scheduled = schedule_step(pure, pipeline, verifier, dump)
    step = scheduled.step
    backward = step.backward
    program = StepProgram(
        forward=_lower(step.forward, backend),
        backward=None if backward is None else _lower(backward, backend),
        local_backward=cache(lambda: _lower(_local_variant(pure, pipeline, verifier), backend)),
        label=label,
        num_outputs=captured.num_outputs,
        tangents=_tangents(captured.graph),
        detached={i: captured.output_names[i] for i in captured.detached},
        trainable=()
        if backward is None
        else tuple(role.name for _, role in backward.outputs if isinstance(role, Grad)),
    )
    return Built(captured, Graphs(pure.joint, step.forward, backward), scheduled.history, program)


def _local_variant(pure: PureStep, pipeline: Pipeline, verifier: Verifier) -> Graph:
    """The backward without reductions, for ``no_sync``."""
    passes = tuple(dataclasses.replace(p, local=True) if isinstance(p, Reduce) else p for p in pipeline.passes)
    step = schedule_step(pure, Pipeline(passes), verifier).step
    assert step.backward is not None, "a step without a backward has no local one"
    return step.backward


def _lower(graph: Graph, backend: str) -> Runnable:
    """Compile the regions of a scheduled graph, and its top level to a program."""
    bodies = {name: BACKENDS[backend](region) for name, region in graph.regions.items()}
    return Runnable(lower_program(graph), bodies, collective_sequence(graph))


def _tangents(joint: Graph) -> dict[int, tuple[int, ...]]:
    """The outputs that have a tangent, with its strides."""
    origins = [(node, meta.origin(node)) for node in joint.inputs]
    return {origin.index: meta.tensor(node).stride() for node, origin in origins if isinstance(origin, Tangent)}
