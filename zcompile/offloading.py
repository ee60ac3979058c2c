"""What is kept in the host's memory: the ``offload`` option as a value."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zcompile.errors import ConfigError

_PART = re.compile(r"\s*([a-z]+)\s*(?:\{([^{}]*)\})?\s*")
STEPS = ("auto", "device", "cpu")


@dataclass(frozen=True)
class Activations:
    """Saved activations are on the host from their last use in forward to their first in backward.

    Attributes:
        mib: the least size of a value that moves, in MiB.
        lookahead: how many groups of values are on their way at once, each way.
    """

    mib: float = 1
    lookahead: int = 1


@dataclass(frozen=True)
class Moments:
    """The states of ``zcompile.optim.AdamW`` are on the host.

    Attributes:
        step: where the update runs: ``device`` (states pass through it chunk by chunk), ``cpu``, or ``auto``: what planning finds
            faster.
        chunk_mib: size of a chunk of one state, in MiB.
        share: the least part of them that is on the host, of all that there are; the rest stays on the device.
    """

    step: str = "auto"
    chunk_mib: float = 32
    share: float = 1


@dataclass(frozen=True)
class Parameters:
    """Shards and their gradients are on the host; what a gather needs of them is uploaded before it."""


_KINDS: dict[str, type[Any]] = {"activations": Activations, "optimizer": Moments, "parameters": Parameters}


@dataclass(frozen=True)
class Offloading:
    """What is offloaded, and how; None where nothing of a kind is."""

    activations: Activations | None = None
    optimizer: Moments | None = None
    parameters: Parameters | None = None

    @classmethod
    def parse(cls, value: str | Sequence[str] | None) -> Offloading:
        """Read ``"activations"``, ``"optimizer+activations{mib=4 lookahead=2}"``, or a list of such parts.

        Raises:
            ConfigError: a kind or option that there is not, a kind that comes twice, or a value without a meaning.
        """
        if value is None:
            return cls()
        if not isinstance(value, str) and not (
            isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
        ):
            raise ConfigError(
                f"offload is {value!r}; it must be a string, or a list of strings, of {', '.join(_KINDS)}"
            )
        parts = [part for text in ([value] if isinstance(value, str) else value) for part in text.split("+")]
        found: dict[str, Any] = {}
        for part in parts:
            match = _PART.fullmatch(part)
            if match is None or match[1] not in _KINDS:
                raise ConfigError(
                    f"offload names {part.strip()!r}; it must be one of {', '.join(_KINDS)}, or several joined by +, with options "
                    "such as activations{mib=4}"
                )
            if match[1] in found:
                raise ConfigError(f"offload names {match[1]!r} twice; name it once")
            found[match[1]] = _KINDS[match[1]](**_options(match[1], match[2] or ""))
        offloading = cls(**found)
        if offloading.parameters is not None and offloading.optimizer is not None and offloading.optimizer.share < 1:
            raise ConfigError(
                f"offload keeps parameters on the host and {1 - offloading.optimizer.share:g} of their states on the device, where "
                "nothing would update them; leave out optimizer{share}, or parameters"
            )
        return offloading

    @property
    def on_host(self) -> tuple[str, ...]:
        """The kinds that are offloaded."""
        return tuple(kind for kind in _KINDS if getattr(self, kind) is not None)

    def with_share(self, share: float) -> Offloading:
        """The same with so much of the optimizer's states on the host, if those are."""
        return self if self.optimizer is None else replace(self, optimizer=replace(self.optimizer, share=share))

    @property
    def moves_in_steps(self) -> bool:
        """Whether forward and backward move something, so that they cannot be replayed."""
        return self.activations is not None or self.parameters is not None

    def __bool__(self) -> bool:
        return bool(self.on_host)

    def __str__(self) -> str:
        texts = []
        for kind in self.on_host:
            part, default = getattr(self, kind), _KINDS[kind]()
            options = [f.name for f in fields(part) if getattr(part, f.name) != getattr(default, f.name)]
            inside = " ".join(f"{name}={getattr(part, name)}" for name in options)
            texts.append(f"{kind}{{{inside}}}" if inside else kind)
        return "+".join(texts)


def _options(kind: str, text: str) -> dict[str, Any]:
    known = {f.name: f for f in fields(_KINDS[kind])}
    options: dict[str, Any] = {}
    for item in text.replace(",", " ").split():
        name, _, value = item.partition("=")
        if name not in known:
            raise ConfigError(
                f"offload of {kind} has no option '{name}'; its options are {', '.join(known) or '(none)'}"
            )
        options[name] = _value(f"{kind}{{{name}}}", known[name].default, value)
    return options


def _value(what: str, default: Any, text: str) -> Any:
    if isinstance(default, str):
        if text not in STEPS:
            raise ConfigError(f"offload has {what} {text!r}; it must be one of {', '.join(STEPS)}")
        return text
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if number.is_integer():
        number = int(number)
    if what == "optimizer{share}":
        if not 0 < number <= 1:
            raise ConfigError(f"offload has {what} {text!r}; it must be a number above 0 that is at most 1")
        return number
    least = 0 if what != "optimizer{chunk_mib}" else 1 / 1024
    if not least <= number < 2**40 or (what.endswith("{lookahead}") and int(number) != number):
        raise ConfigError(f"offload has {what} {text!r}; it must be a number that is at least {least:g}")
    return number
