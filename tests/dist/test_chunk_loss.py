"""Losses in pieces at every stage: gradients are those of plain PyTorch, over windows, in low precision, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import Case, Deep, own_batch
from tests.dist.pool import Pools
from tests.dist.training import full_gradients, this_rank, world_size

pytestmark = pytest.mark.dist

WINDOW = 2
#: several pieces of the logits, which are [12, 37]
PIECE = {None: "0.4KiB", "bf16": "0.2KiB"}


class Tied(Deep):
    """Its head has the weight of the embedding, and a bias."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.head.weight = self.embed.weight


CASES = {"deep": Case(lambda: Deep(layers=1), own_batch), "tied": Case(Tied, own_batch)}


def gradients(name: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """Gradients after a window of backward calls, and this rank's losses."""
    case = CASES[name]
    model = zcompile.compile(case.build(), **{"backend": "eager", "gradient_accumulation_steps": WINDOW, **options})
    losses = []
    for step in range(WINDOW):
        loss = model(**case.data(step, this_rank()))["loss"]
        loss.backward()
        losses.append(loss.item())
    return full_gradients(model), losses, model


def plain_gradients(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    case = CASES[name]
    model = case.build()
    losses = []
    for step in range(WINDOW):
        for rank in range(world_size()):
            loss = model(**case.data(step, rank))["loss"]
            (loss / world_size()).backward()
            losses += [loss.item()] if rank == this_rank() else []
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, losses


def agree(name: str, stage: int, precision: str | None = None, backend: str = "eager") -> None:
    """In float32 beside plain PyTorch; in low precision beside the same without pieces."""
    options = {"stage": stage, "precision": precision, "backend": backend}
    have, losses, model = gradients(name, loss_chunk=PIECE[precision], **options)
    stats = model.history["chunk-loss"].stats
    assert stats["losses in pieces"] == 1 and stats["pieces of rows"] > 2 and stats["pieces of columns"] > 2, str(stats)
    if precision is None:
        want, want_losses = plain_gradients(name)
    else:
        want, want_losses, _ = gradients(name, loss_chunk="none", **options)
    slack = 1e-5 if precision is None else 2e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(want_losses), rtol=1e-5, atol=1e-5)
    assert have.keys() == want.keys()
    for key, value in want.items():
        scale = slack * float(value.abs().max())
        torch.testing.assert_close(have[key], value, rtol=slack, atol=scale, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_those_of_plain_pytorch(ranks: Pools, stage: int) -> None:
    """The head has a bias."""
    ranks(2, agree, name="deep", stage=stage)


def test_tied_weights_get_both_gradients(ranks: Pools) -> None:
    ranks(2, agree, name="tied", stage=3)


def test_low_precision_is_that_of_the_whole_loss(ranks: Pools) -> None:
    ranks(2, agree, name="deep", stage=3, precision="bf16")


@pytest.mark.slow
@pytest.mark.wide
def test_regions_call_the_operators_when_compiled(ranks: Pools) -> None:
    ranks(2, agree, name="deep", stage=3, backend="inductor", limit=300.0)
