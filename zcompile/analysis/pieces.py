"""What the operators that work in pieces take beside their results: memory while they run, and bytes that they move."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from zcompile import ops
from zcompile.cross_entropy import row_stride
from zcompile.ir import meta


def workspace_bytes(node: fx.Node) -> int:
    """Memory that an operator allocates while it runs, beside its results; 0 for operators that do not work in pieces."""
    given: Any = node.kwargs
    if node.target is ops.linear_cross_entropy:
        num_rows, num_columns, size = _sizes(node)
        return min(given["rows"], num_rows) * row_stride(num_columns) * size
    if node.target is ops.linear_cross_entropy_backward:
        num_rows, num_columns, size = _sizes(node)
        hidden: Any = node.args[0]
        total = 4 * meta.tensor(hidden).numel() if given["wanted"][0] and size < 4 else 0
        return num_rows * row_stride(min(given["columns"], num_columns)) * size + total
    if node.target is ops.linear_cross_entropy_with_grads:
        num_rows, num_columns, size = _sizes(node)
        result, total = _summed(node)
        num_biases = 4 * num_columns if given["wanted"][2] and size < 4 else 0
        # the sum, where it is not the result itself, with a piece; then with the result, which exists by then
        piece = min(given["rows"], num_rows) * row_stride(num_columns) * size
        return (max(piece - result, 0) + total if total > result else piece) + num_biases
    return 0


def moved_bytes(node: fx.Node) -> tuple[int, int]:
    """Bytes that an operator reads and writes of its pieces in kernels beside its matmuls; 0 for other operators."""
    given: Any = node.kwargs
    if node.target is ops.linear_cross_entropy:
        num_rows, num_columns, size = _sizes(node)
        return num_rows * num_columns * size, 0
    if node.target is ops.linear_cross_entropy_backward:
        num_rows, num_columns, size = _sizes(node)
        return num_rows * num_columns * size, num_rows * num_columns * size
    if node.target is ops.linear_cross_entropy_with_grads:
        num_rows, num_columns, size = _sizes(node)
        result, total = _summed(node)
        # the sum is read and written with every further piece
        again = max(math.ceil(num_rows / given["rows"]) - 1, 0) * total
        rounded = total if total > result else 0
        moved = num_rows * num_columns * size + again + rounded  # a row is read twice, the second time from a cache
        return moved, moved
    return 0, 0


def _summed(node: fx.Node) -> tuple[int, int]:
    """Bytes of the gradient of the weight, and of what it is added up in; 0 if it is not wanted."""
    given: Any = node.kwargs
    if not given["wanted"][1]:
        return 0, 0
    weight: Any = node.args[1]
    value = meta.tensor(weight)
    return meta.num_bytes(value), value.numel() * given["total"].itemsize


def _sizes(node: fx.Node) -> tuple[int, int, int]:
    """Rows, columns and bytes of an element of the logits."""
    given: Any = node.args
    hidden, weight = meta.tensor(given[0]), meta.tensor(given[1])
    return hidden.shape[0], weight.shape[0], hidden.element_size()
