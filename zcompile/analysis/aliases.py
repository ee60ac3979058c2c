"""Which values may share memory, and who reads each piece of memory last."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import fx

from zcompile import compat, ops
from zcompile.analysis.flow import Flow, Result, num_results
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Region

Storages = frozenset[Result]


class Aliases(Flow[Storages]):
    """The storages that each value may live in. A storage is named by the result that allocated it.

    Views share the storage of what they view, transitively; a result of a region call that is a view of (or is) one of
    the region's inputs shares the argument's storage. Every result of ``zc.wait`` owns its memory: a gathered buffer that
    ``zc.release`` gives back.
    """

    def __init__(self, graph: fx.Graph, regions: Mapping[str, Region]) -> None:
        self._graph = graph
        super().__init__(graph, regions)

    @classmethod
    def of_graph(cls, graph: Graph) -> Aliases:
        """The aliases of a graph with its regions."""
        return cls(graph.fx, graph.regions)

    @cached_property
    def last_readers(self) -> dict[Result, fx.Node]:
        """The last node that reads each storage, through any alias: the output node when it is returned.

        Neither a release nor picking one of several results reads anything.
        """
        last: dict[Result, fx.Node] = {}
        for node in self._graph.nodes:
            if node.target is not ops.release and not edit.is_getitem(node):
                for source in node.all_input_nodes:
                    for storage in self.of(source):
                        last[storage] = node
        return last

    def may_share(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values may share memory."""
        return not self.of(a).isdisjoint(self.of(b))

    def join(self, items: list[Storages]) -> Storages:
        return frozenset().union(*items)

    def leaf(self, result: Result) -> Storages:
        return frozenset((result,))

    def operator(self, node: fx.Node) -> list[Storages]:
        count = num_results(node)
        own = [self.leaf(Result(node, index)) for index in range(count)]
        viewed = _viewed(node)
        if not any(viewed):
            return own
        if len(viewed) == 1 and count > 1:  # a list of views
            viewed = viewed * count
        return [
            self.join([self.of(source) for source in sources]) if sources else mine
            for sources, mine in zip(viewed, own, strict=False)
        ]

    def summarize(self, region: Region) -> list[Any]:
        """For each result: the inputs it may share memory with, and the index of the result that names its own memory."""
        inner = Aliases(region.fx, {})
        position = {node: index for index, node in enumerate(region.inputs)}
        owner: dict[Result, int] = {}
        summary = []
        for index, node in enumerate(region.results):
            shared, own = [], set()
            for storage in inner.of(node):
                if storage.node in position:
                    shared.append(position[storage.node])
                else:
                    own.add(owner.setdefault(storage, index))
            summary.append((shared, own))
        return summary

    def substitute(self, node: fx.Node, summary: list[Any], args: list[Storages]) -> list[Storages]:
        return [
            self.join([*(args[i] for i in shared), frozenset(Result(node, index) for index in own)])
            for shared, own in summary
        ]


def _viewed(node: fx.Node) -> list[list[fx.Node]]:
    """For each return of an operator's schema, the nodes whose memory it may share."""
    target = node.target
    if not compat.is_overload(target):
        return []
    shared = compat.shared_arguments(target)
    if not any(shared):
        return []
    named = dict(zip(compat.argument_names(target), node.args, strict=False)) | node.kwargs
    return [[n for name in names for n in _nodes(named.get(name))] for names in shared]


def _nodes(arg: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((arg,), lambda n: found.append(n) or n)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of one of its arguments."""
    return any(_viewed(node)) and isinstance(meta.value(node), torch.Tensor)
