"""Offloading on GPUs: page-locked memory, copies beside computation, states that pass through the device, training and memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.ranks import NUM_RANKS, Results
from zcompile import compat
from zcompile.program import TensorType, Transfer
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.offload.host import HostMemory, Lanes, Mover
from zcompile.runtime.offload.hosted_update import HostedUpdate
from zcompile.runtime.optim.adamw_update import AdamWOptions, Segment, Segments, update

pytestmark = pytest.mark.gpu

#: of everything here; a name other than cuda is for trying the tests themselves without a GPU
DEVICE, BACKEND = "cuda", "inductor"
one_device = pytest.mark.skipif(DEVICE == "cuda" and NUM_RANKS < 1, reason="needs a CUDA device")
two_devices = pytest.mark.skipif(DEVICE == "cuda" and NUM_RANKS < 2, reason="needs two CUDA devices")

OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1.0, maximize=False)
NUMEL = 5 << 20

ACTIVATIONS, STATES, EVERYTHING = (
    "activations{mib=0}",
    "optimizer{chunk_mib=0.25}",
    "activations{mib=0}+optimizer+parameters",
)
PART = "optimizer{chunk_mib=0.25 share=0.5}"
WHAT = [ACTIVATIONS, STATES, PART, "optimizer{step=cpu chunk_mib=0.25}", "parameters", EVERYTHING]
LESS_MEMORY = [ACTIVATIONS, "optimizer", EVERYTHING]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@one_device
def test_memory_is_page_locked_as_long_as_it_is_held() -> None:
    """Whether it is shows in what CUDA says to locking it once more; torch's ``is_pinned`` knows its own memory only."""
    memory = HostMemory(torch.device(DEVICE))
    flat = memory.zeros(1024, torch.float32, "something")
    assert memory.held_bytes == 4096 and not flat.any()
    view = flat[:]
    if DEVICE == "cuda":
        assert compat.lock_pages(view) == 712, "cudaErrorHostMemoryAlreadyRegistered"
        assert torch.ones(8, device=DEVICE).sum() == 8, "the error is not another call's"
    del flat
    gc.collect()
    assert memory.held_bytes == 0
    assert not view.any(), "the memory itself lives on"
    if DEVICE == "cuda":
        assert compat.lock_pages(view) == 0
        assert compat.unlock_pages(view) == 0


@one_device
def test_values_survive_while_the_allocator_uses_their_memory_again() -> None:
    """Many values leave and come back beside computation that allocates and overwrites as much."""
    device = torch.device(DEVICE)
    buffers = Buffers(device, poison=True)
    mover = Mover(HostMemory(device), Lanes(device), buffers)
    kind = TensorType((512, 1024), torch.float32)
    out, back = Transfer("offload", (0,), (1,), (kind,), "out", 0), Transfer("reload", (1,), (2,), (kind,), "in", 1)
    generator = torch.Generator(device).manual_seed(0)
    expected: list[float] = []
    found: list[Tensor] = []
    for number in range(60):
        value = torch.full((1024, 512), float(number), device=device).t()  # not contiguous
        slots: list[Any] = [value, None, None]
        leaving = mover.start(out, slots)
        noise = torch.randn(2048, 2048, device=device, generator=generator) @ torch.ones(2048, 2048, device=device)
        leaving.wait()
        slots[0] = value = None
        overwritten = torch.full((512, 1024), -1.0, device=device)
        coming = mover.start(back, slots)
        noise = noise @ noise
        coming.wait()
        found.append(slots[2].sum() + 0 * overwritten.sum())
        assert slots[2].stride() == (1, 512)
        mover.memory.give([slots[1]])
        expected.append(512.0 * 1024 * number)
    assert [t.item() for t in found] == expected
    assert mover.memory.held_bytes == 2 << 20, "one block of host memory serves all"


def flat_states() -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and gradients, and states on the CPU."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(NUMEL, generator=generator) for _ in range(4)]
    made[3].abs_()
    return [t.to(DEVICE) for t in made[:2]], made[2:]


