"""What is kept in the host's memory changes no number: against plain PyTorch, and bit for bit where the arithmetic is the same."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.dist.models import Case
from tests.dist.pool import Pools
from tests.dist.training import (
    Trained,
    assert_close_gradients,
    assert_equal_training,
    assert_same_bits,
    compile_and_train,
    full_gradients,
    one_model,
    this_rank,
    train,
    world_size,
)
from zcompile.errors import OptimizerError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

STEPS = 4
#: values of any size move, and states pass in many chunks
KINDS = {"activations": "activations{mib=0}", "optimizer": "optimizer{chunk_mib=0.004}", "parameters": "parameters"}
OPTIONS = ["+".join(KINDS[kind] for kind in kinds) for n in (1, 2, 3) for kinds in combinations(KINDS, n)]
OPTIONS.append("optimizer{step=cpu chunk_mib=0.004}")
OPTIONS += [f"optimizer{{{step}chunk_mib=0.004 share=0.4}}" for step in ("", "step=cpu ")]


class Small(nn.Module):
    """A list of blocks, with uneven rows and a parameter that is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return x.square().mean()


PLAIN = Case(Small, lambda generator: {"x": torch.randn(4, 9, generator=generator)}, loss=lambda loss: loss)
OWN = dataclasses.replace(PLAIN, optimizer=lambda model: zcompile.optim.AdamW(model.parameters(), lr=1e-3))


@functools.cache
def reference() -> Trained:
    """Plain PyTorch with its own AdamW."""
    return one_model(PLAIN, world_size(), STEPS)


def same_arithmetic(offload: str) -> bool:
    """Whether the update is the one that runs without offloading."""
    return "parameters" not in offload and "cpu" not in offload


def equal_training(stage: int) -> None:
    """Every combination; released and offloaded memory is poisoned."""
    options: dict[str, Any] = {"stage": stage, "steps": STEPS, "verify": "fast"}
    without, _, _ = compile_and_train(OWN, **options)
    for offload in OPTIONS:
        mine, model, optimizer = compile_and_train(OWN, offload=offload, poison=True, **options)
        assert_equal_training(mine, reference())
        if same_arithmetic(offload):
            assert_same_bits(mine, without)
        report = model.report(optimizer)
        assert report.predicted is not None
        assert report.host_bytes == report.predicted.host_bytes > 0, "pages on the host are predicted exactly"
        assert report.offloaded_bytes > 0 or "activations" not in offload
        shards = model._session.runner.shards
        assert (shards.hosting.update is None) == (offload == KINDS["activations"])
        hosted = {shards.hosting.hosts_states(index) for index in range(len(shards.parameters))}
        assert hosted == ({True, False} if "share" in offload else {offload != KINDS["activations"]})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_plain_pytorch(ranks: Pools, stage: int) -> None:
    ranks(2, equal_training, stage=stage)


# Together with other options. ---------------------------------------------------------------------------------------------


