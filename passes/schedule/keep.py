"""Hands gathered parameters from forward to backward, those that backward needs first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile.analysis.schedule import Collective, Full, gathered, in_order_of_need, never_release
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import meta
from zcompile.ir.graph import Kept, Step
from zcompile.ir.handover import hand_on
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Keep(StepPass):
    """Keep the units that backward needs first, which forward used last, instead of gathering them again at once.

    Before and after, forward and then backward::

        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %w1_full: f32[8, 8] = zc.wait(%b1)
        %y: f32[4, 8] = call last(%a, %w1_full)
        zc.release([%w1_full])
        return output 0 %y, saved 'a' %a
        ...
        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %w1_full: f32[8, 8] = zc.wait(%b1)
        %ga: f32[4, 8] = call first(%t, %w1_full)
        zc.release([%w1_full])

        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %w1_full: f32[8, 8] = zc.wait(%b1)
        %y: f32[4, 8] = call last(%a, %w1_full)
        return output 0 %y, saved 'a' %a, kept 'w1:float32' %w1_full
        ...
        %w1_full_kept: f32[8, 8] = kept 'w1:float32'
        ...
        %ga: f32[4, 8] = call first(%t, %w1_full_kept)
        zc.release([%w1_full_kept])

    Of each unit, what forward and backward both gather in one dtype is kept; backward gathers the rest as before. A unit of
    which forward gathers nothing is not counted. Exact. Saves the time of a gather of the unit's bytes; costs these bytes
    from the unit's last use in forward to its first use in backward: nothing at the peak for the unit that stands at both.

    Attributes:
        units: how many units are kept, in the order in which backward first needs them; 0 keeps none.
        mib: at most so many MiB of full values are kept, and the first unit that does not fit ends the search; None: no limit.
    """

    name: ClassVar[str] = "keep"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED, Fact.OUTLINED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.KEEP_BOUNDED})
    units: int = 1
    mib: float | None = None

    def run(self, target: Step, stats: Stats) -> None:
        if self.units < 0:
            raise PassError(f"number of units to keep is {self.units}; it must not be negative")
        if self.mib is not None and self.mib < 0:
            raise PassError(f"memory for kept units is {self.mib} MiB; it must not be negative")
        if target.backward is None:
            return
        forward = {full.kept: full.node for full in gathered(target.forward)}  # of two, the one nearer to backward
        chosen = self._choose(in_order_of_need(target, target.backward).values(), forward, stats)
        inputs = hand_on(target, {full.kept: forward[full.kept] for full in chosen})
        dropped: dict[Collective, list[fx.Node]] = {}
        for full in chosen:
            assert full.gather is not None
            never_release(forward[full.kept])
            full.node.replace_all_uses_with(inputs[full.kept])
            dropped.setdefault(full.gather, []).append(full.node)
        for gather, results in dropped.items():
            gather.drop(results)
        stats["parameters kept for backward"] += len(chosen)

    def _choose(self, units: Iterable[list[Full]], forward: Collection[Kept], stats: Stats) -> list[Full]:
        """What backward gathers and shall not; what is kept already counts."""
        limit = float("inf") if self.mib is None else self.mib * MIB
        chosen: list[Full] = []
        num_units = num_bytes = 0
        for unit in units:
            both = [full for full in unit if full.kept in forward]
            if not both:
                continue
            num_units += 1
            num_bytes += sum(meta.num_bytes(meta.value(full.node)) for full in both)
            if num_units > self.units or num_bytes > limit:
                break
            new = [full for full in both if full.gather is not None]
            stats["units kept"] += bool(new)
            chosen.extend(new)
        return chosen
