"""What kernels must do, on whatever device the ``device`` fixture names: run by test_kernels.py in Triton's interpreter
and by tests/gpu on a GPU. Not collected by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from zcompile import cross_entropy
from zcompile.runtime.kernels import cross_entropy as cross_entropy_kernels
from zcompile.runtime.kernels.adamw import Launch
from zcompile.runtime.kernels.average import average_, average_reference
from zcompile.runtime.kernels.stage import stage_, stage_reference
from zcompile.runtime.kernels.sumsq import BLOCK_ELEMENTS, sum_of_squares, sum_of_squares_reference
from zcompile.runtime.optim import adamw_update
from zcompile.runtime.optim.adamw_update import AdamWOptions, Scaling, Segment, Segments, adamw_

OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3.0, maximize=False)
OTHER = AdamWOptions(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.0, step=1.0, maximize=True)
TOLERANCE = {torch.float32: (2e-6, 2e-7), torch.bfloat16: (2e-2, 2e-3), torch.float16: (3e-3, 1e-3)}
MIXES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


#: kernels with a loop to a number that is no constant
loops = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    and triton.__version__ < "3.7"
    and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 makes a number of an array, which NumPy refuses since 2.4",
)


def memory(
    device: torch.device,
    table: tuple[Segment, ...],
    *,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype = torch.float32,
    amsgrad: bool = False,
    seed: int = 0,
) -> Segments:
    """Random memory, as it is in the middle of a training run, with some room behind the last segment."""
    generator = torch.Generator().manual_seed(seed)
    size = max(s.param_start + s.numel for s in table) + 64
    state_size = max(s.state_start + s.numel for s in table) + 64

    def draw(numel: int, kind: torch.dtype) -> Tensor:
        return torch.randn(numel, generator=generator).to(kind).to(device)

    squares = draw(state_size, dtype).square()
    maxima = (squares + draw(state_size, dtype).abs() * 0.1) if amsgrad else None
    return Segments(draw(size, dtype), draw(size, grad_dtype), draw(state_size, dtype), squares, maxima, table)


def with_table(segments: Segments, *tables: tuple[Segment, ...]) -> tuple[Segments, ...]:
    """The same memory, in parts."""
    return tuple(
        Segments(segments.param, segments.grad, segments.exp_avg, segments.exp_avg_sq, segments.max_exp_avg_sq, table)
        for table in tables
    )


def expected(segments: Segments, parts: list[tuple[tuple[Segment, ...], AdamWOptions]], scaling: Scaling) -> Segments:
    """The reference, in float64 with one rounding at the end."""

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.double()

    tensors = (segments.param, segments.grad, segments.exp_avg, segments.exp_avg_sq, segments.max_exp_avg_sq)
    result = Segments(*[wide(t) for t in tensors], segments.table)  # type: ignore[arg-type]
    for (part,), options in zip([with_table(result, table) for table, _ in parts], [o for _, o in parts], strict=True):
        adamw_(part, options, scaling)
    return result


def device_rounds(tensor: Tensor) -> bool:
    return tensor.is_cuda


def check(
    segments: Segments,
    parts: list[tuple[tuple[Segment, ...], AdamWOptions]],
    scaling: Scaling = adamw_update.UNSCALED,
    copy_dtype: torch.dtype | None = None,
    block: int = 256,
) -> None:
    """Launch the kernel and compare all tensors, also outside the segments, where nothing may change."""
    want = expected(segments, parts, scaling)
    grad = segments.grad.clone()
    copy_out = None if copy_dtype is None else torch.full_like(segments.param, 7.0, dtype=copy_dtype)
    for part, (_, options) in zip(with_table(segments, *[table for table, _ in parts]), parts, strict=True):
        Launch(part, block=block).run(options, scaling, copy_out)
    relative, absolute = TOLERANCE[segments.param.dtype]
    for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        got, reference = getattr(segments, name), getattr(want, name)
        if got is not None:
            torch.testing.assert_close(
                got.double(), reference, rtol=relative, atol=absolute, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert torch.equal(segments.grad, grad), "gradients are only read"
    if copy_out is not None:
        untouched = torch.ones_like(copy_out, dtype=torch.bool)
        for segment in itertools.chain.from_iterable(table for table, _ in parts):
            piece = slice(segment.param_start, segment.param_start + segment.numel)
            untouched[piece] = False
            copied, precise = copy_out[piece].float(), segments.param[piece].to(copy_out.dtype).float()
            # the interpreter cuts bits off where hardware rounds
            slack = 0.0 if device_rounds(copy_out) else torch.finfo(copy_out.dtype).eps
            torch.testing.assert_close(copied, precise, rtol=slack, atol=0.0)
        assert bool((copy_out[untouched] == 7.0).all())


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: f"{mix[0]}-{mix[1]}".replace("torch.", ""))
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000])
def test_adamw_dtypes_and_odd_sizes(device: torch.device, mix: tuple[torch.dtype, torch.dtype], numel: int) -> None:
    table = (Segment(128, 0, numel),)
    check(memory(device, table, dtype=mix[0], grad_dtype=mix[1]), [(table, OPTIONS)])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("copy_dtype", [None, torch.bfloat16, torch.float32])
def test_adamw_parts_with_options_of_their_own(
    device: torch.device, amsgrad: bool, copy_dtype: torch.dtype | None
) -> None:
    first = (Segment(0, 0, 320), Segment(640, 320, 64))
    second = (Segment(384, 384, 200), Segment(768, 640, 515))
    segments = memory(device, first + second, amsgrad=amsgrad)
    check(segments, [(first, OPTIONS), (second, OTHER)], copy_dtype=copy_dtype)


def test_adamw_reads_clip_factor_and_scale_from_the_device(device: torch.device) -> None:
    table = (Segment(0, 0, 777),)
    clip, scale = torch.tensor([0.25], device=device), torch.tensor([1024.0], device=device)
    for scaling in (Scaling(clip), Scaling(None, scale), Scaling(clip, scale)):
        check(memory(device, table), [(table, OPTIONS)], scaling)
        check(memory(device, table, grad_dtype=torch.bfloat16), [(table, OTHER)], scaling)


def test_adamw_options_change_between_launches(device: torch.device) -> None:
    """A launch is made once; only the numbers change."""
    table = (Segment(0, 0, 300),)
    segments = memory(device, table)
    launch = Launch(segments, block=128)
    for step, lr in ((1.0, 1e-2), (2.0, 5e-3), (3.0, 0.0)):
        options = AdamWOptions(lr, 0.9, 0.999, 1e-8, 0.1, step, False)
        want = expected(segments, [(table, options)], adamw_update.UNSCALED)
        launch.run(options, adamw_update.UNSCALED)
        torch.testing.assert_close(segments.param.double(), want.param, rtol=2e-6, atol=2e-7)


def test_adamw_reads_the_gradients_that_a_launch_is_given(device: torch.device) -> None:
    """They may lie elsewhere in every step."""
    table = (Segment(64, 0, 300),)
    segments = memory(device, table)
    want = expected(segments, [(table, OPTIONS)], adamw_update.UNSCALED)
    grad = segments.grad.clone()
    launch = Launch(dataclasses.replace(segments, grad=None), block=128)
    launch.run(OPTIONS, adamw_update.UNSCALED, grad=grad)
    torch.testing.assert_close(segments.param.double(), want.param, rtol=2e-6, atol=2e-7)


def test_adamw_keeps_zeros_zero(device: torch.device) -> None:
    """Holes between parameters are updated along and must stay what they are."""
    zeros = [torch.zeros(192, device=device) for _ in range(4)]
    segments = Segments(zeros[0], zeros[1], zeros[2], zeros[3], None, (Segment(0, 0, 192),))
    Launch(segments).run(OPTIONS, adamw_update.UNSCALED)
    assert not any(tensor.any() for tensor in zeros)


def test_adamw_passes_nan_on(device: torch.device) -> None:
    table = (Segment(0, 0, 130),)
    segments = memory(device, table, amsgrad=True)
    segments.grad[7] = math.nan
    Launch(segments).run(OPTIONS, adamw_update.UNSCALED)
    for tensor in (segments.param, segments.exp_avg, segments.exp_avg_sq, segments.max_exp_avg_sq):
        assert tensor is not None
        assert tensor.isnan().nonzero().flatten().tolist() == [7]


def test_adamw_without_elements(device: torch.device) -> None:
    empty = torch.empty(0, device=device)
    Launch(Segments(empty, empty, empty, empty, None, ())).run(OPTIONS, adamw_update.UNSCALED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 63, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS - 7])
def test_sum_of_squares_of_one_tensor(device: torch.device, dtype: torch.dtype, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype).to(device)
    got, want = sum_of_squares([x]), sum_of_squares_reference([x])
    assert got.total.dtype is torch.float64 and got.total.shape == () and got.finite.dtype is torch.bool
    torch.testing.assert_close(got.total, want.total, rtol=1e-6, atol=0)
    assert bool(got.finite)
    assert torch.equal(sum_of_squares([x]).total, got.total), "the same bits every time"


def test_sum_of_squares_of_many_tensors(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (5000, 0, 17, BLOCK_ELEMENTS * 2, 1)
    kinds = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32)
    pieces = [torch.randn(n, generator=generator).to(k).to(device) for n, k in zip(sizes, kinds, strict=True)]
    pieces.append(torch.randn(30, 7, generator=generator).to(device))
    torch.testing.assert_close(sum_of_squares(pieces).total, sum_of_squares_reference(pieces).total, rtol=1e-6, atol=0)
    assert float(sum_of_squares([pieces[1]]).total) == 0.0 and bool(sum_of_squares([pieces[1]]).finite)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 4])
def test_sum_of_squares_sees_what_is_not_finite(device: torch.device, wrong: float, position: int) -> None:
    x = torch.ones(2 * BLOCK_ELEMENTS + 5, device=device)
    x[position] = wrong
    total, finite = sum_of_squares([torch.ones(3, device=device), x])
    assert not bool(finite)
    assert math.isnan(float(total)) if math.isnan(wrong) else float(total) == math.inf


def test_sum_of_squares_that_overflows_is_of_finite_numbers(device: torch.device) -> None:
    total, finite = sum_of_squares([torch.full((10,), 1e30, device=device)])
    assert float(total) == math.inf and bool(finite)


@pytest.mark.parametrize("max_programs", [1, 2, 3])
def test_few_programs_for_many_blocks(device: torch.device, max_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.kernels.sumsq.MAX_PROGRAMS", max_programs)
    x = torch.randn(BLOCK_ELEMENTS * 5 + 11, device=device)
    x[-1] = 100.0
    torch.testing.assert_close(sum_of_squares([x]).total, sum_of_squares_reference([x]).total, rtol=1e-6, atol=0)


#: elements of the tensors of one launch, of two, and of tensors of which some are empty
MANY = {
    "one": [1],
    "a block": [1024],
    "some": [5, 3000, 0, 1024, 1025, 10_000],
    "more than a launch has": [300, 2100] * 9,
}


def spaced(sizes: Sequence[int], memory: Tensor) -> list[Tensor]:
    """Tensors of these sizes in flat memory, with space behind each; all begin at multiples of 16."""
    starts = accumulate((-(-size // 16 + 1) * 16 for size in sizes), initial=0)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY)
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (4, 0)])
@pytest.mark.parametrize(("sent", "dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
def test_average_of_what_ranks_sent(
    device: torch.device, sizes: list[int], size: int, rank: int, sent: torch.dtype, dtype: torch.dtype
) -> None:
    length = sum(sizes) + 48 * len(sizes)
    memory = torch.randn(size, length, generator=torch.Generator().manual_seed(length)).to(sent).to(device)
    *others, own = (spaced(sizes, row) for row in memory)
    out, want = (torch.full((length,), 7.0, dtype=dtype, device=device) for _ in range(2))
    average_(spaced(sizes, out), own, others, rank)
    average_reference(spaced(sizes, want), own, others, rank)
    assert torch.equal(out, want), "what lies behind is left alone"
    mean = memory.double().mean(0)
    for got, expected in zip(spaced(sizes, out), spaced(sizes, mean), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("sizes", MANY.values(), ids=MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_in_two_places(device: torch.device, sizes: list[int], dtype: torch.dtype) -> None:
    length = sum(sizes) + 48 * len(sizes)
    memory = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(device)
    if device.type == "cpu":
        memory = memory.to(dtype).float()  # Triton's interpreter cuts what the device rounds
    sources = spaced(sizes, memory)
    places, wanted = (torch.full((2, length), 7.0, dtype=dtype, device=device) for _ in range(2))
    stage_(sources, *(spaced(sizes, place) for place in places))
    stage_reference(sources, *(spaced(sizes, place) for place in wanted))
    assert torch.equal(places, wanted), "what lies behind is left alone"
    for source, second in zip(sources, spaced(sizes, places[1]), strict=True):
        assert torch.equal(second, source.to(dtype))


def test_tensors_of_several_dtypes(device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    sources = [torch.arange(64.0 * n, device=device) % 32 for n in (1, 20, 40)]
    firsts, seconds = ([torch.zeros_like(t, dtype=d) for t, d in zip(sources, dtypes, strict=True)] for _ in range(2))
    stage_(sources, firsts, seconds)
    for source, first, second in zip(sources, firsts, seconds, strict=True):
        assert torch.equal(first, source.to(first.dtype)) and torch.equal(second, first)


# Cross-entropy. -------------------------------------------------------------------------------------------------------


def logits_and_labels(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator)
    return logits.to(device), labels.to(device)


@loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 200])
def test_cross_entropy_of_odd_sizes(device: torch.device, columns: int, dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(device, 5, columns, dtype)
    padded = torch.full((5, columns + 3), math.nan, dtype=dtype, device=device)[:, :columns].copy_(
        logits
    )  # rows are apart
    have, want = torch.empty(2, 5, device=device), torch.empty(2, 5, dtype=torch.float64, device=device)
    cross_entropy_kernels.reduce_rows(padded, labels, have[0], have[1], block=64)
    cross_entropy.reduce_rows(logits, labels, want[0], want[1])
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.linspace(-1, 2, 5, device=device)
    left, right = padded, logits.double()
    cross_entropy_kernels.differentiate_(left, labels + 7, have[1], grad, 7, block=64)
    cross_entropy.differentiate_(right, labels + 7, want[1], grad.double(), 7)
    slack = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]  # the interpreter cuts bits off
    torch.testing.assert_close(left.double(), right, rtol=slack, atol=1e-5)


@loops
def test_cross_entropy_of_numbers_that_are_not_finite(device: torch.device) -> None:
    logits, labels = logits_and_labels(device, 6, 130, torch.float32)
    logits[0, :100] = -math.inf  # masked classes
    logits[1, 5] = math.nan
    logits[2, 70] = math.inf
    logits[3] *= 1e4
    labels[:4] = torch.tensor([129, 0, 0, 64], device=device)
    labels[4], labels[5] = 130, -1  # not classes
    have, want = torch.empty(2, 6, device=device), torch.empty(2, 6, device=device)
    cross_entropy_kernels.reduce_rows(logits, labels, have[0], have[1], block=64)
    cross_entropy.reduce_rows(logits, labels.clamp(0, 129), want[0], want[1])
    torch.testing.assert_close(have[:, :4], want[:, :4], equal_nan=True)
    assert bool(have[0, 4:].isnan().all()) and bool(have[1, 4:].isfinite().all())
    left, right, found = logits[:4].clone(), logits[:4].clone(), torch.empty(4, device=device)
    cross_entropy_kernels.gradients_(left, labels[:4], found, torch.ones(4, device=device), block=64)
    cross_entropy.differentiate_(right, labels[:4], want[1, :4], torch.ones(4, device=device), 0)
    torch.testing.assert_close(found, want[0, :4], equal_nan=True)
    torch.testing.assert_close(left, right, equal_nan=True)


@loops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy_makes_gradients_with_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Of rows with weights, of which one is 0, in pieces that do not divide them, with an odd number of classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((13, 8), (67, 8), (67,))]
    labels = torch.randint(67, (13,), generator=generator).to(device)
    weights = torch.linspace(0, 2, 13, device=device)
    losses, *grads = cross_entropy.forward_with_grads(
        *inputs, labels, weights, dtype=torch.float32, rows=5, total=torch.float32, wanted=[True, True, True],
        make=partial(cross_entropy_kernels.gradients_, block=64),
    )  # fmt: skip
    exact = [t.to(torch.float64, copy=True).requires_grad_() for t in inputs]
    want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), labels, reduction="none")
    want.backward(weights.double())
    slack = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(losses.double(), want.detach(), rtol=slack, atol=slack)
    for have, leaf in zip(grads, exact, strict=True):
        torch.testing.assert_close(have.double(), leaf.grad, rtol=slack, atol=slack * float(leaf.grad.abs().max()))
