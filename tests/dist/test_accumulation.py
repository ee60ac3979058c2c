"""Windows of backward calls: what is declared or inside ``no_sync`` gives the gradients of the large batch, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import Net, all_rows, net, rows
from tests.dist.pool import Pools
from tests.dist.training import assert_close_gradients, full, full_gradients, this_rank, world_size
from zcompile.errors import OptimizerError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
WINDOW = 3


def compiled(stage: int, model: nn.Module | None = None, **options: Any) -> Any:
    options = {"gradient_accumulation_steps": WINDOW, **options}
    return zcompile.compile(model or net(), stage=stage, backend="eager", verify="full", **options)


def mine(step: int) -> Tensor:
    return rows(step, this_rank())


def plain_after(*steps: int, model: Net | None = None) -> Net:
    """A plain model after backwards on all ranks' rows of each step."""
    model = model or net()
    for step in steps:
        model(all_rows(step, world_size()))["loss"].backward()
    return model


def held(model: Any) -> Any:
    return model._session.runner.executor.accumulation


def num_collectives(model: Any) -> int:
    return model._session.runner.agreement._started


# A declared window. ---------------------------------------------------------------------------------------------------


def window(stage: int, inner: bool) -> None:
    """Two windows; ``inner``: with ``no_sync`` around all but the last backward, as other libraries do it."""
    model = compiled(stage)
    defers = stage <= 1 or inner
    for start in (0, WINDOW):
        before = full_gradients(model)
        counts = []
        for i in range(WINDOW):
            loss = model(mine(start + i))["loss"]
            begin = num_collectives(model)
            if inner and i < WINDOW - 1:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
            counts.append(num_collectives(model) - begin)
            if i < WINDOW - 1 and defers:
                assert_close_gradients(full_gradients(model), before)
                assert model.report().gradient_bytes > 0
        assert not held(model).names()
        assert counts[-1] > 0
        if stage == 0:
            assert counts[:-1] == [0] * (WINDOW - 1)
        if stage >= 2 and not inner:
            assert len(set(counts)) == 1
    reference = plain_after(*range(2 * WINDOW))
    assert_close_gradients(full_gradients(model), reference)
    big = net()
    for start in (0, WINDOW):
        everything = torch.cat([all_rows(start + i, world_size()) for i in range(WINDOW)])
        (WINDOW * big(everything)["loss"]).backward()
    assert_close_gradients(full_gradients(model), big)


@every_stage
@pytest.mark.parametrize("inner", [False, True])
def test_declared_window(ranks: Pools, stage: int, inner: bool) -> None:
    ranks(2, window, stage=stage, inner=inner)


def training(stage: int) -> None:
    """Clipped AdamW over windows; the caller scales the loss."""
    model, plain = compiled(stage), net()
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for start in range(0, 4 * WINDOW, WINDOW):
        for i in range(WINDOW):
            (model(mine(start + i))["loss"] / WINDOW).backward()
        plain(torch.cat([all_rows(start + i, world_size()) for i in range(WINDOW)]))["loss"].backward()
        norm = model.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-5, atol=0)
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@every_stage
def test_training_over_windows_equals_the_large_batch(ranks: Pools, stage: int) -> None:
    ranks(2, training, stage=stage)


def one_rank(accumulate_dtype: str | None) -> None:
    model = compiled(1, accumulate_dtype=accumulate_dtype)
    for i in range(WINDOW):
        model(rows(i, 0))["loss"].backward()
        plain = net()
        for j in range(i + 1):
            plain(rows(j, 0))["loss"].backward()
        assert_close_gradients(full_gradients(model), plain)


@pytest.mark.parametrize("accumulate_dtype", [None, "fp32"])
def test_one_process_sees_its_gradients_at_once(accumulate_dtype: str | None) -> None:
    one_rank(accumulate_dtype)


# Rounding. ------------------------------------------------------------------------------------------------------------


