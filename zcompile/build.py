"""Builds what runs: a captured joint graph goes through its pipeline, is split, verified and lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zcompile.capture.joint import Captured
from zcompile.capture.split import split
from zcompile.errors import ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Grad, Graph, Region, Step, Tangent
from zcompile.lower import interpret
from zcompile.lower.inductor import compile_region
from zcompile.lower.program import lower_program
from zcompile.passes.zero.reduce import Reduce
from zcompile.pipeline import Dump, Facts, History, Pipeline
from zcompile.program import Call, StepProgram
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
    pipeline.check()
    facts: Facts = {}
    joint = captured.graph.copy()
    if dump is not None:
        dump.write("captured", str(joint))
    joint_history = pipeline.run_joint(joint, verifier, dump, facts)
    step = split(joint, captured.fake_mode)
    pure = step.copy()
    step_history = pipeline.run_step(step, verifier, dump, dict(facts))
    local = _local_variant(pure, pipeline, verifier, facts) if step.backward is not None else None
    program = _program(captured, step, local, backend, label)
    graphs = Graphs(joint, step.forward, step.backward)
    return Built(captured, graphs, History(joint_history.entries + step_history.entries), program)


def _local_variant(pure: Step, pipeline: Pipeline, verifier: Verifier, facts: Facts) -> Graph:
    """The backward without reductions, for ``no_sync``."""
    passes = tuple(dataclasses.replace(p, local=True) if isinstance(p, Reduce) else p for p in pipeline.passes)
    Pipeline(passes).run_step(pure, verifier, None, dict(facts))
    assert pure.backward is not None
    return pure.backward


def _program(captured: Captured, step: Step, local: Graph | None, backend: str, label: str) -> StepProgram:
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    bodies: dict[str, Any] = {}

    def lower(graph: Graph, prefix: str) -> Any:
        for name, region in graph.regions.items():
            bodies[prefix + name] = BACKENDS[backend](region)
        program = lower_program(graph)
        return dataclasses.replace(
            program,
            instructions=tuple(
                dataclasses.replace(i, body=prefix + i.body) if isinstance(i, Call) else i for i in program.instructions
            ),
        )

    backward = step.backward
    return StepProgram(
        forward=lower(step.forward, ""),
        backward=None if backward is None else lower(backward, ""),
        local_backward=None if local is None else lower(local, "local_"),
        bodies=bodies,
        forward_sequence=collective_sequence(step.forward),
        backward_sequence=None if backward is None else collective_sequence(backward),
        local_sequence=None if local is None else collective_sequence(local),
        label=label,
        num_outputs=captured.num_outputs,
        tangents={
            o.index: meta.tensor(n).stride() for n in captured.graph.inputs if isinstance(o := meta.origin(n), Tangent)
        },
        detached={i: captured.output_names[i] for i in captured.detached},
        trainable=()
        if backward is None
        else tuple(role.name for _, role in backward.outputs if isinstance(role, Grad)),
    )
