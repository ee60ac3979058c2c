"""Edits of a graph that keep names, types and sources right."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zcompile import compat
from zcompile.ir import meta


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    name: str | None = None,
    like: fx.Node | None = None,
) -> fx.Node:
    """Insert ``target(*args, **kwargs)`` at the insertion point, with its type inferred from its arguments' types.

    Args:
        graph: where to insert.
        target: an operator overload with a fake kernel.
        args: arguments; nodes stand for their values.
        kwargs: keyword arguments.
        name: the wanted name of the node; made unique.
        like: a node to take the source line from.
    """
    kwargs = kwargs or {}
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    meta.set_value(node, infer(target, args, kwargs))
    if like is not None:
        meta.copy_place(node, like)
    return node


def infer(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake value of a call, from the fake values of the nodes in its arguments."""

    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: meta.value(n))
    mode = fake_mode_of(_leaves((fake_args, fake_kwargs)))
    if mode is None:
        return target(*fake_args, **fake_kwargs)
    with mode:
        return target(*fake_args, **fake_kwargs)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for v in value for leaf in _leaves(v)] if isinstance(value, (list, tuple)) else [value]


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The fake tensor mode of the first fake tensor among ``values``; None without one."""
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)


def empty(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A contiguous fake tensor beside another: of its mode, device and (by default) dtype."""
    with fake_mode_of([like]):
        return torch.empty(tuple(shape), dtype=dtype or like.dtype, device=like.device)


def unpack(graph: fx.Graph, node: fx.Node, names: Sequence[str | None]) -> list[fx.Node]:
    """Insert one ``getitem`` for each result of a node with several."""
    assert len(names) == len(meta.value(node)), f"{node.name} has {len(meta.value(node))} results, not {len(names)}"
    return [call_getitem(graph, node, index, name) for index, name in enumerate(names)]


def call_getitem(graph: fx.Graph, node: fx.Node, index: int, name: str | None = None) -> fx.Node:
    """Insert the pick of result ``index`` of a node with several."""
    item = graph.create_node("call_function", operator.getitem, (node, index), name=name)
    meta.set_value(item, meta.value(node)[index])
    return item


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one result of a node with several."""
    return node.target is operator.getitem


def restride(node: fx.Node, value: torch.Tensor) -> bool:
    """Record a value with other strides, and infer again what follows from it.

    Returns:
        False, with everything as it was, when a reader needs the strides that the value had: a view that the new ones do not
        allow, or an operator that may look at memory itself (those of others than torch, ``as_strided``).
    """
    before = {node: meta.value(node)}
    meta.set_value(node, value)
    changed = deque([node])
    while changed:
        for reader in changed.popleft().users:
            if reader.op == "output":
                continue
            inferred = _infer_again(reader) if _takes_any_strides(reader) else None
            if inferred is None:
                for n, old in before.items():
                    meta.set_value(n, old)
                return False
            if _strides(inferred) != _strides(meta.value(reader)):
                before.setdefault(reader, meta.value(reader))
                meta.set_value(reader, inferred)
                changed.append(reader)
    return True


def _infer_again(node: fx.Node) -> Any:
    target: Any = node.target
    try:
        with compat.quiet_fake_kernels():
            return infer(target, node.args, node.kwargs)
    except (RuntimeError, ValueError):
        return None


def _takes_any_strides(node: fx.Node) -> bool:
    """Whether an operator computes the same of a value wherever its elements lie."""
    target: Any = node.target
    if is_getitem(node):
        return True
    return compat.is_overload(target) and target.namespace in ("aten", "prims") and "as_strided" not in target.name()


def _strides(value: Any) -> Any:
    return [leaf.stride() for leaf in _leaves([value]) if isinstance(leaf, torch.Tensor)]


def erase_dead(graph: fx.Graph, keep: Callable[[fx.Node], bool]) -> int:
    """Erase compute that nobody reads, from the end to the start; returns how many nodes went."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not keep(node):
            graph.erase_node(node)
            erased += 1
    return erased
