"""Every way to ask for gradients gives what plain PyTorch gives on the batches of all ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import Net, all_rows, net, rows
from tests.dist.pool import Pools
from tests.dist.training import assert_close_gradients, full, full_gradients, this_rank, world_size
from zcompile.errors import BackwardError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
both_ends = pytest.mark.parametrize("stage", [0, 3])


def compiled(stage: int, model: nn.Module | None = None) -> Any:
    return zcompile.compile(model or net(), stage=stage, backend="eager", verify="off")


def live_bytes(model: Any) -> int:
    """Bytes of gathered parameters."""
    return model._session.runner.executor.buffers.live_bytes


def plain_after(*steps: tuple[int, bool], scale: float = 1.0) -> Net:
    """A plain model after a backward on all ranks' rows of each (step, extra)."""
    model = net()
    for step, extra in steps:
        (scale * model(all_rows(step, world_size()), extra)["loss"]).backward()
    return model


def mine(step: int) -> Tensor:
    return rows(step, this_rank())


# Accumulation. --------------------------------------------------------------------------------------------------------


def accumulates(stage: int) -> None:
    model = compiled(stage)
    model(mine(0))["loss"].backward()
    model(mine(1))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain_after((0, False), (1, False)))


@every_stage
def test_backwards_accumulate(ranks: Pools, stage: int) -> None:
    ranks(2, accumulates, stage=stage)


def no_sync(stage: int, num_local: int) -> None:
    model = compiled(stage)
    for start in (0, 10):  # the second time onto gradients that are there already
        before = full_gradients(model)
        with model.no_sync():
            for i in range(num_local):
                model(mine(start + i))["loss"].backward()
        assert_close_gradients(full_gradients(model), before)
        assert live_bytes(model) == 0
        model(mine(start + num_local))["loss"].backward()
        if start == 0:
            reference = plain_after(*[(i, False) for i in range(num_local + 1)])
            assert_close_gradients(full_gradients(model), reference)
            big = net()
            everything = torch.cat([all_rows(i, world_size()) for i in range(num_local + 1)])
            ((num_local + 1) * big(everything)["loss"]).backward()
            assert_close_gradients(full_gradients(model), big)
    steps = [*range(num_local + 1), *range(10, 10 + num_local + 1)]
    assert_close_gradients(full_gradients(model), plain_after(*[(i, False) for i in steps]))


@every_stage
@pytest.mark.parametrize("num_local", [1, 2])
def test_no_sync(ranks: Pools, stage: int, num_local: int) -> None:
    ranks(2, no_sync, stage=stage, num_local=num_local)


def no_sync_alone(stage: int) -> None:
    """A parameter that only a backward inside no_sync used, and the optimizer step after it."""
    model = compiled(stage)
    with model.no_sync():
        model(mine(0), extra=True)["loss"].backward()
    model(mine(1))["loss"].backward()
    reference = plain_after((0, True), (1, False))
    assert reference.spare.weight.grad is not None
    assert_close_gradients(full_gradients(model), reference)
    model.zero_grad()
    model(mine(2))["loss"].backward()  # nothing is left over
    assert_close_gradients(full_gradients(model), plain_after((2, False)))


@every_stage
def test_parameter_of_a_no_sync_backward_alone(ranks: Pools, stage: int) -> None:
    ranks(2, no_sync_alone, stage=stage)


# Several passes through one graph. ------------------------------------------------------------------------------------


def two_forwards(stage: int) -> None:
    model = compiled(stage)
    a, b = model(mine(0))["loss"], model(mine(1), extra=True)["loss"]
    (a + b).backward()
    assert_close_gradients(full_gradients(model), plain_after((0, False), (1, True)))
    model.zero_grad()
    a = model(mine(2))["loss"]
    kept = live_bytes(model)
    b = model(mine(3))["loss"]
    assert (kept > 0) == (stage > 0) and live_bytes(model) == 2 * kept  # stage 3 keeps the last unit
    a.backward()
    assert live_bytes(model) == kept
    b.backward()
    assert_close_gradients(full_gradients(model), plain_after((2, False), (3, False)))
    assert live_bytes(model) == 0


