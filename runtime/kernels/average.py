"""The mean of what each rank sent, as a Triton kernel, beside its plain-torch reference."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

#: elements that one program averages, and its warps
BLOCK_ELEMENTS = 4096
NUM_WARPS = 8


@triton.jit
def _average_kernel(  # pragma: no cover - runs on the device
    out, received, stride, numel, factor, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program averages one block."""
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < numel
    total = tl.load(received + lanes, mask=mask).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(received + rank * stride + lanes, mask=mask).to(tl.float32)
    tl.store(out + lanes, (total * factor).to(out.dtype.element_ty), mask=mask)


def average_reference(out: Tensor, received: Sequence[Tensor], numel: int) -> None:
    """What ``average_`` computes."""
    wide = [_flat(source, numel).float() for source in received]
    total = wide[0].clone()
    for source in wide[1:]:
        total += source
    _flat(out, numel).copy_(total * (1.0 / len(received)))


def average_(out: Tensor, received: Sequence[Tensor], numel: int) -> None:
    """The mean of ``numel`` elements of each source, added up in order in float32 and rounded once to ``out``'s dtype.

    Reads and writes every element once and waits for nothing.

    Args:
        out: contiguous, float32, bfloat16 or float16; its memory from its first element on is written.
        received: likewise, all of one dtype, at equal distances in one storage; read from their first elements on.
        numel: elements.
    """
    first = received[0]
    stride = received[1].storage_offset() - first.storage_offset() if len(received) > 1 else 0
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        _average_kernel[(triton.cdiv(numel, BLOCK_ELEMENTS),)](
            out,
            first,
            stride,
            numel,
            1.0 / len(received),
            SIZE=len(received),
            BLOCK=BLOCK_ELEMENTS,
            num_warps=NUM_WARPS,
        )


def _flat(tensor: Tensor, numel: int) -> Tensor:
    return tensor.as_strided((numel,), (1,))
