"""The AdamW update over flat memory as one Triton kernel. The reference is ``zcompile.runtime.optim.adamw_update.adamw_``."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from zcompile.runtime.optim.adamw_update import AdamWOptions, Scaling, Segments

#: elements that one program updates, and its warps
BLOCK_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def _update(  # pragma: no cover - runs on the device
    param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor,
    step_size, decay, weight1, beta2, weight2, eps, root_correction,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One block; ``MASKED`` when it reaches beyond its segment. Unmasked accesses are 16 bytes wide."""
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
    param, grad, exp_avg, exp_avg_sq, maxima, copy_out, clip_factor, grad_scale, table, block_segment,
    step_size, decay, weight1, beta2, weight2, eps, root_correction, sign,
    BLOCK: tl.constexpr, CLIP: tl.constexpr, SCALE: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """One program updates one block of one segment; ``table`` rows: first block, param start, state start, elements."""
    block = tl.program_id(0)
    segment = tl.load(block_segment + block)
    row = table + segment * 4
    offset = (block - tl.load(row)) * BLOCK  # int64, as the table is
    param_start = tl.multiple_of(tl.load(row + 1) + offset, 16)
    state_start = tl.multiple_of(tl.load(row + 2) + offset, 16)
    count = tl.load(row + 3) - offset
    factor = sign
    if CLIP:
        factor *= tl.load(clip_factor)
    if SCALE:
        factor /= tl.load(grad_scale)
    if count >= BLOCK:
        _update(
            param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor,
            step_size, decay, weight1, beta2, weight2, eps, root_correction,
            BLOCK, False, AMSGRAD, COPY,
        )  # fmt: skip
    else:
        _update(
            param, grad, exp_avg, exp_avg_sq, maxima, copy_out, param_start, state_start, count, factor,
            step_size, decay, weight1, beta2, weight2, eps, root_correction,
            BLOCK, True, AMSGRAD, COPY,
        )  # fmt: skip


@dataclass(eq=False)
class Launch:
    """Everything about an update that stays the same from step to step: which memory, cut into blocks.

    The numbers of a step are arguments of the kernel, so that nothing has to be copied to the device before it.

    Attributes:
        segments: the pieces to update.
        block: elements for each program, a power of two.
        num_warps: warps for each program.
    """

    segments: Segments
    block: int = BLOCK_ELEMENTS
    num_warps: int = NUM_WARPS

    @cached_property
    def table(self) -> Tensor:
        """int64 ``[num_segments, 4]``: first block, param start, state start, elements."""
        rows, first = [], 0
        for segment in self.segments.table:
            rows.append((first, *segment))
            first += -(-segment.numel // self.block)
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(self.segments.param.device)

    @cached_property
    def block_segment(self) -> Tensor:
        """int32 ``[num_blocks]``: the segment of each block."""
        counts = [-(-segment.numel // self.block) for segment in self.segments.table]
        segments = torch.arange(len(counts), dtype=torch.int32)
        counted = torch.repeat_interleave(segments, torch.tensor(counts, dtype=torch.int64))
        return counted.to(self.segments.param.device)

    def run(
        self, options: AdamWOptions, scaling: Scaling, copy_out: Tensor | None = None, grad: Tensor | None = None
    ) -> None:
        """Launch the update with these numbers, and the gradients in ``grad`` or else in the pieces' own arena."""
        memory, num_blocks = self.segments, self.block_segment.numel()
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
                memory.param if scaling.clip_factor is None else scaling.clip_factor,
                memory.param if scaling.grad_scale is None else scaling.grad_scale,
                self.table,
                self.block_segment,
                *options.numbers,
                BLOCK=self.block,
                CLIP=scaling.clip_factor is not None,
                SCALE=scaling.grad_scale is not None,
                AMSGRAD=memory.max_exp_avg_sq is not None,
                COPY=copy_out is not None,
                num_warps=self.num_warps,
            )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
