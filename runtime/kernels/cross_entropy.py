"""What is done with a piece of logits, as Triton kernels; the plain-torch references are in ``zcompile.cross_entropy``.

Rows may be apart. What lies between them is read and overwritten, and stands for nothing.
"""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zcompile import cross_entropy

#: columns of a row that a program reads at a time, and its warps
BLOCK_COLUMNS = 4096
NUM_WARPS = 8
#: dtypes of logits that the kernels read; they compute in float32
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


@triton.jit
def _reduced(start, num_columns, stride, BLOCK: tl.constexpr):  # pragma: no cover - runs on the device
    """The largest logit of a row, and the log of the sum of exponentials relative to it, in which NaN stays: one read.

    What lies behind the columns is read and left out: loads are wide where a stride is a multiple of 16, for any number of columns.
    """
    lanes = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_columns, BLOCK):
        value = tl.load(start + first + lanes, mask=first + lanes < stride, other=0.0).to(tl.float32)
        value = tl.where(first + lanes < num_columns, value, float("-inf"))
        new = tl.where(value > largest, value, largest)
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing but -inf so far
        total = total * tl.exp(largest - safe) + tl.exp(value - safe)
        largest = new
    top = tl.max(largest, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.log(tl.sum(total * tl.exp(largest - safe), 0))


@triton.jit
def _picked(start, label, num_columns):  # pragma: no cover - runs on the device
    """The logit of the label; NaN for a label out of range."""
    inside = (label >= 0) & (label < num_columns)
    return tl.load(start + label, mask=inside, other=float("nan")).to(tl.float32)


@triton.jit
def _reduce_kernel(  # pragma: no cover - runs on the device
    logits, labels, losses, lse, num_columns, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One program reduces one row."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    top, log_sum = _reduced(start, num_columns, stride, BLOCK)
    tl.store(losses + row, log_sum - (_picked(start, tl.load(labels + row), num_columns) - top))
    tl.store(lse + row, top + log_sum)


@triton.jit
def _gradients_kernel(  # pragma: no cover - runs on the device
    logits, labels, losses, weights, num_columns, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One program reduces one row, then differentiates it: the second read finds the row in a cache."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    label = tl.load(labels + row)
    scale = tl.load(weights + row)
    top, log_sum = _reduced(start, num_columns, stride, BLOCK)
    tl.store(losses + row, log_sum - (_picked(start, label, num_columns) - top))
    tl.debug_barrier()  # all threads have read the label's logit before one of them writes it
    lse = top + log_sum
    lanes = tl.arange(0, BLOCK)
    for first in range(0, num_columns, BLOCK):
        mask = first + lanes < stride
        value = tl.load(start + first + lanes, mask=mask, other=0.0).to(tl.float32)
        result = tl.exp(value - lse) * scale
        result -= tl.where(first + lanes == label, scale, 0.0)
        tl.store(start + first + lanes, result.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _differentiate_kernel(  # pragma: no cover - runs on the device
    logits, labels, lse, grad, first, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """One program differentiates one block of one row."""
    row = tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * stride + lanes
    mask = lanes < stride
    scale = tl.load(grad + row)
    value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    result = tl.exp(value - tl.load(lse + row)) * scale
    result -= tl.where(first + lanes == tl.load(labels + row), scale, 0.0)
    tl.store(place, result.to(logits.dtype.element_ty), mask=mask)


def reduce_rows(logits: Tensor, labels: Tensor, losses: Tensor, lse: Tensor, block: int = BLOCK_COLUMNS) -> None:
    """``zcompile.cross_entropy.reduce_rows`` in one read of the logits; a label out of range gives NaN.

    Args:
        logits: [rows, columns], each row contiguous, of one of ``DTYPES``; contiguous ``labels`` [rows] of int64, ``losses`` and
            ``lse`` [rows] of float32, which are written.
        block: columns that a program reads at a time.
    """
    with _on(logits):
        _reduce_kernel[(logits.shape[0],)](
            logits, labels, losses, lse, logits.shape[1], logits.stride(0), BLOCK=block, num_warps=NUM_WARPS
        )


def differentiate_(
    logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int, block: int = BLOCK_COLUMNS
) -> None:
    """``zcompile.cross_entropy.differentiate_`` in one read and write of the logits.

    Args:
        logits: as for ``reduce_rows``, as are ``labels``, ``lse`` and ``grad``; written.
        first: the first column.
        block: columns of a program.
    """
    grid = (logits.shape[0], triton.cdiv(logits.shape[1], block))
    with _on(logits):
        _differentiate_kernel[grid](
            logits, labels, lse, grad, first, logits.stride(0), BLOCK=block, num_warps=NUM_WARPS
        )


def gradients_(logits: Tensor, labels: Tensor, losses: Tensor, weights: Tensor, block: int = BLOCK_COLUMNS) -> None:
    """``zcompile.cross_entropy.gradients_`` in one read and write of the logits, and a second read where rows outgrow caches.

    Args:
        logits: as for ``reduce_rows``, as are ``labels``, ``losses`` and ``weights``; written.
        block: columns that a program reads at a time.
    """
    with _on(logits):
        _gradients_kernel[(logits.shape[0],)](
            logits, labels, losses, weights, logits.shape[1], logits.stride(0), BLOCK=block, num_warps=NUM_WARPS
        )


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _forward(hidden: Tensor, *args: Any, dtype: torch.dtype, **kwargs: Any) -> tuple[Tensor, Tensor]:
    has_kernel = hidden.dtype in DTYPES and dtype == torch.float32
    reduce = reduce_rows if has_kernel else cross_entropy.reduce_rows
    return cross_entropy.forward(hidden, *args, dtype=dtype, reduce=reduce, **kwargs)


def _backward(hidden: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    differentiate = differentiate_ if hidden.dtype in DTYPES else cross_entropy.differentiate_
    return cross_entropy.backward(hidden, *args, differentiate=differentiate, **kwargs)


def _forward_with_grads(hidden: Tensor, *args: Any, dtype: torch.dtype, **kwargs: Any) -> list[Tensor]:
    has_kernel = hidden.dtype in DTYPES and dtype == torch.float32
    make = gradients_ if has_kernel else cross_entropy.gradients_
    return cross_entropy.forward_with_grads(hidden, *args, dtype=dtype, make=make, **kwargs)


@cache
def register() -> torch.library.Library:
    """Let the operators on GPUs run the kernels, for the whole process."""
    library = torch.library.Library("zc", "IMPL")
    library.impl("linear_cross_entropy", _forward, "CUDA")
    library.impl("linear_cross_entropy_backward", _backward, "CUDA")
    library.impl("linear_cross_entropy_with_grads", _forward_with_grads, "CUDA")
    return library
