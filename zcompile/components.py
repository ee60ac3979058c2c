"""Optimizers and learning rate schedules by the names and parameters that DeepSpeed configurations use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zcompile.dsconfig.reading import unknown
from zcompile.dsconfig.settings import Component
from zcompile.errors import ConfigError
from zcompile.lr_schedules import SCHEDULES
from zcompile.runtime.optim.lion import Lion
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.optim.optimizer_guard import UNSUPPORTED

#: DeepSpeed's own optimizers that there are none of here
_MISSING = ("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD")

#: torch's optimizers by lower-case name
_TORCH: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer and name not in UNSUPPORTED
}

#: DeepSpeed's defaults where torch has others
_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_LION_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}

#: parameters whose ``auto`` is the default; what else is ``auto`` only the user knows
_OPTIMIZER_AUTO = ("betas", "eps", "weight_decay")


def build_optimizer(named: Component, parameters: list[Any]) -> Optimizer:
    """The optimizer that a configuration names, over parameters or parameter groups.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false, as in DeepSpeed; ``torch_adam`` takes torch's class with torch's defaults.

    Raises:
        ConfigError: an unknown name or parameter, with the nearest known one; a value that does not fit.
    """
    params = dict(named.params)
    for name in named.auto:
        if name not in _OPTIMIZER_AUTO:
            raise ConfigError(f"optimizer.params.{name} is 'auto', which nothing here can resolve; give a value")
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm is no parameter of an optimizer; use the key gradient_clipping"
        )
    kind, defaults, extra = _optimizer_class(named.type, params)
    _check_names("optimizer", named.type, params, kind, extra)
    if "betas" in params and isinstance(params["betas"], list):
        params["betas"] = tuple(params["betas"])
    return _construct("optimizer", named.type, lambda: kind(parameters, **(defaults | params)))


def _optimizer_class(name: str, params: dict[str, Any]) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    """The class, its defaults and DeepSpeed's further parameters, which are taken out of ``params``."""
    lower = name.lower()
    if lower in ("adam", "adamw"):
        extra = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
        taken = {key: _flag(f"optimizer.params.{key}", params.pop(key)) for key in extra if key in params}
        for key in ("bias_correction", "fp32_optimizer_states"):
            if not taken.get(key, True):
                raise ConfigError(f"optimizer.params.{key} is false, which is not supported here; leave it out")
        decoupled = lower == "adamw" or taken.get("adam_w_mode", True)
        if taken.get("torch_adam", False):
            return torch.optim.AdamW if decoupled else torch.optim.Adam, {}, extra
        return AdamW if decoupled else torch.optim.Adam, _ADAM_DEFAULTS, extra
    if lower == "lion":
        if "set_grad_none" in params:
            _flag("optimizer.params.set_grad_none", params.pop("set_grad_none"))
        return Lion, _LION_DEFAULTS, ("set_grad_none",)
    if lower in _TORCH:
        return _TORCH[lower], {}, ()
    for missing in (*_MISSING, *UNSUPPORTED):
        if lower == missing.lower():
            why = f": {UNSUPPORTED[missing]}" if missing in UNSUPPORTED else ""
            raise ConfigError(f"optimizer.type is {name!r}, which is not supported here{why}; use AdamW or Lion")
    raise unknown("optimizer.type", name, ["Lion", *(kind.__name__ for kind in _TORCH.values())])


def build_scheduler(named: Component, optimizer: Optimizer) -> LRScheduler:
    """The schedule that a configuration names: one of DeepSpeed's, or one of ``torch.optim.lr_scheduler``.

    Raises:
        ConfigError: an unknown name or parameter, with the nearest known one; a value that does not fit.
    """
    params = dict(named.params)
    for name in named.auto:
        if name == "warmup_min_lr":
            params[name] = 0.0
        elif name == "warmup_max_lr":
            params[name] = [float(group["lr"]) for group in optimizer.param_groups]
        else:
            raise ConfigError(f"scheduler.params.{name} is 'auto', which nothing here can resolve; give a value")
    torchs = {
        name: kind
        for name, kind in vars(torch.optim.lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, LRScheduler) and kind is not LRScheduler
    }
    torchs.pop("ReduceLROnPlateau")  # its step needs a metric, and the engine has none
    kind = SCHEDULES.get(named.type) or torchs.get(named.type)
    if kind is None:
        raise unknown("scheduler.type", named.type, [*SCHEDULES, *torchs])
    _check_names("scheduler", named.type, params, kind, ())
    missing = [
        p.name
        for p in list(inspect.signature(kind).parameters.values())[1:]
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in params
    ]
    if missing:
        raise ConfigError(
            f"scheduler.params of {named.type} lack {', '.join(missing)}; give {'it' if len(missing) == 1 else 'them'}"
        )
    return _construct("scheduler", named.type, lambda: kind(optimizer, **params))


def _check_names(section: str, name: str, params: Mapping[str, Any], kind: Any, extra: tuple[str, ...]) -> None:
    known = [*list(inspect.signature(kind).parameters)[1:], *extra]
    for param in params:
        if param not in known:
            raise unknown(f"{section}.params of {name}:", param, known)


def _construct(section: str, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{section}.params do not fit {name}: {error}") from error


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value
