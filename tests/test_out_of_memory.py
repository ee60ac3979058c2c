"""A device without room: the error says what takes it and what to change, and one process can go on afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from zcompile import errors, out_of_memory
from zcompile.out_of_memory import DeviceMemory, requested_bytes, size
from zcompile.runtime.optim import moments, optimizer

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 8.00 MiB."
NUM_PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def rows(step: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(rows(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def fails(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(MESSAGE)


class Broken(dict):  # type: ignore[type-arg]
    """Regions of which each finds no memory."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return fails


def break_regions(model: Any, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = getattr(model._session.latest.program, direction)
    monkeypatch.setitem(runnable.__dict__, "bodies", Broken())


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_step_says_what_takes_the_memory_and_can_be_repeated(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = build(), zcompile.compile(build(), backend="eager")
    reference, opt = torch.optim.AdamW(plain.parameters()), zcompile.optim.AdamW(model.parameters())
    train(model, opt, range(2))
    with monkeypatch.context() as patch:
        break_regions(model, direction, patch)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            train(model, opt, range(2, 3))
    error = caught.value
    assert isinstance(error, errors.OutOfMemoryError) and isinstance(error, errors.ZCompileError)
    call = 5 if direction == "forward" else 6
    assert str(error).startswith(
        f"[rank 0 of 1] cpu is out of memory in call {call}, {direction} (train): tried to allocate 2.00 MiB, "
    )
    exact = {name: error.anatomy[name] for name in ("parameters", "optimizer", "requested")}
    assert exact == {"parameters": 4 * NUM_PARAMETERS, "optimizer": 4 * (2 * NUM_PARAMETERS + 4), "requested": 2 << 20}
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    opt.zero_grad()
    assert train(model, opt, range(2, 5)) == pytest.approx(train(plain, reference, range(5))[2:], rel=1e-6)


def test_the_first_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zcompile.compile(build(), backend="eager")
    opt = zcompile.optim.AdamW(model.parameters())
    model(rows(0)).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "MomentArena", fails)
        with pytest.raises(
            errors.OutOfMemoryError, match=r"in the optimizer step after call 2, backward \(train\)"
        ) as caught:
            opt.step()
    assert caught.value.anatomy["gradients"] == caught.value.anatomy["parameters"] == 4 * NUM_PARAMETERS
    assert moments.MomentArena is optimizer.MomentArena
    opt.step()


def test_advice_is_computed_from_what_takes_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zcompile.compile(build(), backend="eager")
    opt = zcompile.optim.AdamW(model.parameters())
    train(model, opt, range(2))
    states = 4 * NUM_PARAMETERS + 4 * (2 * NUM_PARAMETERS + 4)
    mib = 1 << 20
    now = DeviceMemory(allocated=states + 3 * mib, reserved=states + 7 * mib, free=mib, total=states + 9 * mib)
    monkeypatch.setattr(out_of_memory, "device_memory", lambda device: now)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    break_regions(model, "forward", monkeypatch)
    with pytest.raises(errors.OutOfMemoryError) as caught:
        train(model, opt, range(1))
    anatomy = caught.value.anatomy
    assert anatomy["activations"] + anatomy["gradients"] == 3 * mib
    assert (anatomy["unallocated"], anatomy["outside"], anatomy["free"]) == (4 * mib, mib, mib)
    (unused, first), (half, second), (narrow, third) = caught.value.advice
    assert unused == 4 * mib and "expandable_segments:True" in first
    assert half == (anatomy["activations"] + 2 * mib) // 2 and "half the micro-batch" in second
    assert narrow == anatomy["activations"] // 2 and 'precision="bf16"' in third
    assert f"{'4.00 MiB':>12}  PYTORCH_CUDA_ALLOC_CONF" in str(caught.value)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(errors.OutOfMemoryError) as caught:
        train(model, opt, range(1))
    assert not any("expandable" in text for _, text in caught.value.advice)


def test_sizes() -> None:
    assert [size(n) for n in (0, 17, 1536, 3 << 20, 5 << 29)] == ["0", "17 bytes", "1.50 KiB", "3.00 MiB", "2.50 GiB"]
    assert requested_bytes("Tried to allocate 1.50 GiB. GPU 0") == 3 << 29
    assert requested_bytes("Tried to allocate 512 bytes.") == 512
    assert requested_bytes("no number") == 0
