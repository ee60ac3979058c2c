"""The AdamW update on flat memory: what a kernel gets, and the plain-torch reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

#: the reference works on this many elements at a time, which bounds its temporaries
CHUNK_ELEMENTS = 1 << 24

#: parameter, gradient, first moment, second moment, its maximum or None: same shape and dtype
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


class Segment(NamedTuple):
    """A contiguous piece of the flat memory, in elements. Parameters and gradients are laid out alike, state is denser."""

    param_start: int
    state_start: int
    numel: int


@dataclass(frozen=True, eq=False)
class Segments:
    """The flat memory that one update covers.

    Attributes:
        param, grad: one arena each, same layout, same dtype.
        exp_avg, exp_avg_sq: flat state of the same dtype.
        max_exp_avg_sq: likewise, with ``amsgrad``.
        table: the pieces to update; starts are 256-byte aligned. Elements between logical parameters are zero in all
            tensors and may be updated along.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    table: tuple[Segment, ...]

    @cached_property
    def device_table(self) -> Tensor:
        """``table`` as int64 ``[num_segments, 3]`` on the device of ``param``, for kernels."""
        return torch.tensor(self.table, dtype=torch.int64).reshape(-1, 3).to(self.param.device)

    @cached_property
    def operands(self) -> list[Operands]:
        """Views of the pieces, none larger than ``CHUNK_ELEMENTS``."""
        views: list[Operands] = []
        for segment in self.table:
            for offset in range(0, segment.numel, CHUNK_ELEMENTS):
                numel = min(CHUNK_ELEMENTS, segment.numel - offset)
                p = slice(segment.param_start + offset, segment.param_start + offset + numel)
                s = slice(segment.state_start + offset, segment.state_start + offset + numel)
                maxima = None if self.max_exp_avg_sq is None else self.max_exp_avg_sq[s]
                views.append((self.param[p], self.grad[p], self.exp_avg[s], self.exp_avg_sq[s], maxima))
        return views

    def __iter__(self) -> Iterator[Operands]:
        return iter(self.operands)

    def without_maxima(self) -> Segments:
        """The same memory for an update without ``amsgrad``."""
        return self if self.max_exp_avg_sq is None else dataclasses.replace(self, max_exp_avg_sq=None)


@dataclass(frozen=True)
class AdamWOptions:
    """The numbers of one update. ``step`` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float
    maximize: bool


def adamw_(pieces: Segments | Iterable[Operands], options: AdamWOptions) -> None:
    """Update parameters and moments in place; the operations and their order are those of ``torch.optim.AdamW``.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2; the maxima are those of Reddi,
    Kale and Kumar, On the Convergence of Adam and Beyond (2018).
    """
    step_size = options.lr / (1 - options.beta1**options.step)
    root_correction = math.sqrt(1 - options.beta2**options.step)
    for param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq in pieces:
        if options.maximize:
            grad = -grad
        param.mul_(1 - options.lr * options.weight_decay)
        exp_avg.lerp_(grad, 1 - options.beta1)
        exp_avg_sq.mul_(options.beta2).addcmul_(grad, grad, value=1 - options.beta2)
        if max_exp_avg_sq is not None:
            torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
            second = max_exp_avg_sq
        else:
            second = exp_avg_sq
        denominator = second.sqrt().div_(root_correction).add_(options.eps)
        param.addcdiv_(exp_avg, denominator, value=-step_size)
