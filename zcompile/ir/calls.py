"""What the arguments of a node are, with their types: fx itself only knows that they are arguments."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import fx


class Unshard(NamedTuple):
    """The arguments of a ``zc.unshard``."""

    shard: fx.Node
    axis: str
    size: int
    dim: int
    shape: list[int]


def source(node: fx.Node) -> fx.Node:
    """The first argument of a node whose first argument is a node, such as what a ``zc.wait`` waits for."""
    first = node.args[0]
    assert isinstance(first, fx.Node), f"the first argument of {node.name} is {first}, not a node"
    return first


def tensors(node: fx.Node) -> list[fx.Node]:
    """The list of tensors that a node reads: a collective, ``zc.cast``, ``zc.release``, or the output node."""
    listed: Any = node.args[0]
    return list(listed)


def picked_from(node: fx.Node) -> fx.Node | None:
    """The node with several results of which ``node`` picks one; None for a node that picks nothing."""
    first = node.args[0] if node.target is operator.getitem else None
    return first if isinstance(first, fx.Node) else None


def index(node: fx.Node) -> int:
    """Which result of a node with several a ``getitem`` picks."""
    picked: Any = node.args[1]
    return picked


def region(node: fx.Node) -> tuple[str, list[fx.Node]]:
    """The name of the region that a ``region_call`` calls, and what it passes."""
    name: Any
    passed: Any
    name, passed = node.args
    return name, list(passed)


def axis(node: fx.Node) -> tuple[str, int]:
    """The axis of a collective and its size."""
    arguments: Any = node.args
    return arguments[1], arguments[2]


def unshard(node: fx.Node) -> Unshard:
    """The arguments of a ``zc.unshard`` but its dtype, which is the node's own."""
    arguments: Any = node.args
    shard, name, size, dim, shape = arguments[:5]
    return Unshard(shard, name, size, dim, list(shape))
