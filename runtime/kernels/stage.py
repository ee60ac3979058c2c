"""Copies tensors to two places each, as one Triton kernel, beside its plain-torch reference."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from zcompile.runtime.kernels.blocks import BLOCK_ELEMENTS, NUM_WARPS, launches


@triton.jit
def _copy_block(source, first, second, offset, numel, BLOCK: tl.constexpr, MASKED: tl.constexpr):  # pragma: no cover
    """One block of a tensor; ``MASKED`` when it reaches beyond its end. Unmasked accesses are 16 bytes wide."""
    lanes = offset + tl.arange(0, BLOCK)
    mask = (lanes < numel) if MASKED else None
    value = tl.load(source + lanes, mask=mask).to(first.dtype.element_ty)
    tl.store(first + lanes, value, mask=mask)
    tl.store(second + lanes, value, mask=mask)


@triton.jit(do_not_specialize=["starts", "numels"])
def _stage_kernel(sources, firsts, seconds, starts, numels, BLOCK: tl.constexpr):  # pragma: no cover - on the device
    """One program copies one block of one tensor, which begins with block ``starts[i]``."""
    block = tl.program_id(0)
    source, first, second, start, numel = sources[0], firsts[0], seconds[0], starts[0], numels[0]
    for i in tl.static_range(1, len(sources)):
        if block >= starts[i]:
            source, first, second, start, numel = sources[i], firsts[i], seconds[i], starts[i], numels[i]
    offset = (block - start).to(tl.int64) * BLOCK
    if offset + BLOCK <= numel:
        _copy_block(source, first, second, offset, numel, BLOCK, False)
    else:
        _copy_block(source, first, second, offset, numel, BLOCK, True)


def stage_reference(sources: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    """What ``stage_`` computes."""
    for source, first, second in zip(sources, firsts, seconds, strict=True):
        first.copy_(source.view(first.shape))
        second.copy_(source.view(second.shape))


def stage_(sources: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    """Copy each of ``sources`` to two tensors of as many elements and one dtype, to which it is rounded once; all contiguous.

    Reads and writes every element once and waits for nothing. float32, bfloat16 and float16; every tensor may have its own.
    """
    for launch in launches(sources, firsts):
        _stage_kernel[(launch.num_blocks,)](
            launch.of(sources),
            launch.of(firsts),
            launch.of(seconds),
            launch.starts,
            launch.numels,
            BLOCK=BLOCK_ELEMENTS,
            num_warps=NUM_WARPS,
        )
