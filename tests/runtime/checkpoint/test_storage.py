"""Pieces in DCP's files: written by some ranks, read by others, and nothing in a file runs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zcompile import compat
from zcompile.errors import StateError
from zcompile.placement import ParamSpec
from zcompile.runtime.checkpoint.pieces import Piece, own_part, staged
from zcompile.runtime.checkpoint.storage import Stored, finish, pack, unsafe_types, write
from zcompile.runtime.sharding.full import cut


def spec(name: str, shape: tuple[int, ...], dim: int | None, size: int) -> ParamSpec:
    return ParamSpec(name, (), shape, torch.float32, True, dim, size)


def pieces(
    fulls: dict[str, tuple[Tensor, int | None]], rank: int, size: int, *, empty: bool = False
) -> dict[str, Piece]:
    out = {}
    for name, (full, dim) in fulls.items():
        one = spec(name, tuple(full.shape), dim if size > 1 else None, size)
        local = cut(one, full, rank)
        out[name] = Piece.of_parameter(one, torch.full_like(local, -1) if empty else local.contiguous(), rank)
    return out


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    saved=st.integers(1, 5),
    loaded=st.integers(1, 5),
    dims=st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_any_division_is_read_as_any_other(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], saved: int, loaded: int, dims: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("c")
    tensors = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}

    def placed(offset: int) -> dict[str, tuple[Tensor, int | None]]:
        """Another dimension in the files than in the program; 3, or more than there are, is replicated."""
        picked = {name: dims[(i + offset) % 8] for i, name in enumerate(tensors)}
        return {n: (t, picked[n] if picked[n] < t.dim() and t.numel() else None) for n, t in tensors.items()}

    for rank in range(saved):
        write(folder, rank, own_part(pieces(placed(0), rank, saved), rank, saved), {f"blob.{rank}": pack([rank, 2.5])})
    finish(folder, saved)
    for rank in range(loaded):
        stored = Stored(folder)
        assert stored.names == {*tensors, *(f"blob.{r}" for r in range(saved))}
        targets = pieces(placed(4), rank, loaded, empty=True)
        assert stored.read(targets, ["blob.0"]) == {"blob.0": [0, 2.5]}
        for name, expected in pieces(placed(4), rank, loaded).items():
            assert torch.equal(targets[name].local, expected.local)


def test_ranks_share_what_all_have() -> None:
    whole = {f"w{i}": Piece.whole(torch.ones(n)) for i, n in enumerate((8, 1, 3, 4, 0))}
    parts = [own_part(whole, rank, 2) for rank in range(2)]
    assert [list(part) for part in parts] == [["w0", "w4"], ["w1", "w2", "w3"]]


def test_a_missing_part_is_found(tmp_path: Path) -> None:
    fulls = {"w": (torch.ones(4, 2), 0)}
    write(tmp_path, 0, pieces(fulls, 0, 2), {})
    with pytest.raises(FileNotFoundError, match="part-1"):
        finish(tmp_path, 2)
    write(tmp_path, 1, {}, {})
    with pytest.raises(ValueError, match="Failed to validate global plan"):
        finish(tmp_path, 2)


def test_staged_values_do_not_change() -> None:
    value = torch.ones(3)
    copy = staged({"w": Piece.whole(value)})["w"]
    value.zero_()
    assert copy.local.sum() == 3 and copy.is_whole


class Custom:
    pass


def test_only_safe_types_are_read(tmp_path: Path) -> None:
    blob = pack({"x": Custom()})
    assert unsafe_types(blob) == [f"{Custom.__module__}.Custom"] and unsafe_types(pack({"x": (1, torch.ones(2))})) == []
    write(tmp_path, 0, {}, {"extra": blob})
    finish(tmp_path, 1)
    with pytest.raises(StateError, match=r"'extra' in the checkpoint holds .*\.Custom, which is not loaded"):
        Stored(tmp_path).read({}, ["extra"])


class Call:
    def __reduce__(self) -> tuple[object, ...]:
        return eval, ("1 + 1",)


@pytest.mark.parametrize("value", [Call(), Custom(), torch.nn.Linear(1, 1)])
def test_metadata_runs_no_code(tmp_path: Path, value: object) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(pickle.UnpicklingError, match="which does not belong there"):
        Stored(tmp_path)
    with open(tmp_path / ".metadata", "rb") as file, pytest.raises(pickle.UnpicklingError):
        compat.load_dcp_metadata(file)
