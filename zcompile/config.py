"""The arguments of ``compile`` as one frozen value, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.errors import ConfigError
from zcompile.offloading import Offloading

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: dtypes as passes spell them
_SPECS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
BACKENDS = ("inductor", "eager")
RECOMPUTE = ("full", "selective")
LOSS_CHUNK = ("auto", "none")
#: bytes by the name of the unit
UNITS = {f"{p}{i}B": (1024 if i else 1000) ** (n + 1) for n, p in enumerate("KMGT") for i in ("i", "")}
VERIFY_LEVELS = ("full", "fast", "off")


@dataclass(frozen=True)
class Config:
    """How to compile a model. See ``zcompile.compile`` for what each field means.

    ``free`` names the options that ``memory_budget`` chooses: those that the caller left out. ``own_policy`` holds the passes that
    ``policy`` names where they are the user's own; they run alone, as they are.
    """

    stage: int = 3
    precision: str | None = None
    reduce_dtype: str | None = None
    backend: str = "inductor"
    policy: str = "prefetch"
    own_policy: tuple[Any, ...] = ()
    recompute: str | float | None = None
    loss_chunk: str | None = None
    offload: str | None = None
    gradient_accumulation_steps: int = 1
    accumulate_dtype: str | None = None
    ignore: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    differentiable: tuple[str | int, ...] | None = None
    verify: str = "full"
    timeout: float = 600.0
    max_captures: int = 16
    sync_init: bool = True
    cuda_graphs: bool | None = None
    debug_nonfinite: bool = False
    memory_budget: str | float | None = None
    free: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"stage is {self.stage!r}; it must be 0, 1, 2 or 3")
        _one_of("backend", self.backend, BACKENDS)
        for of in (self.recompute_bytes, self.budget_bytes):
            of(1)  # raises if it has no meaning
        if self.memory_budget is not None and self.recompute is not None and self.recompute_mode is None:
            raise ConfigError(
                f"recompute is {self.recompute!r} and memory_budget {self.memory_budget!r}, two budgets; pass memory_budget alone"
            )
        if self.loss_chunk not in (None, *LOSS_CHUNK) and _bytes(self.loss_chunk) is None:
            raise ConfigError(
                f"loss_chunk is {self.loss_chunk!r}; it must be one of {', '.join(LOSS_CHUNK)}, or the size of a piece of logits such as "
                "'256MiB'"
            )
        Offloading.parse(self.offload)
        _one_of("verify", self.verify, VERIFY_LEVELS)
        if self.precision is not None:
            _one_of("precision", self.precision, tuple(_PRECISIONS))
        if self.reduce_dtype is not None:
            _one_of("reduce_dtype", self.reduce_dtype, tuple(_SPECS))
        if self.gradient_accumulation_steps < 1:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps}; it must be at least 1"
            )
        if self.accumulate_dtype not in (None, "fp32"):
            raise ConfigError(
                f"accumulate_dtype is {self.accumulate_dtype!r}; it must be fp32, or None for the gradients' own dtype"
            )
        if self.accumulate_dtype is not None and self.gradient_accumulation_steps == 1:
            raise ConfigError("accumulate_dtype is for a declared window; pass gradient_accumulation_steps=N as well")
        if self.max_captures < 1:
            raise ConfigError(f"max_captures is {self.max_captures}; it must be at least 1")
        if self.cuda_graphs and self.debug_nonfinite:
            raise ConfigError(
                "debug_nonfinite waits for the device in every region, which cuda_graphs rules out; pass one of them"
            )
        if self.cuda_graphs and not self.can_replay:
            raise ConfigError(
                f"a step with offload={self.offload!r} is not replayed by cuda_graphs; offload the optimizer alone, or leave one out"
            )
        if self.timeout <= 0:
            raise ConfigError(f"timeout is {self.timeout} seconds; it must be positive")

    @classmethod
    def choosing(
        cls,
        memory_budget: str | float | None,
        *,
        policy: str | None,
        recompute: str | float | None,
        loss_chunk: str | None,
        offload: str | Sequence[str] | None,
        **others: Any,
    ) -> Config:
        """A configuration in which a budget chooses the options that are None; without one they are what they are by default.

        Raises:
            ConfigError: options that have no meaning.
        """
        options = {"policy": policy, "recompute": recompute, "loss_chunk": loss_chunk, "offload": offload}
        options |= {"stage": others.pop("stage")} if "stage" in others else {}
        left_out = tuple(name for name, value in options.items() if value is None)
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("recompute", "offload"):
            if given.get(name) == "none":
                del given[name]
        if "offload" in given:
            given["offload"] = str(Offloading.parse(given["offload"])) or None
        free = left_out if memory_budget is not None else ()
        return cls(memory_budget=memory_budget, free=free, **given, **others)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of compute and gathers; None: the model's own."""
        return None if self.precision is None else _PRECISIONS[self.precision]

    @property
    def recompute_mode(self) -> str | None:
        """``full`` or ``selective``; None: no such mode, but perhaps a budget."""
        return self.recompute if self.recompute in RECOMPUTE else None  # type: ignore[return-value]

    def recompute_bytes(self, device_bytes: int) -> int | None:
        """The budget for all tensors of a rank on a device of ``device_bytes``; None: none was given.

        Raises:
            ConfigError: a value without a meaning.
        """
        if self.recompute is None or self.recompute in RECOMPUTE:
            return None
        return _budget("recompute", self.recompute, device_bytes, f"one of {', '.join(RECOMPUTE)}, ")

    def budget_bytes(self, device_bytes: int) -> int | None:
        """What ``memory_budget`` is on a device of ``device_bytes``; None: there is none.

        Raises:
            ConfigError: a value without a meaning.
        """
        return None if self.memory_budget is None else _budget("memory_budget", self.memory_budget, device_bytes)

    @property
    def loss_chunk_bytes(self) -> int | None:
        """The most that a piece of logits may take; None: no size was given."""
        return None if self.loss_chunk in (None, *LOSS_CHUNK) else _bytes(self.loss_chunk)

    @property
    def can_replay(self) -> bool:
        """Whether steps may be replayed as CUDA graphs: all of their work is the device's, on memory that stays."""
        return not (self.debug_nonfinite or self.offloading.moves_in_steps)

    @property
    def offloading(self) -> Offloading:
        """What is kept in the host's memory."""
        return Offloading.parse(self.offload)

    @property
    def wide_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are added up over a window; None: their own."""
        return None if self.accumulate_dtype is None else torch.float32

    @property
    def summed_dtype(self) -> torch.dtype | None:
        """The dtype in which reductions read gradients; None: their parameters' own."""
        return {None: None, "fp32": torch.float32, **_PRECISIONS}[self.reduce_dtype]

    @property
    def defers_reduction(self) -> bool:
        """Whether a declared window reduces at its end alone (ZeRO stages 0 and 1) and not in each backward."""
        return self.stage <= 1

    @property
    def compute_spec(self) -> str | None:
        """The compute dtype as the precision pass spells it."""
        return None if self.precision is None else _SPECS[self.precision]

    @property
    def reduce_spec(self) -> str | None:
        """The reduction dtype as the reduce pass spells it."""
        return None if self.reduce_dtype is None else _SPECS[self.reduce_dtype]