@every_stage
def test_two_forwards_before_one_backward(ranks: Pools, stage: int) -> None:
    ranks(2, two_forwards, stage=stage)


def retain_graph(stage: int) -> None:
    model = compiled(stage)
    loss = model(mine(0))["loss"]
    kept = live_bytes(model)
    loss.backward(retain_graph=True)
    assert live_bytes(model) == kept and (kept > 0) == (stage > 0)
    once = full_gradients(model)
    loss.backward()
    for name, grad in full_gradients(model).items():
        assert (grad is None) == (once[name] is None)
        assert grad is None or torch.equal(grad, 2 * once[name]), name
    assert_close_gradients(once, plain_after((0, False)))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    del loss
    assert live_bytes(model) == 0


@every_stage
def test_retain_graph(ranks: Pools, stage: int) -> None:
    ranks(2, retain_graph, stage=stage)


def create_graph() -> None:
    model = compiled(3)
    with pytest.raises(BackwardError, match="create_graph=True"):
        model(mine(0))["loss"].backward(create_graph=True)
    model.zero_grad()
    model(mine(0))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain_after((0, False)))


def test_create_graph_is_refused(ranks: Pools) -> None:
    ranks(2, create_graph)


# Hooks. ---------------------------------------------------------------------------------------------------------------


def post_accumulate_hooks(stage: int) -> None:
    model = compiled(stage)
    seen: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad))
    model(mine(0))["loss"].backward()
    reference = {name: p.grad for name, p in plain_after((0, False)).named_parameters() if p.grad is not None}
    assert {name: len(grads) for name, grads in seen.items()} == dict.fromkeys(reference, 1)
    assert_close_gradients({name: full(seen[name][0]) for name in reference}, reference)


@both_ends
def test_post_accumulate_hooks_fire_once_with_the_reduced_gradient(ranks: Pools, stage: int) -> None:
    ranks(2, post_accumulate_hooks, stage=stage)


def step_in_hooks() -> None:
    """An optimizer a parameter that steps as soon as the gradient is there."""
    model, plain = compiled(3), net()
    for each in (model, plain):
        for p in each.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(p: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            if p.requires_grad:
                p.register_post_accumulate_grad_hook(step)
    for i in range(3):
        model(mine(i))["loss"].backward()
        plain(all_rows(i, world_size()))["loss"].backward()
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])


def test_optimizer_in_the_backward(ranks: Pools) -> None:
    ranks(2, step_in_hooks)


def tensor_hooks(stage: int) -> None:
    model, plain = compiled(stage), net()
    calls: list[str] = []

    def double(grad: Tensor) -> Tensor:
        calls.append("hook")
        return 2 * grad

    for each in (model, plain):
        each.middle.weight.register_hook(double)
        each.norm.bias.register_hook(double)
    model(mine(0))["loss"].backward()
    model(mine(1))["loss"].backward()
    assert len(calls) == 4
    for i in range(2):
        plain(all_rows(i, world_size()))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_tensor_hooks(ranks: Pools, stage: int) -> None:
    ranks(2, tensor_hooks, stage=stage)


# Other ways to ask. ---------------------------------------------------------------------------------------------------


def autograd_grad(stage: int) -> None:
    model, plain = compiled(stage), net()
    names = [n for n, p in model.named_parameters() if p.requires_grad and not n.startswith(("unused", "spare"))]
    of = dict(model.named_parameters())
    grads = torch.autograd.grad(model(mine(0))["loss"], [of[n] for n in names])
    assert all(g.placements == of[n].placements for n, g in zip(names, grads, strict=True))
    assert all(p.grad is None for p in model.parameters())
    mine_ = {n: full(g) for n, g in zip(names, grads, strict=True)}
    of = dict(plain.named_parameters())
    expected = torch.autograd.grad(plain(all_rows(0, world_size()))["loss"], [of[n] for n in names])
    assert_close_gradients(mine_, dict(zip(names, expected, strict=True)))
    unused = torch.autograd.grad(model(mine(0))["loss"], [model.unused.weight, model.first.bias], allow_unused=True)
    assert unused[0] is None and unused[1] is not None


