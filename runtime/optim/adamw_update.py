"""The AdamW update on flat memory: what a kernel gets, and the plain-torch reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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
        param, grad: one arena each, same layout. Without ``grad`` every update is given its own: gradient memory comes and
            goes, and must not be kept alive here.
        exp_avg, exp_avg_sq: flat state of the same dtype.
        max_exp_avg_sq: likewise, with ``amsgrad``.
        table: the pieces to update; starts are 256-byte aligned. Elements between logical parameters are zero in all
            tensors and may be updated along.
    """

    param: Tensor
    grad: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    table: tuple[Segment, ...]

    @cached_property
    def launch(self) -> Any:
        """The kernel's launch on these pieces; see ``update``."""
        from zcompile.runtime.kernels.adamw import Launch  # Triton is imported where it is used

        return Launch(self)

    @cached_property
    def _views(self) -> list[tuple[slice, Tensor, Tensor, Tensor, Tensor | None]]:
        """Pieces that are none larger than ``CHUNK_ELEMENTS``: where each lies in the arenas, and its views but the gradient."""
        views = []
        for segment in self.table:
            for offset in range(0, segment.numel, CHUNK_ELEMENTS):
                numel = min(CHUNK_ELEMENTS, segment.numel - offset)
                p = slice(segment.param_start + offset, segment.param_start + offset + numel)
                s = slice(segment.state_start + offset, segment.state_start + offset + numel)
                maxima = None if self.max_exp_avg_sq is None else self.max_exp_avg_sq[s]
                views.append((p, self.param[p], self.exp_avg[s], self.exp_avg_sq[s], maxima))
        return views

    def operands(self, grad: Tensor) -> Iterator[Operands]:
        """The pieces with gradients from ``grad``."""
        return ((param, grad[p], first, second, maxima) for p, param, first, second, maxima in self._views)

    @cached_property
    def _without_maxima(self) -> Segments:
        return self if self.max_exp_avg_sq is None else dataclasses.replace(self, max_exp_avg_sq=None)

    def __iter__(self) -> Iterator[Operands]:
        assert self.grad is not None, "the update gives the gradients"
        return self.operands(self.grad)

    def without_maxima(self) -> Segments:
        """The same memory for an update without ``amsgrad``."""
        return self._without_maxima


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

    @property
    def step_size(self) -> float:
        """The learning rate, corrected for the first moment's start at zero."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """What the root of the second moment is divided by, likewise."""
        return math.sqrt(1 - self.beta2**self.step)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers as the kernel takes them, computed in float64."""
        decay, weight1, weight2 = 1 - self.lr * self.weight_decay, 1 - self.beta1, 1 - self.beta2
        sign = -1.0 if self.maximize else 1.0
        return self.step_size, decay, weight1, self.beta2, weight2, self.eps, self.root_correction, sign


@dataclass(frozen=True)
class Scaling:
    """Numbers on the device, of one float32 element each, by which gradients are read; they are not written back.

    Attributes:
        clip_factor: gradients are multiplied by it.
        grad_scale: gradients are divided by it.
    """

    clip_factor: Tensor | None = None
    grad_scale: Tensor | None = None

    def apply(self, grad: Tensor) -> Tensor:
        """``grad`` scaled, in float32 or wider if it is scaled at all."""
        if self.clip_factor is None and self.grad_scale is None:
            return grad
        factor = torch.ones((), device=grad.device) if self.clip_factor is None else self.clip_factor.reshape(())
        if self.grad_scale is not None:
            factor = factor / self.grad_scale.reshape(())
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * factor


UNSCALED = Scaling()

#: dtypes that the kernel takes, for parameters and gradients
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def update(
    parts: Sequence[tuple[Segments, AdamWOptions]],
    scaling: Scaling = UNSCALED,
    copy_out: Tensor | None = None,
    grad: Tensor | None = None,
) -> None:
    """Update pieces of the same memory, each with its own options, in place.

    On CUDA one kernel for each part reads and writes everything once: 28 bytes for a float32 parameter, 30 with a bfloat16
    ``copy_out``. Elsewhere, and for other dtypes, plain torch operations do it. Nothing here waits for the device.

    Args:
        parts: pieces of the same five tensors.
        scaling: numbers that gradients are scaled by.
        copy_out: laid out like the parameters, of any dtype; gets the new values.
        grad: the gradient arena, where the pieces have none.
    """
    if not parts:
        return
    memory = parts[0][0]
    grad = memory.grad if grad is None else grad
    assert grad is not None, "gradients come with the pieces or with the update"
    if memory.param.is_cuda and memory.param.dtype in KERNEL_DTYPES and grad.dtype in KERNEL_DTYPES:
        for segments, options in parts:
            segments.launch.run(options, scaling, copy_out, grad)
        return
    for segments, options in parts:
        adamw_(segments.operands(grad), options, scaling)
        if copy_out is not None:
            for segment in segments.table:
                piece = slice(segment.param_start, segment.param_start + segment.numel)
                copy_out[piece].copy_(segments.param[piece])


def adamw_(pieces: Segments | Iterable[Operands], options: AdamWOptions, scaling: Scaling = UNSCALED) -> None:
    """Update parameters and moments in place; the operations and their order are those of ``torch.optim.AdamW``.

    Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2; the maxima are those of Reddi,
    Kale and Kumar, On the Convergence of Adam and Beyond (2018). A gradient of another dtype is cast.
    """
    step_size, root_correction = options.step_size, options.root_correction
    for param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq in pieces:
        grad = scaling.apply(grad).to(exp_avg.dtype)
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
