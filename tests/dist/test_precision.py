"""Low-precision compute with fp32 masters: gradients are those of a plain model in that dtype, averaged over ranks in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import rows
from tests.dist.pool import Pools
from tests.dist.training import full_gradients, this_rank, world_size

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Exact(nn.Module):
    """Operations that round alike however they are captured; uneven rows, a small and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.last = nn.Linear(13, 5, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = self.last(torch.relu(self.frozen(torch.relu(self.first(x))))) * self.scale
        return {"loss": out.float().square().sum()}


def gradients_of_rank(rank: int, steps: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """What plain PyTorch computes in ``dtype`` on one rank's rows, each step's gradient widened before they are added."""
    total: dict[str, Tensor] = {}
    for step in steps:
        model = Exact().to(dtype)
        model(rows(step, rank).to(dtype))["loss"].backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, torch.zeros(p.shape)) + p.grad.float()
    return total


def reduces(stage: int, precision: str, reduce_dtype: str | None, num_local: int) -> None:
    options: dict[str, Any] = {} if reduce_dtype is None else {"reduce_dtype": reduce_dtype}
    model = zcompile.compile(Exact(), stage=stage, backend="eager", verify="full", precision=precision, **options)
    with model.no_sync():
        for step in range(num_local):
            model(rows(step, this_rank()))["loss"].backward()
    model(rows(num_local, this_rank()))["loss"].backward()
    found = full_gradients(model)
    ranks = [gradients_of_rank(rank, list(range(num_local + 1)), DTYPES[precision]) for rank in range(world_size())]
    exact = reduce_dtype is None or reduce_dtype == "fp32"
    for name, gradient in found.items():
        if gradient is None:
            assert name not in ranks[0], name
            continue
        assert gradient.dtype == torch.float32, name
        want = torch.stack([r[name].double() for r in ranks]).mean(0)
        rounding = 1e-6 if exact else 2e-2
        torch.testing.assert_close(gradient.double(), want, rtol=rounding, atol=rounding * want.abs().max().item())


@pytest.mark.parametrize(
    ("stage", "precision", "reduce_dtype"),
    [
        (0, "bf16", None),
        (2, "bf16", None),
        (3, "bf16", None),
        (3, "fp16", None),
        (3, "bf16", "fp32"),
        (3, "bf16", "bf16"),
        (0, "fp16", "bf16"),
    ],
)
def test_gradients_are_averaged_wide(ranks: Pools, stage: int, precision: str, reduce_dtype: str | None) -> None:
    """Sent narrow, added up in float32: no rounding but that of the compute dtype, unless a narrow reduction was asked for."""
    ranks(2, reduces, stage=stage, precision=precision, reduce_dtype=reduce_dtype, num_local=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_what_no_sync_leaves_is_added_up_wide(ranks: Pools, stage: int) -> None:
    ranks(2, reduces, stage=stage, precision="bf16", reduce_dtype=None, num_local=2)


def sent_dtypes(stage: int) -> None:
    model = zcompile.compile(Exact(), stage=stage, backend="eager", precision="bf16")
    model(rows(0, this_rank()))["loss"].backward()
    text = str(model.graphs.backward)
    assert ", f32)" in text, "gradients travel in bfloat16 and are averaged in float32"
    assert "_f32" not in text, "no gradient is widened by itself"


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_travel_narrow(ranks: Pools, stage: int) -> None:
    ranks(2, sent_dtypes, stage=stage)
