"""Gradient memory of large models goes with the gradients, and nothing else changes by it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zcompile
from tests.dist.models import CASES, all_rows, net, rows
from tests.dist.pool import Pools
from tests.dist.training import LR, adamw, full, this_rank, train, world_size
from zcompile.runtime.offload import hosting
from zcompile.runtime.sharding import arenas, gradients

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True


@contextlib.contextmanager
def as_if_large(yes: bool = True) -> Iterator[None]:
    """Models that are compiled here have several chunks, which go with their gradients and come with garbage in them."""
    was = arenas.CHUNK_BYTES, gradients.KEEP_BYTES, hosting.aligned_empty

    def garbage(*args: Any) -> Tensor:
        return was[2](*args).fill_(float("nan"))

    if yes:
        arenas.CHUNK_BYTES, gradients.KEEP_BYTES, hosting.aligned_empty = 1, 0, garbage
    try:
        yield
    finally:
        arenas.CHUNK_BYTES, gradients.KEEP_BYTES, hosting.aligned_empty = was


def compiled(model: nn.Module, **options: Any) -> Any:
    return zcompile.compile(model, **{"backend": "eager", "verify": "off", **options})


def is_gone(memory: list[StorageWeakRef]) -> bool:
    """Whether nobody keeps any of it. A thread of gloo may hold what it reduced in place for a moment after the wait."""
    deadline = time.monotonic() + 10
    while not all(m.expired() for m in memory) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(m.expired() for m in memory)


def gradient_memory_goes(name: str, stage: int, ours: bool) -> None:
    case = CASES[name]
    with as_if_large():
        model = compiled(case.build(), stage=stage)
        shards = model._session.runner.shards
        optimizer = (zcompile.optim.AdamW if ours else torch.optim.AdamW)(model.parameters(), lr=LR)
        stored = sum(spec.padded_local_bytes for spec in shards.specs.values())
        memory: list[StorageWeakRef] = []
        for step in range(3):
            loss = case.loss(model(**case.data(step, this_rank())))
            assert is_gone(memory), "gradient memory outlives the start of a forward"
            assert model.report().gradient_bytes == 0
            loss.backward()
            assert model.report().gradient_bytes == stored
            memory = [StorageWeakRef(arena.untyped_storage()) for arena in shards.gradient_arenas().values()]
            assert 4 < len(memory) <= arenas.MAX_CHUNKS + 1
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(**case.data(0, this_rank()))
        assert model.report().gradient_bytes == stored, "only what needs a backward makes room"


@pytest.mark.parametrize(("world", "stage", "ours"), [(1, 3, True), (2, 3, False), (2, 0, True)])
def test_gradient_memory_goes_with_the_gradients(ranks: Pools, world: int, stage: int, ours: bool) -> None:
    ranks(world, gradient_memory_goes, name="deep", stage=stage, ours=ours)


def small_models_keep() -> None:
    case = CASES["deep"]
    model = compiled(case.build())
    optimizer = adamw(model)
    train(model, case, optimizer=optimizer, steps=1)
    (arena,) = model._session.runner.shards.gradient_arenas().values()
    train(model, case, optimizer=optimizer, steps=2)
    (after,) = model._session.runner.shards.gradient_arenas().values()
    assert after is arena and model.report().gradient_bytes > 0


def test_small_models_keep_their_gradient_memory(ranks: Pools) -> None:
    ranks(2, small_models_keep)


def chunks_change_nothing(stage: int, ours: bool, **options: Any) -> None:
    """Frozen, unused, tied and sometimes unused parameters; accumulation, no_sync, clipping, states that travel."""

    def run(large: bool) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
        def make_optimizer(model: nn.Module) -> Any:
            kind = zcompile.optim.AdamW if ours else torch.optim.AdamW
            return kind([p for p in model.parameters() if p.requires_grad], lr=LR)

        seen = []
        with as_if_large(large):
            model = compiled(net(), stage=stage, **options)
            optimizer = make_optimizer(model)
            for step in range(6):
                with model.no_sync() if step == 1 else contextlib.nullcontext():
                    model(rows(step, this_rank()), extra=step in (1, 4))["loss"].backward()
                if step in (1, 2):  # what no_sync left, or onto the gradients that are there
                    model(rows(10 + step, this_rank()))["loss"].backward()
                num_chunks = len(model._session.runner.shards.gradient_arenas())
                assert num_chunks > 4 if large else num_chunks == 1
                seen.append(full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                seen += [full(p.grad) for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 3)
                if step == 2:
                    state, full_optimizer = model.full_state_dict(), model.full_optimizer_state_dict(optimizer)
                    model.load_state_dict({name: value.clone() for name, value in state.items()})
                    optimizer = make_optimizer(model)
                    model.load_full_optimizer_state_dict(optimizer, full_optimizer)
            return seen, model.full_state_dict(), model.full_optimizer_state_dict(optimizer)["state"]

    whole, state, moments = run(False)
    chunked, other, its_moments = run(True)
    assert len(whole) == len(chunked) and all(torch.equal(a, b) for a, b in zip(whole, chunked, strict=True))
    assert all(torch.equal(state[name], other[name]) for name in state)
    assert moments.keys() == its_moments.keys()
    for name, entry in moments.items():
        assert all(torch.equal(value, its_moments[name][key]) for key, value in entry.items()), name


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, {"stage": 3, "ours": True}),
        (2, {"stage": 3, "ours": True, "ignore": ("norm.*", "*.bias")}),
        (2, {"stage": 3, "ours": False, "ignore": ("norm.*", "*.bias")}),
        (2, {"stage": 0, "ours": True}),
        (3, {"stage": 3, "ours": True}),
    ],
    ids=["alone", "some replicated", "torch's AdamW", "replicated", "padded"],
)
def test_chunks_change_no_bit(ranks: Pools, world: int, options: dict[str, Any]) -> None:
    ranks(world, chunks_change_nothing, **options)


def clipping_in_chunks() -> None:
    """Our norm adds up in another order: equal but for rounding."""
    norms, states = [], []
    for large in (False, True):
        with as_if_large(large):
            model = compiled(net(), ignore=("norm.*",))
            for order in (1.0, 2.0, float("inf")):
                model.zero_grad()
                model(rows(0, this_rank()))["loss"].backward()
                norms.append(model.clip_grad_norm_(0.01, norm_type=order))
                states.append([full(p.grad) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(norms[:3], norms[3:])
    torch.testing.assert_close(states[:3], states[3:])


def test_clipping_in_chunks(ranks: Pools) -> None:
    ranks(3, clipping_in_chunks)


def held_gradients(stage: int, large: bool) -> None:
    """``g = p.grad; zero_grad(); backward()`` changes no g, with and without a forward before the backward."""
    with as_if_large(large):
        model, plain = compiled(net(), stage=stage), net()
        for each, data in ((model, rows), (plain, all_rows)):
            arg = this_rank() if each is model else world_size()
            held: list[dict[str, Tensor]] = []
            a, b = each(data(0, arg))["loss"], each(data(1, arg))["loss"]
            for loss in (a, b, None, None):
                loss = each(data(len(held), arg))["loss"] if loss is None else loss
                loss.backward()
                held.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
                if len(held) < 4:
                    each.zero_grad()
            each.held = held
    for mine, theirs in zip(model.held, plain.held, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(full(mine[name]), value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3)])
def test_held_gradients_keep_their_values(ranks: Pools, world: int, stage: int, large: bool) -> None:
    ranks(world, held_gradients, stage=stage, large=large)
