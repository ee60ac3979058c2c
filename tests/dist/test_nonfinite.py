"""debug_nonfinite on ranks: one rank's NaN ends the step on every rank, with one reason."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import CASES, rows
from tests.dist.pool import Pools
from tests.dist.training import adamw, this_rank, train

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True


class Wide(nn.Module):
    """Something to gather in stage 3, and a line that one rank's rows break."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 13)
        self.last = nn.Linear(13, 7)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(self.first(x).clamp(-1, 1)).mean() + (x[:, 0] + 100).log().mean()}


def one_rank_breaks(stage: int, direction: str) -> None:
    model = zcompile.compile(Wide(), stage=stage, backend="eager", verify="off", timeout=20.0, debug_nonfinite=True)
    optimizer = adamw(model)
    for step in range(3):
        x = rows(step, this_rank())
        bad = step == 2 and this_rank() == 1
        if bad and direction == "forward":
            x[0, 0] = -200
        loss = model(x)["loss"]
        (loss * (math.nan if bad else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("stage", "direction"), [(3, "forward"), (0, "backward")])
def test_every_rank_ends_with_the_reason(ranks: Pools, stage: int, direction: str) -> None:
    first, second = ranks.outcomes(2, one_rank_breaks, limit=60.0, stage=stage, direction=direction)
    assert (first.kind, first.error, second.kind, second.error) == ("raised", "RankError", "raised", "NonFiniteError")
    reason = second.text.splitlines()[0]
    what = "aten.log gives 1 nan" if direction == "forward" else "the gradient that arrives at output 0 has 1 nan"
    assert reason.startswith(f"[rank 1 of 2] {direction}: {what}"), reason
    assert f"{__file__}:" in reason or direction == "backward"
    assert reason in first.text, first.text


def broken_parameter() -> None:
    user = Wide()
    with torch.no_grad():
        user.last.weight[6, 12] = math.nan  # a row that the last rank holds
    model = zcompile.compile(user, backend="eager", verify="off", timeout=20.0, debug_nonfinite=True)
    model(rows(0, this_rank()))


def test_a_sharded_parameter_is_named(ranks: Pools) -> None:
    for outcome in ranks.outcomes(2, broken_parameter, limit=60.0):
        assert "parameter 'last.weight' has 1 nan in 91 values, which aten." in outcome.text, outcome
        assert f" reads in module 'last' at {__file__}:" in outcome.text, outcome


def trains(name: str, stage: int) -> None:
    losses = []
    for debug in (True, False):
        model = zcompile.compile(CASES[name].build(), stage=stage, backend="eager", verify="off", debug_nonfinite=debug)
        losses.append(train(model, CASES[name], steps=2))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("name", "stage"), [pytest.param("llama", 3, marks=pytest.mark.wide), ("mlp", 2)])
def test_whole_models_train_as_without(ranks: Pools, name: str, stage: int) -> None:
    ranks(2, trains, name=name, stage=stage)
