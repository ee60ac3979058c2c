"""DeepSpeed's learning rate schedules as torch schedulers: the same values after the same number of steps.

DeepSpeed counts from the first ``scheduler.step()``: a schedule's formula at 0 holds after one step, and before it there is a value of
its own. Formulas are those of DeepSpeed's documentation of learning rate schedulers. ``step()`` is called once an optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zcompile.errors import ConfigError

WARMUP_TYPES = ("log", "linear")

Values = float | Sequence[float]


class _Schedule(LRScheduler):
    """What the schedules share: values given once for all parameter groups or once a group."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_epoch=last_batch_iteration)

    @property
    def iteration(self) -> int:
        """DeepSpeed's index of the last step: -1 before the first one."""
        return self.last_epoch - 1


class _Warmup:
    """A fraction that rises from 0 to 1 over the first steps, by the logarithm of the step or linearly."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
            raise ConfigError(f"warmup_num_steps is {num_steps!r}; it must be a positive integer")
        if kind not in WARMUP_TYPES:
            raise ConfigError(f"warmup_type is {kind!r}; it must be one of {', '.join(WARMUP_TYPES)}")
        self.num_steps = max(2, num_steps)
        self.kind = kind

    def __call__(self, iteration: int) -> float:
        if iteration >= self.num_steps:
            return 1.0
        return math.log(iteration + 1) / math.log(self.num_steps) if self.kind == "log" else iteration / self.num_steps


class WarmupLR(_Schedule):
    """Rise from ``warmup_min_lr`` to ``warmup_max_lr``, then stay.

    Args:
        optimizer: whose ``lr`` is set, in every parameter group.
        warmup_min_lr: where it starts; one value, or one a group.
        warmup_max_lr: where it stays; None: the ``lr`` that the optimizer has.
        warmup_num_steps: optimizer steps of the rise; 1 counts as 2.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        present = [float(group["lr"]) for group in optimizer.param_groups]
        self.max_lrs = present if warmup_max_lr is None else _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = warmup.num_steps, warmup.kind
        super().__init__(optimizer, last_batch_iteration)

    def fraction(self) -> float:
        """How far the learning rate is from its minimum (0) to its maximum (1)."""
        return _Warmup(self.warmup_num_steps, self.warmup_type)(self.iteration)

    def get_lr(self) -> list[Any]:
        if self.iteration < 0:
            return list(self.min_lrs)
        fraction = self.fraction()
        return [low + (high - low) * fraction for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a linear fall to ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Values = 0.0,
        warmup_max_lr: Values | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def fraction(self) -> float:
        if self.iteration < self.warmup_num_steps:
            return super().fraction()
        left = self.total_num_steps - self.iteration
        return max(0.0, left / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Rise from ``warmup_min_ratio`` to 1 times the optimizer's ``lr``, then fall along half a cosine to ``cos_min_ratio`` times it.

    Args:
        optimizer: its ``lr`` at this moment is the peak of each group.
        total_num_steps: optimizer steps until the end of the fall; the ratio stays at ``cos_min_ratio`` from there on.
        warmup_min_ratio: where the rise starts; before the first ``step()`` the learning rate is 0.
        warmup_num_steps: optimizer steps of the rise; 1 counts as 2.
        cos_min_ratio: where the fall ends.
        warmup_type: ``"log"`` or ``"linear"``.
        last_batch_iteration: -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.warmup_type = warmup.num_steps, warmup.kind
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def ratio(self) -> float:
        """What the peak learning rates are multiplied with."""
        if self.iteration < 0:
            return 0.0
        if self.iteration < self.warmup_num_steps:
            risen = _Warmup(self.warmup_num_steps, self.warmup_type)(self.iteration)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * risen
        num_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.iteration - self.warmup_num_steps + 1) / num_steps)
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def get_lr(self) -> list[Any]:
        return [peak * self.ratio() for peak in self.base_lrs]


