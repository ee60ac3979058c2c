"""Copies one tensor to two places, as a Triton kernel, beside its plain-torch reference."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

#: elements that one program copies, and its warps: short programs leave most of the device to the computation beside them
BLOCK_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def _stage_kernel(source, first, second, numel, BLOCK: tl.constexpr):  # pragma: no cover - runs on the device
    """One program copies one block."""
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < numel
    value = tl.load(source + lanes, mask=mask).to(first.dtype.element_ty)
    tl.store(first + lanes, value, mask=mask)
    tl.store(second + lanes, value, mask=mask)


def stage_reference(source: Tensor, first: Tensor, second: Tensor) -> None:
    """What ``stage_`` computes."""
    first.copy_(source.view(first.shape))
    second.copy_(source.view(second.shape))


def stage_(source: Tensor, first: Tensor, second: Tensor) -> None:
    """Copy ``source`` to two tensors of as many elements and one dtype, to which it is rounded once; all contiguous.

    Reads and writes every element once and waits for nothing. float32, bfloat16 and float16.
    """
    numel = source.numel()
    with torch.cuda.device(source.device) if source.is_cuda else contextlib.nullcontext():
        _stage_kernel[(triton.cdiv(numel, BLOCK_ELEMENTS),)](
            source, first, second, numel, BLOCK=BLOCK_ELEMENTS, num_warps=NUM_WARPS
        )
