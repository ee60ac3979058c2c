"""What the operators that work in pieces take beside their results: memory while they run, and bytes that they move."""

from __future__ import annotations

from typing import Any

from torch import fx

from zcompile import ops
from zcompile.ir import meta


def workspace_bytes(node: fx.Node) -> int:
    """Memory that an operator allocates while it runs, beside its results; 0 for operators that do not work in pieces."""
    given: Any = node.kwargs
    if node.target is ops.linear_cross_entropy:
        num_rows, num_columns, size = _sizes(node)
        return min(given["rows"], num_rows) * num_columns * size
    if node.target is ops.linear_cross_entropy_backward:
        num_rows, num_columns, size = _sizes(node)
        hidden: Any = node.args[0]
        total = 4 * meta.tensor(hidden).numel() if given["wanted"][0] and size < 4 else 0
        return num_rows * min(given["columns"], num_columns) * size + total
    return 0


def moved_bytes(node: fx.Node) -> tuple[int, int]:
    """Bytes that an operator reads and writes of its pieces in kernels beside its matmuls; 0 for other operators."""
    if node.target is ops.linear_cross_entropy:
        num_rows, num_columns, size = _sizes(node)
        return num_rows * num_columns * size, 0
    if node.target is ops.linear_cross_entropy_backward:
        num_rows, num_columns, size = _sizes(node)
        return num_rows * num_columns * size, num_rows * num_columns * size
    return 0, 0


def _sizes(node: fx.Node) -> tuple[int, int, int]:
    """Rows, columns and bytes of an element of the logits."""
    given: Any = node.args
    hidden, weight = meta.tensor(given[0]), meta.tensor(given[1])
    return hidden.shape[0], weight.shape[0], hidden.element_size()
