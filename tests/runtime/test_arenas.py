"""Where shards lie in flat memory."""

from __future__ import annotations

import pytest
import torch

from zcompile.placement import ParamSpec
from zcompile.runtime.arenas import ArenaKey, ArenaLayout, Place, Run, aligned_zeros, allocate, detached_view

F32 = ArenaKey(torch.float32, True)
CPU = torch.device("cpu")


def spec(name: str, shape: tuple[int, ...], shard_dim: int | None = 0, **changes: object) -> ParamSpec:
    fields = {"dtype": torch.float32, "requires_grad": True, **changes}
    return ParamSpec(name, (), shape, shard_dim=shard_dim, world_size=2, **fields)  # type: ignore[arg-type]


LAYOUT = ArenaLayout(
    [
        spec("a", (8, 5)),
        spec("scale", (), None),
        spec("b", (64, 2)),
        spec("empty", (0, 3), None),
        spec("frozen", (2, 2), requires_grad=False),
        spec("half", (4,), dtype=torch.bfloat16),
        spec("c", (130,)),
    ]
)


def test_sharded_parameters_come_first_and_are_aligned() -> None:
    assert LAYOUT.places == (
        Place(F32, 0, 20, 64),
        Place(F32, 256, 1, 64),
        Place(F32, 64, 64, 64),
        None,
        Place(ArenaKey(torch.float32, False), 0, 2, 64),
        Place(ArenaKey(torch.bfloat16, True), 0, 2, 128),
        Place(F32, 128, 65, 128),
    )
    assert LAYOUT.sizes[F32] == 320 and LAYOUT.sharded_sizes[F32] == 256


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        ([], []),
        ([3], []),
        ([0, 2, 6], [Run(F32, 0, 256)]),
        ([6, 2, 0], [Run(F32, 0, 256)]),
        ([0, 1, 2, 6], [Run(F32, 0, 256), Run(F32, 256, 320)]),  # replicated ones apart
        ([0, 6], [Run(F32, 0, 64), Run(F32, 128, 256)]),
        ([0, 5], [Run(ArenaKey(torch.bfloat16, True), 0, 128), Run(F32, 0, 64)]),
    ],
)
def test_runs_are_the_fewest(indices: list[int], runs: list[Run]) -> None:
    assert LAYOUT.runs(indices) == runs


def test_arenas_are_aligned_zeros() -> None:
    for key, arena in allocate(LAYOUT.sizes, CPU).items():
        assert arena.data_ptr() % 256 == 0
        assert arena.dtype is key.dtype and arena.shape == (LAYOUT.sizes[key],)
        assert not arena.any()


def test_arena_keys_print() -> None:
    assert {str(key) for key in LAYOUT.sizes} == {"float32", "bfloat16", "float32 frozen"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_detached_view_shares_memory_and_has_its_own_storage(dtype: torch.dtype) -> None:
    arena = aligned_zeros(512, dtype, CPU)
    view = detached_view(arena[256:262].view(2, 3))
    view.fill_(1)
    assert (arena[256:262] == view.new_ones(6)).all() and torch.count_nonzero(
        arena.view(torch.uint8)[: 256 * dtype.itemsize]
    ) == 0
    assert view.storage_offset() == 0 and view.untyped_storage().nbytes() == 6 * dtype.itemsize


def test_a_detached_view_of_nothing() -> None:
    view = detached_view(aligned_zeros(64, torch.float32, CPU)[:0].view(0, 3))
    assert view.shape == (0, 3)
