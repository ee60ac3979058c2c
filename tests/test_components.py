"""Optimizers and schedulers by name: classes, DeepSpeed's defaults and names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zcompile
from zcompile.components import build_optimizer, build_scheduler
from zcompile.dsconfig.settings import Component
from zcompile.errors import ConfigError
from zcompile.lr_schedules import WarmupDecayLR, WarmupLR
from zcompile.runtime.optim.lion import Lion


def named(kind: str, *auto: str, **params: Any) -> Component:
    return Component(kind, params, frozenset(auto))


def optimizer(kind: str, *auto: str, **params: Any) -> Optimizer:
    return build_optimizer(named(kind, *auto, **params), [nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(
    ("kind", "params", "expected", "options"),
    [
        ("Adam", {}, zcompile.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-8}),
        ("adam", {"adam_w_mode": True, "lr": 0.1}, zcompile.optim.AdamW, {"lr": 0.1}),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.0}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("AdamW", {"betas": [0.8, 0.9]}, zcompile.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, zcompile.optim.AdamW, {}),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
        ("AdamW", {"bias_correction": True, "set_grad_none": True}, zcompile.optim.AdamW, {}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9}),
        ("Lion", {}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
        ("NAdam", {}, torch.optim.NAdam, {}),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], expected: type[Optimizer], options: dict[str, Any]) -> None:
    built = optimizer(kind, **params)
    assert type(built) is expected
    assert {key: built.param_groups[0][key] for key in options} == options


def test_l2_adam_and_adamw_differ() -> None:
    """``adam_w_mode`` decides what weight decay does."""
    values = []
    for mode in (True, False):
        p = nn.Parameter(torch.ones(1))
        built = build_optimizer(named("Adam", lr=0.1, weight_decay=0.5, adam_w_mode=mode), [p])
        p.grad = torch.tensor([1e-3])
        built.step()
        values.append(p.item())
    assert values[0] == pytest.approx(1 - 0.05 - 0.1, rel=1e-3)  # decay is apart from the step of lr
    assert values[1] == pytest.approx(1 - 0.1, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("AdamX", {}, "optimizer.type 'AdamX' is not known; did you mean 'Adam"),
        ("Lamb", {}, "optimizer.type is 'Lamb', which is not supported here; use AdamW or Lion"),
        ("OneBitAdam", {}, "optimizer.type is 'OneBitAdam', which is not supported here; "),
        ("Muon", {}, "optimizer.type is 'Muon', which is not supported here: it orthogonalises whole matrices; "),
        (
            "AdamW",
            {"weight_decy": 0.1},
            "optimizer.params of AdamW: 'weight_decy' is not known; did you mean 'weight_decay'?",
        ),
        ("SGD", {"beta": 0.1}, "optimizer.params of SGD: 'beta' is not known; "),
        ("Adam", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm is no parameter of an optimizer; use the key"),
        ("Adam", {"adam_w_mode": 1}, "optimizer.params.adam_w_mode is 1; it must be true or false"),
        ("Adam", {"bias_correction": False}, "optimizer.params.bias_correction is false, which is not supported here"),
        ("AdamW", {"lr": "1e-3x"}, "optimizer.params do not fit AdamW: "),
        ("AdamW", {"lr": -1.0}, "optimizer.params do not fit AdamW: lr is -1.0"),
        ("Lion", {"betas": [0.9]}, "optimizer.params do not fit Lion: "),
    ],
)
def test_optimizers_that_are_refused(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        optimizer(kind, **params)
    assert str(error.value).startswith(message)


def test_automatic_optimizer_parameters() -> None:
    built = optimizer("AdamW", "betas", "eps", "weight_decay", lr=0.1)
    assert (built.defaults["betas"], built.defaults["eps"], built.defaults["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)
    with pytest.raises(ConfigError, match=r"optimizer.params.lr is 'auto', which nothing here can resolve"):
        optimizer("AdamW", "lr")


def test_schedulers() -> None:
    sgd = optimizer("SGD", lr=0.5)
    warm = build_scheduler(named("WarmupLR", "warmup_min_lr", "warmup_max_lr", warmup_num_steps=2), sgd)
    assert isinstance(warm, WarmupLR)
    assert (warm.min_lrs, warm.max_lrs) == ([0.0], [0.5])
    decay = build_scheduler(named("WarmupDecayLR", total_num_steps=9), optimizer("SGD", lr=0.5))
    assert isinstance(decay, WarmupDecayLR) and decay.total_num_steps == 9
    torchs = build_scheduler(named("StepLR", step_size=3), optimizer("SGD", lr=0.5))
    assert isinstance(torchs, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (named("WarmupLr"), "scheduler.type 'WarmupLr' is not known; did you mean 'WarmupLR'?"),
        (named("ReduceLROnPlateau"), "scheduler.type 'ReduceLROnPlateau' is not known"),
        (
            named("WarmupLR", warmup_steps=3),
            "scheduler.params of WarmupLR: 'warmup_steps' is not known; did you mean 'warmup_num_steps'",
        ),
        (named("WarmupDecayLR"), "scheduler.params of WarmupDecayLR lack total_num_steps; give it"),
        (named("OneCycle"), "scheduler.params of OneCycle lack cycle_min_lr, cycle_max_lr; give them"),
        (
            named("WarmupDecayLR", "total_num_steps"),
            "scheduler.params.total_num_steps is 'auto', which nothing here can resolve",
        ),
        (named("WarmupLR", warmup_num_steps=0), "scheduler.params do not fit WarmupLR: warmup_num_steps is 0"),
    ],
)
def test_schedulers_that_are_refused(component: Component, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_scheduler(component, optimizer("SGD", lr=0.5))
    assert str(error.value).startswith(message)
