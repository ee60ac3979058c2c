"""A step before its policy: outlined once for a number of ranks, then scheduled by many policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        """The step as a policy schedules it, verified after each of its passes.

        Raises:
            PipelineError, PassError: a policy that cannot run here.
            VerifyError: a policy that breaks the graph.
        """
        pipeline = Pipeline((*policy, Cleanup()))
        pipeline.check(list(self.facts))
        step = self.step.copy()
        pipeline.run_step(step, self.verifier, None, dict(self.facts))
        return step

    def candidate(self, policy: Sequence[Pass[Any]]) -> Step:
        """The same, not verified: for a search, whose result is."""
        step = self.step.copy()
        for p in policy:
            p.run(step, Stats())
        return step


def outline_step(pure: PureStep, pipeline: Pipeline, specs: Sequence[ParamSpec], verifier: Verifier) -> Unscheduled:
    """Run the step passes of a pipeline without a policy, and verify their result once."""
    passes = tuple(p for p in pipeline.step if not isinstance(p, Cleanup))
    step, facts = pure.step.copy(), Facts(pure.facts)
    Pipeline(passes).run_step(step, Verifier("off"), None, facts)
    verifier.verify(step, facts, Interface.of(pure.step))
    world_size = specs[0].world_size if specs else 1
    return Unscheduled(step, facts, tuple(specs), world_size, verifier)
