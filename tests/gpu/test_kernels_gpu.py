"""The Triton kernels on a GPU: the checks of the interpreter, larger memory, and what training uses of them."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.kernel_checks import *  # noqa: F403 - every check is a test here too
from tests.runtime.kernel_checks import OPTIONS, check, memory
from zcompile.runtime.adamw_update import Segment, adamw_, update
from zcompile.runtime.kernels.sumsq import BLOCK_ELEMENTS, MAX_PROGRAMS, sum_of_squares, sum_of_squares_reference

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


def test_a_captured_launch_takes_new_numbers(device: torch.device) -> None:
    """In a CUDA graph the numbers of a step are read from memory."""
    table = (Segment(0, 0, 4096),)
    segments, expected = memory(device, table), memory(device, table)
    launch = Launch((segments,))  # noqa: F405
    with torch.cuda.device(device):
        launch.set_options([OPTIONS])
        launch.run(Scaling())  # noqa: F405
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch.run(Scaling())  # noqa: F405
        launch.set_options([OTHER])  # noqa: F405
        graph.replay()
    adamw_(expected, OPTIONS)
    adamw_(expected, OTHER)  # noqa: F405
    torch.testing.assert_close(segments.param, expected.param, rtol=1e-5, atol=1e-6)
