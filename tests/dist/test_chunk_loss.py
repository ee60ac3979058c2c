"""Losses in pieces at every stage: gradients are those of plain PyTorch, over windows, in low precision, and compiled."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zcompile
from tests.dist.models import Case, Deep, own_batch, tokens
from tests.dist.pool import Pools
from tests.dist.training import full_gradients, this_rank, world_size
from zcompile import ops

pytestmark = pytest.mark.dist

WINDOW = 2
#: several pieces of the logits, which are [12, 37]
PIECE = {None: "0.4KiB", "bf16": "0.2KiB"}


class Tied(Deep):
    """Its head has the weight of the embedding, and a bias."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.head.weight = self.embed.weight


class Frozen(Deep):
    """Nobody wants the gradients of its head."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.head.requires_grad_(False)


class WideLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


class Wide(Deep):
    """Its head computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.head = WideLinear(self.head.in_features, self.head.out_features)


class Squares(Deep):
    """Its loss depends on the losses of rows in a way that only backward knows."""

    def __init__(self) -> None:
        super().__init__(layers=1)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens, labels)["logits"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": losses.square().mean(), "logits": logits}


CASES = {
    "deep": Case(lambda: Deep(layers=1), own_batch),
    "tied": Case(Tied, own_batch),
    "frozen": Case(Frozen, own_batch),
    "squares": Case(Squares, own_batch),
    "wide": Case(Wide, own_batch),
}


def gradients(name: str, no_sync: bool = False, **options: Any) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    """Gradients after a window of backward calls, and this rank's losses."""
    case = CASES[name]
    options = {"gradient_accumulation_steps": 1 if no_sync else WINDOW, "backend": "eager", **options}
    model = zcompile.compile(case.build(), **options)
    losses = []
    for step in range(WINDOW):
        with model.no_sync() if no_sync and step + 1 < WINDOW else contextlib.nullcontext():
            loss = model(**case.data(step, this_rank()))["loss"]
            (loss * (step + 1)).backward()
        losses.append(loss.item())
    return {n: g for n, g in full_gradients(model).items() if g is not None}, losses, model


def plain_gradients(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    case = CASES[name]
    model = case.build()
    losses = []
    for step in range(WINDOW):
        for rank in range(world_size()):
            loss = model(**case.data(step, rank))["loss"]
            (loss * (step + 1) / world_size()).backward()
            losses += [loss.item()] if rank == this_rank() else []
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, losses


def agree(name: str, stage: int, precision: str | None = None, **options: Any) -> None:
    """In float32 beside plain PyTorch; in low precision beside the same without pieces."""
    options = {"stage": stage, "precision": precision, **options}
    have, losses, model = gradients(name, loss_chunk=PIECE[precision], **options)
    stats = model.history["chunk-loss"].stats
    assert stats["losses in pieces"] == 1 and stats["pieces of rows"] > 2, str(stats)
    in_forward = name != "squares"
    assert stats["gradients made in forward"] == in_forward and (stats["pieces of columns"] > 2) == (not in_forward)
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


@pytest.mark.parametrize(("name", "stage"), [("tied", 1), ("tied", 3), ("frozen", 2), ("squares", 3)])
def test_other_heads(ranks: Pools, name: str, stage: int) -> None:
    """Tied weights get both gradients; those that nobody wants are not made; logits may be computed again."""
    ranks(2, agree, name=name, stage=stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_are_kept_local_until_the_last_call(ranks: Pools, stage: int) -> None:
    ranks(2, agree, name="deep", stage=stage, no_sync=True)


@pytest.mark.parametrize("options", [{}, {"keep_fp32": ("head.*",)}, {"reduce_dtype": "bf16"}])
def test_low_precision_is_that_of_the_whole_loss(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2, agree, name="wide" if "keep_fp32" in options else "deep", stage=3, precision="bf16", **options)


def reduced_at_once(layers: int) -> None:
    """Beside the head's nothing is computed before its reduction can start: no product, and no gather."""
    model = zcompile.compile(
        Deep(layers), stage=3, backend="eager", loss_chunk=PIECE[None], policy="keep{units=0},bucket{mib=0},prefetch"
    )
    model(**own_batch(torch.Generator().manual_seed(0)))["loss"].backward()
    calls = [node.target for node in model.graphs.backward.body]
    start = calls.index(ops.reduce_scatter)
    (first,) = [node for node in model.graphs.backward.body[:start] if node.target is ops.region_call]
    region = model.graphs.backward.regions[first.args[0]]
    assert "aten.mm" not in str([str(node.target) for node in region.fx.nodes])
    assert "head" in model.graphs.backward.body[start].name


def test_the_gradient_of_the_head_is_reduced_first(ranks: Pools) -> None:
    ranks(2, reduced_at_once, layers=2)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("name", ["deep", "squares"])
def test_regions_call_the_operators_when_compiled(ranks: Pools, name: str) -> None:
    ranks(2, agree, name=name, stage=3, backend="inductor", limit=300.0)


#: positions of each rank, call by call: pieces save memory in those with 16
LENGTHS = {
    "one rank has many": [(16, 2), (2, 2), (2, 16), (16, 16), (1, 16)],
    "both have few at first": [(2, 3), (16, 2), (2, 16)],
}


def lengths_differ(name: str, policy: str, always: bool) -> None:
    """Calls in which ranks have other numbers of rows, so that pieces save memory on some of them alone."""
    chunk = f"chunk-loss{{mib={0.5 / 1024} columns=0 drop=true always={str(always).lower()}}}"
    zero = "plan-units,shard{stage=3 size=2},unshard{stage=3},reduce{stage=3},outline"
    model = zcompile.compile(
        CASES["deep"].build(), stage=3, backend="eager", pipeline=f"{chunk},{zero},{policy}cleanup"
    )
    plain = CASES["deep"].build()
    generator = torch.Generator().manual_seed(0)
    for lengths in LENGTHS[name]:
        batches = [dict.fromkeys(("tokens", "labels"), tokens(generator, 2, length)) for length in lengths]
        model(**batches[this_rank()])["loss"].backward()
        torch.stack([plain(**batch)["loss"] for batch in batches]).mean().backward()
        made = sum(entry.stats["gradients made in forward"] for entry in model.history if entry.name == "chunk-loss")
        assert made == (always or name == "one rank has many")
        for key, value in full_gradients(model).items():
            want = plain.get_parameter(key).grad
            torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("policy", "always"), [("keep{units=1},bucket,prefetch,", False), ("", False), ("bucket,", True)]
)
def test_ranks_with_other_numbers_of_rows_gather_alike(ranks: Pools, name: str, policy: str, always: bool) -> None:
    """Gradients that are made in forward need no weight in backward: on all ranks, or on none."""
    ranks(2, lengths_differ, name=name, policy=policy, always=always)
