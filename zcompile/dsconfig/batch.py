"""The three batch sizes of a DeepSpeed configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zcompile.errors import ConfigError

#: in the order of ``Batch``
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Batch:
    """Rows of a step: ``train == micro * accumulation * world``."""

    train: int
    micro: int
    accumulation: int
    world: int

    @classmethod
    def of(cls, train: int | None, micro: int | None, steps: int | None, world: int) -> Batch:
        """Any two of the sizes give the third, and one alone means no accumulation.

        Raises:
            ConfigError: too few are given, or they do not go together.
        """
        if train is None and micro is None:
            also = f" (only gradient_accumulation_steps = {steps} is)" if steps else ""
            raise ConfigError(
                f"neither train_batch_size nor train_micro_batch_size_per_gpu is given{also}; give at least one of them as a number"
            )
        if train is None:
            assert micro is not None, "one of the two is given"
            steps = steps or 1
            train = micro * steps * world
        elif micro is None:
            steps = steps or 1
            micro = _quotient(train, {"gradient_accumulation_steps": steps, "world size": world})
        elif steps is None:
            steps = _quotient(train, {"train_micro_batch_size_per_gpu": micro, "world size": world})
        elif train != micro * steps * world:
            raise ConfigError(
                f"train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro} * gradient_accumulation_steps {steps} * "
                f"world size {world} = {micro * steps * world}; change or leave out one of them"
            )
        return cls(train, micro, steps, world)


def _quotient(train: int, by: dict[str, int]) -> int:
    """``train`` divided by a product that must divide it."""
    product = math.prod(by.values())
    if train % product:
        text = " * ".join(f"{name} {value}" for name, value in by.items())
        raise ConfigError(f"train_batch_size is {train}, which {text} = {product} does not divide; change one of them")
    return train // product
