"""Keeps gathered parameters over an accumulation window, in which nothing writes to their shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import Collective, first_uses, gathered, never_release
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Kept, Step
from zcompile.ir.handover import hand_on, kept_parameter, take
from zcompile.pipeline import Pipeline, Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Hold(StepPass):
    """Let whole units that forward hands on to backward stay gathered until the window of micro-batches ends.

    A window of four runs four graphs: forward, backward inside, forward inside, backward inside, ..., forward inside, backward.
    The first forward gathers, the last backward releases. Both come from this pass as it stands in a pipeline: of each unit of
    which forward hands something on, it hands on as well what backward does not read (biases); where backward gathers nothing, also
    units of which it reads nothing (embeddings). Backward gives these back at its start. With ``inside``, on the scheduled step,
    the graphs for the middle follow from these two. Before and after, forward and then backward::

        %b0: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b0)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        return output 0 %y, saved 'x' %x, kept 'w0:float32' %w0_full
        ...
        %w0_full_kept: f32[8, 8] = kept 'w0:float32'
        %g0: f32[8, 8] = call layer_backward(%t, %x, %w0_full_kept)
        zc.release([%w0_full_kept])
        return grad 'w0' %g0

        %w0_full_held: f32[8, 8] = kept 'w0:float32'
        ...
        %y: f32[4, 8] = call layer(%x, %w0_full_held)
        return output 0 %y, saved 'x' %x, kept 'w0:float32' %w0_full_held
        ...
        %w0_full_kept: f32[8, 8] = kept 'w0:float32'
        %g0: f32[8, 8] = call layer_backward(%t, %x, %w0_full_kept)
        return grad 'w0' %g0, kept 'w0:float32' %w0_full_kept

    Exact: no region changes. Saves a gather of the units' bytes in every micro-batch but the first; costs these bytes from their
    last use in backward to their first in forward.

    Attributes:
        units: how many units are held, in the order in which forward first needs them; None: all that may be.
        inside: make the graphs for the middle of a window.
    """

    name: ClassVar[str] = "hold"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED, Fact.OUTLINED})
    units: int | None = None
    inside: bool = False

    def run(self, target: Step, stats: Stats) -> None:
        if self.units is not None and self.units < 0:
            raise PassError(f"number of units to hold is {self.units}; it must not be negative")
        if target.backward is None:
            return
        units = _kept_units(target)[: self.units]
        _hand_on_rest(target, target.backward, units, stats)
        if self.inside:
            _hand_round(target.forward, target.backward, units, stats)


def inside_window(pipeline: Pipeline) -> Hold | None:
    """The pass that makes the graphs for the middle of a window from a pipeline's scheduled step; None: nothing is held."""
    return next((replace(p, inside=True) for p in pipeline.passes if isinstance(p, Hold)), None)


def _kept_units(step: Step) -> list[str]:
    """The units that may stay, in the order in which forward first reads them.

    Those of which forward hands something on; where backward gathers nothing, all.
    """
    unit_of = {param.name: param.unit or param.name for graph in step.graphs for _, param in graph.params()}
    kept = {unit_of[kept_parameter(role)] for _, role in step.forward.outputs if isinstance(role, Kept)}
    full = {value.node: value.unit for value in gathered(step.forward)}
    if step.backward is not None and not any(gathered(step.backward)):
        kept.update(full.values())
    for node in step.forward.inputs:
        origin = meta.origin(node)
        if isinstance(origin, Kept):
            full[node] = unit_of[kept_parameter(origin)]
    return list(dict.fromkeys(full[node] for node in first_uses(step.forward) if node in full and full[node] in kept))


def _hand_on_rest(step: Step, backward: Graph, units: list[str], stats: Stats) -> None:
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


def _hand_round(forward: Graph, backward: Graph, units: list[str], stats: Stats) -> None:
    """Forward takes what it would gather and hand on, and backward hands it on instead of giving it back."""
    handed = {role for _, role in forward.outputs if isinstance(role, Kept)}
    found = [value for value in gathered(forward) if value.unit in units and value.kept in handed]
    inputs = take(forward, {value.kept: value.node for value in found}, "held")
    dropped: dict[Collective, list[fx.Node]] = {}
    for value in found:
        assert value.gather is not None
        value.node.replace_all_uses_with(inputs[value.kept])
        dropped.setdefault(value.gather, []).append(value.node)
    for gather, results in dropped.items():
        gather.drop(results)
    for node in inputs.values():
        never_release(node)
    held: list[tuple[fx.Node, Kept]] = []
    for node in backward.inputs:
        origin = meta.origin(node)
        if isinstance(origin, Kept) and origin in inputs:
            never_release(node)
            held.append((node, origin))
    backward.set_outputs([*backward.outputs, *held])
    stats["parameters held"] += len(held)
    stats["gathers left out"] += len(dropped)
