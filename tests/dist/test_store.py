"""What is kept for later processes, on several ranks: some find it and others do not, and all train the same."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.pool import Pools
from tests.dist.training import this_rank
from tests.test_store import Net, batch, compiled
from zcompile import store
from zcompile.capture import joint
from zcompile.errors import RankTimeoutError

pytestmark = pytest.mark.dist


@contextlib.contextmanager
def kept_in(folder: str) -> Iterator[None]:
    """Inside, things are kept in a folder."""
    before = os.environ.get(store.VARIABLE, "")
    os.environ[store.VARIABLE] = folder
    try:
        yield
    finally:
        os.environ[store.VARIABLE] = before


def train(folders: list[str], seconds: float = 0.0, **options: Any) -> dict[str, Any]:
    """Three steps, of which the second is ``no_sync``; this rank's folder is the one of its number. Captures take ``seconds`` more."""
    captures, real = 0, joint._aot_joint

    def counted(*args: Any) -> Any:
        nonlocal captures
        captures += 1
        time.sleep(seconds)
        return real(*args)

    joint._aot_joint = counted
    try:
        with kept_in(folders[this_rank() % len(folders)]):
            model = compiled(Net, stage=2, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(this_rank())
            losses = []
            for step in range(3):
                with model.no_sync() if step == 1 else contextlib.nullcontext():
                    losses.append(model(batch(step + this_rank()))["loss"])
                    losses[-1].backward()
                if step != 1:
                    optimizer.step()
                    optimizer.zero_grad()
            state = {name: value.tolist() for name, value in model.full_state_dict().items()}
            return {"captures": captures, "losses": [float(loss.detach()) for loss in losses], "state": state}
    finally:
        joint._aot_joint = real


def test_ranks_that_find_a_step_wait_for_those_that_do_not(ranks: Pools, tmp_path: Path) -> None:
    """Cold on both ranks with one folder, warm on both, and cold on rank 1 alone, three seconds slower."""
    shared, other = str(tmp_path / "shared"), str(tmp_path / "other")
    cold = ranks(2, train, folders=[shared])
    assert [outcome["captures"] for outcome in cold] == [1, 1]
    warm = ranks(2, train, folders=[shared])
    assert [outcome["captures"] for outcome in warm] == [0, 0]
    mixed = ranks(2, train, folders=[shared, other], seconds=3.0)
    assert [outcome["captures"] for outcome in mixed] == [0, 1]
    for one, same, half in zip(cold, warm, mixed, strict=True):
        for what in ("losses", "state"):
            assert same[what] == one[what] and half[what] == one[what]
    names = [{path.name for path in Path(folder).iterdir()} for folder in (shared, other)]
    assert names[0] == names[1]


def late(folders: list[str]) -> None:
    with pytest.raises(RankTimeoutError, match="rank 1") as caught:
        train(folders, seconds=6.0, timeout=2.0)
    if this_rank() == 0:
        assert "rank 1" in str(caught.value)


def test_a_rank_that_does_not_come_in_time_is_named(ranks: Pools, tmp_path: Path) -> None:
    shared, other = str(tmp_path / "shared"), str(tmp_path / "other")
    ranks(2, train, folders=[shared])
    ranks(2, late, folders=[shared, other])
