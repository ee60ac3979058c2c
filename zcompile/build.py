"""Builds what runs: a captured joint graph goes through its pipeline, is split, verified and lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from zcompile.capture.joint import Captured
from zcompile.capture.split import split
from zcompile.errors import ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Grad, Graph, Region, Step, Tangent
from zcompile.lower import interpret
from zcompile.lower.finite import Watch, watched
from zcompile.lower.inductor import compile_region
from zcompile.lower.program import lower_program
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Dump, Facts, History, Pipeline
from zcompile.program import Runnable, StepProgram
from zcompile.verify.ranks import collective_sequence
from zcompile.verify.verifier import Verifier

#: how a region becomes something that runs, by the name of the backend
BACKENDS: dict[str, Callable[[Region], Any]] = {
    "eager": lambda region: interpret.build(region.fx),
    "inductor": compile_region,
}


@dataclass(frozen=True)
class Graphs:
    """The graphs of a captured step: ``joint`` before the split, ``forward`` and ``backward`` as scheduled."""

    joint: Graph
    forward: Graph
    backward: Graph | None

    def __str__(self) -> str:
        return "\n".join(str(g) for g in (self.joint, self.forward, self.backward) if g is not None)


@dataclass(frozen=True)
class Built:
    """One captured step, ready to run."""

    captured: Captured
    graphs: Graphs
    history: History
    program: StepProgram


def build(
    captured: Captured,
    pipeline: Pipeline,
    verifier: Verifier,
    backend: str,
    *,
    label: str,
    dump: Dump | None = None,
    watch: Watch | None = None,
) -> Built:
    """Run the pipeline on a capture and lower the result.

    Args:
        captured: the joint graph and what is known about its outputs.
        pipeline: checked for order here.
        verifier: runs after every pass.
        backend: ``"eager"`` or ``"inductor"``.
        label: how the step is called in errors.
        dump: where to write the graphs after each pass.
        watch: check that what regions compute is finite, and how to speak of it; None: they run unwatched.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    pipeline.check()
    facts: Facts = {}
    joint = captured.graph.copy()
    if dump is not None:
        dump.write("captured", str(joint))
    joint_history = pipeline.run_joint(joint, verifier, dump, facts)
    step = split(joint, captured.fake_mode)
    pure = step.copy()
    step_history = pipeline.run_step(step, verifier, dump, dict(facts))
    backward = step.backward
    program = StepProgram(
        forward=_lower(step.forward, backend, watch),
        backward=None if backward is None else _lower(backward, backend, watch),
        local_backward=cache(lambda: _lower(_local_variant(pure, pipeline, verifier, facts), backend, watch)),
        label=label,
        num_outputs=captured.num_outputs,
        tangents=_tangents(captured.graph),
        detached={i: captured.output_names[i] for i in captured.detached},
        trainable=()
        if backward is None
        else tuple(role.name for _, role in backward.outputs if isinstance(role, Grad)),
    )
    graphs = Graphs(joint, step.forward, backward)
    return Built(captured, graphs, History(joint_history.entries + step_history.entries), program)


def _local_variant(pure: Step, pipeline: Pipeline, verifier: Verifier, facts: Facts) -> Graph:
    """The backward without reductions, for ``no_sync``."""
    passes = tuple(dataclasses.replace(p, local=True) if isinstance(p, Reduce) else p for p in pipeline.passes)
    step = pure.copy()
    Pipeline(passes).run_step(step, verifier, None, dict(facts))
    assert step.backward is not None, "a step without a backward has no local one"
    return step.backward


def _lower(graph: Graph, backend: str, watch: Watch | None) -> Runnable:
    """Compile the regions of a scheduled graph, and its top level to a program."""
    bodies = {name: BACKENDS[backend](region) for name, region in graph.regions.items()}
    program = lower_program(graph)
    if watch is not None:
        program, bodies = watched(graph, program, bodies, watch)
    return Runnable(program, bodies, collective_sequence(graph))


def _tangents(joint: Graph) -> dict[int, tuple[int, ...]]:
    """The outputs that have a tangent, with its strides."""
    origins = [(node, meta.origin(node)) for node in joint.inputs]
    return {origin.index: meta.tensor(node).stride() for node, origin in origins if isinstance(origin, Tangent)}
