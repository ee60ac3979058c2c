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

#: elements that one program averages, and its warps: short programs leave most of the device to the computation beside them
BLOCK_ELEMENTS = 1024
NUM_WARPS = 4


@triton.jit
def _average_kernel(  # pragma: no cover - runs on the device
    out, own, received, stride, numel, factor, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program averages one block."""
    lanes = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own + lanes, mask=mask).to(tl.float32)
        else:
            total += tl.load(received + (rank - (rank > RANK)) * stride + lanes, mask=mask).to(tl.float32)
    tl.store(out + lanes, (total * factor).to(out.dtype.element_ty), mask=mask)


def average_reference(out: Tensor, own: Tensor, received: Sequence[Tensor], rank: int) -> None:
    """What ``average_`` computes."""
    total = torch.zeros(out.numel(), device=out.device)
    for source in (*received[:rank], own, *received[rank:]):
        total += source.reshape(-1).float()
    out.view(-1).copy_(total * (1.0 / (1 + len(received))))


def average_(out: Tensor, own: Tensor, received: Sequence[Tensor], rank: int) -> None:
    """The mean of one piece of each rank, added up in the order of ranks in float32 and rounded once to ``out``'s dtype.

    Reads and writes every element once and waits for nothing.

    Args:
        out: contiguous, float32, bfloat16 or float16.
        own: the piece of this rank: contiguous, of as many elements.
        received: the other ranks' pieces in their order: likewise, all of one dtype, at equal distances in one storage.
        rank: this rank.
    """
    first = received[0] if received else own
    stride = received[1].storage_offset() - first.storage_offset() if len(received) > 1 else 0
    numel = out.numel()
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        _average_kernel[(triton.cdiv(numel, BLOCK_ELEMENTS),)](
            out,
            own,
            first,
            stride,
            numel,
            1.0 / (1 + len(received)),
            RANK=rank,
            SIZE=1 + len(received),
            BLOCK=BLOCK_ELEMENTS,
            num_warps=NUM_WARPS,
        )
