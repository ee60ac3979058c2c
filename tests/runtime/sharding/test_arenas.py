"""Where shards lie in flat memory."""

from __future__ import annotations

import random

import pytest
import torch

from zcompile.placement import ParamSpec
from zcompile.runtime.sharding.arenas import (
    MAX_CHUNKS,
    ArenaKey,
    ArenaLayout,
    Place,
    Run,
    aligned_zeros,
    allocate,
    detached_view,
)

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


def sizes_of_chunks(layout: ArenaLayout) -> list[list[int]]:
    """Bytes of the shards in each chunk."""
    return [
        [place.extent * key.dtype.itemsize for i in members if (place := layout.places[i])]
        for key, members in layout.members.items()
    ]


@pytest.mark.parametrize(
    ("rows", "chunks"),
    [
        ([64] * 3, [[256] * 3]),
        ([64] * 4, [[256] * 4]),
        ([64] * 6, [[256] * 4, [256] * 2]),
        ([64, 256, 64, 64, 64, 64], [[256] * 4, [1024], [256]]),  # a large one alone, the open chunk goes on behind it
        ([512, 64, 512], [[2048], [256], [2048]]),
        ([256] * 3, [[1024], [1024], [1024]]),
        ([192, 192, 192], [[768, 768], [768]]),  # until it is full
    ],
)
def test_chunks(rows: list[int], chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.sharding.arenas.CHUNK_BYTES", 1024)
    layout = ArenaLayout([spec(f"p{i}", (n * 2,)) for i, n in enumerate(rows)])
    assert sizes_of_chunks(layout) == chunks
    assert [key.chunk for key in layout.sizes] == list(range(len(chunks)))
    for key, members in layout.members.items():
        places = [place for i in members if (place := layout.places[i])]
        assert [p.start for p in places] == [sum(p.extent for p in places[:i]) for i in range(len(places))]
        assert layout.sizes[key] == layout.sharded_sizes[key] == sum(p.extent for p in places)


def test_few_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters: each chunk is a launch of the optimizer."""
    monkeypatch.setattr("zcompile.runtime.sharding.arenas.CHUNK_BYTES", 1024)
    rng = random.Random(0)
    for _ in range(50):
        rows = [int(64 * 2 ** rng.uniform(0, 8)) for _ in range(rng.randrange(1, 300))]
        layout = ArenaLayout([spec(f"p{i}", (n * 2,)) for i, n in enumerate(rows)])
        assert len(layout.sizes) <= MAX_CHUNKS + 1
        largest = max(max(1024, sum(map(sum, sizes_of_chunks(layout))) // MAX_CHUNKS), max(rows) * 4)
        assert all(sum(chunk) <= 2 * largest + 512 for chunk in sizes_of_chunks(layout))
        assert sorted(i for members in layout.members.values() for i in members) == list(range(len(rows)))


def test_chunks_of_a_llama_of_1_billion_parameters() -> None:
    """At two ranks, with the constants as they are: the numbers in BENCHMARKS.md."""
    block = [
        (2048, 2048),
        (512, 2048),
        (512, 2048),
        (2048, 2048),
        (8192, 2048),
        (8192, 2048),
        (2048, 8192),
        (2048,),
        (2048,),
    ]
    shapes = [(32000, 2048), *block * 16, (2048,), (32000, 2048)]
    chunks = sizes_of_chunks(ArenaLayout([spec(f"p{i}", shape) for i, shape in enumerate(shapes)]))
    sizes = [sum(chunk) / 2**20 for chunk in chunks]
    assert len(sizes) == 14 and 132 < min(sizes) and max(sizes) < 222 and 2105 < sum(sizes) < 2107


def test_replicated_parameters_lie_behind_sharded_ones_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.sharding.arenas.CHUNK_BYTES", 1024)
    layout = ArenaLayout([spec(f"p{i}", (128,), None if i % 2 else 0) for i in range(12)])
    sharded, replicated = 64, 128
    keys = list(layout.members)
    assert list(layout.members.values()) == [[0, 2, 4, 6], [8, 10, 1], [3, 5], [7, 9], [11]]
    assert layout.sharded_sizes[keys[0]] == layout.sizes[keys[0]] == 4 * sharded
    assert (layout.sharded_sizes[keys[1]], layout.sizes[keys[1]]) == (2 * sharded, 2 * sharded + replicated)
    assert layout.sharded_sizes[keys[2]] == 0
    runs = layout.runs(range(12))
    assert [(run.key.chunk, run.start, run.stop) for run in runs][:4] == [
        (0, 0, 256),
        (1, 0, 128),
        (1, 128, 256),
        (2, 0, 256),
    ]


def test_frozen_parameters_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.sharding.arenas.CHUNK_BYTES", 256)
    layout = ArenaLayout([spec(f"p{i}", (128,), requires_grad=False) for i in range(9)])
    assert list(layout.sizes) == [ArenaKey(torch.float32, False)]


def test_arenas_are_aligned_zeros() -> None:
    for key, arena in allocate(LAYOUT.sizes, CPU).items():
        assert arena.data_ptr() % 256 == 0
        assert arena.dtype is key.dtype and arena.shape == (LAYOUT.sizes[key],)
        assert not arena.any()


def test_arena_keys_print() -> None:
    assert {str(key) for key in LAYOUT.sizes} == {"float32", "bfloat16", "float32 frozen"}
    assert str(F32._replace(chunk=3)) == "float32 3"


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
