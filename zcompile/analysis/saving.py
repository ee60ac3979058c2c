"""What a block of the model may save for backward, and what it then computes again: the choices between memory and time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from zcompile.analysis.blocks import Block, storage
from zcompile.analysis.chains import is_view
from zcompile.analysis.cost import Cost, node_cost
from zcompile.ir import edit, meta
from zcompile.ir.operators import runs_once

#: rates by which times are compared, those of no device in particular so that every machine chooses alike: 16-bit and wider
#: matmuls in flop/us, memory in bytes/us
_FLOPS_PER_US = {"bf16": 4e8, "f16": 4e8}
_WIDE_FLOPS_PER_US = 5e7
_BYTES_PER_US = 3e6
#: an elementwise value that is computed again mostly fuses with what reads it: this part of its bytes moves
_FUSED = 0.25

#: bytes that a microsecond is worth, from memory at any price to time at any price
_PRICES = (0, *(10**4 * 3**i for i in range(14)))


@dataclass(frozen=True)
class Saving:
    """One choice for a block.

    Attributes:
        saved: places in the block of the nodes whose values are saved; none of the others is.
        num_bytes: bytes of them.
        us: time to compute the rest again, in nominal microseconds.
        flops: of the matmuls, attention and convolutions among it.
    """

    saved: frozenset[int]
    num_bytes: int
    us: float
    flops: float


def savings(block: Block, forward: Collection[fx.Node]) -> list[Saving]:
    """The choices for a block, from the fewest bytes to the shortest time: none of them is worse in both than another.

    For each price of time in bytes, the choice with the least sum is a minimum cut: a value is computed again (and costs time),
    or saved (and costs bytes), or not needed. What draws random numbers or makes gradients is never computed again. What a later
    block reads is saved anyway and costs nothing here. Their lower convex hull is what the prices find (Lagrange multipliers).

    Args:
        block: nodes of the forward.
        forward: all nodes of the forward.
    """
    network = _Network(block, forward)
    found = {saving.saved: saving for price in _PRICES for saving in [network.cheapest(price)]}
    hull: list[Saving] = []
    for saving in sorted(found.values(), key=lambda s: (s.num_bytes, s.us)):
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], saving):
            hull.pop()
        if not hull or saving.us < hull[-1].us:
            hull.append(saving)
    return hull


def _gain(a: Saving, b: Saving) -> float:
    """Microseconds that a byte more buys, from ``a`` to ``b``."""
    return (a.us - b.us) / max(b.num_bytes - a.num_bytes, 1)


def structure(block: Block, forward: Collection[fx.Node]) -> Any:
    """A key that is equal for blocks whose choices are the same."""
    place = {node: index for index, node in enumerate(block.nodes)}
    free = handed_on(block, forward)

    def describe(node: fx.Node) -> Any:
        value = meta.value(node)
        return place.get(node, (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else str(value))

    return tuple(
        (
            str(node.target),
            str(fx.map_arg((node.args, node.kwargs), describe)),
            node in free,
            any(user not in forward for user in node.users),
        )
        for node in block.nodes
    )


def save_expensive(block: Block, forward: Collection[fx.Node]) -> Saving:
    """Save the results of matmuls, attention and convolutions that backward needs, and compute everything else again."""
    network = _Network(block, forward, keep=lambda cost: cost.num_flops > 0)
    return network.cheapest(0)


def handed_on(block: Block, forward: Collection[fx.Node]) -> set[fx.Node]:
    """The values of a block that later forward nodes read: they are saved when backward needs them."""
    inside = set(block.nodes)
    return {storage(node) for node in block.nodes if any(user in forward and user not in inside for user in node.users)}


class _Network:
    """The minimum-cut problem of one block: each node is split in two, with an edge that saving its value cuts.

    The source side is what is not computed in backward, the sink side what is. An edge from the source to a node is cut where
    the node is computed again, and costs its time.
    """

    def __init__(self, block: Block, forward: Collection[fx.Node], keep: Any = lambda cost: False) -> None:
        self.nodes = block.nodes
        self.place = {node: index for index, node in enumerate(block.nodes)}
        self.costs = [_recompute_cost(node) for node in block.nodes]
        self.kept = [runs_once(node) or bool(keep(cost)) for node, cost in zip(block.nodes, self.costs, strict=True)]
        self.free = handed_on(block, forward)
        self.needed = [any(u not in forward and u.op != "output" for u in node.users) for node in block.nodes]

    def cheapest(self, price: int) -> Saving:
        """The choice with the least sum of bytes, and of microseconds times ``price``."""
        graph = nx.DiGraph()
        for index, node in enumerate(self.nodes):
            available = node in self.free
            if available or self.kept[index]:
                graph.add_edge("source", (index, 0))  # no capacity: without limit
            elif price and self.costs[index].num_bytes:
                graph.add_edge("source", (index, 0), capacity=int(_us(self.costs[index]) * price) + 1)
            if available:
                graph.add_edge((index, 0), (index, 1), capacity=0)
            elif is_view(node) or not isinstance(meta.value(node), torch.Tensor):
                graph.add_edge((index, 0), (index, 1))
            else:
                graph.add_edge((index, 0), (index, 1), capacity=meta.num_bytes(meta.value(node)))
            for user in node.users:
                if user in self.place:
                    graph.add_edge((index, 1), (self.place[user], 0))
            if self.needed[index]:
                graph.add_edge((index, 1), "sink")
        if "source" not in graph or "sink" not in graph:
            return Saving(frozenset(), 0, 0.0, 0.0)
        _, (_, again) = nx.minimum_cut(graph, "source", "sink", flow_func=boykov_kolmogorov)  # by far the fastest here
        pairs = range(len(self.nodes))
        saved = frozenset(
            i for i in pairs if (i, 0) not in again and (i, 1) in again and self.nodes[i] not in self.free
        )
        computed = [self.costs[i] for i in pairs if (i, 0) in again and (i, 0) in graph]
        return Saving(
            saved,
            sum(meta.num_bytes(meta.value(self.nodes[i])) for i in saved),
            sum(map(_us, computed)),
            sum(cost.num_flops for cost in computed),
        )


def _recompute_cost(node: fx.Node) -> Cost:
    """What it costs to compute a value once more; nothing for views and picks."""
    return Cost() if is_view(node) or edit.is_getitem(node) else node_cost(node)


def _us(cost: Cost) -> float:
    """Nominal time."""
    compute = sum(flops / _FLOPS_PER_US.get(dtype, _WIDE_FLOPS_PER_US) for dtype, flops in cost.flops.items())
    moved = cost.num_bytes / _BYTES_PER_US
    return max(compute, moved) if compute else _FUSED * cost.bytes_written / _BYTES_PER_US


def within(choices: Iterable[list[Saving]], limit_bytes: float) -> list[Saving]:
    """One choice for each block, with at most ``limit_bytes`` in all if that is possible, at the least time.

    Starts from the shortest time, and takes the step with the most bytes for its time until the limit holds: optimal up to one
    step, as each block's choices are convex. Of blocks alike the first steps first: its values would live longest.
    """
    ladders = [list(reversed(levels)) for levels in choices]
    at = [0] * len(ladders)
    total = sum(ladder[0].num_bytes for ladder in ladders)
    steps = [
        (_gain(after, before), level, block)
        for block, ladder in enumerate(ladders)
        for level, (before, after) in enumerate(pairwise(ladder))
    ]
    for _, level, block in sorted(steps):
        if total <= limit_bytes:
            break
        ladder = ladders[block]
        assert at[block] == level, "a convex ladder is taken in order"
        total -= ladder[level].num_bytes - ladder[level + 1].num_bytes
        at[block] = level + 1
    return [ladder[level] for ladder, level in zip(ladders, at, strict=True)]
