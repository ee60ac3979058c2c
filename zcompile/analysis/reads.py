"""What each value was computed from: the graph inputs (and, if wanted, the collectives) that went into it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.flow import Flow, Result, num_results
from zcompile.ir import calls, meta
from zcompile.ir.graph import Graph, Region


class Reads(Flow[int]):
    """For each value a bit mask over ``leaves``: what it depends on.

    The loss depends on every parameter: compare masks, which costs a machine word for 30 leaves, before asking for leaves.

    Args:
        graph: the nodes.
        regions: the regions that ``graph`` calls.
        through_waits: whether to look through collectives, down to the graph inputs; else each result of a collective is a leaf too.
    """

    def __init__(self, graph: fx.Graph, regions: Mapping[str, Region], *, through_waits: bool) -> None:
        self.leaves: list[Result] = []
        self._through_waits = through_waits
        super().__init__(graph, regions)

    @classmethod
    def of_graph(cls, graph: Graph, *, through_waits: bool) -> Reads:
        """The reads of a graph with its regions."""
        return cls(graph.fx, graph.regions, through_waits=through_waits)

    def leaves_of(self, node: fx.Node) -> list[Result]:
        """The leaves that a value depends on, in graph order."""
        return self.leaves_in(self.of(node))

    def leaves_in(self, mask: int) -> list[Result]:
        """The leaves of a mask, in graph order."""
        found = []
        while mask:
            found.append(self.first(mask))
            mask &= mask - 1
        return found

    def first(self, mask: int) -> Result:
        """The first leaf of a mask that is not empty, in graph order."""
        return self.leaves[(mask & -mask).bit_length() - 1]

    def mask(self, results: Iterable[Result]) -> int:
        """The mask of those results that are leaves."""
        wanted = set(results)
        return sum(1 << bit for bit, leaf in enumerate(self.leaves) if leaf in wanted)

    def join(self, items: list[int]) -> int:
        mask = 0
        for item in items:
            mask |= item
        return mask

    def leaf(self, result: Result) -> int:
        self.leaves.append(result)
        return 1 << (len(self.leaves) - 1)

    def operator(self, node: fx.Node) -> list[int]:
        count = num_results(node)
        if node.target is ops.wait and not self._through_waits and not ops.is_transfer(calls.source(node).target):
            return [self.leaf(Result(node, index)) for index in range(count)]
        if node.target is ops.wait:
            return self.results(node.all_input_nodes[0])
        if ops.is_start(node.target) or node.target is ops.cast:
            tensors: Any = node.args[0]
            return [self.of(t) for t in tensors]
        return [self.join([self.of(source) for source in node.all_input_nodes])] * count

    def summarize(self, region: Region) -> list[Any]:
        """For each result, the positions of the inputs it depends on."""
        inner = Reads(region.fx, {}, through_waits=True)
        position = {node: index for index, node in enumerate(region.inputs)}
        return [[position[leaf.node] for leaf in inner.leaves_of(node)] for node in region.results]

    def substitute(self, node: fx.Node, summary: list[Any], args: list[int]) -> list[int]:
        return [self.join([args[i] for i in inputs]) for inputs in summary]


class Copies(Flow[Result | None]):
    """Values that only repeat a graph input or a gathered value: views, casts and copies of it.

    What such a value carries is the result that it repeats; None for everything else. The rule is that by which the split
    never saves them: exactly one input node, itself a leaf or a repeat, and no fewer elements than that input.
    """

    def join(self, items: list[Result | None]) -> Result | None:
        return None

    def leaf(self, result: Result) -> Result | None:
        return result

    def operator(self, node: fx.Node) -> list[Result | None]:
        count = num_results(node)
        if node.target is ops.wait:
            started = calls.source(node)
            return (
                self.results(started)
                if ops.is_transfer(started.target)
                else [Result(node, index) for index in range(count)]
            )
        if node.target is ops.cast or ops.is_transfer(node.target):
            tensors: Any = node.args[0]
            return [self.of(t) for t in tensors]
        sources = node.all_input_nodes
        if len(sources) != 1 or ops.is_zc(node.target) or count > 1:
            return [None] * count
        before, after = _num_elements(sources[0]), _num_elements(node)
        return [self.of(sources[0]) if after >= before else None]

    def summarize(self, region: Region) -> list[Any]:
        """For each result, the position of the input that it repeats, or None."""
        inner = Copies(region.fx, {})
        position = {node: index for index, node in enumerate(region.inputs)}
        repeated = [inner.of(node) for node in region.results]
        return [None if r is None else position[r.node] for r in repeated]

    def substitute(self, node: fx.Node, summary: list[Any], args: list[Result | None]) -> list[Result | None]:
        return [None if index is None else args[index] for index in summary]


def _num_elements(node: fx.Node) -> int:
    val = meta.value(node)
    return val.numel() if isinstance(val, torch.Tensor) else 0
