"""Where a parameter lives: its shard dimension, and the shapes of its shards on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

#: parameters up to this size are replicated when every dimension would leave a rank without rows
REPLICATE_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ParamSpec:
    """One parameter and how it is divided over one mesh axis. Equal on every rank.

    Rows of the shard dimension go to ranks as ``torch.chunk`` and DTensor's ``Shard`` do: ``chunk`` rows a rank, the
    last ranks get what is left. In storage every rank has ``chunk`` rows; the rows past the end are padding.

    Attributes:
        name: first dotted name in the user's model.
        aliases: further names of the same parameter (tied weights).
        shape: logical full shape.
        dtype: the dtype that the optimizer updates.
        requires_grad: whether it was trainable when the model was compiled.
        shard_dim: the dimension that is divided; None: replicated on every rank.
        world_size: ranks on the axis.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    shard_dim: int | None
    world_size: int

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the parameter, the canonical one first."""
        return (self.name, *self.aliases)

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the full parameter, without padding."""
        return self.numel * self.dtype.itemsize

    @property
    def is_sharded(self) -> bool:
        return self.shard_dim is not None

    @cached_property
    def chunk(self) -> int:
        """Rows that each rank stores; sharded parameters only."""
        if self.shard_dim is None:
            raise ValueError(f"parameter {self.name!r} is replicated and has no chunk; check is_sharded first")
        return -(-self.shape[self.shard_dim] // self.world_size)

    @property
    def is_padded(self) -> bool:
        """Whether some rank stores padding rows."""
        return self.shard_dim is not None and self.chunk * self.world_size != self.shape[self.shard_dim]

    @cached_property
    def padded_local_shape(self) -> tuple[int, ...]:
        """What every rank stores, contiguous: the same on all ranks."""
        if self.shard_dim is None:
            return self.shape
        return (*self.shape[: self.shard_dim], self.chunk, *self.shape[self.shard_dim + 1 :])

    @property
    def padded_local_numel(self) -> int:
        return math.prod(self.padded_local_shape)

    @property
    def padded_local_bytes(self) -> int:
        return self.padded_local_numel * self.dtype.itemsize

    @property
    def padded_full_shape(self) -> tuple[int, ...]:
        """What an all-gather of the stored shards gives: they are concatenated along dimension 0, whatever ``shard_dim`` is."""
        if self.shard_dim is None:
            return self.shape
        first, *rest = self.padded_local_shape
        return (self.world_size * first, *rest)

    @property
    def padded_full_bytes(self) -> int:
        return math.prod(self.padded_full_shape) * self.dtype.itemsize

    def rows(self, rank: int) -> tuple[int, int]:
        """First and past-the-last row of the shard dimension that ``rank`` holds; sharded parameters only."""
        if self.shard_dim is None:
            raise ValueError(f"parameter {self.name!r} is replicated and has no rows; check is_sharded first")
        total = self.shape[self.shard_dim]
        return min(rank * self.chunk, total), min((rank + 1) * self.chunk, total)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The logical shape on ``rank``: what DTensor calls the local shape."""
        if self.shard_dim is None:
            return self.shape
        start, stop = self.rows(rank)
        return (*self.shape[: self.shard_dim], stop - start, *self.shape[self.shard_dim + 1 :])


def leaves_a_rank_empty(num_rows: int, world_size: int) -> bool:
    """Whether dividing ``num_rows`` as ``torch.chunk`` does gives the last rank nothing."""
    return (world_size - 1) * -(-num_rows // world_size) >= num_rows


def choose_shard_dim(
    shape: Sequence[int], dtype: torch.dtype, world_size: int, *, stage: int, ignored: bool
) -> int | None:
    """The dimension to shard a parameter on, or None to replicate it.

    Dimension 0 if it leaves no rank empty, else the first other one that the ranks divide evenly. (An uneven shard of
    another dimension is not contiguous without its padding, and torch's fused optimizers step such memory wrongly and
    silently.) If there is none: replicated up to ``REPLICATE_MAX_BYTES``, because an empty shard makes torch's infinity
    norm raise on that rank and hang the others; above it dimension 0 with empty ranks, because replicating large
    parameters costs too much.

    Args:
        shape: logical full shape.
        dtype: dtype of the stored parameter.
        world_size: ranks on the axis.
        stage: ZeRO stage, 0 to 3; 0 replicates everything.
        ignored: the user asked for this parameter to be left whole.
    """
    if stage == 0 or ignored or math.prod(shape) == 0 or len(shape) == 0:
        return None
    if not leaves_a_rank_empty(shape[0], world_size):
        return 0
    for dim, num_rows in enumerate(shape):
        if num_rows % world_size == 0:
            return dim
    return None if math.prod(shape) * dtype.itemsize <= REPLICATE_MAX_BYTES else 0
