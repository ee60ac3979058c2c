"""Verifies graphs: the invariants, the capture's interface and every fact that passes have established."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zcompile.errors import ConfigError
from zcompile.ir.graph import Direction, Graph, Step
from zcompile.verify import parameters, schedule
from zcompile.verify.facts import Fact
from zcompile.verify.gradients import check_grads_reduced
from zcompile.verify.inference import Inference
from zcompile.verify.interface import Interface
from zcompile.verify.invariants import check_invariants
from zcompile.verify.subject import Subject

__all__ = ["Facts", "Interface", "Verifier"]

#: what is established, each fact with the options of the pass that established it
Facts = Mapping[Fact, Mapping[str, Any]]

_LEVELS = ("full", "fast", "off")


class Verifier:
    """Checks graphs after every pass. Keep one for a whole pipeline: it remembers the types that operators give.

    Linear in the number of nodes. Operators' fake kernels run once for each distinct call, so that equal layers cost one.

    Args:
        level: ``"full"`` checks everything; ``"fast"`` takes recorded types as they are; ``"off"`` checks nothing.
    """

    def __init__(self, level: str = "full") -> None:
        if level not in _LEVELS:
            raise ConfigError(f"verify is '{level}'; it must be one of {', '.join(_LEVELS)}")
        self.level = level
        self._inference = Inference()

    def verify(self, target: Step | Graph, facts: Facts, interface: Interface | None = None) -> None:
        """Verify a step or a joint graph.

        Args:
            target: what to verify; not changed.
            facts: what is established.
            interface: the interface of the capture, which ``target`` must have kept.

        Raises:
            VerifyError: the first violation: what is wrong, the node, the user's source line and the nodes around it.
        """
        if self.level == "off":
            return
        subjects = check_invariants(target, self._inference, types=self.level == "full")
        _check_facts(subjects, facts)
        if interface is not None:
            interface.check(subjects)

    def verify_joint(self, graph: Graph, facts: Facts, interface: Interface | None = None) -> None:
        """Verify the joint graph; see ``verify``."""
        self.verify(graph, facts, interface)

    def verify_step(self, step: Step, facts: Facts, interface: Interface | None = None) -> None:
        """Verify a step; see ``verify``."""
        self.verify(step, facts, interface)


def _check_facts(subjects: list[Subject], facts: Facts) -> None:
    axes = _shard_axes(subjects)
    needed = parameters.needed_in_backward(subjects)
    for subject in subjects:
        if Fact.UNITS_PLANNED in facts and Fact.OUTLINED not in facts:
            schedule.check_units_planned(subject)
        if Fact.OUTLINED in facts:
            schedule.check_outlined(subject)
        if Fact.PARAMS_SHARDED in facts:
            parameters.check_params_sharded(subject, facts[Fact.PARAMS_SHARDED])
        if Fact.PARAMS_GATHERED in facts:
            keep = facts.get(Fact.KEEP_BOUNDED)
            parameters.check_params_gathered(subject, facts[Fact.PARAMS_GATHERED], keep, needed)
        if Fact.GRADS_REDUCED in facts and subject.graph.direction is not Direction.FORWARD:
            check_grads_reduced(subject, facts[Fact.GRADS_REDUCED], axes)
        if Fact.BUCKETED in facts:
            schedule.check_bucketed(subject, facts[Fact.BUCKETED])
        if Fact.PREFETCH_BOUNDED in facts:
            schedule.check_prefetch_bounded(subject, facts[Fact.PREFETCH_BOUNDED])
        if Fact.OFFLOAD_BOUNDED in facts:
            schedule.check_offload_bounded(subject, facts[Fact.OFFLOAD_BOUNDED])
    if Fact.RECOMPUTE_SAFE in facts:
        schedule.check_recompute_safe(subjects)


def _shard_axes(subjects: list[Subject]) -> dict[str, str]:
    """The axis that each parameter is gathered over, by name."""
    axes: dict[str, str] = {}
    for subject in subjects:
        for gather in subject.gathers:
            for result in gather.results:
                param = subject.gathered[result]
                if param is not None:
                    axes[param.name] = gather.axis
    return axes
