"""Collectives of one rank: copies, without a process group. More ranks: tests/dist/test_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zcompile.runtime.agreement import Agreement
from zcompile.runtime.collectives import Collectives


@pytest.fixture
def collectives() -> Collectives:
    mesh = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"), group=None)
    return Collectives(mesh, Agreement(None, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_one_rank_gathers_a_copy(collectives: Collectives, dtype: torch.dtype) -> None:
    shards = [torch.ones(3, 2).to(dtype), torch.ones(0, 4).to(dtype)]
    fulls = [torch.zeros_like(t) for t in shards]
    collectives.all_gather(fulls, shards).wait("all_gather of a")
    assert all(torch.equal(a, b) for a, b in zip(fulls, shards, strict=True))


def test_one_rank_reduces_to_the_same(collectives: Collectives) -> None:
    grads = [torch.arange(6.0).view(3, 2)]
    parts = [torch.zeros(3, 2)]
    collectives.reduce_scatter(parts, grads).wait()
    collectives.all_reduce(grads, "sum").wait()
    collectives.broadcast(grads).wait()
    assert torch.equal(parts[0], torch.arange(6.0).view(3, 2)) and torch.equal(grads[0], parts[0])


def test_sizes_and_reductions_are_checked(collectives: Collectives) -> None:
    with pytest.raises(AssertionError, match=r"\(5,\) is not 1 times \(4,\)"):
        collectives.all_gather([torch.zeros(5)], [torch.zeros(4)])
    with pytest.raises(AssertionError, match="integers have no average"):
        collectives.all_reduce([torch.zeros(4, dtype=torch.int64)])
    with pytest.raises(AssertionError, match="unknown reduction"):
        collectives.all_reduce([torch.zeros(4)], "median")


def test_close_is_harmless(collectives: Collectives) -> None:
    collectives.close()
    collectives.close()
