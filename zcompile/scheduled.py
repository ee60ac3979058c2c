"""From a capture to a scheduled step: joint passes, the split, step passes. Compiling and planning share it."""

from __future__ import annotations

from dataclasses import dataclass, field

from zcompile.capture.joint import Captured
from zcompile.capture.split import split
from zcompile.ir.graph import Graph, Step
from zcompile.pipeline import Dump, Facts, History, Pipeline
from zcompile.verify.verifier import Verifier


@dataclass(frozen=True)
class Graphs:
    """The graphs of a captured step: ``joint`` before the split, ``forward`` and ``backward`` as scheduled."""

    joint: Graph
    forward: Graph
    backward: Graph | None

    def __str__(self) -> str:
        return "\n".join(str(g) for g in (self.joint, self.forward, self.backward) if g is not None)


@dataclass(frozen=True)
class PureStep:
    """A step as it comes from the split: nothing distributed in it, the same for every world size, stage and policy.

    Attributes:
        joint: the graph before the split.
        step: forward and backward after it; never changed.
        facts: what the joint passes established.
        history: what they did.
    """

    joint: Graph
    step: Step
    facts: Facts
    history: History


@dataclass(frozen=True)
class Scheduled:
    """A step as it runs.

    Attributes:
        step: forward and backward after all passes.
        facts: what they established.
        history: one entry a pass, those before the split first.
    """

    step: Step
    facts: Facts
    history: History


def split_step(captured: Captured, pipeline: Pipeline, verifier: Verifier, dump: Dump | None = None) -> PureStep:
    """Run the joint passes of a pipeline on a copy of a capture, and split it."""
    pipeline.check()
    facts: Facts = {}
    joint = captured.graph.copy()
    if dump is not None:
        dump.write("captured", str(joint))
    history = pipeline.run_joint(joint, verifier, dump, facts)
    return PureStep(joint, split(joint, captured.fake_mode), facts, history)


@dataclass(frozen=True)
class Splits:
    """What joint passes and the split make of one capture, each combination of passes once.

    Attributes:
        captured: what is split.
        verifier: checks every joint pass.
    """

    captured: Captured
    verifier: Verifier
    _known: dict[str, PureStep] = field(default_factory=dict, repr=False)

    def of(self, pipeline: Pipeline) -> PureStep:
        """The step before anything distributed is in it."""
        joint = ",".join(map(str, pipeline.joint))
        if joint not in self._known:
            self._known[joint] = split_step(self.captured, pipeline, self.verifier)
        return self._known[joint]


def schedule_step(pure: PureStep, pipeline: Pipeline, verifier: Verifier, dump: Dump | None = None) -> Scheduled:
    """Run the step passes of a pipeline on a copy of a pure step."""
    pipeline.check()
    step = pure.step.copy()
    facts = dict(pure.facts)
    history = pipeline.run_step(step, verifier, dump, facts)
    return Scheduled(step, facts, History(pure.history.entries + history.entries))
