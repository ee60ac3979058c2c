"""Gradients that are a scalar tangent times numbers which forward knows: forward can compute all of them but that factor."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile.analysis.chains import is_view
from zcompile.analysis.matching import calls, is_full_of_zeros, is_zero
from zcompile.ir import edit, meta
from zcompile.ir.graph import Tangent
from zcompile.ir.operators import is_random, operator_name

_aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
_FULL: Any = _aten.full.default
#: linear in their first argument
_OF_FIRST = frozenset(
    {
        _aten.neg.default, _aten.clone.default, _aten._unsafe_view.default, _aten.sum.default, _aten.sum.dim_IntList,
        _aten.mean.default, _aten.mean.dim, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar,
        _aten.gather.default, _aten.index.Tensor, _aten.index_select.default,
    }
)  # fmt: skip
#: linear in what they put together, where each of it is zero or linear: where that stands among their arguments
_OF_ALL: dict[Any, tuple[int, ...]] = {
    _aten.add.Tensor: (0, 1),
    _aten.sub.Tensor: (0, 1),
    _aten.where.self: (1, 2),
    _aten.slice_scatter.default: (0, 1),
    _aten.select_scatter.default: (0, 1),
    _aten.index_put.default: (0, 2),
    _aten.scatter_add.default: (0, 3),
    _aten.index_add.default: (0, 3),
}


class NoMultipleError(Exception):
    """Why a gradient is not a multiple of one scalar tangent."""


@dataclass(frozen=True)
class Multiple:
    """A gradient that is ``tangent * factor``, where forward can compute the factor.

    Attributes:
        value: the gradient.
        tangent: of one number.
        chain: the operators from the tangent to the value, in order.
        others: what else the value is computed from, in order, from inputs alone.
    """

    value: fx.Node
    tangent: fx.Node
    chain: tuple[fx.Node, ...]
    others: tuple[fx.Node, ...]

    def write_factor(self, graph: fx.Graph, before: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
        """Compute the factor in front of a node of forward: the chain again, of one instead of the tangent.

        Args:
            graph: that of all these nodes.
            before: where ``call`` inserts; the others are moved there, if they come later.
            call: inserts a call of an operator with arguments.
        """
        behind = _behind(graph, before)
        for node in self.others:
            if node in behind:
                before.prepend(node)
                meta.set_forward(node)
        env = {self.tangent: full(graph, self.tangent, 1)}
        for node in self.chain:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env.get(n, n))
            env[node] = call(node.target, *args, **kwargs)
        return env[self.value]


def full(graph: fx.Graph, like: fx.Node, number: float) -> fx.Node:
    """Insert a tensor of the shape, dtype and device of ``like``, of one number."""
    value = meta.tensor(like)
    options = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
    node = graph.create_node("call_function", _FULL, (list(value.shape), number), options)
    meta.set_value(node, edit.empty(value, value.shape))
    return node


def multiple_of_tangent(value: fx.Node, without: fx.Node) -> Multiple:
    """A gradient as a multiple of a scalar tangent.

    Args:
        value: a node of a joint graph.
        without: what the factor must not depend on, as it is computed in front of it.

    Raises:
        NoMultipleError: it is none, with the reason.
    """
    order = _ancestors(value)
    tangents = [node for node in order if isinstance(meta.origin(node), Tangent)]
    if len(tangents) != 1:
        raise NoMultipleError(f"their gradients come from {len(tangents)} outputs")
    (tangent,) = tangents
    if meta.tensor(tangent).numel() != 1:
        raise NoMultipleError("their gradients come from an output that is no scalar")
    if without in order:
        raise NoMultipleError("their gradients depend on the losses")
    linear: dict[fx.Node, None] = {tangent: None}
    others = []
    behind = _behind(value.graph, without)
    for node in order:
        if any(source in linear for source in node.all_input_nodes):
            if not _is_linear(node, linear):
                raise NoMultipleError(f"their gradients go through {operator_name(node.target)}")
            linear[node] = None
        elif node.op == "call_function":
            if node in behind and is_random(node):
                raise NoMultipleError(f"their gradients depend on {operator_name(node.target)}, which runs later")
            others.append(node)
    return Multiple(value, tangent, tuple(linear)[1:], tuple(others))


def _ancestors(value: fx.Node) -> list[fx.Node]:
    """What a node is computed from, and itself, in the order of the graph."""
    found, waiting = {value}, [value]
    while waiting:
        new = [node for node in waiting.pop().all_input_nodes if node not in found]
        found.update(new)
        waiting += new
    return [node for node in value.graph.nodes if node in found]


def _behind(graph: fx.Graph, place: fx.Node) -> set[fx.Node]:
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(place) :])


def _is_linear(node: fx.Node, linear: Collection[fx.Node]) -> bool:
    """Whether a node is linear and homogeneous in those of its arguments that are in ``linear``, of which it has at least one."""
    target, args = node.target, list(node.args)
    if target is _aten.mul.Tensor and args[0] not in linear:
        args.reverse()
    if target in _OF_ALL or target is _aten.cat.default:
        parts: Any = args[0] if target is _aten.cat.default else [args[place] for place in _OF_ALL[target]]
        only = all(source in parts for source in node.all_input_nodes if source in linear)
        return only and all(part in linear or _is_zeros(part) for part in parts)
    if target is _CAST:
        return meta.tensor(node).is_floating_point()
    if target is _aten.constant_pad_nd.default:
        return bool(len(args) < 3 or args[2] == 0)
    # once: a square is not linear
    is_known = target in _OF_FIRST or edit.is_getitem(node) or is_view(node)
    return is_known and args[0] in linear and _count(args, linear) == 1


def _count(args: Any, linear: Collection[fx.Node]) -> int:
    found: list[fx.Node] = []
    fx.map_arg(args, lambda node: found.append(node) if node in linear else None)
    return len(found)


def _is_zeros(node: Any) -> bool:
    while calls(node, _aten.expand.default, _aten.view.default):
        node = node.args[0]
    return is_zero(node) or is_full_of_zeros(node)