def windows(model: Any, optimizer: torch.optim.Optimizer, *, clip: bool) -> list[Any]:
    """Steps over windows of two backward calls, one of them inside ``no_sync``."""
    found: list[Any] = []
    for step in range(3):
        for number in range(2):
            x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + number + 100 * this_rank()))
            loss = model(x)
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                loss.backward()
            found.append(loss.item())
        if clip:
            found.append(model.clip_grad_norm_(0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def other_options(stage: int) -> None:
    """Recomputation, accumulation and clipping; the same numbers as without offloading."""
    for options in (
        {"recompute": "full"},
        {"gradient_accumulation_steps": 2},
        {"precision": "bf16", "reduce_dtype": "fp32"},
    ):
        runs = []
        for offload in (None, "+".join(KINDS.values()), f"{KINDS['activations']}+{KINDS['optimizer']}"):
            model = zcompile.compile(
                PLAIN.build(), stage=stage, backend="eager", verify="fast", offload=offload, **options
            )
            optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)
            runs.append((windows(model, optimizer, clip=True), model.full_state_dict()))
        (without, state), everything, device = runs
        assert device[0] == without and all(torch.equal(device[1][n], v) for n, v in state.items())
        assert everything[0] == pytest.approx(without, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(everything[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_with_other_options(ranks: Pools, stage: int) -> None:
    ranks(2, other_options, stage=stage)


def scaled(offload: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """fp16 with a scaler, a step of which overflows."""
    model = zcompile.compile(PLAIN.build(), precision="fp16", backend="eager", verify="fast", offload=offload)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = zcompile.GradScaler(init_scale=2.0**10)
    found = []
    for step in range(4):
        loss = model(**PLAIN.data(step, this_rank()))
        scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        found.append(model.clip_grad_norm_(1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale(), float(scaler.step_was_skipped)]
    return found, model.full_state_dict()


def fp16() -> None:
    (found, state), (again, hosted) = scaled(None), scaled("+".join(KINDS.values()))
    assert found == pytest.approx(again, rel=1e-4, nan_ok=True)
    for name, value in state.items():
        torch.testing.assert_close(hosted[name], value, rtol=1e-5, atol=1e-6)


def test_fp16_with_a_step_that_overflows(ranks: Pools) -> None:
    ranks(2, fp16)


def retained() -> None:
    """Two forwards before their backwards, and a second backward through one graph."""
    plain = PLAIN.build()
    model = zcompile.compile(PLAIN.build(), backend="eager", offload=KINDS["activations"])
    model._session.runner.executor.buffers.poison = True
    inputs = [PLAIN.data(step, 0)["x"] for step in range(2)]
    for one in (plain, model):
        losses = [one(x) for x in inputs]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
    assert_close_gradients(full_gradients(model), plain)
    memory = model._session.runner.shards.hosting.memory
    held = memory.held_bytes
    dropped = model(inputs[0])
    del dropped
    model(inputs[1]).backward()
    assert memory.held_bytes == held, "what a forward without a backward took is used again"


def test_retained_graphs_and_dropped_outputs(ranks: Pools) -> None:
    ranks(2, retained)


def resumed(folder: str) -> None:
    """A checkpoint of either kind goes on as the other, bit for bit: the update is the same."""
    hosted = f"{KINDS['activations']}+{KINDS['optimizer']}"
    for saved, loaded in ((None, hosted), (hosted, None), (hosted, hosted)):
        options: dict[str, Any] = {"backend": "eager", "verify": "fast"}
        model = zcompile.compile(PLAIN.build(), offload=saved, **options)
        optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, OWN, optimizer=optimizer, steps=2)
        path = f"{folder}/{saved}-{loaded}"
        zcompile.save_checkpoint(path, model, optimizer)
        state = model.full_optimizer_state_dict(optimizer)
        losses = train(model, OWN, optimizer=optimizer, steps=3)
        other = zcompile.compile(PLAIN.build(), offload=loaded, **options)
        another = zcompile.optim.AdamW(other.parameters(), lr=1e-3)
        zcompile.load_checkpoint(path, other, another)
        copied = other.full_optimizer_state_dict(another)["state"]
        for name, entry in state["state"].items():
            assert all(torch.equal(value, copied[name][key]) for key, value in entry.items()), name
        assert train(other, OWN, optimizer=another, steps=3) == losses
        another.load_state_dict(copy.deepcopy(another.state_dict()))
        other.load_full_optimizer_state_dict(another, state)
        assert other.report(another).optimizer_bytes == model.report(optimizer).optimizer_bytes


def test_checkpoints(ranks: Pools, tmp_path: Any) -> None:
    ranks(2, resumed, folder=str(tmp_path))


def whole(stage: int) -> None:
    """Parameters on the host: full states, full parameters for a while and for good, and other optimizers."""
    model = zcompile.compile(PLAIN.build(), stage=stage, backend="eager", verify="fast", offload="parameters")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, OWN, optimizer=optimizer, steps=2)
    sgd = dataclasses.replace(PLAIN, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
    one = one_model(sgd, 2, 2)
    state = model.full_state_dict()
    for name, value in one.state.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    with model.unsharded() as original:
        torch.testing.assert_close(original.blocks[0].weight, one.state["blocks.0.weight"], rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            original.blocks[0].weight.zero_()
    assert not model.full_state_dict()["blocks.0.weight"].any()
    model.load_state_dict(one.state)
    assert torch.equal(zcompile.unwrap(model).blocks[1].weight, one.state["blocks.1.weight"])


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_on_the_host(ranks: Pools, stage: int) -> None:
    ranks(2, whole, stage=stage)


# What does not go. --------------------------------------------------------------------------------------------------------


def too_little(most: int, offload: str, call: bool) -> None:
    os.environ["ZCOMPILE_HOST_BYTES"] = str(most if this_rank() == 1 else 2**30)
    try:
        model = zcompile.compile(PLAIN.build(), backend="eager", timeout=20.0, offload=offload)
        if call:
            model(**PLAIN.data(0, this_rank()))
    finally:
        del os.environ["ZCOMPILE_HOST_BYTES"]


@pytest.mark.parametrize(
    ("offload", "what", "call"),
    [
        ("optimizer", "optimizer states", False),
        ("parameters", "parameters", False),
        (KINDS["activations"], "activations", True),
    ],
)
def test_too_little_memory_on_one_host(ranks: Pools, offload: str, what: str, call: bool) -> None:
    """An error on every rank before anything trains, with the numbers."""
    outcomes = ranks.outcomes(2, too_little, limit=60.0, most=1000, offload=offload, call=call)
    assert (
        outcomes[1].error == "HostMemoryError" and "this rank may have 1,000, of which 0 are taken" in outcomes[1].text
    )
    assert outcomes[1].text.startswith(f"offloading of {what} takes ")
    assert outcomes[0].error == "RankError" and f"offloading of {what} takes " in outcomes[0].text


def another_optimizer() -> str:
    model = zcompile.compile(PLAIN.build(), backend="eager", offload="optimizer")
    optimizer = torch.optim.AdamW(model.parameters())
    model(**PLAIN.data(0, this_rank())).backward()
    with pytest.raises(
        OptimizerError, match="keeps its states on the device and offload='optimizer' puts none of them"
    ):
        optimizer.step()
    return str(len(optimizer.state))


def test_an_optimizer_that_stays_on_the_device(ranks: Pools) -> None:
    assert ranks(2, another_optimizer) == ["0", "0"]
