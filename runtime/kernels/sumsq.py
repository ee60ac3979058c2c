"""Sum of squares and finite check of flat memory in one pass, as Triton kernels, beside their plain-torch reference."""
# Triton's own types do not describe how kernels are launched or what they compute with.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: elements that one program reads at a time, and its warps
BLOCK_ELEMENTS = 4096
NUM_WARPS = 8

#: most programs for one tensor: a few on each multiprocessor; the number is part of the result's bits
MAX_PROGRAMS = 1024


class SumOfSquares(NamedTuple):
    """Both without dimensions, on the device. ``total`` is float64; ``finite`` is a bool."""

    total: Tensor
    finite: Tensor


def sum_of_squares_reference(pieces: Sequence[Tensor]) -> SumOfSquares:
    """What ``sum_of_squares`` computes, in float64."""
    assert pieces, "there is something to add"
    total = torch.stack([piece.double().square().sum() for piece in pieces]).sum()
    return SumOfSquares(total, torch.stack([piece.isfinite().all() for piece in pieces]).all())


def sum_of_squares(pieces: Sequence[Tensor]) -> SumOfSquares:
    """The sum of the squares of all elements, and whether all are finite.

    Reads every element once and waits for nothing. Adds in float32 within a program and in float64 across programs, in an
    order that depends on sizes only, so equal inputs give equal bits. Infinity and NaN propagate to the total; a total
    that overflowed has ``finite`` True.

    Args:
        pieces: contiguous tensors of float32, bfloat16 or float16 on one device, at least one.
    """
    assert pieces, "there is something to add"
    device = pieces[0].device
    grids = [min(triton.cdiv(piece.numel(), BLOCK_ELEMENTS), MAX_PROGRAMS) for piece in pieces]
    num_programs = sum(grids)
    partial = torch.empty(max(num_programs, 1), dtype=torch.float32, device=device)
    bad = torch.empty(max(num_programs, 1), dtype=torch.int32, device=device)
    total = torch.empty((), dtype=torch.float64, device=device)
    finite = torch.empty((), dtype=torch.bool, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        first = 0
        for piece, grid in zip(pieces, grids, strict=True):
            if grid:
                blocks = triton.cdiv(triton.cdiv(piece.numel(), BLOCK_ELEMENTS), grid)
                _partial_kernel[(grid,)](
                    piece.view(-1),
                    partial[first:],
                    bad[first:],
                    piece.numel(),
                    NUM_BLOCKS=blocks,
                    BLOCK=BLOCK_ELEMENTS,
                    num_warps=NUM_WARPS,
                )
                first += grid
        _total_kernel[(1,)](
            partial,
            bad,
            total,
            finite.view(torch.uint8),
            num_programs,
            NUM_ROUNDS=triton.cdiv(num_programs, 1024),
            BLOCK=1024,
            num_warps=4,
        )
    return SumOfSquares(total, finite)


@triton.jit
def _partial_kernel(
    memory, partial, bad, numel, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the device
    """Each program adds ``NUM_BLOCKS`` neighbouring blocks, lane by lane."""
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    start = program.to(tl.int64) * NUM_BLOCKS * BLOCK
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for block in range(NUM_BLOCKS):
        offsets = start + block * BLOCK + lanes
        x = tl.load(memory + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
        sums += x * x
        wrong |= tl.where(tl.abs(x) < float("inf"), 0, 1)
    tl.store(partial + program, tl.sum(sums, axis=0))
    tl.store(bad + program, tl.max(wrong, axis=0))


@triton.jit
def _total_kernel(
    partial, bad, total, finite, num_programs, NUM_ROUNDS: tl.constexpr, BLOCK: tl.constexpr
):  # pragma: no cover - runs on the device
    """One program adds all partial sums in float64."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    wrong = tl.zeros((BLOCK,), dtype=tl.int32)
    for number in range(NUM_ROUNDS):
        programs = number * BLOCK + lanes
        sums += tl.load(partial + programs, mask=programs < num_programs, other=0.0).to(tl.float64)
        wrong |= tl.load(bad + programs, mask=programs < num_programs, other=0)
    tl.store(total, tl.sum(sums, axis=0))
    tl.store(finite, (1 - tl.max(wrong, axis=0)).to(tl.uint8))
