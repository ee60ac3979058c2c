"""Questions about single nodes that patterns are made of: what is called with what, and whether two nodes are one value."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import fx

from zcompile.ir import meta

_aten: Any = torch.ops.aten
#: how many operators back two values are compared
_MAX_DEPTH = 16


def calls(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Whether something is a node that calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.target in targets


def arguments(node: Any, target: Any, count: int) -> list[Any]:
    """The ``count`` arguments of a call of ``target``, all positional; as many times None for anything else."""
    fits = calls(node, target) and len(node.args) == count and not node.kwargs
    return list(node.args) if fits else [None] * count


def first_argument(node: Any, target: Any) -> Any:
    """The first argument of a call of ``target``; None for anything else."""
    return node.args[0] if calls(node, target) else None


def same_value(a: Any, b: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether two nodes surely are one value: one node, or equal operators of equal values."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        if a is b:
            return True
        if depth == 0 or not (a.op == b.op == "call_function" and a.target is b.target) or _may_be_random(a):
            return False
        return same_value(a.args, b.args, depth - 1) and same_value(a.kwargs, b.kwargs, depth - 1)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y, depth) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[key], b[key], depth) for key in a)
    return type(a) is type(b) and a == b


def _may_be_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def same_labels(a: Any, b: Any) -> bool:
    """Whether two columns of labels are one, where ``nll_loss`` puts 0 in the place of those that it ignores."""
    (of_a, ignored_a), (of_b, ignored_b) = _labels(a), _labels(b)
    same_size = meta.tensor(a).numel() == meta.tensor(of_a).numel() == meta.tensor(b).numel()
    return same_size and ignored_a == ignored_b and same_value(of_a, of_b)


def _labels(column: Any) -> tuple[Any, Any]:
    """What labels are a column of, and which are 0 in it; None: none are."""
    kept, labels, zero = arguments(_flat(column), _aten.where.self, 3)
    compared, ignored = arguments(kept, _aten.ne.Scalar, 2)
    if compared is not None and is_zero(zero) and same_value(_flat(compared), _flat(labels)):
        return _flat(labels), ignored
    return _flat(column), None


def _flat(node: Any) -> Any:
    """Without dimensions of size 1 that were added to it."""
    while calls(node, _aten.unsqueeze.default):
        node = node.args[0]
    return node


def matrix(node: Any) -> tuple[Any, bool]:
    """What a matrix is a transpose of, and whether it is one."""
    transposed = False
    while calls(node, _aten.permute.default) and node.args[1] == [1, 0]:
        node, transposed = node.args[0], not transposed
    return node, transposed


def is_matrix(node: Any, of: Any, *, transposed: bool) -> bool:
    """Whether a matrix is ``of``, or the transpose of it."""
    (have, have_transposed), (want, want_transposed) = matrix(node), matrix(of)
    return have_transposed == (want_transposed != transposed) and same_value(have, want)


def is_over_last(node: fx.Node, dim: Any) -> bool:
    """Whether ``dim`` is the last dimension of a node's first argument, alone."""
    read: Any = node.args[0]
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    rank = meta.tensor(read).dim()
    return len(dims) == 1 and rank > 0 and dims[0] % rank == rank - 1


def is_zero(node: Any) -> bool:
    """Whether a node is the constant 0 without dimensions."""
    return bool(calls(node, _aten.scalar_tensor.default) and node.args[0] == 0)


def is_full_of_zeros(node: Any) -> bool:
    """Whether a node is a tensor of zeros."""
    return bool(calls(node, _aten.full.default) and node.args[1] == 0)
