"""Starts gathers before they are needed, and lets reductions finish behind later regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import Collective, collectives, first_uses, is_gather, is_reduction
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Graph, Kept, Step
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Prefetch(StepPass):
    """Overlap collectives with the computation of ``lookahead`` buckets.

    Before and after, with a lookahead of one::

        %b0: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b0)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %w1_full: f32[8, 8] = zc.wait(%b1)

        %b0: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b0)
        %b1: bucket = zc.all_gather([%w1], 'dp', 2)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        %w1_full: f32[8, 8] = zc.wait(%b1)

    Kept values count as a bucket that is there already: the first gather of backward starts before the region that reads the
    last kept ones. Exact: no region changes. Costs the bytes of the buckets in flight.

    Attributes:
        lookahead: how many gathers are in flight while a region computes, and how many reductions.
        limit_mib: no gather starts while the gathers in flight and it would pass this many MiB; None: no limit.
    """

    name: ClassVar[str] = "prefetch"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED, Fact.GRADS_REDUCED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.PREFETCH_BOUNDED})
    lookahead: int = 1
    limit_mib: float | None = None

    def run(self, target: Step, stats: Stats) -> None:
        if self.lookahead < 0:
            raise PassError(f"lookahead is {self.lookahead}; it must not be negative")
        if self.lookahead == 0:
            return
        for graph in target.graphs:
            self._start_early(graph, stats)
            self._wait_late(graph, stats)

    def _start_early(self, graph: Graph, stats: Stats) -> None:
        found = _arrivals(graph)
        limit = float("inf") if self.limit_mib is None else self.limit_mib * MIB
        for index, c in enumerate(found):
            if index == 0 or not isinstance(c, Collective):
                continue
            # behind the arrival at position `done`; -1: where the first of all starts, with nothing waited for
            done = max(index - self.lookahead, -1)
            while done < index - 1 and _bytes(found[done + 1 : index + 1]) > limit:
                done += 1
            if _start_after(c, _behind(found[max(done, 0)], waited=done >= 0)):
                stats["gathers moved"] += 1

    def _wait_late(self, graph: Graph, stats: Stats) -> None:
        found = collectives(graph, is_reduction)
        for index, c in enumerate(found):
            later = index + self.lookahead
            before = found[later].start if later < len(found) else graph.output
            last = c.results[-1] if c.results else c.wait
            if last.next is before or (before is graph.output and _only_waits_follow(last)):
                continue
            for node in (c.wait, *c.results):
                before.prepend(node)
            stats["reductions moved"] += 1


#: where full parameters arrive: a gather, or the node that first reads values which forward kept
_Arrival = Collective | fx.Node


def _arrivals(graph: Graph) -> list[_Arrival]:
    """Where full parameters arrive, in order. A region that waits for a gather counts once, whatever it reads beside it."""
    uses = first_uses(graph)
    gathers = {c.wait: c for c in collectives(graph, is_gather)}
    readers = {uses[node] for node in graph.inputs if node in uses and isinstance(meta.origin(node), Kept)}
    readers -= {uses[result] for c in gathers.values() for result in c.results if result in uses}
    found: list[_Arrival] = []
    for node in graph.body:
        if node in gathers:
            found.append(gathers[node])
        elif node in readers:
            found.append(node)
    return found


def _bytes(arrivals: Sequence[_Arrival]) -> int:
    """Bytes of the gathers among them."""
    return sum(c.num_bytes for c in arrivals if isinstance(c, Collective))


def _behind(arrival: _Arrival, *, waited: bool) -> fx.Node:
    """The node behind which gathers may start: ``waited``, when the values are there; else where they begin to come."""
    if isinstance(arrival, Collective):
        return arrival.results[-1] if waited else arrival.start
    node = arrival.prev
    while _belongs_to_start(node):
        node = node.prev
    return node


def _start_after(c: Collective, anchor: fx.Node) -> bool:
    """Move a gather's start behind ``anchor`` and the starts already there; False when it is there already."""
    first = (*c.casts, c.start)[0]
    cursor = anchor
    while cursor.next is not first and _belongs_to_start(cursor.next):
        cursor = cursor.next
    if cursor.next is first:
        return False
    c.move_start(cursor)
    return True


def _belongs_to_start(node: fx.Node) -> bool:
    source = calls.picked_from(node) or node
    return is_gather(node) or source.target is ops.cast


def _only_waits_follow(node: fx.Node) -> bool:
    """Whether nothing but waits and their results stands between a node and the end of the graph."""
    while node.next.op != "output":
        node = node.next
        if node.target is not ops.wait and not edit.is_getitem(node):
            return False
    return True
