"""Learning rate schedules against the formulas of DeepSpeed's documentation, step by step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from zcompile.errors import ConfigError
from zcompile.lr_schedules import SCHEDULES, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR = 0.4

# What each schedule is after `k` steps, worked out from the documentation: its iteration is k - 1, and k = 0 is the start.


def warmup(i: int, steps: int, kind: str) -> float:
    if i >= steps:
        return 1.0
    return i / steps if kind == "linear" else math.log(i + 1) / math.log(steps)


def warmup_lr(k: int, low: float, high: float, steps: int, kind: str) -> float:
    return low if k == 0 else low + (high - low) * warmup(k - 1, steps, kind)


def warmup_decay(k: int, total: int, low: float, high: float, steps: int, kind: str) -> float:
    if k - 1 < steps:
        return warmup_lr(k, low, high, steps, kind)
    return low + (high - low) * max(0.0, (total - (k - 1)) / max(1, total - steps))


def warmup_cosine(k: int, total: int, floor: float, start: float, steps: int, kind: str) -> float:
    if k == 0:
        return 0.0
    if k - 1 < steps:
        return LR * (start + (1 - start) * warmup(k - 1, steps, kind))
    done = min(1.0, (k - steps) / max(1, total - steps))
    return LR * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def one_cycle(k: int, low: float, high: float, up: int, down: int, decay: float, every: int) -> float:
    if k > up + down:
        return low / (1 + decay * (k - up - down) / every)
    k %= up + down
    return low + (high - low) * (k / up if k <= up else (up + down - k) / down)


def range_test(k: int, low: float, size: int, rate: float, stairs: bool) -> float:
    return low * (1 + rate * (k // size if stairs else k / size))


CASES: dict[str, tuple[str, dict[str, Any], Callable[[int], float]]] = {
    "warmup log": (
        "WarmupLR",
        dict(warmup_min_lr=0.01, warmup_max_lr=0.2, warmup_num_steps=7),
        lambda k: warmup_lr(k, 0.01, 0.2, 7, "log"),
    ),
    "warmup linear, of the optimizer's lr": (
        "WarmupLR",
        dict(warmup_num_steps=5, warmup_type="linear"),
        lambda k: warmup_lr(k, 0.0, LR, 5, "linear"),
    ),
    "warmup of one step": ("WarmupLR", dict(warmup_num_steps=1), lambda k: warmup_lr(k, 0.0, LR, 2, "log")),
    "decay log": (
        "WarmupDecayLR",
        dict(total_num_steps=20, warmup_min_lr=0.001, warmup_max_lr=0.1, warmup_num_steps=6),
        lambda k: warmup_decay(k, 20, 0.001, 0.1, 6, "log"),
    ),
    "decay linear, default maximum": (
        "WarmupDecayLR",
        dict(total_num_steps=15, warmup_num_steps=3, warmup_type="linear"),
        lambda k: warmup_decay(k, 15, 0.0, 0.001, 3, "linear"),
    ),
    "decay shorter than its warmup": (
        "WarmupDecayLR",
        dict(total_num_steps=4, warmup_num_steps=8),
        lambda k: warmup_decay(k, 4, 0.0, 0.001, 8, "log"),
    ),
    "cosine": (
        "WarmupCosineLR",
        dict(total_num_steps=20, warmup_num_steps=4),
        lambda k: warmup_cosine(k, 20, 0.0001, 0.0, 4, "log"),
    ),
    "cosine linear": (
        "WarmupCosineLR",
        dict(total_num_steps=18, warmup_min_ratio=0.1, warmup_num_steps=5, cos_min_ratio=0.2, warmup_type="linear"),
        lambda k: warmup_cosine(k, 18, 0.2, 0.1, 5, "linear"),
    ),
    "one cycle": (
        "OneCycle",
        dict(cycle_min_lr=0.1, cycle_max_lr=0.9, cycle_first_step_size=5, decay_lr_rate=0.5, decay_step_size=3),
        lambda k: one_cycle(k, 0.1, 0.9, 5, 5, 0.5, 3),
    ),
    "one cycle, uneven": (
        "OneCycle",
        dict(cycle_min_lr=0.2, cycle_max_lr=0.6, cycle_first_step_size=4, cycle_second_step_size=9),
        lambda k: one_cycle(k, 0.2, 0.6, 4, 9, 0.0, 1),
    ),
    "range test": (
        "LRRangeTest",
        dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=4, lr_range_test_step_rate=2.0),
        lambda k: range_test(k, 0.01, 4, 2.0, False),
    ),
    "range test in stairs": (
        "LRRangeTest",
        dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=4, lr_range_test_staircase=True),
        lambda k: range_test(k, 0.01, 4, 1.0, True),
    ),
}


def adam(groups: int = 1) -> Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=LR)


def run(optimizer: Optimizer, scheduler: Any, steps: int) -> list[float]:
    """The learning rate that each of the next steps is made with."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("case", CASES)
