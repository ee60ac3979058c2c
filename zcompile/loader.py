"""The data loader of ``initialize``: each rank its own rows, shuffled by epoch, and a position that can be saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from zcompile.errors import ConfigError, StateError


class Loader:
    """Micro-batches of one rank. Iterating goes through one epoch; every epoch has another order, the same on all ranks.

    The rows of an epoch are those of ``torch.utils.data.DistributedSampler``: all ranks together see the whole dataset, and a few
    rows twice where the world size does not divide it.

    Args:
        dataset: a map-style dataset.
        batch_size: rows of a micro-batch.
        rank: this rank.
        world_size: ranks.
        drop_last: leave out a last batch that is too small.
        collate_fn: makes a batch of a list of rows; None: torch's default.
        seed: of the order, the same on all ranks.
        pin_memory: put batches into pinned memory.

    Raises:
        ConfigError: an iterable-style dataset, or fewer rows than a batch with ``drop_last``.

    Attributes:
        epoch: the epoch that the next batch belongs to.
        batches: batches of this epoch that were given out.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        seed: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"training_data is a {type(dataset).__name__}, whose rows cannot be divided among ranks; pass a map-style dataset, "
                "or use a loader of your own and leave training_data out"
            )
        self.epoch = 0
        self.batches = 0
        self._world_size = world_size
        self._sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=seed)
        self._rest = _Rest(self._sampler)
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._rest,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )
        self._batch_size = batch_size
        self._len = len(self._loader)
        if self._len == 0:
            raise ConfigError(
                f"training_data has {len(self._sampler)} rows a rank, fewer than the micro-batch of {batch_size} with "
                "dataloader_drop_last; lower the micro-batch size"
            )
        self._begun = False

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch."""
        return self._batch_size

    @property
    def dataset(self) -> Any:
        """What the rows come from."""
        return self._loader.dataset

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._len

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch; after ``load_state_dict``, the rest of the epoch that was saved."""
        if self._begun:
            self.epoch, self.batches = self.epoch + 1, 0
        self._begun = True
        epoch = self.epoch
        self._sampler.set_epoch(epoch)
        self._rest.skip = self.batches * self._batch_size
        for batch in self._loader:
            if self.epoch != epoch:
                return  # another iteration has begun since
            self.batches += 1
            yield batch
        if self.epoch == epoch:
            self.epoch, self.batches, self._begun = epoch + 1, 0, False

    def state_dict(self) -> dict[str, int]:
        """The position, the same on every rank: the epoch, and how many rows of it all ranks together have taken."""
        epoch, batches = (self.epoch + 1, 0) if self.batches == self._len else (self.epoch, self.batches)
        rows = batches * self._batch_size * self._world_size
        return {"epoch": epoch, "rows": rows, "total_rows": len(self.dataset), "seed": self._sampler.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a ``state_dict`` was taken; the batch size and the world size may be others.

        Raises:
            StateError: another dataset size, or a position that lies inside of a batch of these sizes.
        """
        if state["total_rows"] != len(self.dataset):
            raise StateError(
                f"position is in a dataset of {state['total_rows']} rows and this one has {len(self.dataset)}; pass the same dataset"
            )
        together = self._batch_size * self._world_size
        if state["rows"] % together:
            raise StateError(
                f"position is {state['rows']} rows into epoch {state['epoch']}, which micro-batch {self._batch_size} * world size "
                f"{self._world_size} = {together} does not divide; choose sizes that do"
            )
        self.epoch, self.batches, self._begun = state["epoch"], state["rows"] // together, False
        self._sampler.seed = state["seed"]


class _Rest(Sampler[int]):
    """Another sampler's rows without the first few."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(iter(self.sampler), self.skip, None)

    def __len__(self) -> int:
        return len(self.sampler) - self.skip