@both_ends
def test_autograd_grad(ranks: Pools, stage: int) -> None:
    ranks(2, autograd_grad, stage=stage)


def backward_inputs(stage: int) -> None:
    model, plain = compiled(stage), net()
    model(mine(0))["loss"].backward(inputs=[model.first.weight, model.norm.bias])
    plain(all_rows(0, world_size()))["loss"].backward(inputs=[plain.first.weight, plain.norm.bias])
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_backward_of_some_parameters(ranks: Pools, stage: int) -> None:
    ranks(2, backward_inputs, stage=stage)


def input_gradients(stage: int) -> None:
    """The gradient of an input is of this rank's own loss."""
    model, plain = compiled(stage), net()
    x, y = mine(0).requires_grad_(), mine(0).requires_grad_()
    model(x)["loss"].backward()
    plain(y)["loss"].backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert_close_gradients(full_gradients(model), plain_after((0, False)))


@both_ends
def test_inputs_that_require_grad(ranks: Pools, stage: int) -> None:
    ranks(2, input_gradients, stage=stage)


def loss_outside(stage: int) -> None:
    """A loss of the user's own, scaled, on the outputs of a model that has none."""
    plain = nn.Sequential(net().first, nn.Tanh(), net().middle)
    model = compiled(stage, copy.deepcopy(plain))
    (3 * model(mine(0)).square().mean()).backward()
    (3 * plain(all_rows(0, world_size())).square().mean()).backward()
    assert_close_gradients(full_gradients(model), plain)


@both_ends
def test_loss_outside_the_model(ranks: Pools, stage: int) -> None:
    ranks(2, loss_outside, stage=stage)


# Norms. ---------------------------------------------------------------------------------------------------------------


class Gained(Net):
    """With a parameter that is replicated in every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor, extra: bool = False) -> dict[str, Tensor]:
        return super().forward(x * self.gain, extra)


def gained() -> Gained:
    torch.manual_seed(1)
    return Gained()


def clipping(stage: int) -> None:
    """The flat norm, torch's on the same DTensors and plain PyTorch's."""
    model, again, plain = compiled(stage, gained()), compiled(stage, gained()), gained()
    for order in (1.0, 2.0, 3.0, math.inf):
        for each, data in ((model, mine(0)), (again, mine(0)), (plain, all_rows(0, world_size()))):
            each.zero_grad()
            each(data)["loss"].backward()
        flat = model.clip_grad_norm_(0.01, norm_type=order)
        torchs = full(torch.nn.utils.clip_grad_norm_(again.parameters(), 0.01, norm_type=order))
        alone = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=order)
        torch.testing.assert_close(flat, alone, rtol=1e-5, atol=0)
        torch.testing.assert_close(flat, torchs, rtol=1e-5, atol=0)
        assert flat > 0.01
        assert_close_gradients(full_gradients(model), plain)
        assert_close_gradients(full_gradients(again), plain)


@every_stage
def test_clipping(ranks: Pools, stage: int) -> None:
    ranks(2, clipping, stage=stage)


@every_stage
@pytest.mark.parametrize("world", [3])
def test_clipping_with_padding(ranks: Pools, world: int, stage: int) -> None:
    ranks(world, clipping, stage=stage)


def zero_grad(stage: int) -> None:
    model = compiled(stage)
    model(mine(0))["loss"].backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=False)
    for name, p in model.named_parameters():
        assert p.grad is before[name]
        assert p.grad is None or not full(p.grad).any(), name
    model(mine(1))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain_after((1, False)))


@every_stage
def test_zero_grad_in_place(ranks: Pools, stage: int) -> None:
    ranks(2, zero_grad, stage=stage)
