"""Learning rate schedules of torch and transformers on two ranks: the numbers of plain PyTorch on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import zcompile
from tests.dist.models import all_rows, rows
from tests.dist.pool import Pools
from tests.dist.training import this_rank

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

STEPS = 6

#: some change more than the rate: the betas, or the rate by the loss
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch_schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: torch_schedules.StepLR(o, 2, 0.3),
    "cosine": lambda o: torch_schedules.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: torch_schedules.OneCycleLR(o, 0.05, total_steps=STEPS),
    "cyclic": lambda o: torch_schedules.CyclicLR(o, 0.001, 0.05, 2, cycle_momentum=True),
    "restarts": lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 2),
    "plateau": lambda o: torch_schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1.0),
    "sequence": lambda o: torch_schedules.SequentialLR(
        o, [torch_schedules.LinearLR(o, 0.1, total_iters=2), torch_schedules.ExponentialLR(o, 0.7)], [2]
    ),
    "hf linear": lambda o: transformers.get_linear_schedule_with_warmup(o, 2, STEPS),
    "hf cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, STEPS),
    "hf inverse square root": lambda o: transformers.get_inverse_sqrt_schedule(o, 2),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": torch.optim.AdamW,
    "zcompile": zcompile.optim.AdamW,
}


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))


def run(model: nn.Module, make: Callable[..., Any], schedule: str, batch: Callable[[int], torch.Tensor]) -> list[Any]:
    """The options after each step of one schedule."""
    optimizer = make(model.parameters(), lr=0.01)
    scheduler, seen = SCHEDULES[schedule](optimizer), []
    for step in range(STEPS):
        x = batch(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*((1.0,) if schedule == "plateau" else ()))
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"]))
    return seen


def run_all() -> dict[str, tuple[list[Any], dict[str, list[Any]]]]:
    """Each schedule with both optimizers, on one compiled model."""
    model = zcompile.compile(build(), backend="eager")
    start, results = model.full_state_dict(), {}
    for schedule in SCHEDULES:
        for name, make in OPTIMIZERS.items():
            model.load_state_dict(start)
            seen = run(model, make, schedule, lambda step: rows(step, this_rank()))
            results[f"{schedule}, {name}"] = (
                seen,
                {key: value.tolist() for key, value in model.full_state_dict().items()},
            )
    return results


def test_schedules_are_those_of_plain_pytorch(ranks: Pools) -> None:
    for results in ranks(2, run_all):
        assert len(results) == len(SCHEDULES) * len(OPTIMIZERS)
        for name, (seen, state) in results.items():
            model = build()
            expected = run(model, torch.optim.AdamW, name.rpartition(", ")[0], lambda step: all_rows(step, 2))
            assert seen == expected, name
            assert len({lr for lr, _ in seen}) > 1, f"{name} never changes the rate"
            for key, value in model.state_dict().items():
                torch.testing.assert_close(
                    torch.tensor(state[key]), value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
                )
