"""Twenty steps of AdamW under zcompile give what plain PyTorch gives: losses, parameters, buffers; and memory as promised."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.dist.models import CASES
from tests.dist.pool import Pools
from tests.dist.training import Trained, assert_equal_training, over_ranks, plain, this_rank, train_case, world_size

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True  # the first job with a model captures it; a capture does not depend on the stage

STAGES = (0, 1, 2, 3)
MODELS = [name for name in CASES if name != "deep"]
#: models that run by default at every stage on two ranks, and at stage 3 on one and (uneven rows) three; all others at stage 3 on two
ALWAYS = ("llama", "mlp")
#: the one that runs with every stage on three ranks, and on four
CHEAPEST = "mlp"


@functools.cache
def reference(name: str, world: int) -> Trained:
    return plain(CASES[name], world)


def equal_training(name: str, **options: Any) -> None:
    """Train a case; check the result, and on the way the memory of gathered parameters, which is poisoned at release."""
    mine, model, _ = train_case(name, poison=True, **options)
    buffers = model._session.runner.executor.buffers
    assert buffers.live_bytes == 0, f"{buffers.live_bytes} bytes of gathered parameters are alive after a step"
    everyone = over_ranks(mine.losses)
    assert all(losses == mine.losses for losses in everyone)
    if this_rank() == 0:
        assert_equal_training(mine, reference(name, world_size()), tuple(CASES[name].loose))


def combinations() -> list[Any]:
    """(model, stage, world); the rarer ones only with ``--wide``."""
    found = []
    for world in (1, 2, 3, 4):
        for name in MODELS:
            for stage in STAGES:
                default = stage == 3 and (world == 2 or (name in ALWAYS and world < 4))
                default |= (world == 2 and name in ALWAYS) or (
                    name == CHEAPEST and (world == 3 or stage == world - 1 == 3)
                )
                marks = () if default else (pytest.mark.wide,)
                found.append(pytest.param(name, stage, world, marks=marks, id=f"{name}-stage{stage}-{world}ranks"))
    return found


@pytest.mark.parametrize(("name", "stage", "world"), combinations())
def test_equals_plain_pytorch(ranks: Pools, name: str, stage: int, world: int) -> None:
    ranks(world, equal_training, name=name, stage=stage)


@pytest.mark.parametrize("name", ALWAYS)
@pytest.mark.parametrize("world", [0], ids=["no group"])
def test_equals_plain_pytorch_without_a_process_group(ranks: Pools, name: str, world: int) -> None:
    ranks(world, equal_training, name=name, stage=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALWAYS)
def test_equals_plain_pytorch_with_inductor(ranks: Pools, name: str) -> None:
    ranks(2, equal_training, name=name, stage=3, backend="inductor", limit=400.0)
