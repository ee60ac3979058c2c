"""The collectives of a graph in order: where each starts, where it is waited for, what it carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from zcompile import ops
from zcompile.ir import calls, meta
from zcompile.ir.graph import Graph


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


def is_gather(node: fx.Node) -> bool:
    """Whether a node starts a gather of parameters."""
    return node.target is ops.all_gather


def is_reduction(node: fx.Node) -> bool:
    """Whether a node starts a reduction of gradients."""
    return node.target in (ops.reduce_scatter, ops.all_reduce)
