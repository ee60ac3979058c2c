"""The cross-entropy of a linear layer, piece by piece, so that all its logits never exist: in plain torch, for any device.

Loops of matmuls. What is done with a piece of logits is a parameter of each: the runtime has kernels for it on GPUs.

Where the weight that each row's loss has in what is differentiated is known in forward, one loop over rows does it all with three
products: the logits of a piece become its losses, then its gradients in place, and these the gradients of hidden states and
weight. The latter is a sum over pieces, a few of which may be added up in 16 bits: rounding after each piece made the error of
the gradient, beside that of eager bfloat16, 1.2 times as large with two pieces, 1.4 with three, 1.6 with four, 2.1 with eight and
3.0 with sixteen; added up in float32 it stays what it is (``benchmarks/loss.py --sums``).

Else there are two loops, and a fourth product. Forward goes over rows. A row's log-sum-exp needs all its logits, and rows need
nothing of each other, so that nothing is added up over pieces. Backward goes over the columns, whose gradients need all rows: the
gradient of the weight, the largest result, is written once, by matmuls over as many rows as without pieces. The gradient of the
hidden states alone is a sum over pieces, and that is taken in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: ``reduce(logits, labels, losses, lse)`` writes the losses and the log-sum-exp of rows
Reduce = Callable[[Tensor, Tensor, Tensor, Tensor], None]
#: ``differentiate(logits, labels, lse, grad, first)`` makes logits their gradients, in place; ``first`` is their first column
Differentiate = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]
#: ``make(logits, labels, losses, weights)`` writes the losses of rows, and makes logits their gradients times weights, in place
Make = Callable[[Tensor, Tensor, Tensor, Tensor], None]


#: at most so many numbers at a time are computed beside a piece of logits, where there is no kernel
_BLOCK = 1 << 20


def row_stride(columns: int) -> int:
    """Numbers from one row of a piece to the next, a multiple of 16: of 16 bytes for matmuls, of 16 numbers for wide loads."""
    return -(-columns // 16) * 16


def reduce_rows(logits: Tensor, labels: Tensor, losses: Tensor, lse: Tensor) -> None:
    """Write ``lse = log(sum(exp(logits)))`` and ``losses = lse - logits[labels]`` of every row, computed in their dtype.

    Args:
        logits: [rows, columns].
        labels: [rows], int64, in range.
        losses: [rows], written.
        lse: [rows], written.
    """
    for part in _blocks(logits):
        wide = logits[part].to(losses.dtype)
        largest = wide.amax(1, keepdim=True)
        log_sum = (wide - largest).exp_().sum(1, keepdim=True).log()
        lse[part] = (largest + log_sum).squeeze(1)
        losses[part] = (log_sum - (wide.gather(1, labels[part].unsqueeze(1)) - largest)).squeeze(1)


def differentiate_(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int) -> None:
    """Make logits the gradients of the losses with respect to them: ``(exp(logits - lse) - [column is label]) * grad``.

    Args:
        logits: [rows, columns], columns ``first`` and on of all; written.
        labels: [rows], int64.
        lse: [rows], in the dtype to compute in.
        grad: [rows], the gradients of the losses, in that dtype.
        first: the first column.
    """
    places = labels - first
    of_label = torch.where((places >= 0) & (places < logits.shape[1]), -grad, 0)
    places = places.clamp(0, logits.shape[1] - 1)
    for part in _blocks(logits):
        wide = logits[part].to(lse.dtype)  # the logits themselves, if they are as wide
        wide.sub_(lse[part].unsqueeze(1)).exp_().mul_(grad[part].unsqueeze(1))
        wide.scatter_add_(1, places[part].unsqueeze(1), of_label[part].unsqueeze(1))
        if wide.dtype != logits.dtype:
            logits[part] = wide


def gradients_(logits: Tensor, labels: Tensor, losses: Tensor, weights: Tensor) -> None:
    """``reduce_rows``, then ``differentiate_`` with weights of rows for the gradients of their losses.

    Args:
        logits: [rows, columns], written.
        labels: [rows], int64, in range.
        losses: [rows], in the dtype to compute in, written.
        weights: [rows], in that dtype.
    """
    lse = torch.empty_like(losses)
    reduce_rows(logits, labels, losses, lse)
    differentiate_(logits, labels, lse, weights, 0)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows."""
    rows = max(_BLOCK // max(logits.shape[1], 1), 1)
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    reduce: Reduce = reduce_rows,
) -> tuple[Tensor, Tensor]:
    """``zc.linear_cross_entropy``: see ``zcompile.ops``."""
    losses = hidden.new_empty(hidden.shape[0], dtype=dtype)
    lse = torch.empty_like(losses)
    labels = labels.contiguous()
    memory = _memory(hidden, min(rows, len(hidden)), len(weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = _logits(hidden[part], weight, bias, memory)
        reduce(logits, labels[part], losses[part], lse[part])
    return losses, lse


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    columns: int,
    wanted: list[bool],
    differentiate: Differentiate = differentiate_,
) -> list[Tensor]:
    """``zc.linear_cross_entropy_backward``: see ``zcompile.ops``."""
    labels, lse, grad = labels.contiguous(), lse.contiguous(), grad.contiguous()
    wide = torch.promote_types(hidden.dtype, torch.float32)
    of_hidden = hidden.new_empty(hidden.shape if wanted[0] else 0, dtype=wide)
    of_weight = weight.new_empty(weight.shape if wanted[1] else 0)
    of_bias = weight.new_empty(weight.shape[0] if wanted[2] else 0)
    memory = _memory(hidden, len(hidden), min(columns, len(weight)))
    for first in range(0, len(weight), columns):
        part = slice(first, first + columns)
        logits = _logits(hidden, weight[part], None if bias is None else bias[part], memory)
        differentiate(logits, labels, lse, grad, first)
        if wanted[0]:
            _add_product(of_hidden, logits, weight[part], beta=int(first > 0))
        if wanted[1]:
            torch.mm(logits.t(), hidden, out=of_weight[part])
        if wanted[2]:
            torch.sum(logits, 0, out=of_bias[part])
    results = (of_hidden.to(hidden.dtype) if wanted[0] else of_hidden, of_weight, of_bias)
    return [result for result, is_wanted in zip(results, wanted, strict=True) if is_wanted]


def forward_with_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    total: torch.dtype,
    wanted: list[bool],
    make: Make = gradients_,
) -> list[Tensor]:
    """``zc.linear_cross_entropy_with_grads``: see ``zcompile.ops``."""
    labels, row_weights = labels.contiguous(), row_weights.contiguous()
    losses = hidden.new_empty(len(hidden), dtype=dtype)
    of_hidden = hidden.new_empty(hidden.shape if wanted[0] else 0)
    of_weight = weight.new_empty(weight.shape if wanted[1] else 0, dtype=total)
    of_bias = weight.new_zeros(len(weight) if wanted[2] else 0, dtype=torch.promote_types(weight.dtype, torch.float32))
    if len(hidden) == 0:
        of_weight.zero_()
    memory = _memory(hidden, min(rows, len(hidden)), len(weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = _logits(hidden[part], weight, bias, memory)
        make(logits, labels[part], losses[part], row_weights[part])
        if wanted[0]:
            torch.mm(logits, weight, out=of_hidden[part])
        if wanted[1]:
            _add_product(of_weight, logits.t(), hidden[part], beta=int(start > 0))
        if wanted[2]:
            of_bias += logits.sum(0, dtype=of_bias.dtype)
        del logits
    del memory  # before the gradient of the weight exists twice
    found = (of_hidden, of_weight.to(weight.dtype), of_bias.to(weight.dtype))
    return [losses, *(result for result, is_wanted in zip(found, wanted, strict=True) if is_wanted)]


def _memory(hidden: Tensor, rows: int, columns: int) -> Tensor:
    """Memory for a piece of logits."""
    return hidden.new_empty(rows * row_stride(columns))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    """Logits in the first part of ``memory``."""
    rows, columns = len(hidden), len(weight)
    stride = row_stride(columns)
    out = memory[: rows * stride].view(rows, stride)[:, :columns]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, beta: int) -> None:
    """``total = beta * total + a @ b``, added up in the dtype of ``total``, which may be wider."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=beta, out=total)