class LRRangeTest(_Schedule):
    """Grow from ``lr_range_test_min_lr`` by ``lr_range_test_step_rate`` times it every ``lr_range_test_step_size`` steps.

    Args:
        optimizer: whose ``lr`` is set.
        lr_range_test_min_lr: where it starts; one value, or one a group.
        lr_range_test_step_size: optimizer steps between two stairs.
        lr_range_test_step_rate: height of a stair, in units of the minimum.
        lr_range_test_staircase: in stairs instead of continuously.
        last_batch_iteration: -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Values = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size < 1:
            raise ConfigError(f"lr_range_test_step_size is {lr_range_test_step_size}; it must be a positive integer")
        self.min_lrs = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        interval = (self.iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * growth for low in self.min_lrs]


class OneCycle(_Schedule):
    """One cycle from ``cycle_min_lr`` to ``cycle_max_lr`` and back, then a decay; momentum moves the other way.

    Momentum is the first of ``betas``; the second one is 0.99, as in DeepSpeed. An optimizer without ``betas`` keeps its own.

    Args:
        optimizer: whose ``lr`` and ``betas`` are set.
        cycle_min_lr: the low end; one value, or one a group.
        cycle_max_lr: the high end.
        decay_lr_rate: after the cycle the low end is divided by ``1 + decay_lr_rate * steps / decay_step_size``.
        cycle_first_step_size: optimizer steps of the rise.
        cycle_second_step_size: optimizer steps of the fall; None: as the rise.
        cycle_first_stair_count: stairs of the rise; 0: continuous.
        cycle_second_stair_count: stairs of the fall; None: as the rise.
        decay_step_size: the unit of steps in the decay; 0: no decay.
        cycle_momentum: whether momentum moves.
        cycle_min_mom: the low end of momentum.
        cycle_max_mom: the high end.
        decay_mom_rate: after the cycle the high end is multiplied with ``1 + decay_mom_rate * steps / decay_step_size``.
        last_batch_iteration: -1 starts anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Values,
        cycle_max_lr: Values,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Values = 0.8,
        cycle_max_mom: Values = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            raise ConfigError(
                f"cycle_first_step_size is {cycle_first_step_size} and cycle_second_step_size is {second}; the first must be "
                "positive, the second must not be negative"
            )
        self.first_steps, self.second_steps = cycle_first_step_size, second
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_steps = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        super().__init__(optimizer, last_batch_iteration)

    def height(self) -> float:
        """How far the learning rate is from the low end (0) to the high end (1), inside the cycle."""
        step = (self.iteration + 1) % (self.first_steps + self.second_steps)
        rising = step <= self.first_steps
        left, half = (
            (step, self.first_steps) if rising else (self.first_steps + self.second_steps - step, self.second_steps)
        )
        stairs = self.first_stairs if rising else self.second_stairs
        return left / half if stairs <= 0 else math.floor(left * stairs / half) / stairs

    def decay_intervals(self) -> float | None:
        """How long the decay has gone on, in units of ``decay_step_size``; None inside the cycle."""
        past = self.iteration - (self.first_steps + self.second_steps)
        if past < 0:
            return None
        return (past + 1) / self.decay_steps if self.decay_steps else 0.0

    def get_lr(self) -> list[Any]:
        if (decay := self.decay_intervals()) is not None:
            return [low / (1 + self.decay_lr_rate * decay) for low in self.min_lrs]
        height = self.height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[float]:
        """The first of ``betas`` of each group."""
        if self.iteration < 0:
            return list(self.min_moms)
        if (decay := self.decay_intervals()) is not None:
            return [high * (1 + self.decay_mom_rate * decay) for high in self.max_moms]
        height = self.height()
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        """Set learning rate and momentum for the next optimizer step."""
        super().step(epoch)
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self.get_mom(), strict=True):
                group["betas"] = (momentum, 0.99)


#: every schedule by DeepSpeed's name
SCHEDULES: dict[str, type[LRScheduler]] = {
    s.__name__: s for s in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def _per_group(optimizer: Optimizer, name: str, value: Values) -> list[float]:
    """A value for each parameter group."""
    if not isinstance(value, (list, tuple)):
        return [value] * len(optimizer.param_groups)  # type: ignore[list-item]
    if len(value) != len(optimizer.param_groups):
        raise ConfigError(
            f"{name} has {len(value)} values and the optimizer has {len(optimizer.param_groups)} parameter groups; "
            "give one value, or one a group"
        )
    return list(value)
