"""The collectives of a graph in order: where each starts, where it is waited for, what it carries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from zcompile import ops
from zcompile.ir import calls, meta
from zcompile.ir.graph import Graph, Kept, Param, Step
from zcompile.ir.handover import kept_parameter, kept_value


@dataclass(frozen=True)
class Collective:
    """One started collective.

    Attributes:
        start: the node that starts it.
        wait: the node that waits for it.
        results: the picks of its values, right after the wait.
        start_index: position of ``start`` among the graph's nodes.
        wait_index: position of ``wait``.
        num_bytes: bytes of the pending values.
    """

    start: fx.Node
    wait: fx.Node
    results: tuple[fx.Node, ...]
    start_index: int
    wait_index: int
    num_bytes: int

    @property
    def casts(self) -> list[fx.Node]:
        """The ``zc.cast`` nodes and their picks that only feed this collective, in order."""
        found: dict[fx.Node, None] = {}
        for send in self.sends:
            source = calls.picked_from(send)
            if source is not None and source.target is ops.cast:
                found[source] = None
        return [n for cast in found for n in (cast, *cast.users)]

    def move_start(self, behind: fx.Node) -> None:
        """Move the start, and the casts that feed it, right behind a node."""
        for node in reversed((*self.casts, self.start)):
            behind.append(node)

    @property
    def sends(self) -> list[fx.Node]:
        """The tensors that go in."""
        return calls.tensors(self.start)

    @property
    def shards(self) -> list[fx.Node]:
        """What goes in before any cast: a gather's shards, one for each result."""
        found = []
        for send in self.sends:
            source = calls.picked_from(send)
            is_cast = source is not None and source.target is ops.cast
            found.append(calls.tensors(source)[calls.index(send)] if source is not None and is_cast else send)
        return found

    def drop(self, results: Collection[fx.Node]) -> None:
        """Take results that nothing reads any more out of the collective, and what it sends for them, with its casts.

        A collective without results goes. What this object says of the graph is no longer right afterwards.
        """
        sends = self.sends
        gone = {calls.index(r) for r in results}
        casts: dict[fx.Node, set[int]] = {}
        for send in (sends[index] for index in sorted(gone)):
            source = calls.picked_from(send)
            if source is not None and source.target is ops.cast:
                casts.setdefault(source, set()).add(calls.index(send))
        _narrow(self.start, self.wait, gone)
        for cast, picks in casts.items():
            _narrow(cast, cast, picks)


def collectives(graph: Graph, want: Callable[[fx.Node], bool] = lambda node: True) -> list[Collective]:
    """The collectives of a graph in the order they start, those that ``want`` accepts."""
    position = {node: index for index, node in enumerate(graph.fx.nodes)}
    found = []
    for node in graph.body:
        if not ops.is_collective(node.target) or not want(node):
            continue
        wait = next(user for user in node.users if user.target is ops.wait)
        results = tuple(sorted(wait.users, key=lambda n: position[n]))
        found.append(Collective(node, wait, results, position[node], position[wait], meta.num_bytes(meta.value(node))))
    return found


class Full(NamedTuple):
    """A full parameter in one graph: what it is called when it is kept, its unit, its node, and the gather it comes from.

    An input that another graph handed on comes from no gather.
    """

    kept: Kept
    unit: str
    node: fx.Node
    gather: Collective | None


def in_order_of_need(step: Step, graph: Graph) -> dict[str, list[Full]]:
    """What a graph of a step reads of each unit, by unit, in the order in which it first does; of one in two places, the first.

    What another graph handed on counts before what is gathered.
    """
    unit_of = {param.name: param.unit or param.name for each in step.graphs for _, param in each.params()}
    found: dict[Kept, Full] = {}
    for node in graph.inputs:
        kept = meta.origin(node)
        if isinstance(kept, Kept):
            found[kept] = Full(kept, unit_of[kept_parameter(kept)], node, None)
    for full in gathered(graph):
        found.setdefault(full.kept, full)
    of_node = {full.node: full for full in found.values()}
    units: dict[str, list[Full]] = {}
    for node in first_uses(graph):
        if node in of_node:
            units.setdefault(of_node[node].unit, []).append(of_node[node])
    return units


def gathered(graph: Graph) -> Iterator[Full]:
    """The full parameters that a graph gathers, in the order in which their gathers start."""
    for gather in collectives(graph, is_gather):
        params = [meta.origin(shard) for shard in gather.shards]
        for result in gather.results:
            param = params[calls.index(result)]
            if isinstance(param, Param):
                yield Full(kept_value(param.name, meta.tensor(result).dtype), param.unit or param.name, result, gather)


def first_uses(graph: Graph) -> dict[fx.Node, fx.Node]:
    """For each value the first node that reads it, other than to release it; in the order in which they are first read."""
    first: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        if node.target is not ops.release:
            for source in node.all_input_nodes:
                first.setdefault(source, node)
    return first


def never_release(value: fx.Node) -> None:
    """Take a value out of the releases that give it back; one that gives nothing back any more goes."""
    for release in [user for user in value.users if user.target is ops.release]:
        rest = [n for n in calls.tensors(release) if n is not value]
        release.args = (rest,)
        if not rest:
            release.graph.erase_node(release)


def _narrow(call: fx.Node, picked: fx.Node, gone: Collection[int]) -> None:
    """Take items out of the list that a call reads, and the results that are picked from it (or from its wait) for them."""
    for pick in list(picked.users):
        index = calls.index(pick)
        if index in gone:
            pick.graph.erase_node(pick)
        else:
            pick.args = (picked, index - sum(g < index for g in gone))
    listed = calls.tensors(call)
    left = [index for index in range(len(listed)) if index not in gone]
    nodes = [call] if picked is call else [picked, call]
    if not left:
        for node in nodes:
            node.graph.erase_node(node)
        return
    call.args = ([listed[index] for index in left], *call.args[1:])
    for node in nodes:
        meta.set_value(node, [meta.value(node)[index] for index in left])


def is_gather(node: fx.Node) -> bool:
    """Whether a node starts a gather of parameters."""
    return node.target is ops.all_gather


def is_reduction(node: fx.Node) -> bool:
    """Whether a node starts a reduction of gradients."""
    return node.target in (ops.reduce_scatter, ops.all_reduce)
