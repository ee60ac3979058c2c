"""Memory on the host: bounded and counted, values that share memory, states that are updated in chunks."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import Tensor, nn

import zcompile
from zcompile.errors import HostMemoryError
from zcompile.program import TensorType, Transfer
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.offload.host import PAGE_BYTES, HostMemory, Lanes, Mover, free_bytes, ranks_here
from zcompile.runtime.offload.hosted_update import HostedUpdate
from zcompile.runtime.optim.adamw_update import AdamWOptions, Segment, Segments, adamw_

CPU = torch.device("cpu")


# Memory. ------------------------------------------------------------------------------------------------------------------


def test_the_limit_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.offload.host.free_bytes", lambda: 1_000_000)
    assert HostMemory(CPU, ranks_on_host=4).limit_bytes == 225_000
    monkeypatch.setenv("ZCOMPILE_HOST_BYTES", "12345")
    assert HostMemory(CPU, ranks_on_host=4).limit_bytes == 12345
    monkeypatch.setenv("ZCOMPILE_HOST_BYTES", "much")
    with pytest.raises(HostMemoryError, match="ZCOMPILE_HOST_BYTES is 'much'; it must be a number of bytes"):
        HostMemory(CPU)


def test_free_memory_is_measured() -> None:
    assert 0 < free_bytes() < 1 << 50


def test_ranks_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_here(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (ranks_here(8), ranks_here(2)) == (4, 2)


def test_memory_is_counted_while_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMPILE_HOST_BYTES", str(4 * PAGE_BYTES))
    memory = HostMemory(CPU)
    one = memory.zeros(PAGE_BYTES // 4 + 1, torch.float32, "states")
    assert memory.held_bytes == 2 * PAGE_BYTES and one.data_ptr() % PAGE_BYTES == 0 and not one.any()
    memory.promise(PAGE_BYTES, "activations")
    with pytest.raises(
        HostMemoryError, match="offloading of states takes 8,192 bytes of host memory and this rank may have 16,384"
    ):
        memory.zeros(2 * PAGE_BYTES, torch.uint8, "states")
    other = memory.zeros(1, torch.float32, "activations")
    assert memory.held_bytes == 3 * PAGE_BYTES
    del one, other
    gc.collect()
    assert memory.held_bytes == 0 and memory.peak_bytes == 3 * PAGE_BYTES


# Transfers. ---------------------------------------------------------------------------------------------------------------


def test_values_that_share_memory_move_once_and_share_it_again() -> None:
    memory, buffers = HostMemory(CPU), Buffers(CPU, poison=True)
    mover = Mover(memory, Lanes(CPU), buffers)
    base = torch.arange(12.0).view(3, 4)
    expected = base.clone()
    kinds = (TensorType((3, 4), torch.float32), TensorType((4, 3), torch.float32))
    slots: list[Tensor] = [base, base.t(), *[torch.empty(0)] * 4]
    mover.start(Transfer("offload", (0, 1), (2, 3), kinds, "out", 0), slots).wait()
    assert base.isnan().all(), "its memory is given up"
    assert memory.values_bytes == PAGE_BYTES
    mover.start(Transfer("reload", (2, 3), (4, 5), kinds, "in", 1), slots).wait()
    assert torch.equal(slots[4], expected) and torch.equal(slots[5], expected.t())
    assert slots[5].stride() == (1, 4) and slots[4].data_ptr() == slots[5].data_ptr()
    mover.memory.give([slots[2], slots[3]])
    again = memory.take(48)
    assert again.data_ptr() == slots[2].data_ptr() and memory.take(48).data_ptr() != again.data_ptr()


# States. ------------------------------------------------------------------------------------------------------------------


def operands(numel: int, amsgrad: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor | None] = [torch.randn(numel, generator=generator) for _ in range(5)]
    for state in made[3:]:
        assert state is not None
        state.abs_()
    return made if amsgrad else [*made[:4], None]


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("step", ["device", "cpu", "in place"])
def test_states_are_updated_in_chunks(step: str, amsgrad: bool) -> None:
    """Two pieces of several chunks, the last ones uneven, and what lies between them untouched."""
    table = (Segment(0, 64, 5000), Segment(6000, 5064, 2500))
    options = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3.0, maximize=False)
    mine, theirs = operands(9000, amsgrad), operands(9000, amsgrad)
    param, grad, first, second, maxima = theirs
    assert param is not None and grad is not None and first is not None and second is not None
    adamw_(Segments(param, grad, first, second, maxima, table), options)
    param, grad, first, second, maxima = mine
    assert param is not None and grad is not None and first is not None and second is not None
    hosted = HostedUpdate(CPU, HostMemory(CPU), Lanes(CPU), step, 4096)
    hosted.begin()
    hosted.update([(Segments(param, None, first, second, maxima, table), options)], grad)
    hosted.settle()
    for a, b in zip(mine, theirs, strict=True):
        if a is not None and b is not None:
            assert torch.equal(a, b) if step == "device" else torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert hosted.device_bytes == (3 * 4096 * (3 if amsgrad else 2) if step == "device" else 0)


def test_states_of_another_dtype_and_several_steps() -> None:
    """What torch's fused kernel does not take, and pieces that are at different steps."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(100, dtype=torch.float64, generator=generator) for _ in range(4)]
    values[3].abs_()
    parts = [(Segment(0, 0, 64), 1.0), (Segment(64, 64, 36), 7.0)]
    results = []
    for hosted in (False, True):
        param, grad, first, second = (value.clone() for value in values)
        for segment, step in parts:
            options = AdamWOptions(1e-2, 0.9, 0.99, 1e-8, 0.0, step, maximize=True)
            memory = Segments(param, grad, first, second, None, (segment,))
            if hosted:
                HostedUpdate(CPU, HostMemory(CPU), Lanes(CPU), "device", 1 << 20).update([(memory, options)], grad)
            else:
                adamw_(memory, options)
        results.append([param, first, second])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# What saves nothing. ------------------------------------------------------------------------------------------------------


def run_with(offload: str) -> None:
    model = zcompile.compile(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), offload=offload, backend="eager"
    )
    model(torch.randn(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ("activations", "offload='activations' moves no activation of sequential: none of those that forward saves"),
        ("parameters", "offload='parameters': every parameter is whole on every rank"),
    ],
)
def test_what_saves_nothing_says_so(offload: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zcompile"):
        run_with(offload)
    assert [r.message for r in caplog.records if r.message.startswith(message)]


def test_what_saves_something_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zcompile"):
        run_with("optimizer")
    assert not [r.message for r in caplog.records if "offload" in r.message]
