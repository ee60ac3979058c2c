"""Calls of every kind: eval in the middle, ragged batches, changing shapes, several models, errors and what follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import CASES, Net, all_rows, net, rows
from tests.dist.pool import Pools
from tests.dist.training import (
    LR,
    Trained,
    adamw,
    assert_close_gradients,
    assert_equal_training,
    average_gradients,
    copies,
    detached,
    full_gradients,
    mean_over_ranks,
    seed,
    this_rank,
    world_size,
)
from zcompile.errors import BackwardError, SignatureError

pytestmark = pytest.mark.dist

both_ends = pytest.mark.parametrize("stage", [0, 3])


def compiled(stage: int = 3, model: nn.Module | None = None, **options: Any) -> Any:
    return zcompile.compile(model or net(), stage=stage, **{"backend": "eager", "verify": "off", **options})


def mine(step: int, count: int = 3) -> Tensor:
    return rows(step, this_rank(), count)


def assert_close_state(model: Any, plain: nn.Module) -> None:
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], rtol=1e-5, atol=1e-2 * LR, msg=lambda m, n=name: f"{n}: {m}"
        )


# Which parameters train. ----------------------------------------------------------------------------------------------


def frozen_and_unused(stage: int) -> None:
    model, plain = compiled(stage), net()
    optimizer, reference = adamw(model), adamw(plain)
    before = model.full_state_dict()
    for step in range(3):
        model(mine(step))["loss"].backward()
        plain(all_rows(step, world_size()))["loss"].backward()
        for name in ("unused.weight", "spare.bias", "frozen.weight"):
            assert model.get_parameter(name).grad is None
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    after = model.full_state_dict()
    for name in ("unused.weight", "spare.bias", "frozen.weight"):
        assert torch.equal(after[name], before[name]), name
    assert_close_state(model, plain)
    for each in (model, plain):  # freeze and thaw later
        each.frozen.requires_grad_(True)
        each.middle.requires_grad_(False)
    model(mine(5))["loss"].backward()
    plain(all_rows(5, world_size()))["loss"].backward()
    assert plain.frozen.weight.grad is not None and plain.middle.weight.grad is None
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_frozen_and_unused_parameters(ranks: Pools, stage: int) -> None:
    ranks(2, frozen_and_unused, stage=stage)


def tied(stage: int) -> None:
    model, plain = compiled(stage), net()
    assert model.again.weight is model.first.weight
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert names == [n for n, _ in plain.named_parameters(remove_duplicate=False)]
    state = model.full_state_dict()
    assert torch.equal(state["again.weight"], state["first.weight"])
    model(mine(0))["loss"].backward()
    plain(all_rows(0, world_size()))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_tied_weights(ranks: Pools, stage: int) -> None:
    ranks(2, tied, stage=stage)


# Modes and shapes. ----------------------------------------------------------------------------------------------------


def eval_in_the_middle(stage: int) -> None:
    case, user = CASES["mlp"], CASES["mlp"].build()
    user.layers[0].bias.requires_grad_(False)  # rounding noise moves it, and eval mode would show that
    plains = copies(user, world_size())
    model = compiled(stage, user)
    optimizers, optimizer = [adamw(p) for p in plains], adamw(model)
    for step in range(6):
        if step in (2, 4):
            for each in (model, *plains):
                each.eval()
            data = case.data(100 + step, this_rank())
            with torch.no_grad():
                value = model(**data)
                assert not value.requires_grad
                torch.testing.assert_close(value, plains[this_rank()](**data), rtol=1e-4, atol=1e-5)
            if step == 4:  # eval mode with gradients
                model(**data).backward()
                for rank, plain in enumerate(plains):
                    plain(**case.data(100 + step, rank)).backward()
                average_gradients(plains)
                assert_close_gradients(full_gradients(model), plains[0])
                for each in (model, *plains):
                    each.zero_grad()
            for each in (model, *plains):
                each.train()
        seed(step, this_rank())
        model(**case.data(step, this_rank())).backward()
        for rank, plain in enumerate(plains):
            seed(step, rank)
            plain(**case.data(step, rank)).backward()
        average_gradients(plains)
        for each in (optimizer, *optimizers):
            each.step()
            each.zero_grad()
    assert_equal_training(Trained([], model.full_state_dict()), Trained([], detached(plains[0])))
    for name, buffer in model.named_buffers():  # each rank's own
        torch.testing.assert_close(buffer, plains[this_rank()].get_buffer(name), rtol=1e-4, atol=1e-5)


@both_ends
def test_eval_in_the_middle(ranks: Pools, stage: int) -> None:
    ranks(2, eval_in_the_middle, stage=stage)


def ragged(stage: int) -> None:
    """Ranks with different numbers of rows, which change at different steps: the mean of the ranks' means."""
    model = compiled(stage)
    plains = copies(net(), world_size())
    optimizers, optimizer = [adamw(p) for p in plains], adamw(model)

    def count(step: int, rank: int) -> int:
        return 3 if rank == 0 or step < 3 else 2 + step % 2

    losses, expected = [], []
    for step in range(6):
        loss = model(rows(step, this_rank(), count(step, this_rank())))["loss"]
        loss.backward()
        losses.append(loss.item())
        each = []
        for rank, plain in enumerate(plains):
            loss = plain(rows(step, rank, count(step, rank)))["loss"]
            loss.backward()
            each.append(loss.item())
        expected.append(sum(each) / len(each))
        average_gradients(plains)
        for each in (optimizer, *optimizers):
            each.step()
            each.zero_grad()
    assert model.report().captures == (1 if this_rank() == 0 else 2)
    assert_equal_training(
        Trained(mean_over_ranks(losses), model.full_state_dict()), Trained(expected, detached(plains[0]))
    )


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ragged_batches(ranks: Pools, stage: int) -> None:
    ranks(2, ragged, stage=stage)


