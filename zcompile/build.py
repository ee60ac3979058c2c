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
from zcompile.ir.graph import Grad, Graph, Kept, Region, Step
from zcompile.lower import interpret
from zcompile.lower.finite import Watch, watched
from zcompile.lower.inductor import compile_region
from zcompile.lower.program import lower_program
from zcompile.passes.schedule.hold import inside_window
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Dump, History, Pipeline
from zcompile.program import InWindow, Runnable, StepProgram, TensorType
from zcompile.scheduled import Graphs, Scheduled, schedule
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
    backward = step.backward
    forward_bodies = _bodies(step.forward, backend)
    backward_bodies = {} if backward is None else _bodies(backward, backend)

    @cache
    def local() -> tuple[Scheduled, dict[str, Any]]:
        variant = schedule(captured, _without_reductions(pipeline), verifier, store=store, pure=scheduled.pure)
        return variant, _bodies(_backward(variant.step), backend)

    def local_backward() -> Runnable:
        variant, bodies = local()
        return _runnable(_backward(variant.step), bodies, watch)

    def local_in_window() -> Runnable:
        variant, bodies = local()
        return _runnable(_backward(_in_window(variant, pipeline, verifier, dump)), bodies, watch)

    def in_window() -> InWindow | None:
        if backward is None or inside_window(pipeline) is None:
            return None
        middle = _in_window(scheduled, pipeline, verifier, dump)
        takes = {
            origin.name: TensorType(tuple(meta.tensor(node).shape), meta.tensor(node).dtype)
            for node in middle.forward.inputs
            if isinstance(origin := meta.origin(node), Kept)
        }
        if not takes:
            return None
        forward = _runnable(middle.forward, forward_bodies, watch)
        return InWindow(takes, forward, _runnable(_backward(middle), backward_bodies, watch), cache(local_in_window))

    program = StepProgram(
        forward=_runnable(step.forward, forward_bodies, watch),
        backward=None if backward is None else _runnable(backward, backward_bodies, watch),
        local_backward=cache(local_backward),
        in_window=cache(in_window),
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
    """The pipeline whose backward keeps gradients on its rank, for ``no_sync``."""
    return Pipeline(tuple(dataclasses.replace(p, local=True) if isinstance(p, Reduce) else p for p in pipeline.passes))


def _in_window(scheduled: Scheduled, pipeline: Pipeline, verifier: Verifier, dump: Dump | None) -> Step:
    """The graphs for the middle of a window: their regions are those of the scheduled step."""
    hold = inside_window(pipeline)
    assert hold is not None, "the pipeline holds something"
    step = scheduled.step.copy()
    Pipeline((hold,)).run_step(step, verifier, dump, dict(scheduled.facts))
    return step


def _backward(step: Step) -> Graph:
    assert step.backward is not None, "a step without a backward has one way to run"
    return step.backward


def _bodies(graph: Graph, backend: str) -> dict[str, Any]:
    """The regions of a scheduled graph, compiled."""
    return {name: BACKENDS[backend](region) for name, region in graph.regions.items()}


def _runnable(graph: Graph, bodies: dict[str, Any], watch: Watch | None) -> Runnable:
    """The program of a scheduled graph's top level, with what its regions were compiled to."""
    program = lower_program(graph)
    if watch is not None:
        program, bodies = watched(graph, program, bodies, watch)
    return Runnable(program, bodies, collective_sequence(graph))
