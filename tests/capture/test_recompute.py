"""Recomputation saves memory and changes no bit."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.captures import shared_captures
from tests.dist.models import CASES, Batch
from zcompile.errors import ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Saved
from zcompile.planner.budget import tensor_bytes


@pytest.fixture(autouse=True)
def one_capture_a_model() -> Iterator[None]:
    """What is computed again is decided after the capture."""
    with shared_captures():
        yield


def dropped(name: str) -> Callable[[], nn.Module]:
    """A case's model with dropout everywhere."""

    def make() -> nn.Module:
        model = CASES[name].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        return model

    return make


MODELS = {
    "llama": (CASES["llama"].build, CASES["llama"].data(0, 0)),
    "hf_llama": (CASES["hf_llama"].build, CASES["hf_llama"].data(0, 0)),
    "bert_dropout": (dropped("bert"), CASES["bert"].data(0, 0)),
}


def step(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients of one step from fixed random numbers."""
    torch.manual_seed(7)
    output: Any = model(**batch)
    output["loss"].backward()
    return output["loss"].detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: Any) -> int:
    return sum(meta.num_bytes(meta.value(n)) for n, role in model.graphs.forward.outputs if isinstance(role, Saved))


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_steps_have_the_same_bits(name: str) -> None:
    make, batch = MODELS[name]
    plain = make()
    results, bytes_of = {}, {}
    for mode in (None, "selective", "full"):
        model = zcompile.compile(copy.deepcopy(plain), backend="eager", recompute=mode)
        results[mode] = step(model, batch)
        bytes_of[mode] = saved_bytes(model)
    assert bytes_of["full"] < 0.6 * bytes_of[None]
    assert bytes_of["full"] < bytes_of["selective"]
    loss, grads = step(plain, batch)
    for mode, (mine, my_grads) in results.items():
        assert torch.equal(mine, results[None][0]), mode
        assert all(torch.equal(g, results[None][1][n]) for n, g in my_grads.items()), mode
    torch.testing.assert_close(results["full"][0], loss)
    torch.testing.assert_close(results["full"][1], grads, rtol=1e-4, atol=1e-6)


def test_a_users_checkpoints_are_left_alone() -> None:
    make, batch = MODELS["hf_llama"]
    model: Any = make()
    model.gradient_checkpointing_enable()
    compiled = zcompile.compile(model, backend="eager", recompute="selective")
    step(compiled, batch)
    assert compiled.history["recompute"].stats["blocks"] == 0


def test_nothing_saved_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = zcompile.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager", recompute="full")
    with caplog.at_level(logging.WARNING, "zcompile"):
        model(torch.zeros(2, 4)).sum().backward()
    assert "recompute='full' saves nothing" in caplog.text


def peak(model: Any) -> int:
    predicted = model.report().predicted
    assert predicted is not None
    return tensor_bytes(predicted)


def test_a_budget_is_kept_and_used() -> None:
    make, batch = MODELS["llama"]
    batch = {name: value.repeat(16, 1) for name, value in batch.items()}
    peaks, results = {}, {}
    for option in (None, "full"):
        model = zcompile.compile(make(), backend="eager", recompute=option)
        results[option], peaks[option] = step(model, batch), peak(model)
    assert peaks["full"] < 0.8 * peaks[None]
    for part in (0.0, 0.7):
        budget = int(peaks["full"] + part * (peaks[None] - peaks["full"]))
        model = zcompile.compile(make(), backend="eager", recompute=f"{budget / 2**20:.6f}MiB")
        results[part] = step(model, batch)
        assert peak(model) <= budget + 1
    for mine, my_grads in results.values():
        assert torch.equal(mine, results[None][0])
        assert all(torch.equal(g, results[None][1][n]) for n, g in my_grads.items())
    roomy = zcompile.compile(make(), backend="eager", recompute="1GiB")
    step(roomy, batch)
    assert "recompute" not in [entry.name for entry in roomy.history]
    tight = zcompile.compile(make(), backend="eager", recompute="1KiB")
    with pytest.raises(
        ConfigError, match=r"budget of 0\.00 GiB .* use more ranks, a higher stage or a smaller micro-batch"
    ):
        tight(**batch)


@pytest.mark.parametrize("option", ["most", "24", "0GiB", 0, 1.5, True])
def test_unknown_options(option: Any) -> None:
    with pytest.raises(ConfigError, match=f"recompute is {option!r}; it must be one of full, selective, a budget"):
        zcompile.compile(nn.Linear(2, 2), recompute=option)


def test_a_share_needs_a_gpu() -> None:
    model = zcompile.compile(nn.Linear(2, 2), backend="eager", recompute=0.5)
    with pytest.raises(ConfigError, match="a share of a GPU's memory, and the model is on cpu"):
        model(torch.zeros(1, 2))
