"""Loss scaling on ranks: fp16 training, overflows that one rank alone sees, and scalers that decide on each rank by itself."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import net, rows
from tests.dist.pool import Pools
from tests.dist.training import full, full_gradients, over_ranks, this_rank, world_size
from zcompile.errors import LossScaleError, NonFiniteError, OptimizerError, RankMismatchError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ours": zcompile.optim.AdamW,
    "torch": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Mixed(nn.Module):
    """A replicated parameter first, then sharded ones with padding, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.first = nn.Linear(7, 13)
        self.middle = nn.Linear(13, 7)
        self.last = nn.Linear(7, 13, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.last(torch.tanh(self.middle(torch.relu(self.first(x) * self.scale))))
        return {"loss": out.float().square().mean()}


def compiled(stage: int, **options: Any) -> Any:
    return zcompile.compile(Mixed(), stage=stage, **{"backend": "eager", "verify": "off", **options})


def mine(step: int) -> Tensor:
    return rows(step, this_rank())


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's parameters and optimizer state."""
    values = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    values += list(model.parameters())
    return [(t.to_local() if hasattr(t, "to_local") else t).detach().clone() for t in values]


def assert_same_bits(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# fp16 from end to end. ------------------------------------------------------------------------------------------------

STEPS, LR, MAX_NORM = 8, 3e-2, 0.5


class Masters:
    """Plain PyTorch in one process with the same casts: fp32 masters, fp16 compute, gradients of ranks averaged in fp32."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.masters = Mixed()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.masters.parameters())

    def backward(self, step: int, scale: float) -> float:
        """Leaves averaged scaled gradients; returns the loss."""
        losses, total = [], [torch.zeros_like(p) for p in self.parameters()]
        for rank in range(self.world):
            half = copy.deepcopy(self.masters).half()
            loss = half(rows(step, rank).half())["loss"]
            (loss * scale).backward()
            losses.append(loss.item())
            for sum_, p in zip(total, half.parameters(), strict=True):
                assert p.grad is not None
                sum_ += p.grad.float() / self.world
        for sum_, p in zip(total, self.parameters(), strict=True):
            p.grad = sum_
        return sum(losses) / self.world


def fp16_training(stage: int, make: str) -> list[float]:
    """As the AMP tutorial does: unscale, clip, step, update; 2^24 is too much at first."""
    scaling = {"init_scale": 2.0**24, "growth_interval": 3}
    model, plain = compiled(stage, precision="fp16"), Masters(world_size())
    ours, theirs = OPTIMIZERS[make](model.parameters(), lr=LR), OPTIMIZERS[make](plain.parameters(), lr=LR)
    scaler, reference = zcompile.GradScaler(hysteresis=1, **scaling), torch.amp.GradScaler("cpu", **scaling)
    losses, skipped, step = [], 0, 0
    while step < STEPS:
        loss = model(mine(step % 2))["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(ours)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()

        reference.scale(torch.ones(()))
        expected = plain.backward(step % 2, reference.get_scale())
        reference.unscale_(theirs)
        nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        reference.step(theirs)
        reference.update()
        theirs.zero_grad()

        assert scaler.get_scale() == reference.get_scale()
        mean = sum(over_ranks(loss.item())) / world_size()
        assert abs(mean - expected) <= 2e-3 * expected, f"step {step}: {mean}, plain PyTorch {expected}"
        skipped += scaler.step_was_skipped
        if not scaler.step_was_skipped:
            losses.append(mean)
            step += 1
    assert skipped >= 2
    for first, last in ((losses[0], losses[-2]), (losses[1], losses[-1])):  # of the same data
        assert last < 0.95 * first, losses
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.masters.state_dict()[name], rtol=1e-2, atol=5e-3)
    return losses


@every_stage
def test_fp16_training(ranks: Pools, stage: int) -> None:
    ranks(2, fp16_training, stage=stage, make="ours")


@pytest.mark.parametrize("make", ["torch", "sgd"])
def test_fp16_training_with_torchs_optimizers(ranks: Pools, make: str) -> None:
    ranks(2, fp16_training, stage=3, make=make)


@pytest.mark.parametrize("world", [0, 3])
def test_fp16_training_at_other_world_sizes(ranks: Pools, world: int) -> None:
    ranks(world, fp16_training, stage=3, make="ours")


def resumed() -> None:
    """A run that stops and goes on from its states is the run that did not stop."""

    def run(model: Any, optimizer: torch.optim.Optimizer, scaler: Any, steps: range) -> list[float]:
        scales = []
        for step in steps:
            scaler.scale(model(mine(step))["loss"]).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    def fresh() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = compiled(3, precision="fp16")
        scaler = zcompile.GradScaler(init_scale=2.0**22, growth_interval=2, hysteresis=3)
        return model, zcompile.optim.AdamW(model.parameters(), lr=LR), scaler

    whole, first, second = fresh(), fresh(), fresh()
    want = run(*whole, range(10))
    assert len(set(want)) > 2
    got = run(*first, range(5))
    second[0].load_state_dict(first[0].full_state_dict())
    second[0].load_full_optimizer_state_dict(second[1], first[0].full_optimizer_state_dict(first[1]))
    second[2].load_state_dict(first[2].state_dict())
    got += run(*second, range(5, 10))
    assert got == want
    assert_same_bits(bits(second[0], second[1])[-4:], bits(whole[0], whole[1])[-4:])


def test_resume(ranks: Pools) -> None:
    ranks(2, resumed)


# Overflows. -----------------------------------------------------------------------------------------------------------


def overflow_on_one_rank(stage: int, make: str, bad_rank: int, bad: float) -> None:
    """One element of one rank's own shard; a replicated gradient is the same everywhere."""
    model = compiled(stage)
    optimizer = OPTIMIZERS[make](model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = zcompile.GradScaler(hysteresis=1, init_scale=64.0)
    for step in range(3):
        before = bits(model, optimizer)
        scaler.scale(model(mine(step))["loss"]).backward()
        if step == 1:
            grad = model.middle.weight.grad.to_local()
            if stage == 0 or this_rank() == bad_rank:
                grad[0, 2] = bad
        scaler.unscale_(optimizer)
        norm = model.clip_grad_norm_(0.1)
        assert math.isfinite(norm) == (step != 1)
        scaler.step(optimizer)
        assert scaler.step_was_skipped == (step == 1)
        if not scaler.step_was_skipped:
            schedule.step()
        else:
            assert_same_bits(bits(model, optimizer), before)
        scaler.update()
        assert set(over_ranks(scaler.get_scale())) == {64.0 if step == 0 else 32.0}
        optimizer.zero_grad()
    assert schedule.get_last_lr() == [LR / 4]
    if make != "sgd":
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@every_stage
def test_an_overflow_on_one_rank_skips_all(ranks: Pools, stage: int) -> None:
    ranks(2, overflow_on_one_rank, stage=stage, make="ours", bad_rank=1, bad=math.inf)


@pytest.mark.parametrize("world", [3])
def test_an_overflow_on_the_last_of_three(ranks: Pools, world: int) -> None:
    ranks(world, overflow_on_one_rank, stage=3, make="torch", bad_rank=world - 1, bad=math.nan)


def half_overflow_of_one_rank() -> None:
    """A batch of one rank alone that overflows in half precision."""
    model = compiled(3, precision="fp16")
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler(hysteresis=1, init_scale=2.0)
    x = mine(0) * (1e6 if this_rank() == 1 else 1.0)
    loss = model(x)["loss"]
    assert math.isfinite(loss) == (this_rank() == 0)
    before = bits(model, optimizer)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped and scaler.get_scale() == 1.0
    assert_same_bits(bits(model, optimizer), before)


def test_half_precision_overflows_on_one_rank(ranks: Pools) -> None:
    ranks(2, half_overflow_of_one_rank)


def at_the_minimum(stage: int) -> str:
    model = compiled(stage)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler(hysteresis=1, init_scale=2.0)
    for step in range(2):
        scaler.scale(model(mine(step))["loss"]).backward()
        if stage == 0 or this_rank() == 1:
            model.middle.bias.grad.to_local()[-1] = math.nan
            model.last.weight.grad.to_local()[-1] = math.inf
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)  # makes NaN of every gradient
        scaler.step(optimizer)
        if step == 0:
            scaler.update()
            optimizer.zero_grad()
    with pytest.raises(LossScaleError) as caught:
        scaler.update()
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_at_the_minimum_every_rank_names_the_parameters(ranks: Pools, stage: int) -> None:
    first, second = ranks(2, at_the_minimum, stage=stage)
    assert first == second
    assert first.startswith(
        "loss scale is at its minimum 1 and the gradient of parameter 'first.weight' and of 1 more is not finite; "
    )


def skipping_without_scaling() -> list[str]:
    """The variant for bf16 and fp32: no scale, but a step with NaN is skipped and said."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zcompile").addHandler(handler)
    try:
        model = compiled(3, precision="bf16")
        optimizer = zcompile.optim.AdamW(model.parameters(), lr=LR)
        scaler = zcompile.GradScaler(dynamic=False, init_scale=1.0)
        before = bits(model, optimizer)
        scaler.scale(model(mine(0) * (math.nan if this_rank() == 1 else 1))["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped
        assert_same_bits(bits(model, optimizer), before)
    finally:
        logging.getLogger("zcompile").removeHandler(handler)
    return [message for message in seen if "step skipped" in message]


def test_skipping_without_scaling(ranks: Pools) -> None:
    first, second = ranks(2, skipping_without_scaling)
    assert second == []
    assert first == ["step skipped at loss scale 1: the gradient of parameter 'scale' and of 4 more is not finite"]


def error_if_nonfinite(stage: int) -> str:
    model = compiled(stage)
    model(mine(0))["loss"].backward()
    if stage == 0 or this_rank() == 1:
        model.middle.weight.grad.to_local()[-1, 0] = math.inf
    before = full_gradients(model)
    with pytest.raises(NonFiniteError) as caught:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, before[name], rtol=0, atol=0)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_names_what_is_not_finite(ranks: Pools, stage: int) -> None:
    first, second = ranks(2, error_if_nonfinite, stage=stage)
    assert first == second and "the gradient of parameter 'middle.weight' is not finite" in first


def windows(stage: int) -> None:
    """Gradients of several backward calls under one scale; half of a window cannot be unscaled, as the rest would stay scaled."""
    model, plain = compiled(stage, gradient_accumulation_steps=2), compiled(stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler(hysteresis=1, init_scale=8.0)
    scaler.scale(model(mine(0))["loss"]).backward()
    if stage == 0:  # which keeps gradients until the window ends
        with pytest.raises(OptimizerError, match=r"left out of \.grad"):
            scaler.unscale_(optimizer)
    scaler.scale(model(mine(1))["loss"]).backward()
    scaler.unscale_(optimizer)
    for step in range(2):
        plain(mine(step))["loss"].backward()
    want = full_gradients(plain)
    for name, grad in full_gradients(model).items():
        torch.testing.assert_close(grad, want[name])
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.step_was_skipped


@pytest.mark.parametrize("stage", [0, 3])
def test_accumulation_windows(ranks: Pools, stage: int) -> None:
    ranks(2, windows, stage=stage)


# Odd ranks. -----------------------------------------------------------------------------------------------------------


def some_without_gradients() -> None:
    """A rank whose gradients were taken away, and parameters that have no rows on the last rank."""
    user = nn.Sequential(nn.Linear(7, 2), nn.Linear(2, 2000), nn.Linear(2000, 2))
    model = zcompile.compile(user, stage=3, backend="eager", verify="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler(hysteresis=1, init_scale=4.0)
    for step in range(3):
        scaler.scale(model(mine(step)).square().mean()).backward()
        want = {n: None if g is None else g / scaler.get_scale() for n, g in full_gradients(model).items()}
        scaler.unscale_(optimizer)
        for name, grad in full_gradients(model).items():
            torch.testing.assert_close(grad, want[name])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.scale(model(mine(9)).square().mean()).backward()
    if this_rank() == 1:
        optimizer.zero_grad()
    elif this_rank() == 0:
        model[1].weight.grad.to_local()[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped and scaler.get_scale() == 2.0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_without_gradients_take_part(ranks: Pools, world: int) -> None:
    ranks(world, some_without_gradients)


def two_models() -> None:
    """One optimizer over two compiled models and a plain parameter: an overflow anywhere skips everything, everywhere."""
    a, b = compiled(3), compiled(1)
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD(
        [{"params": [plain]}, {"params": list(a.parameters())}, {"params": list(b.parameters())}], lr=LR
    )
    scaler = zcompile.GradScaler(init_scale=4.0)
    for bad in ("none", "plain", "a", "b"):
        (scaler.scale(a(mine(0))["loss"]) + scaler.scale(b(mine(1))["loss"])).backward()
        plain.grad = torch.full((3,), 4.0)
        if this_rank() == 1 and bad != "none":
            grad = {"plain": plain, "a": a.middle.weight, "b": b.middle.weight}[bad].grad
            full_rows = grad.to_local() if hasattr(grad, "to_local") else grad
            full_rows[0] = math.nan
        before = bits(nn.ParameterList([*a.parameters(), *b.parameters(), plain]), optimizer)
        scaler.step(optimizer)
        scaler.update(4.0)
        optimizer.zero_grad()
        after = bits(nn.ParameterList([*a.parameters(), *b.parameters(), plain]), optimizer)
        assert scaler.step_was_skipped == (bad != "none")
        assert all(map(torch.equal, before, after)) == (bad != "none")


def test_two_models_under_one_optimizer(ranks: Pools) -> None:
    ranks(2, two_models)


def different_scales() -> None:
    model = compiled(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler(init_scale=2.0 ** (3 + this_rank()))
    scaler.scale(model(mine(0))["loss"]).backward()
    with pytest.raises(RankMismatchError, match="loss scales from 8 to 16"):
        scaler.step(optimizer)


def test_different_scales_are_refused(ranks: Pools) -> None:
    ranks(2, different_scales)


def one_forgets() -> None:
    model = zcompile.compile(Mixed(), backend="eager", verify="off", timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = zcompile.GradScaler()
    scaler.scale(model(mine(0))["loss"]).backward()
    if this_rank() == 0:
        scaler.unscale_(optimizer)
    else:
        model.clip_grad_norm_(1.0)


def test_ranks_that_do_something_else_are_named(ranks: Pools) -> None:
    for outcome in ranks.outcomes(2, one_forgets, limit=60.0):
        assert outcome.kind == "raised" and outcome.error == "RankMismatchError", outcome
        assert "GradScaler.unscale_" in outcome.text and "clip_grad_norm_" in outcome.text


# torch's own scaler. --------------------------------------------------------------------------------------------------


def torchs_scaler(overflows: bool, fused: bool) -> None:
    """Its decision is this rank's alone, because the first gradient is replicated: no rank may make the step."""
    model = zcompile.compile(Mixed(), stage=3, backend="eager", verify="off", timeout=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    before = bits(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(mine(0))["loss"]).backward()
    if overflows and this_rank() == 0:
        model.middle.weight.grad.to_local()[0, 0] = math.inf
    try:
        scaler.step(optimizer)
        scaler.update()
        model(mine(1))["loss"].backward()  # a rank that skipped the step hears from the other here
    finally:
        assert_same_bits(bits(model, optimizer), before)


@pytest.mark.parametrize(("overflows", "fused"), [(False, False), (True, False), (True, True)])
def test_torchs_scaler_is_refused(ranks: Pools, overflows: bool, fused: bool) -> None:
    outcomes = ranks.outcomes(2, torchs_scaler, limit=60.0, overflows=overflows, fused=fused)
    assert all(o.kind == "raised" for o in outcomes), outcomes
    refused = [o for o in outcomes if o.error == OptimizerError.__name__]
    assert len(refused) == (1 if overflows and not fused else 2), outcomes
    for outcome in outcomes:
        assert "torch.amp.GradScaler steps the sharded parameter 'first.weight'" in outcome.text
    assert all("use zcompile.GradScaler" in o.text for o in refused)


def torchs_scaler_where_it_is_right() -> None:
    """All gradients replicated; a disabled scaler; parameters of no compiled model; FSDP's scaler, which asks all ranks."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    for stage, scaler in (
        (0, torch.amp.GradScaler("cpu")),
        (3, torch.amp.GradScaler("cpu", enabled=False)),
        (3, ShardedGradScaler("cpu")),
    ):
        model, plain = compiled(stage), compiled(stage)
        optimizer, reference = (torch.optim.SGD(m.parameters(), lr=LR) for m in (model, plain))
        scaler.scale(model(mine(0))["loss"]).backward()
        plain(mine(0))["loss"].backward()
        scaler.step(optimizer)
        reference.step()
        for name, p in model.named_parameters():
            torch.testing.assert_close(full(p), full(plain.get_parameter(name)))
    other, scaler = net(), torch.amp.GradScaler("cpu")
    before = other.first.bias.detach().clone()
    scaler.scale(other(mine(0))["loss"]).backward()
    scaler.step(torch.optim.SGD(other.parameters(), lr=LR))
    assert not torch.equal(other.first.bias, before)


def test_torchs_scaler_where_it_is_right(ranks: Pools) -> None:
    ranks(2, torchs_scaler_where_it_is_right)
