"""From a capture to a scheduled step: joint passes, the split, step passes. Compiling and planning share it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

from zcompile.capture.joint import Captured
from zcompile.capture.split import split
from zcompile.ir import pickled
from zcompile.ir.graph import Graph, Step
from zcompile.pipeline import Dump, Entry, Facts, History, Pipeline, Snapshots
from zcompile.store import Store
from zcompile.verify.verifier import Verifier


@dataclass(frozen=True)
class Graphs:
    """The graphs of a captured step: ``joint`` before the split, ``forward`` and ``backward`` as scheduled."""

    forward: Graph
    backward: Graph | None
    load_joint: Callable[[], Graph]

    @property
    def joint(self) -> Graph:
        """The graph before the split."""
        return self.load_joint()

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
        pure: gives the step before anything distributed was in it.
    """

    step: Step
    facts: Facts
    history: History
    pure: Callable[[], PureStep]


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
    return Scheduled(step, facts, History(pure.history.entries + history.entries), lambda: pure)


def schedule(
    captured: Captured,
    pipeline: Pipeline,
    verifier: Verifier,
    *,
    store: Store | None = None,
    dump: Dump | None = None,
    pure: Callable[[], PureStep] | None = None,
) -> Scheduled:
    """Run a whole pipeline on a capture, or find what an earlier process made of an equal one.

    What is found was verified as strictly when it was made. What it does not need to run, the graphs before each pass, is made
    again when asked for.

    Args:
        captured: the joint graph, if it has a key also in other processes.
        pipeline: checked for order.
        verifier: runs after every pass.
        store: what earlier processes left.
        dump: where to write the graph after each pass; they all run then.
        pure: gives the split that the joint passes come to, where it is known.
    """
    pipeline.check()
    key = _key(captured, pipeline, verifier)
    found = pickled.find(store, key, captured.fake_mode) if dump is None else None
    if found is None:
        pure_step = split_step(captured, pipeline, verifier, dump) if pure is None else pure()
        scheduled = schedule_step(pure_step, pipeline, verifier, dump)
        counts = [(entry.spec, entry.name, entry.stats) for entry in scheduled.history]
        pickled.keep(store, key, lambda: (scheduled.step, scheduled.facts, counts))
        return scheduled
    unchecked = Verifier("off")
    pure = pure or cache(lambda: split_step(captured, pipeline, unchecked))
    again = cache(lambda: schedule_step(pure(), pipeline, unchecked).history)
    step, facts, counts = found
    entries = [Entry(spec, name, stats, partial(_graphs_of, again, i)) for i, (spec, name, stats) in enumerate(counts)]
    return Scheduled(step, facts, History(entries), pure)


def _graphs_of(again: Callable[[], History], index: int) -> Snapshots:
    return again()[index].load()


def _key(captured: Captured, pipeline: Pipeline, verifier: Verifier) -> str:
    """What stands for a step in other processes; empty where nothing does, as with passes that are not zcompile's."""
    options = [value for p in pipeline.passes for value in p.options().values()]
    is_told = all(type(p).__module__.startswith("zcompile.") for p in pipeline.passes)
    if not captured.key or not is_told or not all(type(o) in (int, float, bool, str, type(None)) for o in options):
        return ""
    specs = [f"{p.name} {p.options()!r}" for p in pipeline.passes]
    return hashlib.sha256("\n".join((captured.key, verifier.level, *specs)).encode()).hexdigest()
