"""Shard dimensions and shapes of parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zcompile.placement import REPLICATE_MAX_BYTES, ParamSpec, choose_shard_dim, leaves_a_rank_empty

F32 = torch.float32


def spec(shape: tuple[int, ...], world_size: int, shard_dim: int | None) -> ParamSpec:
    return ParamSpec("w", (), shape, F32, True, shard_dim, world_size)


@pytest.mark.parametrize(
    ("shape", "world_size", "expected"),
    [
        ((32, 8), 4, 0),
        ((13, 8), 4, 0),  # 4, 4, 4, 1
        ((9, 8), 4, 1),  # 3, 3, 3, 0 on dimension 0
        ((3, 8), 4, 1),
        ((3, 10, 8), 4, 2),  # 3, 3, 3, 1 on dimension 1 would not be contiguous
        ((3, 10), 4, None),
        ((3, 3), 4, None),  # small: replicated
        ((3,), 4, None),
        ((4096, 4096), 512, 0),
        ((4000, 1000, 1000), 4096, 0),  # large: empty ranks rather than replicas
        ((), 2, None),
        ((0, 4), 2, None),
        ((5, 3), 1, 0),
    ],
)
def test_the_first_dimension_that_leaves_no_rank_empty(
    shape: tuple[int, ...], world_size: int, expected: int | None
) -> None:
    assert choose_shard_dim(shape, F32, world_size, stage=3, ignored=False) == expected


def test_large_parameters_keep_empty_ranks_rather_than_replicas() -> None:
    rows = REPLICATE_MAX_BYTES // 4 // 3
    assert choose_shard_dim((3, rows), F32, 2 * rows, stage=3, ignored=False) is None  # just fits
    assert choose_shard_dim((3, rows + 1), F32, 2 * rows, stage=3, ignored=False) == 0
    assert choose_shard_dim((3, rows + 1), torch.bfloat16, 2 * rows, stage=3, ignored=False) is None


@pytest.mark.parametrize(("stage", "ignored"), [(0, False), (3, True), (1, True)])
def test_stage_0_and_ignored_parameters_are_replicated(stage: int, ignored: bool) -> None:
    assert choose_shard_dim((32, 8), F32, 4, stage=stage, ignored=ignored) is None


def test_shapes_of_a_padded_shard() -> None:
    s = spec((13, 8), 4, 0)
    assert (s.chunk, s.padded_local_shape, s.padded_full_shape, s.is_padded) == (4, (4, 8), (16, 8), True)
    assert [s.local_shape(r) for r in range(4)] == [(4, 8), (4, 8), (4, 8), (1, 8)]
    assert (s.num_bytes, s.padded_local_bytes, s.padded_full_bytes) == (13 * 32, 4 * 32, 16 * 32)


def test_shapes_of_a_shard_on_another_dimension() -> None:
    s = spec((2, 10), 4, 1)
    assert (s.padded_local_shape, s.padded_full_shape) == ((2, 3), (8, 3))
    assert [s.local_shape(r) for r in range(4)] == [(2, 3), (2, 3), (2, 3), (2, 1)]


def test_shapes_of_a_replica() -> None:
    s = spec((2, 10), 4, None)
    assert s.padded_local_shape == s.padded_full_shape == s.local_shape(3) == (2, 10)
    assert not s.is_padded and not s.is_sharded
    with pytest.raises(ValueError, match="'w' is replicated"):
        s.rows(0)
    with pytest.raises(ValueError, match="'w' is replicated"):
        _ = s.chunk


@given(st.integers(1, 200), st.integers(1, 40))
def test_rows_are_those_of_torch_chunk(num_rows: int, world_size: int) -> None:
    s = spec((num_rows,), world_size, 0)
    expected = [len(part) for part in torch.arange(num_rows).chunk(world_size)]
    expected += [0] * (world_size - len(expected))
    assert [s.local_shape(rank)[0] for rank in range(world_size)] == expected
    assert leaves_a_rank_empty(num_rows, world_size) == (0 in expected)
    assert s.is_padded == (set(expected) != {s.chunk})
