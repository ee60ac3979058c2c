"""One rank's device is full: that rank says what takes it and what would help, and the others end with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import CASES, Deep
from tests.dist.pool import Pools
from tests.dist.training import adamw, this_rank, train
from zcompile.errors import OutOfMemoryError, RankError

pytestmark = pytest.mark.dist

#: small models are one bucket otherwise
POLICY = "bucket{mib=0},prefetch"


def compiled(stage: int) -> tuple[Any, Any]:
    model = zcompile.compile(Deep(12), stage=stage, backend="eager", timeout=60.0, policy=POLICY)
    return model, adamw(model)


def no_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity")


def full_on_one_rank() -> tuple[str, str, list[tuple[int, str]], dict[str, int], int]:
    """Stage 1, and a region of rank 1 that finds no memory. Also what stage 3 saves really."""
    model, optimizer = compiled(1)
    train(model, CASES["deep"], optimizer=optimizer, steps=2)
    whole = model.report().gathered_peak_bytes
    sharded, other = compiled(3)
    train(sharded, CASES["deep"], optimizer=other, steps=2)
    saved = whole - sharded.report().gathered_peak_bytes
    if this_rank() == 1:
        bodies = model._session.latest.program.forward.bodies
        bodies[list(bodies)[-1]] = no_memory
    try:
        train(model, CASES["deep"], optimizer=optimizer, steps=2)
    except torch.OutOfMemoryError as error:
        assert isinstance(error, OutOfMemoryError)
        return "OutOfMemoryError", str(error), error.advice, error.anatomy, saved
    except RankError as error:
        return "RankError", str(error), [], {}, saved
    raise AssertionError("nothing was raised")


def test_every_rank_ends_with_the_reason_and_stage_3_is_proposed(ranks: Pools) -> None:
    (kind, text, _, _, saved), (own_kind, own_text, advice, anatomy, _) = ranks(2, full_on_one_rank)
    ranks.drop()
    assert (kind, own_kind) == ("RankError", "OutOfMemoryError")
    reason = "[rank 1 of 2] cpu is out of memory in call 5, forward (train): tried to allocate 20.00 MiB"
    assert own_text.startswith(reason)
    assert text.startswith("[rank 0 of 2] rank 1 failed in call 5, forward (train), with OutOfMemoryError: " + reason)
    estimates = {text: value for value, text in advice}
    assert 0.5 * saved <= estimates["stage=3 instead of 1"] <= 1.05 * saved, (advice, saved)
    states = anatomy["parameters"] + anatomy["gradients"] + anatomy["optimizer"]
    assert 0.9 * states / 2 <= estimates["4 ranks instead of 2: half the states on each"] <= states / 2
    assert anatomy["parameters"] > 0 and anatomy["optimizer"] >= 1.9 * anatomy["parameters"]
