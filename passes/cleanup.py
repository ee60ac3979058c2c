"""Removes what nobody reads: dead computation, gathers of parameters that are only released, inner dead code."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import collectives, is_gather, never_release
from zcompile.ir import calls, edit
from zcompile.ir.graph import Graph, Step
from zcompile.ir.operators import is_random
from zcompile.pipeline import Stats, StepPass


@dataclass(frozen=True)
class Cleanup(StepPass):
    """Drop dead nodes, and take parameters that nobody computes with out of their gathers.

    Before and after::

        %b: bucket = zc.all_gather([%w0, %w1], 'dp', 2)
        %w0_full: f32[8, 8], %w1_full: f32[8, 8] = zc.wait(%b)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        zc.release([%w0_full, %w1_full])

        %b: bucket = zc.all_gather([%w0], 'dp', 2)
        %w0_full: f32[8, 8] = zc.wait(%b)
        %y: f32[4, 8] = call layer(%x, %w0_full)
        zc.release([%w0_full])

    Exact.
    """

    name: ClassVar[str] = "cleanup"

    def run(self, target: Step, stats: Stats) -> None:
        for graph in target.graphs:
            for region in graph.regions.values():
                stats["dead nodes"] += edit.erase_dead(region.fx, keep=is_random)
            random = {name for name, region in graph.regions.items() if any(map(is_random, region.fx.nodes))}
            stats["dead nodes"] += edit.erase_dead(graph.fx, keep=lambda node, random=random: _has_effect(node, random))
            _drop_unread_gathers(graph, stats)
            used = {calls.region(n)[0] for n in graph.body if n.target is ops.region_call}
            for name in [n for n in graph.regions if n not in used]:
                del graph.regions[name]
                stats["dead regions"] += 1


def _has_effect(node: fx.Node, random: Set[str]) -> bool:
    """Whether a node without readers still matters.

    ``zc`` operators do, results of waits keep their places, and what draws random numbers moves the stream on.
    """
    if node.target is ops.region_call:
        return calls.region(node)[0] in random
    source = calls.picked_from(node)
    is_result = source is not None and source.target is ops.wait
    return is_result or is_random(node) or (ops.is_zc(node.target) and node.target is not ops.cast)


def _drop_unread_gathers(graph: Graph, stats: Stats) -> None:
    for c in collectives(graph, is_gather):
        unread = [r for r in c.results if all(u.target is ops.release for u in r.users)]
        for result in unread:
            never_release(result)
        if unread:
            c.drop(unread)
        stats["gathers dropped"] += len(unread)
