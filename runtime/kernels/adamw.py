"""The AdamW update over flat memory as one Triton kernel. The reference is ``zcompile.runtime.adamw_update.adamw_``."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from zcompile.runtime.adamw_update import AdamWOptions, Scaling, Segments

#: elements that one program updates, and its warps
BLOCK_ELEMENTS = 1024
NUM_WARPS = 4

#: numbers that the kernel reads for each segment
NUM_OPTIONS = 8


@triton.jit
def _update(  # pragma: no cover - runs on the device
    param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor, numbers,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One block; ``MASKED`` when it reaches beyond its segment. Unmasked accesses are 16 bytes wide."""
    step_size = tl.load(numbers)
    decay = tl.load(numbers + 1)
    weight1 = tl.load(numbers + 2)
    beta2 = tl.load(numbers + 3)
    weight2 = tl.load(numbers + 4)
    eps = tl.load(numbers + 5)
    root_correction = tl.load(numbers + 6)
    lanes = tl.arange(0, BLOCK)
    mask = (lanes < count) if MASKED else None
    p = tl.load(param + param_start + lanes, mask=mask).to(tl.float32)
    g = tl.load(grad + param_start + lanes, mask=mask).to(tl.float32)
    m = tl.load(exp_avg + state_start + lanes, mask=mask).to(tl.float32)
    v = tl.load(exp_avg_sq + state_start + lanes, mask=mask).to(tl.float32)
    g *= factor
    p *= decay
    m += weight1 * (g - m)
    v = v * beta2 + weight2 * g * g
    second = v
    if AMSGRAD:
        highest = tl.load(maxima + state_start + lanes, mask=mask).to(tl.float32)
        second = tl.maximum(highest, v, propagate_nan=tl.PropagateNan.ALL)
        tl.store(maxima + state_start + lanes, second.to(maxima.dtype.element_ty), mask=mask)
    p -= step_size * (m / (tl.sqrt(second) / root_correction + eps))
    tl.store(param + param_start + lanes, p.to(param.dtype.element_ty), mask=mask)
    tl.store(exp_avg + state_start + lanes, m.to(exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + state_start + lanes, v.to(exp_avg_sq.dtype.element_ty), mask=mask)
    if COPY:
        tl.store(copy_out + param_start + lanes, p.to(copy_out.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(  # pragma: no cover - runs on the device
    param, grad, exp_avg, exp_avg_sq, maxima, copy_out, clip_factor, grad_scale, table, block_segment, numbers,
    BLOCK: tl.constexpr, NUM_OPTIONS: tl.constexpr, CLIP: tl.constexpr, SCALE: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One program updates one block of one segment; ``table`` rows: first block, param start, state start, elements."""
    block = tl.program_id(0)
    segment = tl.load(block_segment + block)
    row = table + segment * 4
    offset = (block - tl.load(row)) * BLOCK  # int64, as the table is
    param_start = tl.multiple_of(tl.load(row + 1) + offset, 16)
    state_start = tl.multiple_of(tl.load(row + 2) + offset, 16)
    count = tl.load(row + 3) - offset
    numbers += segment * NUM_OPTIONS
    factor = tl.load(numbers + 7)
    if CLIP:
        factor *= tl.load(clip_factor)
    if SCALE:
        factor /= tl.load(grad_scale)
    if count >= BLOCK:
        _update(
            param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor, numbers,
            BLOCK, False, AMSGRAD, COPY,
        )  # fmt: skip
    else:
        _update(
            param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor, numbers,
            BLOCK, True, AMSGRAD, COPY,
        )  # fmt: skip


@dataclass(eq=False)
class Launch:
    """Everything about an update that stays the same from step to step: which memory, cut into blocks.

    The numbers of a step lie in device memory too, so ``run`` alone may be captured into a CUDA graph: ``set_options``
    before a replay changes what the replay does.

    Attributes:
        parts: pieces of the same tensors, each with options of its own.
        block: elements for each program, a power of two.
        num_warps: warps for each program.
    """

    parts: tuple[Segments, ...]
    block: int = BLOCK_ELEMENTS
    num_warps: int = NUM_WARPS
    _options: Tensor | None = field(default=None, init=False)

    @property
    def _memory(self) -> Segments:
        return self.parts[0]

    @cached_property
    def table(self) -> Tensor:
        """int64 ``[num_segments, 4]``: first block, param start, state start, elements."""
        rows, first = [], 0
        for segment in (s for part in self.parts for s in part.table):
            rows.append((first, *segment))
            first += -(-segment.numel // self.block)
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(self._memory.param.device)

    @cached_property
    def block_segment(self) -> Tensor:
        """int32 ``[num_blocks]``: the segment of each block."""
        counts = [-(-s.numel // self.block) for part in self.parts for s in part.table]
        segments = torch.arange(len(counts), dtype=torch.int32)
        return torch.repeat_interleave(segments, torch.tensor(counts, dtype=torch.int64)).to(self._memory.param.device)

    def set_options(self, options: Sequence[AdamWOptions]) -> None:
        """Write the numbers of the next update, one entry for each part. Waits for nothing."""
        rows = [_row(o) for part, o in zip(self.parts, options, strict=True) for _ in part.table]
        device = self._memory.param.device
        values = torch.tensor(rows, dtype=torch.float32, pin_memory=device.type == "cuda")
        # torch's pinned allocator gives this memory to nobody else until the copy is done
        target = self._options
        if target is None:
            target = self._options = torch.empty(len(rows), NUM_OPTIONS, device=device)
        target.copy_(values.view(-1, NUM_OPTIONS), non_blocking=True)

    def run(self, scaling: Scaling, copy_out: Tensor | None = None, grad: Tensor | None = None) -> None:
        """Launch the update with the numbers written last, and the gradients in ``grad`` or else in the parts' own arena."""
        memory, options, num_blocks = self._memory, self._options, self.block_segment.numel()
        assert options is not None, "options are set before a launch"
        if num_blocks == 0:
            return
        with _on(memory.param.device):
            _adamw_kernel[(num_blocks,)](
                memory.param,
                memory.grad if grad is None else grad,
                memory.exp_avg,
                memory.exp_avg_sq,
                memory.exp_avg_sq if memory.max_exp_avg_sq is None else memory.max_exp_avg_sq,
                memory.param if copy_out is None else copy_out,
                options if scaling.clip_factor is None else scaling.clip_factor,
                options if scaling.grad_scale is None else scaling.grad_scale,
                self.table,
                self.block_segment,
                options,
                BLOCK=self.block,
                NUM_OPTIONS=NUM_OPTIONS,
                CLIP=scaling.clip_factor is not None,
                SCALE=scaling.grad_scale is not None,
                AMSGRAD=memory.max_exp_avg_sq is not None,
                COPY=copy_out is not None,
                num_warps=self.num_warps,
            )


def _row(options: AdamWOptions) -> tuple[float, ...]:
    """The numbers as the kernel reads them, computed in float64."""
    return (
        options.step_size,
        1 - options.lr * options.weight_decay,
        1 - options.beta1,
        options.beta2,
        1 - options.beta2,
        options.eps,
        options.root_correction,
        -1.0 if options.maximize else 1.0,
    )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
