"""Groups the collectives of neighbouring units to a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import Collective, collectives, is_gather, is_reduction
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Graph, Step
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Bucket(StepPass):
    """Send the collectives of whole neighbouring units as one coalesced call, up to a size.

    Before and after::

        %b0: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b0)
        ...
        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %w1_full: f32[8, 8] = zc.wait(%b1)

        %b0: bucket = zc.all_gather([%w0, %w1], 'dp', 2)
        %w0_full: f32[8, 8], %w1_full: f32[8, 8] = zc.wait(%b0)

    A gather moves to where the first of its units is needed, a reduction to where the last of its gradients is ready. A unit
    larger than the size stays alone, and a unit is never divided. Exact: a bucket is a list of tensors, nothing is packed.

    Attributes:
        mib: largest size of a joined bucket, in MiB of full values; 0 joins nothing.
    """

    name: ClassVar[str] = "bucket"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED, Fact.GRADS_REDUCED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    mib: float = 32

    def run(self, target: Step, stats: Stats) -> None:
        if self.mib < 0:
            raise PassError(f"bucket size is {self.mib} MiB; it must not be negative")
        for graph in target.graphs:
            for group in self._groups(collectives(graph, is_gather)):
                _join_gathers(graph, group, stats)
            for group in self._groups(collectives(graph, is_reduction)):
                _join_reductions(graph, group, stats)

    def _groups(self, found: Sequence[Collective]) -> list[list[Collective]]:
        """Runs of neighbours that may be joined: one operator, axis and dtype, together within the size."""
        groups: list[list[Collective]] = []
        total = 0.0
        for c in found:
            size = _full_bytes(c)
            if groups and _kind(groups[-1][0]) == _kind(c) and total + size <= self.mib * MIB:
                groups[-1].append(c)
                total += size
            else:
                groups.append([c])
                total = size
        return [g for g in groups if len(g) > 1]


def _kind(c: Collective) -> tuple[object, ...]:
    return (c.start.target, c.start.args[1:], meta.tensor(c.sends[0]).dtype)


def _full_bytes(c: Collective) -> int:
    """Bytes of the full side: what a gather makes, what a reduction reads."""
    return max(c.num_bytes, sum(meta.num_bytes(meta.value(s)) for s in c.sends))


def _join_gathers(graph: Graph, group: list[Collective], stats: Stats) -> None:
    first = group[0]
    sends = [s for c in group for s in c.sends]
    for node in [n for c in group[1:] for n in c.casts]:  # a cast reads nothing but shards, so it may come earlier
        first.start.prepend(node)
    with graph.fx.inserting_before(first.start):
        start = edit.call(graph.fx, ops.all_gather, (sends, *first.start.args[1:]), name=first.start.name)
    _replace(graph, group, start, first.wait, stats)


def _join_reductions(graph: Graph, group: list[Collective], stats: Stats) -> None:
    last = group[-1]
    sends = [s for c in group for s in c.sends]
    target: Any = last.start.target
    with graph.fx.inserting_before(last.start):
        start = edit.call(graph.fx, target, (sends, *last.start.args[1:]), name=last.start.name)
    _replace(graph, group, start, last.wait, stats)


def _replace(graph: Graph, group: list[Collective], start: fx.Node, at: fx.Node, stats: Stats) -> None:
    """One wait at ``at`` for the joined collective; the old ones go, and the new ones take the names of those that were there."""
    names = next((c.start.name, c.wait.name) for c in group if c.wait is at)
    with graph.fx.inserting_before(at):
        wait = edit.call(graph.fx, ops.wait, (start,), name=at.name)
        new = edit.unpack(graph.fx, wait, [None] * len(meta.value(wait)))
    offset = 0
    for c in group:
        for old in c.results:
            replacement = new[offset + calls.index(old)]
            old.replace_all_uses_with(replacement)
            graph.fx.erase_node(old)
            replacement.name = old.name
        offset += len(c.sends)
        graph.fx.erase_node(c.wait)
        graph.fx.erase_node(c.start)
    start.name, wait.name = names
    stats["collectives joined"] += len(group)
    stats["buckets"] += 1
