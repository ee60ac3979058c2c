"""The Triton kernels on a GPU: the checks of the interpreter, larger memory, and what training uses of them."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernel_checks import *  # noqa: F403 - every check is a test here too
from tests.runtime.kernel_checks import OPTIONS, check, memory
from zcompile import ops
from zcompile.runtime.kernels import cross_entropy as cross_entropy_kernels
from zcompile.runtime.kernels.sumsq import BLOCK_ELEMENTS, MAX_PROGRAMS, sum_of_squares, sum_of_squares_reference
from zcompile.runtime.optim.adamw_update import Segment, adamw_, update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Also a device that is not the current one."""
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    return torch.device("cuda", request.param)


@pytest.mark.parametrize("block", [1024, 2048, 4096])
def test_adamw_on_large_memory(device: torch.device, block: int) -> None:
    table = (Segment(0, 0, (1 << 22) + 37), Segment((1 << 22) + 64, (1 << 22) + 64, 1 << 20))
    check(memory(device, table), [(table, OPTIONS)], copy_dtype=torch.bfloat16, block=block)


def test_a_program_of_the_sum_reads_several_blocks(device: torch.device) -> None:
    x = torch.randn(BLOCK_ELEMENTS * (MAX_PROGRAMS * 2 + 3) + 11, device=device)
    torch.testing.assert_close(sum_of_squares([x]).total, sum_of_squares_reference([x]).total, rtol=1e-6, atol=0)


def test_update_beyond_32_bits(device: torch.device) -> None:
    """Element offsets above 2**31, in bfloat16 to save memory; both arenas share one gradient and state."""
    if torch.cuda.mem_get_info(device)[0] < 48 * 2**30:
        pytest.skip("needs 48 GiB")
    numel, tail = 2**31 + 4096, 4096
    tensors = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(4)]
    generator = torch.Generator(device).manual_seed(0)
    for tensor in tensors:
        tensor[-tail:] = torch.rand(tail, generator=generator, device=device).bfloat16()
    small = Segments(*[t[-tail:].clone() for t in tensors], None, (Segment(0, 0, tail),))  # noqa: F405
    large = Segments(*tensors, None, (Segment(0, 0, numel),))  # noqa: F405
    update([(large, OPTIONS)])
    update([(small, OPTIONS)])
    assert torch.equal(tensors[0][-tail:], small.param)
    assert not tensors[0][:-tail].any()
    x = tensors[1]
    torch.testing.assert_close(sum_of_squares([x]).total, x[-tail:].double().square().sum(), rtol=1e-6, atol=0)


def test_update_waits_for_nothing(device: torch.device) -> None:
    table = (Segment(0, 0, 4096),)
    segments, expected = memory(device, table), memory(device, table)
    update([(segments, OPTIONS)])  # compiles and makes tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        update([(segments, OPTIONS)])
        sum_of_squares([segments.grad])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        adamw_(expected, OPTIONS)
    torch.testing.assert_close(segments.param, expected.param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_in_pieces(device: torch.device, dtype: torch.dtype, bias: bool) -> None:
    """The operators with their kernels, whose products are added up in float32, beside float64; an odd number of classes."""
    library = cross_entropy_kernels.register()
    assert library is cross_entropy_kernels.register()
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offsets = (torch.randn(shape, generator=generator) for shape in ((300, 64), (1001, 64), (1001,)))
    labels = torch.randint(1001, (300,), generator=generator).to(device)
    grad = torch.rand(300, generator=generator).to(device)
    inputs = [t.to(device, dtype) for t in (hidden, weight, *([offsets] if bias else []))]
    exact = [t.to(torch.float64, copy=True).requires_grad_() for t in inputs]
    want = torch.nn.functional.cross_entropy(torch.nn.functional.linear(*exact), labels, reduction="none")
    want.backward(grad.double())
    wide = torch.promote_types(dtype, torch.float32)
    given = (inputs[0], inputs[1], inputs[2] if bias else None, labels)
    losses, lse = ops.linear_cross_entropy(*given, dtype=wide, rows=128)
    again, _ = ops.linear_cross_entropy(*given, dtype=wide, rows=128)
    assert torch.equal(losses, again)
    slack = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(losses.double(), want.detach(), rtol=slack, atol=slack * float(want.detach().max()))
    found = ops.linear_cross_entropy_backward(*given, lse, grad.to(wide), columns=384, wanted=[True, True, bias])
    assert len(found) == len(exact)
    made = {
        total: ops.linear_cross_entropy_with_grads(
            *given, grad.to(wide), dtype=wide, rows=128, total=total, wanted=[True, True, bias]
        )
        for total in {dtype, wide}
    }
    assert all(torch.equal(losses, same) for same, *_ in made.values())
    for several in (found, *(grads for _, *grads in made.values())):
        for have, leaf in zip(several, exact, strict=True):
            assert have.dtype == dtype
            torch.testing.assert_close(have.double(), leaf.grad, rtol=slack, atol=slack * float(leaf.grad.abs().max()))


def test_linear_cross_entropy_is_captured_in_a_cuda_graph(device: torch.device) -> None:
    cross_entropy_kernels.register()
    with torch.cuda.device(device), device:
        hidden, weight = torch.randn(200, 32).bfloat16(), torch.randn(500, 32).bfloat16()
        labels, grad = torch.randint(500, (200,)), torch.rand(200)

    def both() -> list[torch.Tensor]:
        losses, lse = ops.linear_cross_entropy(hidden, weight, None, labels, dtype=torch.float32, rows=64)
        return [
            losses,
            *ops.linear_cross_entropy_backward(
                hidden, weight, None, labels, lse, grad, columns=128, wanted=[True, True, False]
            ),
            *ops.linear_cross_entropy_with_grads(
                hidden,
                weight,
                None,
                labels,
                grad,
                dtype=torch.float32,
                rows=64,
                total=torch.float32,
                wanted=[True, True, False],
            ),
        ]

    with torch.cuda.device(device):
        want = both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the stream that torch takes by default belongs to the device that was current when the first graph was captured
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            have = both()
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