def _budget(option: str, given: object, device_bytes: int, others: str = "") -> int:
    """Bytes of a budget: a size such as ``24GiB``, an integer of bytes, or a share of the device as a float."""
    if isinstance(given, str):
        if (size := _bytes(given)) is not None:
            return size
    elif isinstance(given, float):
        if 0 < given <= 1:
            return int(given * device_bytes)
    elif isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    raise ConfigError(
        f"{option} is {given!r}; it must be {others}a budget such as '24GiB' or a number of bytes, or a share of the device's memory "
        "such as 0.8"
    )


def _bytes(text: object) -> int | None:
    """Bytes of a size such as ``24GiB``; None for what is no positive size."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([KMGT]i?B)", text) if isinstance(text, str) else None
    return int(float(match[1]) * UNITS[match[2]]) or None if match is not None else None


def dtype_name(value: object) -> str | None:
    """``torch.bfloat16`` or ``"bf16"`` -> ``"bf16"``; None stays None."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if isinstance(value, torch.dtype):
        if value not in names:
            raise ConfigError(f"dtype {value} is not one of fp32, bf16, fp16")
        return names[value]
    return None if value is None else str(value)


def names_tuple(what: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; a single string is one pattern."""
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"{what} holds {pattern!r}; it takes glob patterns on parameter names")
    return patterns


def outputs_tuple(given: Sequence[str | int] | int | None) -> tuple[str | int, ...] | None:
    """Names and indices as a tuple; a single one stands for itself."""
    if given is None:
        return None
    return (given,) if isinstance(given, (str, int)) else tuple(given)


def _one_of(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what} is {value!r}; it must be one of {', '.join(known)}")
