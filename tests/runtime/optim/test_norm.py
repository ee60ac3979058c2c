"""Norms and clipping of sharded gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.conftest import Launch
from tests.runtime.models import Odd, cut_into_chunks, full_gradients, reduced, set_gradients, shard
from zcompile.errors import ShardingError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.norm import clip_grad_norm_

ORDERS = [1.0, 2.0, 3.0, 0.5, math.inf, 0.0, -math.inf, -1.0]


def compare(mesh: Mesh, order: float, *, skip: tuple[str, ...] = (), max_norm: float = 0.7) -> Tensor:
    """Clip sharded and plain gradients; returns our norm."""
    torch.manual_seed(0)
    model, plain = Odd(), Odd()
    shards = shard(model, mesh)
    gradients = full_gradients(plain, 1, skip=(*skip, "nothing"))
    set_gradients(plain, gradients)
    shards.accumulate_many(*reduced(shards, gradients))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, order)
    norm = clip_grad_norm_(shards, mesh, max_norm, order)
    torch.testing.assert_close(norm, expected)
    for name in gradients:
        grad = plain.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(reduced(shards, {name: grad})[1][0], shards.grad_local(name))
    assert all(not hole.any() for key in shards.gradient_arenas() for hole in shards.holes(key))
    return norm


@pytest.mark.usefixtures("both_sizes")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("skip", [(), ("up.weight", "scale")])
def test_equal_to_torch_on_one_process(order: float, skip: tuple[str, ...]) -> None:
    assert compare(Mesh.create(device="cpu"), order, skip=skip).shape == ()


def test_without_gradients_the_norm_is_zero() -> None:
    mesh = Mesh.create(device="cpu")
    shards = shard(nn.Linear(3, 4), mesh)
    for order in (2.0, math.inf, 0.0):
        assert clip_grad_norm_(shards, mesh, 1.0, order) == 0.0


def test_low_precision_gradients_are_summed_in_float32() -> None:
    mesh = Mesh.create(device="cpu")
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    shards = shard(model, mesh)
    gradients = {name: torch.full(p.shape, 0.1, dtype=torch.bfloat16) for name, p in model.named_parameters()}
    shards.accumulate_many(*reduced(shards, gradients))
    norm = clip_grad_norm_(shards, mesh, 1.0)
    expected = torch.cat([g.float().flatten() for g in gradients.values()]).norm()
    torch.testing.assert_close(norm, expected)
    assert norm.dtype is torch.float32 and model.weight.grad is not None and model.weight.grad.dtype is torch.bfloat16


def test_a_gradient_of_the_users_counts_and_is_scaled() -> None:
    mesh = Mesh.create(device="cpu")
    model = nn.Linear(3, 4)
    shards = shard(model, mesh)
    model.weight.grad = torch.full((4, 3), 2.0)
    shards.accumulate("bias", torch.full((4,), 2.0))
    assert clip_grad_norm_(shards, mesh, 4.0) == 8.0
    torch.testing.assert_close(model.weight.grad, torch.full((4, 3), 1.0))


@pytest.mark.usefixtures("one_rank")
def test_a_wrongly_placed_gradient_is_refused() -> None:
    mesh = Mesh.create(device="cpu")
    model = nn.Linear(3, 4)
    shards = shard(model, mesh)
    model.weight.grad = torch.full((4, 3), 2.0)
    with pytest.raises(ShardingError, match="'weight' is a DTensor"):
        clip_grad_norm_(shards, mesh, 1.0)


def test_error_if_nonfinite() -> None:
    mesh = Mesh.create(device="cpu")
    shards = shard(nn.Linear(3, 4), mesh)
    shards.accumulate("bias", torch.tensor([1.0, math.inf, 0.0, 0.0]))
    with pytest.raises(RuntimeError, match="is inf, so they cannot be clipped"):
        clip_grad_norm_(shards, mesh, 1.0, error_if_nonfinite=True)


def on_ranks(rank: int, world_size: int, cut: bool) -> list[Tensor]:
    if cut:
        cut_into_chunks(pytest.MonkeyPatch())
    mesh = Mesh.create(device="cpu", timeout=20)
    norms = [compare(mesh, order) for order in ORDERS]
    norms.append(compare(mesh, 2.0, skip=("up.weight", "scale")))

    # The same as torch on DTensors.
    torch.manual_seed(0)
    model = Odd()
    shards = shard(model, mesh)
    gradients = full_gradients(Odd(), 1, skip=("nothing",))
    for order in (1.0, 2.0, math.inf):
        for p in model.parameters():
            p.grad = None
        shards.accumulate_many(*reduced(shards, gradients))
        ours = clip_grad_norm_(shards, mesh, 1e9, order)
        theirs = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.numel()], 1e9, order)
        torch.testing.assert_close(ours, theirs.full_tensor())

    # A NaN or infinity on one rank reaches all, and leaves with the gradients that had it.
    for bad in (math.nan, math.inf):
        for order in (1.0, 2.0, math.inf):
            gradients["up.weight"][0, 0] = bad  # rank 0's
            for p in model.parameters():
                p.grad = None
            shards.accumulate_many(*reduced(shards, gradients))
            norm = clip_grad_norm_(shards, mesh, 1.0, order)
            assert math.isnan(norm) if math.isnan(bad) else math.isinf(norm)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
            assert clip_grad_norm_(shards, mesh, 1.0, order) == 0.0
    return norms


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_to_torch_on_ranks(launch: Launch, world_size: int) -> None:
    first, *others = launch(world_size, on_ranks, False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for norms in launch(world_size, on_ranks, True):
        torch.testing.assert_close(norms, first)
