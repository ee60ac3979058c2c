"""What a path of casts, views and slices of rows does with one column, and its transpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from zcompile.ir import meta

_aten: Any = torch.ops.aten
_VIEW: Any = _aten.view.default
#: views that keep all elements; of them, an alias keeps the shape
VIEWS = (_VIEW, _aten._unsafe_view.default, _aten.alias.default)
_RESHAPES = VIEWS[:2]
SLICE, SLICE_SCATTER, CLONE = _aten.slice.Tensor, _aten.slice_scatter.default, _aten.clone.default


def replay(path: Iterable[fx.Node], value: Any, call: Callable[..., Any]) -> Any:
    """Do with one column what a path does with all of them.

    Args:
        path: nodes of ``LinearLoss.path`` or ``Gradients.path``.
        value: a node or a tensor, of the shape that the path begins with but for one column.
        call: calls an operator with arguments.
    """
    for node in path:
        if node.target in _RESHAPES:
            value = call(_VIEW, value, [*meta.tensor(node).shape[:-1], 1])
        elif node.target is SLICE:  # contiguous, for the views that follow
            value = call(CLONE, call(SLICE, value, *node.args[1:]), memory_format=torch.contiguous_format)
        elif node.target is SLICE_SCATTER:
            value = call(_aten.constant_pad_nd.default, value, _padding(node, node.args[1], node))
    return value


def replay_backward(path: Iterable[fx.Node], value: Any, call: Callable[..., Any]) -> Any:
    """The transpose of ``replay`` over a loss's path: rows that slices leave out become 0."""
    for node in reversed(tuple(path)):
        before: Any = node.args[0]
        if node.target in _RESHAPES:
            value = call(_VIEW, value, [*meta.tensor(before).shape[:-1], 1])
        elif node.target is SLICE:
            value = call(_aten.constant_pad_nd.default, value, _padding(node, node, before))
    return value


def _slice_of(node: fx.Node) -> tuple[int, Any, Any, int]:
    """Dimension, start, end and step of a slice, or of where one is scattered."""
    given: Any = node.args[1:] if node.target is SLICE else node.args[2:]
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = (*given, *defaults[len(given) :])
    return dim % meta.tensor(node).dim(), start, end, step


def is_of_rows(node: fx.Node) -> bool:
    """Whether a slice takes neighbouring rows."""
    dim, _, _, step = _slice_of(node)
    return dim != meta.tensor(node).dim() - 1 and step == 1


def _padding(node: fx.Node, part: Any, whole: Any) -> list[int]:
    """What ``constant_pad_nd`` takes to make ``whole``, around the ``part`` that a slice takes or that is scattered into it."""
    dim, start, end, _ = _slice_of(node)
    size = meta.tensor(whole).shape[dim]
    first = slice(start, end).indices(size)[0]
    last = size - first - meta.tensor(part).shape[dim]
    return [*[0] * (2 * (meta.tensor(whole).dim() - 1 - dim)), first, last]