def test_values(case: str) -> None:
    name, params, formula = CASES[case]
    optimizer = adam()
    rates = run(optimizer, SCHEDULES[name](optimizer, **params), 40)
    assert rates == pytest.approx([formula(k) for k in range(40)], rel=1e-12, abs=1e-15)
    assert len(set(rates)) > 1


@pytest.mark.parametrize("case", CASES)
def test_state_dict_goes_on_at_the_same_place(case: str) -> None:
    name, params, formula = CASES[case]
    optimizer = adam()
    scheduler = SCHEDULES[name](optimizer, **params)
    run(optimizer, scheduler, 6)
    states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    fresh = adam()
    resumed = SCHEDULES[name](fresh, **params)
    fresh.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    assert run(fresh, resumed, 20) == pytest.approx([formula(k) for k in range(6, 26)], rel=1e-12, abs=1e-15)
    assert fresh.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"] or name == "OneCycle"


def test_numbers_worked_out_by_hand() -> None:
    optimizer = adam()
    rates = run(optimizer, WarmupLR(optimizer, 0.0, 1.0, warmup_num_steps=4), 8)
    assert rates == pytest.approx([0.0, 0.0, 0.5, math.log(3) / math.log(4), 1.0, 1.0, 1.0, 1.0])
    optimizer = adam()
    rates = run(optimizer, WarmupDecayLR(optimizer, 6, 0.0, 1.0, 2, "linear"), 9)
    assert rates == pytest.approx([0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    optimizer = adam()
    rates = run(optimizer, WarmupCosineLR(optimizer, 6, 0.0, 2, 0.0, "linear"), 9)
    half = math.sqrt(0.5) / 2
    assert rates == pytest.approx([0.0, 0.0, 0.5 * LR, (0.5 + half) * LR, 0.5 * LR, (0.5 - half) * LR, 0.0, 0.0, 0.0])


def test_one_cycle_moves_momentum_the_other_way() -> None:
    optimizer = adam()
    scheduler = OneCycle(
        optimizer,
        0.1,
        0.3,
        cycle_first_step_size=2,
        cycle_min_mom=0.5,
        cycle_max_mom=0.9,
        decay_mom_rate=1.0,
        decay_step_size=2,
    )
    betas = []
    for _ in range(7):
        betas.append(optimizer.param_groups[0]["betas"])
        optimizer.step()
        scheduler.step()
    assert [b[0] for b in betas] == pytest.approx([0.5, 0.7, 0.5, 0.7, 0.9, 0.9 * 1.5, 0.9 * 2.0])
    assert {b[1] for b in betas} == {0.99}


def test_one_cycle_leaves_an_optimizer_without_betas_alone() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=LR, momentum=0.3)
    run(optimizer, OneCycle(optimizer, 0.1, 0.3, cycle_first_step_size=2), 4)
    assert optimizer.param_groups[0]["momentum"] == 0.3


def test_one_cycle_in_stairs() -> None:
    optimizer = adam()
    scheduler = OneCycle(
        optimizer,
        0.0,
        1.0,
        cycle_first_step_size=6,
        cycle_second_step_size=4,
        cycle_first_stair_count=3,
        cycle_second_stair_count=2,
    )
    thirds = [0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1]
    assert run(optimizer, scheduler, 11) == pytest.approx([*thirds, 0.5, 0.5, 0.0, 0.0])


def test_one_value_a_group() -> None:
    optimizer = adam(groups=2)
    scheduler = WarmupLR(optimizer, [0.0, 0.1], [1.0, 0.5], warmup_num_steps=2, warmup_type="linear")
    seen = []
    for _ in range(4):
        seen.append([g["lr"] for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [[0.0, 0.1], [0.0, 0.1], [0.5, pytest.approx(0.3)], [1.0, 0.5]]
    with pytest.raises(ConfigError, match=r"warmup_max_lr has 3 values and the optimizer has 2 parameter groups"):
        WarmupLR(optimizer, 0.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=0), "warmup_num_steps is 0; it must be a positive integer"),
        (lambda o: WarmupLR(o, warmup_num_steps=2.5), "warmup_num_steps is 2.5"),
        (lambda o: WarmupCosineLR(o, 10, warmup_type="cubic"), "warmup_type is 'cubic'; it must be one of log, linear"),
        (lambda o: OneCycle(o, 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size is 0"),
        (lambda o: SCHEDULES["LRRangeTest"](o, lr_range_test_step_size=0), "lr_range_test_step_size is 0"),
    ],
)
def test_refused(make: Callable[[Optimizer], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(adam())