def changing_length(stage: int) -> None:
    case = CASES["deep"]
    model, plain = compiled(stage, case.build()), case.build()
    optimizer, reference = adamw(model), adamw(plain)
    for step, length in enumerate((6, 4, 6, 6, 4)):
        batch = {k: v[:, :length] for k, v in case.data(step, this_rank()).items()}
        case.loss(model(**batch)).backward()
        parts = [{k: v[:, :length] for k, v in case.data(step, r).items()} for r in range(world_size())]
        case.loss(plain(**{k: torch.cat([p[k] for p in parts]) for k in batch})).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_close_state(model, plain)


@both_ends
def test_changing_sequence_length(ranks: Pools, stage: int) -> None:
    ranks(2, changing_length, stage=stage)


def max_captures() -> None:
    model, plain = compiled(3, max_captures=2), net()
    model(mine(0))["loss"].backward()
    model(mine(0, 4))["loss"].backward()
    with pytest.raises(SignatureError, match=r"max_captures is 2 .*shape of tensor argument 0 is \[5, 7\]"):
        model(mine(0, 5))
    model.zero_grad()
    model(mine(1))["loss"].backward()  # the captures that there are still serve
    plain(all_rows(1, world_size()))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain)


def test_max_captures(ranks: Pools) -> None:
    ranks(2, max_captures)


# Several models. ------------------------------------------------------------------------------------------------------


def two_models(stage: int) -> None:
    """An actor whose output a critic reads, and that is trained through it; a reference model that only looks."""
    actor, critic = compiled(stage, differentiable=["out"]), compiled(3 - stage)
    target = compiled(3).eval()
    plain_actor, plain_critic = net(), net()
    optimizers = [adamw(m) for m in (actor, critic, plain_actor, plain_critic)]
    frozen = net()
    for step in range(3):
        x, everyone = mine(step), all_rows(step, world_size())
        with torch.no_grad():
            seen = target(x)["out"]
            torch.testing.assert_close(seen, frozen(x)["out"])
        (critic(actor(x)["out"])["loss"]).backward() if step != 1 else critic(x)["loss"].backward()
        (plain_critic(plain_actor(everyone)["out"])["loss"]).backward() if step != 1 else plain_critic(everyone)[
            "loss"
        ].backward()
        assert_close_gradients(full_gradients(critic), plain_critic)
        assert_close_gradients(full_gradients(actor), plain_actor)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_close_state(actor, plain_actor)
    assert_close_state(critic, plain_critic)


@both_ends
def test_two_models(ranks: Pools, stage: int) -> None:
    ranks(2, two_models, stage=stage)


# Errors, and going on. ------------------------------------------------------------------------------------------------


def tangent_at_logits() -> None:
    case = CASES["deep"]
    model = compiled(3, case.build())
    out = model(**case.data(0, this_rank()))
    with pytest.raises(
        BackwardError, match=r"output .*logits.*not differentiable.*differentiable=\[\.\.\., 'logits'\]"
    ):
        (out["loss"] + out["logits"].sum()).backward()
    assert all(p.grad is None for p in model.parameters())
    case.loss(model(**case.data(0, this_rank()))).backward()
    other, plain = compiled(3, case.build(), differentiable=["loss", "logits"]), case.build()
    out = other(**case.data(0, this_rank()))
    (out["loss"] + out["logits"].square().mean()).backward()
    out = plain(**{k: torch.cat([case.data(0, r)[k] for r in range(world_size())]) for k in case.data(0, 0)})
    (out["loss"] + out["logits"].square().mean()).backward()
    assert_close_gradients(full_gradients(other), plain)


def test_gradient_at_a_detached_output(ranks: Pools) -> None:
    ranks(2, tangent_at_logits)


class Touchy(Net):
    """Raises its own error on request."""

    def forward(self, x: Tensor, extra: bool = False, fail: bool = False) -> dict[str, Tensor]:
        if fail:
            raise ValueError("three is a bad number")
        return super().forward(x, extra)


def touchy() -> Touchy:
    torch.manual_seed(1)
    return Touchy()


def raises_and_goes_on(stage: int) -> None:
    model, plain = compiled(stage, touchy()), net()
    model(mine(0))["loss"].backward()
    with pytest.raises(ValueError, match="three is a bad number") as caught:
        model(mine(1), fail=True)
    assert type(caught.value) is ValueError
    with pytest.raises(Exception, match="must have same reduction dim"):  # shapes that do not fit
        model(torch.zeros(2, 8))
    model(mine(1))["loss"].backward()
    for step in range(2):
        plain(all_rows(step, world_size()))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_exception_on_all_ranks_then_going_on(ranks: Pools, stage: int) -> None:
    ranks(2, raises_and_goes_on, stage=stage)


def exception_in_backward_hook() -> None:
    """An error in a user's tensor hook on all ranks leaves the model usable."""
    model, plain = compiled(3), net()
    handle = model.norm.bias.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(mine(0))["loss"].backward()
    handle.remove()
    model.zero_grad()
    model(mine(1))["loss"].backward()
    plain(all_rows(1, world_size()))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain)
    assert model._session.runner.executor.buffers.live_bytes == 0


def test_exception_in_a_hook_then_going_on(ranks: Pools) -> None:
    ranks(2, exception_in_backward_hook)


def random_streams() -> None:
    """Compiling and capturing draws nothing from the user's random stream."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    user = net()
    torch.manual_seed(5)
    model = compiled(3, user)
    model(mine(0))["loss"].backward()
    assert torch.equal(torch.rand(3), expected)


def test_random_streams_are_left_alone(ranks: Pools) -> None:
    ranks(2, random_streams)
