"""Keeps gathered parameters over an accumulation window, in which nothing writes to their shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import Collective, gathered, in_order_of_need, never_release
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Kept, Step
from zcompile.ir.handover import hand_on, take
from zcompile.pipeline import Pipeline, Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Hold(StepPass):
    """Let units stay gathered over a window of micro-batches: what forward hands on to backward, and what it needs first.

    A window runs four graphs: forward, backward inside, forward inside, backward inside, ..., forward inside, backward. The first
    gathers, the last releases. Both come from this pass as it stands in a pipeline: of each unit of which forward hands something
    on, it hands on as well what backward does not read (biases); where backward gathers nothing, also units of which it reads
    nothing (embeddings). Backward gives these back at its start. With ``inside``, on the scheduled step, the graphs for the middle
    follow from these two. What forward hands on goes round::

        %b0: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b0)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        return output 0 %y, saved 'x' %x, kept 'w0:float32' %w0_full
        ...
        %w0_full_kept: f32[8, 8] = kept 'w0:float32'
        %g0: f32[8, 8] = call layer_backward(%t, %x, %w0_full_kept)
        zc.release([%w0_full_kept])
        return grad 'w0' %g0

    becomes::

        %w0_full_held: f32[8, 8] = kept 'w0:float32'
        ...
        %y: f32[4, 8] = call layer(%x, %w0_full_held)
        return output 0 %y, saved 'x' %x, kept 'w0:float32' %w0_full_held
        ...
        %w0_full_kept: f32[8, 8] = kept 'w0:float32'
        %g0: f32[8, 8] = call layer_backward(%t, %x, %w0_full_kept)
        return grad 'w0' %g0, kept 'w0:float32' %w0_full_kept

    and what backward gathers last, which the next forward needs first, is released there instead.

    Exact: no region changes. Saves a gather of the units' bytes in every micro-batch but the first; costs these bytes from their
    last use in backward to their first in forward, when no activations are there: next to nothing at the peak.

    Attributes:
        units: how many units that forward hands on go round, in the order in which it needs them; None: all.
        first: how many units that backward gathers it leaves to the next forward, in the order in which that needs them.
        inside: make the graphs for the middle of a window.
    """

    name: ClassVar[str] = "hold"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED, Fact.OUTLINED})
    units: int | None = None
    first: int = 1
    inside: bool = False

    def run(self, target: Step, stats: Stats) -> None:
        if self.units is not None and self.units < 0:
            raise PassError(f"number of units to hold is {self.units}; it must not be negative")
        if self.first < 0:
            raise PassError(f"number of first units to hold is {self.first}; it must not be negative")
        backward = target.backward
        if backward is None:
            return
        needed = in_order_of_need(target, target.forward)
        order = {unit: [full.kept for full in values] for unit, values in needed.items()}
        kept = _kept_units(target, backward, order)[: self.units]
        _hand_on_rest(target, backward, kept, stats)
        if self.inside:
            again = {value.kept for value in gathered(backward)}
            first = [unit for unit in order if any(value in again for value in order[unit])][: self.first]
            _hand_round(target.forward, backward, kept, first, stats)


def inside_window(pipeline: Pipeline) -> Hold | None:
    """The pass that makes the graphs for the middle of a window from a pipeline's scheduled step; None: nothing is held."""
    return next((replace(p, inside=True) for p in pipeline.passes if isinstance(p, Hold)), None)


def _kept_units(step: Step, backward: Graph, order: dict[str, list[Kept]]) -> list[str]:
    """The units of which forward hands something on; where backward gathers nothing, all."""
    kept = {role for _, role in step.forward.outputs if isinstance(role, Kept)}
    return [unit for unit in order if not any(gathered(backward)) or not kept.isdisjoint(order[unit])]


def _hand_on_rest(step: Step, backward: Graph, units: Collection[str], stats: Stats) -> None:
    """Hand on what else forward gathers of these units; backward gives it back before anything else."""
    kept = {role for _, role in step.forward.outputs if isinstance(role, Kept)}
    known = kept | {value.kept for value in gathered(backward)}
    rest = {v.kept: v.node for v in gathered(step.forward) if v.unit in units and v.kept not in known}
    if not rest:
        return
    for node in rest.values():
        never_release(node)
    first = next(iter(backward.body), backward.output)
    inputs = hand_on(step, rest)
    with backward.fx.inserting_before(first):
        edit.call(backward.fx, ops.release, (list(inputs.values()),), name="release")
    stats["parameters handed on beside"] += len(rest)


def _hand_round(forward: Graph, backward: Graph, units: Collection[str], first: Collection[str], stats: Stats) -> None:
    """Forward takes what it would gather, and backward hands it on instead of giving it back.

    Args:
        forward: hands on to ``backward`` what it keeps of ``units``, and gives back what it takes of the ``first``.
        backward: gathers these again.
        units: that are kept.
        first: that are not.
        stats: counts.
    """
    kept = {role for _, role in forward.outputs if isinstance(role, Kept)}
    again = {value.kept: value.node for value in gathered(backward)}
    times = Counter(value.kept for value in gathered(forward))
    found = [
        value
        for value in gathered(forward)
        if (value.unit in units and value.kept in kept)
        or (value.unit in first and value.kept in again and times[value.kept] == 1)
    ]
    inputs = take(forward, {value.kept: value.node for value in found}, "held")
    dropped: dict[Collective, list[fx.Node]] = {}
    for value in found:
        assert value.gather is not None
        value.node.replace_all_uses_with(inputs[value.kept])
        if value.kept in kept:  # of two, the first was released
            never_release(inputs[value.kept])
        dropped.setdefault(value.gather, []).append(value.node)
    for gather, results in dropped.items():
        gather.drop(results)
    there = {origin: node for node in backward.inputs if isinstance(origin := meta.origin(node), Kept)}
    held = [(there.get(value) or again[value], value) for value in inputs]
    for node, _ in held:
        never_release(node)
    backward.set_outputs([*backward.outputs, *held])
    stats["parameters held"] += len(held)
    stats["gathers left out"] += len(dropped)
