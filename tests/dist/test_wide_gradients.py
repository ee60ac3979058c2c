"""Unrounded gradients on ranks: what is reduced is the fp32 sum of each rank's products."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

import zcompile
from tests.dist.pool import Pools
from tests.dist.training import this_rank, world_size
from tests.passes.test_wide_gradients import Model, batch, pipeline, wanted

pytestmark = pytest.mark.dist


def gradients(stage: int, how: str) -> None:
    """Of one backward, or of two that are added up without communication and reduced with the second."""
    torch.manual_seed(0)
    plain, size, own = Model(), world_size(), this_rank()
    spec = pipeline(stage=stage, precision="bf16", size=size)
    model = zcompile.compile(copy.deepcopy(plain), stage=stage, backend="eager", precision="bf16", pipeline=spec)
    batches = [own, own + size] if how == "no_sync" else [own]
    if how == "no_sync":
        with model.no_sync():
            model(batch(batches[0])).backward()
    model(batch(batches[-1])).backward()
    assert model.history["wide-gradients"].stats == {"products widened": 3, "casts dropped": 1}
    everyone = [wanted(plain, batch(number))[1] for number in range(size * len(batches))]
    for name in ("first.weight", "second.weight"):
        grad = model.get_parameter(name).grad
        have = grad.full_tensor() if isinstance(grad, DTensor) else grad
        want = sum(found[name] for found in everyone) / size
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    model.close()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("how", ["backward", "no_sync"])
def test_means_of_unrounded_sums(ranks: Pools, stage: int, how: str) -> None:
    ranks(2, gradients, stage=stage, how=how)
