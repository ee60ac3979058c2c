"""Aligned products at stage 3: a tied, sharded weight of odd rows is gathered, padded and reduced as plain PyTorch would have it."""

from __future__ import annotations

import pytest
import torch

from tests.dist.models import Case
from tests.dist.pool import Pools
from tests.dist.training import assert_equal_training, compile_and_train, plain, this_rank, world_size
from tests.passes.test_align import FORCED, SEQ, VOCAB, Model
from zcompile.config import Config
from zcompile.passes import default_pipeline
from zcompile.passes.align import Align

pytestmark = pytest.mark.dist

STEPS = 6


def own_ids(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two rows of tokens."""
    return {"ids": torch.randint(VOCAB, (2, SEQ), generator=generator)}


CASE = Case(Model, own_ids)


def equal_training(stage: int) -> None:
    """Gathered weights are poisoned when they are released: a padded copy must not outlive them."""
    pipeline = str(default_pipeline(Config(stage=stage), size=world_size())).replace(str(Align()), str(FORCED))
    mine, model, _ = compile_and_train(CASE, steps=STEPS, poison=True, stage=stage, pipeline=pipeline)
    assert model.history["align"].stats["products aligned"] == 33
    if this_rank() == 0:
        assert_equal_training(mine, plain(CASE, world_size(), STEPS))


@pytest.mark.parametrize("stage", [1, 3])
def test_equals_plain_pytorch(ranks: Pools, stage: int) -> None:
    ranks(2, equal_training, stage=stage)
