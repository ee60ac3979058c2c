"""The cross-entropy of a linear layer, piece by piece, so that all its logits never exist: in plain torch, for any device.

Two loops of matmuls. What is done with a piece of logits is a parameter of each: the runtime has kernels for it on GPUs.

Forward goes over rows. A row's log-sum-exp needs all its logits, and rows need nothing of each other, so that nothing is added
up over pieces. Backward goes over the columns, whose gradients need all rows: the gradient of the weight, the largest result,
is written once, by matmuls over as many rows as without pieces. The gradient of the hidden states alone is a sum over pieces,
and that is taken in float32 at least. (Over rows it would be the gradient of the weight that is added up, in
``vocabulary * hidden`` numbers of float32 instead of ``rows * hidden``.) Computing the gradients in forward already, which saves
the second matmul of logits, would save a whole gradient of the weight from forward to backward, compute without the tangent,
which underflows in float16, and do it where no backward follows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: ``reduce(logits, labels, losses, lse)`` writes the losses and the log-sum-exp of rows
Reduce = Callable[[Tensor, Tensor, Tensor, Tensor], None]
#: ``differentiate(logits, labels, lse, grad, first)`` makes logits their gradients, in place; ``first`` is their first column
Differentiate = Callable[[Tensor, Tensor, Tensor, Tensor, int], None]


def reduce_rows(logits: Tensor, labels: Tensor, losses: Tensor, lse: Tensor) -> None:
    """Write ``lse = log(sum(exp(logits)))`` and ``losses = lse - logits[labels]`` of every row, computed in their dtype.

    Args:
        logits: [rows, columns].
        labels: [rows], int64, in range.
        losses: [rows], written.
        lse: [rows], written.
    """
    wide = logits.to(losses.dtype)
    largest = wide.amax(1, keepdim=True)
    log_sum = (wide - largest).exp().sum(1, keepdim=True).log()
    lse.copy_((largest + log_sum).squeeze(1))
    losses.copy_((log_sum - (wide.gather(1, labels.unsqueeze(1)) - largest)).squeeze(1))


def differentiate_(logits: Tensor, labels: Tensor, lse: Tensor, grad: Tensor, first: int) -> None:
    """Make logits the gradients of the losses with respect to them: ``(exp(logits - lse) - [column is label]) * grad``.

    Args:
        logits: [rows, columns], columns ``first`` and on of all; written.
        labels: [rows], int64.
        lse: [rows], in the dtype to compute in.
        grad: [rows], the gradients of the losses, in that dtype.
        first: the first column.
    """
    grad = grad.unsqueeze(1)
    columns = torch.arange(first, first + logits.shape[1], device=logits.device)
    result = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_().mul_(grad)
    result -= torch.where(columns == labels.unsqueeze(1), grad, 0)
    logits.copy_(result)


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
    memory = hidden.new_empty(min(rows, len(hidden)) * len(weight))
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
    memory = hidden.new_empty(len(hidden) * min(columns, len(weight)))
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


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor) -> Tensor:
    """Logits in the first part of ``memory``."""
    out = memory[: len(hidden) * len(weight)].view(len(hidden), len(weight))
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