class Rounds(nn.Module):
    """In bf16: a sharded parameter that pads, and one of a dtype that is wide already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(5, 7, bias=False).bfloat16()
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor, extra: bool = True) -> dict[str, Tensor]:
        y = self.body(x.bfloat16()).float() if extra else x.sum() * torch.ones(2, 7)
        return {"loss": self.head(y).square().sum()}


def rounds_once(stage: int, wide: bool, in_no_sync: bool) -> None:
    """The same rows in each of 11 backwards and on every rank: the sum of gradients is 11 times one, to the last bit."""
    count = 11
    x = torch.linspace(-1, 1, 10).view(2, 5)
    plain = Rounds()
    plain(x)["loss"].backward()
    one = plain.body.weight.grad
    assert one is not None
    summed = torch.zeros_like(one)
    for _ in range(count):
        summed += one
    exact = (count * one.float()).bfloat16()
    assert not torch.equal(summed, exact), "bf16 sums would do"
    model = compiled(stage, Rounds(), gradient_accumulation_steps=count, accumulate_dtype="fp32" if wide else None)
    for i in range(count):
        last = i == count - 1
        loss = model(x, extra=not last)["loss"] if wide and last else model(x)["loss"]
        if in_no_sync and not last:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        if wide and last:  # what the last backward does not use is complete as well
            exact = ((count - 1) * one.float()).bfloat16()
    found = full_gradients(model)["body.weight"]
    assert found is not None and found.dtype == torch.bfloat16
    assert torch.equal(found, exact) == wide
    assert not held(model).names()


@every_stage
@pytest.mark.parametrize(("wide", "in_no_sync"), [(True, False), (True, True), (False, False)])
def test_accumulation_in_float32_rounds_once(ranks: Pools, stage: int, wide: bool, in_no_sync: bool) -> None:
    ranks(2, rounds_once, stage=stage, wide=wide, in_no_sync=in_no_sync)


# Windows that do not end. ---------------------------------------------------------------------------------------------


def unfinished(stage: int) -> None:
    """A step in the middle of a window is refused; ``sync_gradients`` completes it, ``zero_grad`` drops it."""
    model = compiled(stage, accumulate_dtype="fp32" if stage == 3 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for i in range(2):
        model(mine(i))["loss"].backward()
    if stage <= 1:
        with pytest.raises(OptimizerError, match="2 of 3 of the declared window"):
            optimizer.step()
    model.sync_gradients()
    assert_close_gradients(full_gradients(model), plain_after(0, 1))
    optimizer.step()
    optimizer.zero_grad()
    weights = net()
    weights.load_state_dict(model.full_state_dict())
    for i in range(WINDOW):  # the window begins anew
        model(mine(10 + i))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain_after(10, 11, 12, model=weights))
    model.zero_grad()
    model(mine(20))["loss"].backward()
    model.zero_grad()
    assert not held(model).names()
    for i in range(WINDOW):
        model(mine(30 + i))["loss"].backward()
    weights.zero_grad()
    assert_close_gradients(full_gradients(model), plain_after(30, 31, 32, model=weights))


@every_stage
def test_unfinished_windows(ranks: Pools, stage: int) -> None:
    ranks(2, unfinished, stage=stage)


def step_inside_no_sync(stage: int) -> None:
    model = compiled(stage, gradient_accumulation_steps=1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.no_sync():
        model(mine(0))["loss"].backward()
        other.step()  # not of this model
        with pytest.raises(OptimizerError, match=r"left out of \.grad; .*sync_gradients"):
            optimizer.step()
    model.sync_gradients()
    optimizer.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_without_the_gradients_of_no_sync_is_refused(ranks: Pools, stage: int) -> None:
    ranks(2, step_inside_no_sync, stage=stage)


def step_with_a_closure(stage: int, kind: str) -> None:
    """The closure's backward leaves gradients outside of .grad: in ``no_sync``, or in a window that it does not end."""
    model = compiled(stage, gradient_accumulation_steps=1 if kind == "no_sync" else WINDOW)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0), zcompile.optim.AdamW(model.parameters(), lr=1.0)]

    def closure() -> torch.Tensor:
        with model.no_sync() if kind == "no_sync" else torch.enable_grad():
            loss = model(mine(0))["loss"]
            loss.backward()
        return loss

    for optimizer in optimizers:
        before = full_state(model)
        with pytest.raises(OptimizerError, match=r"left out of \.grad"):
            optimizer.step(closure)
        with pytest.raises(OptimizerError, match=r"left out of \.grad"):
            optimizer.step(closure=closure)
        assert all(torch.equal(a, b) for a, b in zip(before, full_state(model), strict=True))
        model.zero_grad()


def full_state(model: Any) -> list[torch.Tensor]:
    return [full(p.detach()).clone() for p in model.parameters()]


@pytest.mark.parametrize(("stage", "kind"), [(1, "window"), (0, "no_sync"), (3, "no_sync")])
def test_a_step_whose_closure_leaves_gradients_behind_is_refused(ranks: Pools, stage: int, kind: str) -> None:
    ranks(2, step_with_a_closure, stage=stage, kind=kind)


# Other ways to ask for gradients. -------------------------------------------------------------------------------------


def autograd_grad(stage: int) -> None:
    """``autograd.grad`` gives its own gradients, takes none of the window's along and does not count as a part of it."""
    model = compiled(stage)
    names = ["first.weight", "middle.bias"]
    parameters = dict(model.named_parameters())
    for i in range(WINDOW):
        with model.no_sync() if i == 0 else torch.enable_grad():
            grads = torch.autograd.grad(model(mine(40 + i))["loss"], [parameters[n] for n in names])
        plain = dict(plain_after(40 + i).named_parameters())
        for name, grad in zip(names, grads, strict=True):
            torch.testing.assert_close(full(grad), plain[name].grad, rtol=1e-5, atol=1e-7)
        model(mine(i))["loss"].backward()
    assert_close_gradients(full_gradients(model), plain_after(*range(WINDOW)))


@every_stage
def test_autograd_grad_within_a_window(ranks: Pools, stage: int) -> None:
    ranks(2, autograd_grad, stage=stage)


def hooks(stage: int, in_no_sync: bool) -> None:
    """Hooks are called in every backward, with the gradient of all ranks; others' gradients are complete at the end."""
    model, plain = compiled(stage), net()
    seen: dict[str, list[Tensor]] = {"model": [], "plain": []}
    for label, module in (("model", model), ("plain", plain)):
        parameters = dict(module.named_parameters())
        parameters["first.weight"].register_hook(lambda grad: grad * 2)
        parameters["norm.weight"].register_post_accumulate_grad_hook(
            lambda p, label=label: seen[label].append(full(p.grad))
        )
    for i in range(WINDOW):
        loss = model(mine(i), extra=i == 0)["loss"]
        with model.no_sync() if in_no_sync and i < WINDOW - 1 else torch.enable_grad():
            loss.backward()
        plain(all_rows(i, world_size()), i == 0)["loss"].backward()
    assert plain.spare.weight.grad is not None
    assert_close_gradients(full_gradients(model), plain)
    torch.testing.assert_close(seen["model"], seen["plain"], rtol=1e-5, atol=1e-7)


@every_stage
@pytest.mark.parametrize("in_no_sync", [False, True])
def test_hooks_within_a_window(ranks: Pools, stage: int, in_no_sync: bool) -> None:
    ranks(2, hooks, stage=stage, in_no_sync=in_no_sync)
