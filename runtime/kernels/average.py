"""The mean of what each rank sent, of many tensors in one Triton kernel, beside its plain-torch reference."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zcompile.runtime.kernels.blocks import BLOCK_ELEMENTS, NUM_WARPS, launches


@triton.jit
def _average_block(  # pragma: no cover - runs on the device
    out, own, received, stride, offset, numel, factor,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of a tensor; ``MASKED`` when it reaches beyond its end. Unmasked accesses are 16 bytes wide."""
    lanes = offset + tl.arange(0, BLOCK)
    mask = (lanes < numel) if MASKED else None
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += tl.load(own + lanes, mask=mask).to(tl.float32)
        else:
            total += tl.load(received + lanes, mask=mask).to(tl.float32)
            received += stride
    tl.store(out + lanes, (total * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["starts", "numels"])
def _average_kernel(  # pragma: no cover - runs on the device
    outs, owns, received, strides, starts, numels, factor,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program averages one block of one tensor, which begins with block ``starts[i]``."""
    block = tl.program_id(0)
    out, own, others, stride, start, numel = outs[0], owns[0], received[0], strides[0], starts[0], numels[0]
    for i in tl.static_range(1, len(outs)):
        if block >= starts[i]:
            out, own, others, stride, start, numel = outs[i], owns[i], received[i], strides[i], starts[i], numels[i]
    offset = (block - start).to(tl.int64) * BLOCK
    if offset + BLOCK <= numel:
        _average_block(out, own, others, stride, offset, numel, factor, RANK, SIZE, BLOCK, False)
    else:
        _average_block(out, own, others, stride, offset, numel, factor, RANK, SIZE, BLOCK, True)


def average_reference(
    outs: Sequence[Tensor], owns: Sequence[Tensor], received: Sequence[Sequence[Tensor]], rank: int
) -> None:
    """What ``average_`` computes."""
    for out, own, *others in zip(outs, owns, *received, strict=True):
        total = torch.zeros(out.numel(), device=out.device)
        for source in (*others[:rank], own, *others[rank:]):
            total += source.reshape(-1).float()
        out.view(-1).copy_(total * (1.0 / (1 + len(others))))


def average_(outs: Sequence[Tensor], owns: Sequence[Tensor], received: Sequence[Sequence[Tensor]], rank: int) -> None:
    """The means of one piece of each rank, added up in the order of ranks in float32 and rounded once to each ``out``'s dtype.

    Reads and writes every element once and waits for nothing.

    Args:
        outs: contiguous, float32, bfloat16 or float16, each its own.
        owns: this rank's pieces: contiguous, of as many elements, of what the others sent.
        received: the other ranks' pieces in their order: likewise; those of one tensor at equal distances in one storage.
        rank: this rank.
    """
    pieces = received[0] if received else owns
    if len(received) > 1:
        strides = [b.storage_offset() - a.storage_offset() for a, b in zip(*received[:2], strict=True)]
    else:
        strides = [0] * len(outs)
    for launch in launches(outs, owns):
        _average_kernel[(launch.num_blocks,)](
            launch.of(outs),
            launch.of(owns),
            launch.of(pieces),
            launch.of(strides),
            launch.starts,
            launch.numels,
            1.0 / (1 + len(received)),
            RANK=rank,
            SIZE=1 + len(received),
            BLOCK=BLOCK_ELEMENTS,
            num_warps=NUM_WARPS,
        )
