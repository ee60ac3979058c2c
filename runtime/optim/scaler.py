"""Loss scaling for fp16: a ``torch.amp.GradScaler`` whose decisions hold on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.errors import ConfigError, LossScaleError, ScalerError, StateError
from zcompile.runtime.optim.norm import describe_nonfinite
from zcompile.runtime.optim.unscale import Verdict, unscale

log = logging.getLogger("zcompile")


@dataclass
class Checked:
    """One optimizer since the last ``update``: what its gradients are, and whether it has made its step."""

    verdict: Verdict
    stepped: bool = False


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for compiled models, with DeepSpeed's hysteresis and minimum.

    Use it as torch's: ``scaler.scale(loss).backward()``, perhaps ``scaler.unscale_(optimizer)`` and clipping, then
    ``scaler.step(optimizer)`` and ``scaler.update()``. An optimizer's step is skipped on all ranks if any of its gradients is
    not finite on any rank; then nothing changes, the optimizer's step counters included. A scheduler should not count such a
    step either: ask ``step_was_skipped``.

    How the scale moves (DeepSpeed's ``DynamicLossScaler``): an overflow uses up one of ``hysteresis`` tolerated overflows; when
    one is left, an overflow multiplies the scale by ``backoff_factor``, but not below ``min_scale``, and if it is there already
    ``update`` raises. After every ``growth_interval`` good steps since the last overflow the scale is multiplied by
    ``growth_factor``, unless that overflows float32, and all overflows are tolerated again; with ``consecutive_hysteresis``
    after each good step.

    It is right for any mixture of sharded, replicated and plain parameters, of one or several models. Gradients are unscaled
    and checked in one pass over flat memory, with one collective of four numbers and one wait for the device for each
    optimizer and step, in ``unscale_`` (or ``step``, if that was not called). Collective for an optimizer of a compiled
    model: every rank makes the same calls, also one without gradients. One that has plain parameters alone is each rank's
    own business, as torch's is.

    Args:
        device: accepted as torch does; gradients are handled where they are.
        dynamic: False keeps the scale; steps that overflow are skipped all the same.
        init_scale: the first scale; the default is 2 to the power of 16.
        growth_factor: more than 1.
        backoff_factor: between 0 and 1.
        growth_interval: good steps until the scale grows (DeepSpeed's ``loss_scale_window``).
        hysteresis: the first so many overflows but one leave the scale as it is.
        consecutive_hysteresis: refill the hysteresis at each good step, not only at each growth.
        min_scale: where the scale does not fall further.
        enabled: False makes ``step`` call the optimizer and everything else do nothing.

    Raises:
        ConfigError: an option out of its range.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        dynamic: bool = True,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        enabled: bool = True,
    ) -> None:
        # torch's own state stays that of a disabled one: nothing of it is used, on any version
        super().__init__("cpu" if device is None else torch.device(device).type, enabled=False)
        self._on = enabled
        if enabled:
            _check_options(init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, dynamic, min_scale)
        self.dynamic = dynamic
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.min_scale = float(min_scale)
        self._hysteresis_left = hysteresis
        self._value = float(init_scale)
        self._growth, self._backoff, self._interval = growth_factor, backoff_factor, growth_interval
        self._good_steps = 0
        self._scaled = False
        self._skipped = False
        self._optimizers: dict[int, Checked] = {}

    # What a step does. ------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or all in nested iterables of them, by the scale."""
        if not self._on:
            return outputs
        if isinstance(outputs, Tensor):
            self._scaled = True
            return outputs * self._value
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(value) for value in outputs)
        if isinstance(outputs, Iterable):
            return map(self.scale, outputs)
        raise ScalerError(f"outputs hold a {type(outputs).__name__}; pass a tensor or an iterable of tensors")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, and check them. Once a step, after all of them are there. Collective.

        Raises:
            ScalerError: it was called already, or after ``step``, since the last ``update``; ``scale`` was never called.
            OptimizerError: a gradient is sparse or float16, which cannot hold unscaled values.
            ShardingError: a gradient is placed differently from its parameter.
            RankMismatchError: ranks have different scales, or do something else.
        """
        if not self._on:
            return
        checked = self._optimizers.get(id(optimizer))
        if checked is not None:
            when = "after step()" if checked.stepped else "already"
            raise ScalerError(f"unscale_() is called {when} for this optimizer; call update() at the end of each step")
        self._optimizers[id(optimizer)] = self._check(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that was done, and call ``optimizer.step(*args, **kwargs)`` unless gradients overflow. Collective.

        Returns:
            What the optimizer's step returned; None if it was skipped.

        Raises:
            ScalerError: a closure, or a second call since the last ``update``.
        """
        if not self._on:
            self._skipped = False
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(callable(arg) for arg in args):
            raise ScalerError("step() with a closure is not supported, because its gradients would not be unscaled")
        checked = self._optimizers.get(id(optimizer))
        if checked is None:
            checked = self._optimizers[id(optimizer)] = self._check(optimizer)
        elif checked.stepped:
            raise ScalerError("step() is called twice for this optimizer; call update() at the end of each step")
        checked.stepped = True
        self._skipped = checked.verdict.overflow
        if not self._skipped:
            return optimizer.step(*args, **kwargs)
        if checked.verdict.is_first:
            log.warning("step skipped at loss scale %g: %s", self._value, describe_nonfinite(checked.verdict.names))
        return None

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last ``step`` left everything as it was because of an overflow: then the scheduler should wait, too."""
        return self._skipped

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale as the gradients of this step ask for, or set it. Call it once, at the end of each step.

        Raises:
            LossScaleError: gradients overflow at the minimum; the same on every rank, with the names of their parameters.
            ScalerError: no gradients were checked since the last ``update``.
        """
        if not self._on:
            return
        scale = None if new_scale is None else _checked_scale(float(new_scale), "new_scale", ConfigError)
        checked, self._optimizers = list(self._optimizers.values()), {}
        if scale is not None:
            self._value = scale
            return
        if not checked:
            raise ScalerError("update() has no gradients to go by; call step(optimizer) or unscale_(optimizer) first")
        if not self.dynamic:
            return
        if any(each.verdict.overflow for each in checked):
            self._good_steps = 0
            self._back_off([name for each in checked for name in each.verdict.names])
        else:
            self._good_steps += 1
            grows = self._good_steps >= self._interval
            if grows:
                self._good_steps = 0
                grown = self._value * self._growth
                self._value = grown if grown <= torch.finfo(torch.float32).max else self._value
            if grows or self.consecutive_hysteresis:
                self._hysteresis_left = self.hysteresis

    def _back_off(self, names: list[str]) -> None:
        if self._hysteresis_left > 1:
            self._hysteresis_left -= 1
        elif self._value <= self.min_scale:
            raise LossScaleError(
                f"loss scale is at its minimum {self.min_scale:g} and {describe_nonfinite(names)}; look for what is not finite "
                "with debug_nonfinite=True, lower the learning rate, or use precision='bf16'"
            )
        else:
            self._value = max(self._value * self._backoff, self.min_scale)

    def _check(self, optimizer: Optimizer) -> Checked:
        if not self._scaled:
            raise ScalerError("scale() was never called, so no gradient is scaled; call scaler.scale(loss).backward()")
        return Checked(unscale(optimizer, self._value))

    # State. -----------------------------------------------------------------------------------------------------------

    def get_scale(self) -> float:
        """The present scale; 1.0 if scaling is disabled."""
        return self._value if self._on else 1.0

    def is_enabled(self) -> bool:
        return self._on

    def get_growth_factor(self) -> float:
        return self._growth

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff = new_factor

    def get_growth_interval(self) -> int:
        return self._interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """Everything about the scale, under torch's keys and the names of the other options; empty if disabled.

        Take it after ``update``. ``torch.amp.GradScaler`` can load it too.
        """
        if not self._on:
            return {}
        return {
            "scale": self._value,
            "growth_factor": self._growth,
            "backoff_factor": self._backoff,
            "growth_interval": self._interval,
            "_growth_tracker": self._good_steps,
            "dynamic": self.dynamic,
            "hysteresis": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_scale,
            "hysteresis_left": self._hysteresis_left,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``, also one of ``torch.amp.GradScaler``: what that lacks stays as constructed.

        Raises:
            StateError: an entry is missing, or the scale is out of range.
            ScalerError: the state is empty, as that of a disabled scaler is.
        """
        if not self._on:
            return
        if not state_dict:
            raise ScalerError("state dict is empty, as that of a disabled scaler; start a new scaler instead")
        missing = [
            key
            for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
            if key not in state_dict
        ]
        if missing:
            raise StateError(f"state dict of the scaler lacks {', '.join(missing)}; pass what state_dict() gave")
        self._value = _checked_scale(float(state_dict["scale"]), "scale", StateError)
        self._growth, self._backoff = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._interval, self._good_steps = state_dict["growth_interval"], state_dict["_growth_tracker"]
        self.dynamic = state_dict.get("dynamic", self.dynamic)
        self.hysteresis = state_dict.get("hysteresis", self.hysteresis)
        self.consecutive_hysteresis = state_dict.get("consecutive_hysteresis", self.consecutive_hysteresis)
        self.min_scale = state_dict.get("min_scale", self.min_scale)
        self._hysteresis_left = state_dict.get("hysteresis_left", self.hysteresis)

    def __getstate__(self) -> dict[str, Any]:
        if self._optimizers:
            raise ScalerError("a scaler cannot be pickled or copied in the middle of a step; do it after update()")
        return self.__dict__.copy()


def _check_options(
    init_scale: float, growth: float, backoff: float, interval: int, hysteresis: int, dynamic: bool, min_scale: float
) -> None:
    _checked_scale(init_scale, "init_scale", ConfigError)
    for name, value, good, rule in (
        ("growth_factor", growth, growth > 1, "more than 1"),
        ("backoff_factor", backoff, 0 < backoff < 1, "between 0 and 1"),
        ("growth_interval", interval, interval >= 1, "at least 1"),
        ("hysteresis", hysteresis, hysteresis >= 1, "at least 1"),
        (
            "min_scale",
            min_scale,
            not dynamic or 0 < min_scale <= init_scale,
            f"positive and at most init_scale={init_scale}",
        ),
    ):
        if not good:
            raise ConfigError(f"{name} is {value}; it must be {rule}")


def _checked_scale(value: float, name: str, error: type[ConfigError | StateError]) -> float:
    """A scale that, like its inverse, is a positive and finite float32."""
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= value <= limits.max:
        raise error(f"{name} is {value}; it must be positive and finite in float32, such as 65536.0")
    return value