@one_device
@pytest.mark.parametrize("step", ["device", "cpu"])
def test_states_on_the_host_are_updated_as_those_on_the_device(step: str) -> None:
    device = torch.device(DEVICE)
    memory = HostMemory(device)
    (param, grad), states = flat_states()
    direct = [param.clone(), *(t.to(device) for t in states)]
    hosted = [memory.zeros(NUMEL, torch.float32, "optimizer states").copy_(t) for t in states]
    table = (Segment(0, 0, NUMEL // 2), Segment(NUMEL // 2, NUMEL // 2, NUMEL - NUMEL // 2))
    theirs = Segments(direct[0], None, direct[1], direct[2], None, table)
    mine = Segments(param, None, hosted[0], hosted[1], None, table)
    hosting = HostedUpdate(device, memory, Lanes(device), step, 1 << 20)
    for number in range(3):
        options = AdamWOptions(**{**vars(OPTIONS), "step": float(number + 1)})
        update([(theirs, options)], grad=grad)
        hosting.begin()
        hosting.update([(mine, options)], grad=grad)
        grad = grad * 0.5
    hosting.settle()
    synchronize()
    for a, b in zip((param, *hosted), direct, strict=True):
        if step == "device":
            assert torch.equal(a.cpu(), b.cpu())
        else:
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-5, atol=5e-7)  # a few roundings of numbers near one


@one_device
@pytest.mark.skipif(DEVICE != "cuda", reason="times")
def test_copies_go_beside_computation() -> None:
    device = torch.device(DEVICE)
    lanes, memory = Lanes(device), HostMemory(device)
    source = torch.zeros(256 << 20, device=device)
    target = memory.zeros(256 << 20, torch.float32, "something")
    matrix = torch.randn(4096, 4096, device=device)  # ten products take about as long as a copy of 1 GiB

    def compute() -> None:
        for _ in range(10):
            torch.mm(matrix, matrix)

    def timed(copies: bool, computes: bool) -> float:
        synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copy = lanes.start("out", [target], [source]) if copies else None
        if computes:
            compute()
        if copy is not None:
            copy.wait()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    timed(True, True)
    both, copies, computes = timed(True, True), timed(True, False), timed(False, True)
    assert both < max(copies, computes) + 0.3 * min(copies, computes), (both, copies, computes)


def jobs(world_size: int) -> list[str]:
    """Everything that runs on so many ranks."""
    training = [f"offload:3:{what}" for what in WHAT]
    return ["plain", *training, "memory:3", *(f"memory:3:{what}" for what in LESS_MEMORY)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("offload"), DEVICE, BACKEND, jobs)


WORLDS = [pytest.param(1, marks=one_device), pytest.param(2, marks=[two_devices, pytest.mark.dist])]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("what", WHAT)
def test_training_equals_plain_pytorch(results: Results, world_size: int, what: str) -> None:
    reference = results.of(world_size, "plain")["losses"]
    found = results.of(world_size, f"offload:3:{what}")
    assert found["losses"] == pytest.approx(reference, rel=5e-5)
    assert found["host_bytes"] == found["predicted_host_bytes"] > 0
    places = {ACTIVATIONS: ["cuda"], PART: ["cpu", "cuda"]}.get(what, ["cpu"])
    assert found["states_on"] == (places if DEVICE == "cuda" else ["cpu"])
    assert found["gathered_live_bytes"] == 0


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("what", LESS_MEMORY)
def test_memory_falls(results: Results, world_size: int, what: str) -> None:
    """By the states at least, where these are on the host: a step still has the buffers that they pass through."""
    without = results.of(world_size, "memory:3")
    found = results.of(world_size, f"memory:3:{what}")
    if what == ACTIVATIONS:
        assert found["saved_bytes"] < 0.5 * without["saved_bytes"] and found["offloaded_bytes"] > 0
    elif DEVICE == "cuda":
        assert found["allocated_peak"] < without["allocated_peak"] - without["optimizer_bytes"] // 2, (found, without)
        assert found["allocated_after"] <= found["allocated_before"] + 2**20, "a step leaves nothing behind"
