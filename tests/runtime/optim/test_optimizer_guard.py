"""Optimizers that cannot work, and optimizers built before the model was compiled."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import full_gradients, plan, reduced, set_gradients
from zcompile.errors import OptimizerError
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.optim.optimizer_guard import check_optimizer, repoint, watch_optimizers
from zcompile.runtime.sharding.adopt import adopt, install
from zcompile.runtime.sharding.shards import ParameterShards


def taken_over(model: nn.Module) -> ParameterShards:
    """Shard a model and the optimizers that it has."""
    mesh = Mesh.create(device="cpu")
    shards = ParameterShards(plan(model, mesh.size), mesh)
    replaced = adopt(shards, dict(model.named_parameters()), sync_init=True)
    install(shards, model)
    repoint(shards, replaced)
    return shards


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: torch.optim.Adafactor(p),
            "Adafactor cannot step the sharded parameter 'weight': its factored moments",
        ),
        (lambda p: torch.optim.LBFGS(p), "LBFGS cannot step"),
        (lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]), "Muon cannot step"),
        (lambda p: torch.optim.Rprop(p), "Rprop cannot step"),
        (lambda p: torch.optim.SGD(p, fused=True), "SGD cannot step .* use .* SGD with fused=False"),
    ],
)
def test_optimizers_that_cannot_work_say_so_in_step(make: Callable[..., Any], message: str) -> None:
    model = nn.Linear(3, 4)
    shards = taken_over(model)
    watch_optimizers(shards, Accumulation())
    optimizer = make(list(model.parameters()))
    shards.accumulate_many(*reduced(shards, full_gradients(nn.Linear(3, 4), 0)))
    with pytest.raises(OptimizerError, match=message):
        optimizer.step(lambda: 0.0)
    with pytest.raises(OptimizerError, match=message):
        check_optimizer(optimizer)


@pytest.mark.usefixtures("one_rank")
def test_others_are_left_alone() -> None:
    shards = taken_over(nn.Linear(3, 4))
    watch_optimizers(shards, Accumulation())
    plain = nn.Linear(3, 4)
    plain(torch.ones(2, 3)).sum().backward()
    torch.optim.Adafactor(plain.parameters()).step()  # not ours
    check_optimizer(torch.optim.SGD(shards.parameters))


def test_any_optimizer_works_without_a_process_group() -> None:
    model = nn.Linear(3, 4)
    shards = taken_over(model)
    watch_optimizers(shards, Accumulation())
    shards.accumulate_many(*reduced(shards, full_gradients(nn.Linear(3, 4), 0)))
    torch.optim.Adafactor(model.parameters()).step()


def test_the_watch_ends_with_the_shards() -> None:
    from torch.optim import optimizer as torch_optimizer

    hooks: dict[int, Any] = vars(torch_optimizer)["_global_optimizer_pre_hooks"]
    before = len(hooks)
    shards = taken_over(nn.Linear(3, 4))
    watch_optimizers(shards, Accumulation())
    assert len(hooks) == before + 1
    del shards
    gc.collect()
    assert len(hooks) == before


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ours": lambda p: AdamW(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_built_before_goes_on(
    make: Callable[[Any], torch.optim.Optimizer],
    steps_before: int,
    distributed: bool,
    request: pytest.FixtureRequest,
) -> None:
    if distributed:
        request.getfixturevalue("one_rank")
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    plain = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(plain.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    for seed in range(steps_before):
        for m, optimizer in ((model, ours), (plain, theirs)):
            set_gradients(m, full_gradients(plain, seed))
            optimizer.step()
            optimizer.zero_grad()
    shards = taken_over(model)
    for seed in range(2, 4):
        gradients = full_gradients(plain, seed)
        set_gradients(plain, gradients)
        shards.accumulate_many(*reduced(shards, gradients))
        theirs.step()
        ours.step()
        ours.zero_grad()
    schedule.step()
    assert ours.param_groups[0]["lr"] == 0.05
    for name, value in plain.named_parameters():
        torch.testing.assert_close(shards.local(name), value.detach())


@pytest.mark.usefixtures("one_rank")
def test_state_that_cannot_be_divided_is_refused() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OptimizerError, match=r"holds state 'row_var' of shape \[4, 1\] for parameter 'weight'"):
        taken_over(model)
