"""The gradient scaler on one process: torch's behaviour, the hysteresis table, states, and what is refused."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.runtime.models import Odd, full_gradients, reduced, set_gradients, shard
from zcompile.errors import ConfigError, LossScaleError, OptimizerError, ScalerError, ShardingError, StateError
from zcompile.runtime.communication.mesh import Mesh

BAD = [math.inf, -math.inf, math.nan]


def one_weight(**options: Any) -> tuple[nn.Parameter, torch.optim.SGD, zcompile.GradScaler]:
    weight = nn.Parameter(torch.ones(3))
    scaler = zcompile.GradScaler(**options)
    scaler.scale(torch.ones(()))
    return weight, torch.optim.SGD([weight], lr=1.0), scaler


def drive(scaler: torch.amp.GradScaler, overflows: str) -> list[float]:
    """The scale after each step of a plain parameter: ``x`` overflows, ``.`` does not."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales = []
    for kind in overflows:
        scaler.scale(weight.sum()).backward()
        assert weight.grad is not None
        if kind == "x":
            weight.grad[1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


# The scale. -----------------------------------------------------------------------------------------------------------

TABLE = [
    # overflows, options that differ, the scale after each step from 16 on
    ("xxx", {}, [16, 8, 4]),  # once it has run out it stays at the last one
    ("xxx", {"hysteresis": 1}, [8, 4, 2]),
    ("xxxxx", {"hysteresis": 4}, [16, 16, 16, 8, 4]),
    ("x.x", {}, [16, 16, 8]),  # a good step alone does not refill
    ("x.x.xx", {"consecutive_hysteresis": True}, [16, 16, 16, 16, 16, 8]),
    ("...x.x", {}, [16, 16, 32, 32, 32, 16]),
    ("x...xx", {}, [16, 16, 16, 32, 32, 16]),  # growth refills
    ("..x...", {}, [16, 16, 16, 16, 16, 32]),  # the window starts after the overflow
    ("......", {}, [16, 16, 32, 32, 32, 64]),
    ("xxxx", {"hysteresis": 1, "min_scale": 3.0}, [8, 4, 3, None]),
    ("xxxxx", {"min_scale": 16.0}, [16, None]),
    ("x.x.x", {"dynamic": False, "growth_interval": 1}, [16] * 5),
    ("x..", {"hysteresis": 1, "backoff_factor": 0.25, "growth_factor": 3.0, "growth_interval": 2}, [4, 4, 12]),
]


@pytest.mark.parametrize(("overflows", "options", "scales"), TABLE)
def test_hysteresis_table(overflows: str, options: dict[str, Any], scales: list[float | None]) -> None:
    scaler = zcompile.GradScaler(**{"init_scale": 16.0, "growth_interval": 3, **options})
    for kind, scale in zip(overflows, scales, strict=False):
        if scale is None:
            with pytest.raises(
                LossScaleError, match=r"minimum .* the gradient of parameter '0 of group 0' is not finite"
            ):
                drive(scaler, kind)
        else:
            assert drive(scaler, kind) == [scale]


def deepspeed(overflows: str, window: int, hysteresis: int, consecutive: bool, least: float) -> Iterator[float]:
    """The documented rule, written down by iteration numbers."""
    scale, left, last = 64.0, hysteresis, -1
    for step, kind in enumerate(overflows):
        if kind == "x":
            if left == 1:
                if scale == least:
                    return
                scale = max(scale / 2, least)
            left, last = max(left - 1, 1), step
        else:
            grows = (step - last) % window == 0
            left = hysteresis if consecutive or grows else left
            scale = scale * 2 if grows else scale
        yield scale


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_scale_moves_as_documented(hysteresis: int, consecutive: bool) -> None:
    generator = torch.Generator().manual_seed(hysteresis)
    overflows = "".join(".x"[int(v)] for v in (torch.rand(150, generator=generator) < 0.3).tolist())
    want = list(deepspeed(overflows, 4, hysteresis, consecutive, 2.0))
    scaler = zcompile.GradScaler(
        init_scale=64.0,
        growth_interval=4,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_scale=2.0,
    )
    assert drive(scaler, overflows[: len(want)]) == want and len(set(want)) > 3
    if len(want) < len(overflows):
        with pytest.raises(LossScaleError):
            drive(scaler, overflows[len(want)])


def test_without_hysteresis_it_is_torchs() -> None:
    overflows = ".x..xx....x....."
    options = {"init_scale": 64.0, "growth_interval": 3}
    theirs = torch.amp.GradScaler("cpu", **options)
    assert drive(zcompile.GradScaler("cpu", hysteresis=1, **options), overflows) == drive(theirs, overflows)


def test_growth_stops_before_infinity() -> None:
    scaler = zcompile.GradScaler(init_scale=2.0**126, growth_interval=1)
    assert drive(scaler, "...") == [2.0**127] * 3


# Steps. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.AdamW, zcompile.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("explicit", [False, True])
def test_equal_to_torch(make: Callable[..., torch.optim.Optimizer], explicit: bool) -> None:
    def train(scaler: torch.amp.GradScaler) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer, scales = make(model.parameters(), lr=0.1), []
        for step in range(6):
            scaler.scale(model(torch.randn(2, 5)).square().sum()).backward()
            if step in (1, 4):
                model[0].bias.grad[0] = BAD[step % 3]
            if explicit:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return model.state_dict(), scales

    ours, our_scales = train(zcompile.GradScaler(hysteresis=1, growth_interval=2))
    theirs, their_scales = train(torch.amp.GradScaler("cpu", growth_interval=2))
    assert our_scales == their_scales
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


@pytest.mark.parametrize("bad", BAD)
def test_a_skipped_step_changes_nothing(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    weight, optimizer, scaler = one_weight(dynamic=False, init_scale=1.0)
    optimizer = torch.optim.AdamW([("body.weight", weight)], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(3)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped
    scaler.update()
    before, state = weight.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])
    weight.grad = torch.tensor([1.0, bad, 1.0])
    with caplog.at_level(logging.WARNING, "zcompile"):
        assert scaler.step(optimizer) is None
    assert scaler.step_was_skipped and scaler.get_scale() == 1.0
    assert caplog.messages == ["step skipped at loss scale 1: the gradient of parameter 'body.weight' is not finite"]
    assert torch.equal(weight, before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    scaler.update()
    weight.grad = torch.ones(3)
    scaler.step(optimizer)
    schedule.step()
    assert not scaler.step_was_skipped and optimizer.state[weight]["step"] == 2


def test_step_returns_what_the_optimizer_does_and_passes_arguments() -> None:
    weight, _, scaler = one_weight()

    class Returns(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    weight.grad = torch.ones(3)
    assert scaler.step(Returns([weight], lr=1.0), None, flag=2) == ((None,), {"flag": 2})


def test_fused_optimizers_get_unscaled_gradients() -> None:
    """They offer to unscale themselves; then there would be two."""
    weight, _, scaler = one_weight()
    fused, plain = torch.optim.AdamW([weight], fused=True), nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 65536.0)
    plain.grad = torch.ones(3)
    scaler.step(fused)
    torch.optim.AdamW([plain]).step()
    torch.testing.assert_close(weight, plain)
    scaler.update()
    weight.grad = torch.full((3,), math.inf)
    scaler.step(fused)
    torch.testing.assert_close(weight, plain, rtol=0, atol=0)


def test_several_optimizers_are_skipped_by_themselves_and_one_overflow_counts() -> None:
    a, first, scaler = one_weight(hysteresis=1)
    b = nn.Parameter(torch.ones(3))
    second = torch.optim.SGD([b], lr=1.0)
    a.grad, b.grad = torch.full((3,), 65536.0), torch.tensor([0.0, math.nan, 0.0])
    scaler.step(first)
    assert not scaler.step_was_skipped
    scaler.step(second)
    assert scaler.step_was_skipped
    scaler.update()
    assert torch.equal(a.detach(), torch.zeros(3)) and torch.equal(b.detach(), torch.ones(3))
    assert scaler.get_scale() == 2.0**15


def test_outputs_are_scaled_wherever_they_are() -> None:
    scaler = zcompile.GradScaler(init_scale=4.0)
    x = torch.ones(())
    nested = scaler.scale([x, (x, [x])])
    assert nested == [4.0, (4.0, [4.0])] and isinstance(nested[1], tuple)
    assert list(scaler.scale(iter([x, x]))) == [4.0, 4.0]
    with pytest.raises(ScalerError, match="outputs hold a int"):
        scaler.scale([x, 3])


def test_other_gradients() -> None:
    """Zeros, a parameter without any, sparse rows that occur twice, other dtypes, complex numbers and memory with strides."""
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
    values = [torch.randn(4, 3, dtype=d, generator=generator) for d in dtypes]
    params = [nn.Parameter(torch.zeros_like(v)) for v in values]
    for p, v in zip(params, values, strict=True):
        p.grad = (v * 8).T.contiguous().T
    zero, none, empty = (nn.Parameter(torch.zeros(n)) for n in (2, 2, 0))
    zero.grad, empty.grad = torch.zeros(2), torch.zeros(0)
    table = nn.Embedding(5, 2, sparse=True)
    scaler = zcompile.GradScaler(init_scale=8.0)
    scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
    optimizer = torch.optim.SGD([*params, zero, none, empty, table.weight], lr=1.0)
    scaler.unscale_(optimizer)
    for p, v in zip(params, values, strict=True):
        torch.testing.assert_close(p.grad, v)
    assert none.grad is None and not zero.grad.any()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]
    assert not scaler._optimizers[id(optimizer)].verdict.overflow


def test_disabled_it_does_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = zcompile.GradScaler(enabled=False, init_scale=math.inf)
    loss = weight.sum()
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.get_scale() == 1.0
    weight.grad = torch.tensor([1.0, math.inf, 0.0])
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    scaler.update()
    assert weight[0] == 0 and not scaler.step_was_skipped
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


# Order and options. ---------------------------------------------------------------------------------------------------


def test_what_has_no_meaning_is_refused() -> None:
    weight, optimizer, scaler = one_weight()
    weight.grad = torch.full((3,), 65536.0)
    with pytest.raises(ScalerError, match="no gradients to go by"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match="already for this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for again in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match=r"after step|twice"):  # torch's type
            again(optimizer)
    with pytest.raises(ScalerError, match="middle of a step"):
        pickle.dumps(scaler)
    scaler.update()
    weight.grad = None
    with pytest.raises(ScalerError, match="no parameter of the optimizer has a gradient"):
        scaler.step(optimizer)
    with pytest.raises(ScalerError, match="scale\\(\\) was never called"):
        zcompile.GradScaler().step(optimizer)


@pytest.mark.parametrize("how", ["keyword", "positional"])
def test_closures_are_refused(how: str) -> None:
    weight, optimizer, scaler = one_weight()
    weight.grad = torch.ones(3)
    with pytest.raises(ScalerError, match="closure"):
        scaler.step(optimizer, closure=lambda: 0.0) if how == "keyword" else scaler.step(optimizer, lambda: 0.0)


def test_half_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = zcompile.GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="float16") as caught:  # torch's type
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert isinstance(caught.value, OptimizerError)


@pytest.mark.parametrize(
    "options",
    [
        {"init_scale": math.inf},
        {"init_scale": 0.0},
        {"init_scale": math.nan},
        {"init_scale": 1e-40, "min_scale": 1e-41},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"min_scale": 2.0, "init_scale": 1.0},
        {"min_scale": 0.0},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is|min_scale is"):
        zcompile.GradScaler(**options)


def test_a_new_scale() -> None:
    scaler = zcompile.GradScaler()
    for value, want in ((4.0, 4.0), (3, 3.0), (torch.tensor([8.0]), 8.0)):
        scaler.update(value)
        assert scaler.get_scale() == want
    for bad in (*BAD, 0.0, -1.0):
        with pytest.raises(ConfigError, match="new_scale is"):
            scaler.update(bad)
    assert scaler.get_scale() == 8.0


# State. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_resumes(how: str) -> None:
    options = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 3, "min_scale": 2.0}
    overflows = "x..x.....xxx..x"
    want = drive(zcompile.GradScaler(**options), overflows)
    for cut in range(1, len(overflows)):
        scaler = zcompile.GradScaler(**options)
        start = drive(scaler, overflows[:cut])
        if how == "state_dict":
            saved, scaler = scaler.state_dict(), zcompile.GradScaler()
            scaler.load_state_dict(saved)
            assert scaler.state_dict() == saved
        else:
            scaler = pickle.loads(pickle.dumps(scaler)) if how == "pickle" else copy.deepcopy(scaler)
        assert start + drive(scaler, overflows[cut:]) == want


def test_states_go_from_and_to_torchs() -> None:
    overflows = "..x.."
    theirs, ours = torch.amp.GradScaler("cpu", growth_interval=4), zcompile.GradScaler(hysteresis=1)
    drive(theirs, overflows)
    ours.load_state_dict(theirs.state_dict())
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    rest = "..x....."
    assert drive(ours, rest) == drive(theirs, rest) == drive(back, rest)


def test_states_that_do_not_fit_are_refused() -> None:
    scaler = zcompile.GradScaler()
    with pytest.raises(ScalerError, match="empty"):
        scaler.load_state_dict({})
    with pytest.raises(StateError, match="lacks growth_factor"):
        scaler.load_state_dict({"scale": 1.0})
    with pytest.raises(StateError, match="scale is inf"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": math.inf})


# Flat memory. ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("both_sizes")
@pytest.mark.parametrize("bad", [None, *BAD])
def test_flat_gradients(bad: float | None) -> None:
    """Every gradient is divided once, tied ones too; one that the user assigned; nothing between them changes."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    shards = shard(model, Mesh.create(device="cpu"))
    gradients = full_gradients(plain, 1, skip=("scale", "nothing"))
    if bad is not None:
        gradients["wide.weight"][1, 3] = bad
    set_gradients(plain, gradients)
    shards.accumulate_many(*reduced(shards, gradients))
    model.up.bias.grad = model.up.bias.grad.clone()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours, theirs = zcompile.GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    pairs = [(ours, zcompile.optim.AdamW(model.parameters())), (theirs, torch.optim.AdamW(plain.parameters()))]
    for scaler, optimizer in pairs:
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
    for name, p in plain.named_parameters():
        assert (p.grad is None) == (model.get_parameter(name).grad is None)
        if p.grad is not None:
            torch.testing.assert_close(model.get_parameter(name).grad, p.grad, equal_nan=True)
    assert all(not hole.any() for key in shards.gradient_arenas() for hole in shards.holes(key))
    ours.step(pairs[0][1])
    assert ours.step_was_skipped == (bad is not None)
    changed = any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert changed == (bad is None) and (bad is None or not pairs[0][1].state)


def test_an_overflow_of_another_optimizers_gradient_does_not_count() -> None:
    torch.manual_seed(0)
    model = Odd()
    shards = shard(model, Mesh.create(device="cpu"))
    gradients = full_gradients(Odd(), 1, skip=("nothing",))
    gradients["up.weight"][0, 0] = math.nan
    shards.accumulate_many(*reduced(shards, gradients))
    mine = torch.optim.SGD([p for n, p in model.named_parameters() if n != "up.weight"], lr=1.0)
    scaler = zcompile.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(mine)
    assert not scaler.step_was_skipped
    scaler.step(torch.optim.SGD([model.up.weight], lr=1.0))
    assert scaler.step_was_skipped


@pytest.mark.usefixtures("one_rank")
def test_a_wrongly_placed_gradient_is_refused() -> None:
    model = nn.Linear(3, 4)
    shards = shard(model, Mesh.create(device="cpu"))  # who lives as long as it does
    model.weight.grad = torch.full((4, 3), 2.0)
    scaler = zcompile.GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(ShardingError, match="'weight' is a DTensor"):
        scaler.unscale_(torch.optim.SGD(shards.parameters, lr=1.0))
