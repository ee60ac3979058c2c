"""Builds what runs: a captured joint graph goes through its pipeline, is split, verified and lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from zcompile.capture.joint import Captured
from zcompile.errors import ConfigError
from zcompile.ir.graph import Grad, Graph, Region
from zcompile.lower import interpret
from zcompile.lower.finite import Watch, watched
from zcompile.lower.inductor import compile_region
from zcompile.lower.program import lower_program
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Dump, History, Pipeline
from zcompile.program import Runnable, StepProgram
from zcompile.scheduled import Graphs, schedule
from zcompile.store import Store
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
    captured: Captured,
    pipeline: Pipeline,
    verifier: Verifier,
    backend: str,
    *,
    label: str,
    dump: Dump | None = None,
    watch: Watch | None = None,
    store: Store | None = None,
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
        store: what earlier processes left.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    scheduled = schedule(captured, pipeline, verifier, store=store, dump=dump)
    step = scheduled.step

    def local_backward() -> Runnable:
        local = schedule(captured, _without_reductions(pipeline), verifier, store=store, pure=scheduled.pure)
        assert local.step.backward is not None, "a step without a backward has no local one"
        return _lower(local.step.backward, backend, watch)

    backward = step.backward
    program = StepProgram(
        forward=_lower(step.forward, backend, watch),
        backward=None if backward is None else _lower(backward, backend, watch),
        local_backward=cache(local_backward),
        label=label,
        num_outputs=captured.num_outputs,
        tangents=captured.joint.tangents,
        detached={i: captured.output_names[i] for i in captured.detached},
        trainable=()
        if backward is None
        else tuple(role.name for _, role in backward.outputs if isinstance(role, Grad)),
    )
    graphs = Graphs(step.forward, backward, lambda: scheduled.pure().joint)
    return Built(captured, graphs, scheduled.history, program)


def _without_reductions(pipeline: Pipeline) -> Pipeline:
    """The pipeline of the backward for ``no_sync``."""
    return Pipeline(tuple(dataclasses.replace(p, local=True) if isinstance(p, Reduce) else p for p in pipeline.passes))


def _lower(graph: Graph, backend: str, watch: Watch | None) -> Runnable:
    """Compile the regions of a scheduled graph, and its top level to a program."""
    bodies = {name: BACKENDS[backend](region) for name, region in graph.regions.items()}
    program = lower_program(graph)
    if watch is not None:
        program, bodies = watched(graph, program, bodies, watch)
    return Runnable(program, bodies, collective_sequence(graph))
