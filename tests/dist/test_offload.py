"""What is kept in the host's memory changes no number: against plain PyTorch, and bit for bit where the arithmetic is the same."""

from __future__ import annotations

import dataclasses
import functools
from itertools import combinations
from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import CASES, Case
from tests.dist.pool import Pools
from tests.dist.training import (
    Trained,
    assert_equal_training,
    assert_same_bits,
    compile_and_train,
    one_model,
    this_rank,
    world_size,
)

pytestmark = pytest.mark.dist

STEPS = 4
#: values of any size move, and states pass in many chunks
KINDS = {"activations": "activations{mib=0}", "optimizer": "optimizer{chunk_mib=0.004}", "parameters": "parameters"}
OPTIONS = ["+".join(KINDS[kind] for kind in kinds) for n in (1, 2, 3) for kinds in combinations(KINDS, n)]
OPTIONS.append("optimizer{step=cpu chunk_mib=0.004}")


def own(name: str) -> Case:
    """A case that is trained with our AdamW."""
    return dataclasses.replace(CASES[name], optimizer=lambda model: zcompile.optim.AdamW(model.parameters(), lr=1e-3))


@functools.cache
def reference(name: str) -> Trained:
    """Plain PyTorch with its own AdamW."""
    return one_model(CASES[name], world_size(), STEPS)


def same_arithmetic(offload: str) -> bool:
    """Whether the update is the one that runs without offloading."""
    return "parameters" not in offload and "cpu" not in offload


def equal_training(name: str, stage: int) -> None:
    """Every combination; released and offloaded memory is poisoned."""
    options: dict[str, Any] = {"stage": stage, "steps": STEPS, "verify": "fast"}
    without, _, _ = compile_and_train(own(name), **options)
    for offload in OPTIONS:
        mine, model, optimizer = compile_and_train(own(name), offload=offload, poison=True, **options)
        assert_equal_training(mine, reference(name))
        if same_arithmetic(offload):
            assert_same_bits(mine, without)
        report = model.report(optimizer)
        assert report.host_bytes > 0
        assert report.offloaded_bytes > 0 or "activations" not in offload
        shards = model._session.runner.shards
        assert (shards.hosting.update is None) == (offload == KINDS["activations"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_equals_plain_pytorch(ranks: Pools, stage: int) -> None:
    ranks(2, equal_training, name="deep", stage=stage)
