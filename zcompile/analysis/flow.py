"""One walk over a graph that carries something along its values, through lists, views and region calls."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from torch import fx

from zcompile import ops
from zcompile.ir import meta
from zcompile.ir.graph import Region

T = TypeVar("T")


class Result(NamedTuple):
    """One result of a node: ``slot`` counts within a node with several, and is 0 for a node with one."""

    node: fx.Node
    slot: int


class Flow(ABC, Generic[T]):
    """Something that every result of every node carries, computed in one walk in program order.

    A region is walked once, however often it is called: subclasses say what its results carry in terms of its inputs.

    Args:
        graph: the nodes; well formed (the verifier checks that first).
        regions: the regions that ``graph`` calls.
    """

    def __init__(self, graph: fx.Graph, regions: Mapping[str, Region]) -> None:
        self._regions = regions
        self._summaries: dict[str, list[Any]] = {}
        self._carried: dict[fx.Node, list[T]] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._carried[node] = self._transfer(node)

    def results(self, node: fx.Node) -> list[T]:
        """What each result of ``node`` carries."""
        return self._carried[node]

    def of(self, node: fx.Node) -> T:
        """What a node carries; all its results together when it has several."""
        results = self._carried[node]
        return results[0] if len(results) == 1 else self.join(results)

    def _transfer(self, node: fx.Node) -> list[T]:
        if node.op == "placeholder":
            return [self.leaf(Result(node, 0))]
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            index: Any = node.args[1]
            if isinstance(meta.value(node.args[0]), (list, tuple)):
                return [self._carried[node.args[0]][index]] * num_results(
                    node
                )  # several when the result is itself a list
        if node.target is ops.region_call:
            name: Any = node.args[0]
            if name not in self._summaries:
                self._summaries[name] = self.summarize(self._regions[name])
            args: Any = node.args[1]
            return self.substitute(node, self._summaries[name], [self.of(a) for a in args])
        return self.operator(node)

    @abstractmethod
    def join(self, items: list[T]) -> T:
        """What a value carries that several values went into."""

    @abstractmethod
    def leaf(self, result: Result) -> T:
        """What a graph input carries."""

    @abstractmethod
    def operator(self, node: fx.Node) -> list[T]:
        """What each result of an operator carries."""

    @abstractmethod
    def summarize(self, region: Region) -> list[Any]:
        """For each result of a region, what it carries in terms of the region's inputs."""

    @abstractmethod
    def substitute(self, node: fx.Node, summary: list[Any], args: list[T]) -> list[T]:
        """What each result of a region call carries, given what its arguments carry."""


def num_results(node: fx.Node) -> int:
    """How many results a node has: the length of a list value, else 1."""
    val = meta.value(node)
    return len(val) if isinstance(val, (list, tuple)) else 1
