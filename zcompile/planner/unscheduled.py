"""A step before its policy: outlined once for a number of ranks, then scheduled by many policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zcompile.errors import ZCompileError
from zcompile.ir.graph import Step
from zcompile.passes.cleanup import Cleanup
from zcompile.pipeline import Facts, Pass, Pipeline, Stats
from zcompile.placement import ParamSpec
from zcompile.scheduled import PureStep
from zcompile.verify.facts import Fact
from zcompile.verify.verifier import Interface, Verifier


@dataclass(frozen=True)
class Unscheduled:
    """What policies start from.

    Attributes:
        step: regions and collectives, each collective where it is needed; never changed.
        facts: what holds of it.
        specs: how each parameter is divided.
        world_size: ranks.
        verifier: checks what policies do.
    """

    step: Step
    facts: Mapping[Fact, Mapping[str, Any]]
    specs: tuple[ParamSpec, ...]
    world_size: int
    verifier: Verifier

    def schedule(self, policy: Sequence[Pass[Any]]) -> Step:
        """The step as a policy schedules it, verified.

        Raises:
            PipelineError, PassError: a policy that cannot run here.
            VerifyError: a policy that breaks the graph.
        """
        pipeline = Pipeline((*policy, Cleanup()))
        pipeline.check(list(self.facts))
        step, facts = self.step.copy(), dict(self.facts)
        try:
            apply(pipeline.passes, step, facts)
            self.verifier.verify(step, facts, self.interface)
        except ZCompileError:
            pipeline.run_step(self.step.copy(), self.verifier, None, dict(self.facts))  # says which pass it was
            raise
        return step

    def candidate(self, policy: Sequence[Pass[Any]]) -> Step:
        """The same, not verified: for a search, whose result is."""
        step = self.step.copy()
        apply(policy, step, dict(self.facts))
        return step

    @cached_property
    def interface(self) -> Interface:
        """What a policy must keep."""
        return Interface.of(self.step)


def outline_step(pure: PureStep, pipeline: Pipeline, specs: Sequence[ParamSpec], verifier: Verifier) -> Unscheduled:
    """Run the step passes of a pipeline without a policy, and verify their result once."""
    pipeline.check()
    step, facts = pure.step.copy(), dict(pure.facts)
    apply(tuple(p for p in pipeline.step if not isinstance(p, Cleanup)), step, facts)
    verifier.verify(step, facts, Interface.of(pure.step))
    return Unscheduled(step, facts, tuple(specs), specs[0].world_size if specs else 1, verifier)


def apply(passes: Sequence[Pass[Any]], step: Step, facts: Facts) -> None:
    """Run passes on a step in place, without a history; ``facts`` holds what is established, and is updated."""
    for p in passes:
        p.run(step, Stats())
        for fact in p.breaks:
            facts.pop(fact, None)
        facts.update({fact: p.options() for fact in p.establishes})
