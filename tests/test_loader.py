"""The loader: rows of ranks and epochs, and positions that are saved and found again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, TensorDataset

from zcompile.errors import ConfigError, StateError
from zcompile.loader import Loader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def loaders(count: int = 23, batch: int = 3, world: int = 2, **options: Any) -> list[Loader]:
    return [Loader(Numbers(count), batch, rank=rank, world_size=world, **options) for rank in range(world)]


def lists(loader: Loader, count: int | None = None) -> list[list[int]]:
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == count:
            break
    return batches


def test_an_epoch_is_the_dataset_once() -> None:
    ranks = loaders()
    for _ in range(3):
        rows = [row for loader in ranks for batch in lists(loader) for row in batch]
        assert len(rows) == 24 and set(rows) == set(range(23))  # one row twice: 23 rows on 2 ranks


def test_rows_are_those_of_torchs_sampler() -> None:
    for rank, loader in enumerate(loaders(count=24)):
        sampler = DistributedSampler(Numbers(24), num_replicas=2, rank=rank, seed=0)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert [row for batch in lists(loader) for row in batch] == list(sampler)


def test_epochs_differ_in_order_and_seeds_too() -> None:
    (loader,) = loaders(world=1)
    (other,) = loaders(world=1, seed=1)
    first, second = lists(loader), lists(loader)
    assert first != second
    assert lists(other) != first


def test_sizes() -> None:
    loader, _ = loaders(count=20)
    assert len(loader) == 4 and [len(b) for b in lists(loader)] == [3, 3, 3, 1]
    loader, _ = loaders(count=20, drop_last=True)
    assert len(loader) == 3 and [len(b) for b in lists(loader)] == [3, 3, 3]
    assert loader.batch_size == 3 and len(loader.dataset) == 20


def test_an_iteration_that_was_broken_off_ends_its_epoch() -> None:
    (loader,) = loaders(world=1)
    (whole,) = loaders(world=1)
    lists(whole)
    lists(loader, count=2)
    assert loader.epoch == 0
    assert lists(loader) == lists(whole)
    assert loader.epoch == 2


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 8, 11])
def test_position(position: int) -> None:
    """After any number of batches, inside an epoch or at its end, what follows is what would have followed."""
    expected: list[list[int]] = []
    (loader,) = loaders(count=11, world=1)
    for _ in range(4):
        expected += lists(loader)
    (loader,) = loaders(count=11, world=1)
    seen: list[list[int]] = []
    state = loader.state_dict()
    while len(seen) < position:
        for batch in loader:
            seen.append(batch.tolist())
            state = copy.deepcopy(loader.state_dict())
            if len(seen) == position:
                break
    (resumed,) = loaders(count=11, world=1, seed=5)
    resumed.load_state_dict(state)
    while len(seen) < len(expected):
        seen += lists(resumed)
    assert seen == expected


def test_position_at_another_world_size() -> None:
    two = loaders(count=24, batch=2, world=2)
    for loader in two:
        lists(loader, count=2)
    (one,) = loaders(count=24, batch=4, world=1)
    lists(one, count=2)
    (resumed,) = loaders(count=24, batch=4, world=1)
    resumed.load_state_dict(two[0].state_dict())
    assert two[0].state_dict() == two[1].state_dict() == one.state_dict()
    rest = lists(resumed)
    assert len(rest) == 4
    again = loaders(count=24, batch=2, world=2)
    for loader in again:
        loader.load_state_dict(one.state_dict())
    assert sorted(row for loader in again for b in lists(loader) for row in b) == sorted(row for b in rest for row in b)


def test_positions_that_do_not_fit() -> None:
    loader, _ = loaders(count=24)
    lists(loader, count=1)
    state = loader.state_dict()
    with pytest.raises(StateError, match="position is in a dataset of 24 rows and this one has 23"):
        loaders(count=23)[0].load_state_dict(state)
    with pytest.raises(
        StateError, match=r"position is 6 rows into epoch 0, which micro-batch 4 \* world size 1 = 4 does not divide"
    ):
        loaders(count=24, batch=4, world=1)[0].load_state_dict(state)


def test_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(10))

    with pytest.raises(ConfigError, match="training_data is a Stream, whose rows cannot be divided"):
        Loader(Stream(), 2)
    with pytest.raises(ConfigError, match="training_data has 2 rows a rank, fewer than the micro-batch of 3"):
        loaders(count=4, drop_last=True)


def test_collate() -> None:
    data = TensorDataset(torch.arange(4.0))
    batch = next(iter(Loader(data, 4, collate_fn=lambda rows: sum(row[0] for row in rows))))
    assert batch == 6.0
