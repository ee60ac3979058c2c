"""Bytes of model states on a rank: parameters, gradients and optimizer states, as numbers and as formulas in the world size."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from zcompile.errors import PlanError
from zcompile.placement import ParamSpec

#: the symbol for the number of ranks in every formula
WORLD = sympy.Symbol("W", integer=True, positive=True)

#: numbers of a parameter's size that an optimizer keeps for it, beside the parameter and its gradient
OPTIMIZERS: Mapping[str, int] = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}

#: bytes of the step counter that Adam keeps for each parameter
STEP_BYTES = 4


def num_states(optimizer: str) -> int:
    """How many numbers of a parameter's size an optimizer keeps.

    Raises:
        PlanError: an optimizer that is not known.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer '{optimizer}' is not known; the known ones are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]


def parameter_bytes(specs: Iterable[ParamSpec]) -> int:
    """Bytes of the stored shards, with padding: the same on every rank."""
    return sum(spec.padded_local_bytes for spec in specs)


def optimizer_bytes(specs: Iterable[ParamSpec], trained: Collection[str], optimizer: str, rank: int = 0) -> int:
    """Bytes of the optimizer's state on a rank, without padding; rank 0 has the most.

    Args:
        specs: all parameters.
        trained: names of those that get a gradient; the others have no state.
        optimizer: one of ``OPTIMIZERS``.
        rank: whose rows.
    """
    count = num_states(optimizer)
    mine = [spec for spec in specs if spec.name in trained]
    steps = STEP_BYTES * len(mine) if optimizer in ("adamw", "adam") else 0
    return steps + sum(count * math.prod(spec.local_shape(rank)) * spec.dtype.itemsize for spec in mine)


def shard_formula(shards: Iterable[tuple[ParamSpec, int]]) -> sympy.Expr:
    """Bytes of stored shards as a formula in the number of ranks, for parameters divided as these are.

    Args:
        shards: parameters with their bytes an element.
    """
    rows: dict[int, int] = {}
    fixed = 0
    for spec, itemsize in shards:
        if spec.shard_dim is None:
            fixed += spec.numel * itemsize
        elif count := spec.shape[spec.shard_dim]:
            rows[count] = rows.get(count, 0) + spec.numel // count * itemsize
    return sympy.Add(
        fixed, *(width * sympy.ceiling(sympy.Integer(count) / WORLD) for count, width in sorted(rows.items()))
    )


# By hand: so many bytes for each parameter, whatever the model. ----------------------------------------------------------


@dataclass(frozen=True)
class ByteCosts:
    """Bytes for each parameter of a model, for a table without the model.

    Attributes:
        parameter: the copy that is computed with.
        gradient: the gradient.
        optimizer: everything that only the optimizer reads, masters included.
    """

    parameter: float = 2
    gradient: float = 2
    optimizer: float = 12

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"{name} bytes are {value}; they must be a number that is not negative")

    def formula(self, stage: int, params: sympy.Expr) -> sympy.Expr:
        """Bytes on a rank under a ZeRO stage (Rajbhandari et al., ZeRO, 2020, figure 1): stage 1 divides optimizer states,
        2 gradients too, 3 parameters too."""
        whole = [self.optimizer, self.gradient, self.parameter]
        divided = sympy.nsimplify(sum(whole[:stage]))
        return params * (sympy.nsimplify(sum(whole[stage:])) + divided / WORLD)


#: bytes for each parameter as zcompile stores them: what is divided over ranks, and what is whole on every rank from forward to
#: backward (a gathered copy in the compute dtype)
def own_formula(stage: int, params: sympy.Expr, *, precision: str | None, states: int) -> sympy.Expr:
    """Bytes on a rank as zcompile stores model states, in fp32 with masters computed in ``precision`` (None: in fp32).

    Masters, gradients and optimizer states (4 bytes each) are whole at stage 0 and divided from stage 1 on. At stages 1 and 2
    the parameters that backward reads stay gathered in the compute dtype from forward to backward; stage 3 gathers a few at a
    time, which this does not count.
    """
    stored = 4 + 4 + 4 * states
    if stage == 0:
        return params * stored
    copy = {None: 4, "bf16": 2, "fp16": 2}[precision]
    return params * (sympy.Integer(stored) / WORLD + (copy if stage in (1, 2) else 0))


def evaluate(formula: sympy.Expr, world_size: int) -> int:
    """Bytes for so many ranks, rounded up."""
    return int(sympy.ceiling(formula.subs(WORLD, world_size)))


def table(
    num_params: float, world_size: int, costs: ByteCosts, *, precision: str | None, optimizer: str
) -> list[dict[str, Any]]:
    """Model states of stages 0 to 3: bytes by the paper's accounting with these costs, and by zcompile's own.

    Raises:
        PlanError: numbers that have no meaning.
    """
    if not math.isfinite(num_params) or num_params <= 0:
        raise PlanError(f"number of parameters is {num_params}; it must be positive")
    if world_size < 1:
        raise PlanError(f"world size is {world_size}; it must be at least 1")
    symbol = sympy.Symbol("P", positive=True)
    rows = []
    for stage in range(4):
        paper = costs.formula(stage, symbol)
        own = own_formula(stage, symbol, precision=precision, states=num_states(optimizer))
        count = sympy.Integer(round(num_params))
        rows.append(
            {
                "stage": stage,
                "bytes": evaluate(paper.subs(symbol, count), world_size),
                "formula": str(paper),
                "zcompile_bytes": evaluate(own.subs(symbol, count), world_size),
                "zcompile_formula": str(own),
            }
        )
    return rows


def replicated(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Parameters that every rank stores whole although there are several ranks."""
    return [spec for spec in specs if spec.world_size > 1 and not spec.is_sharded]


def padded(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Parameters with padding rows on some rank."""
    return [spec for spec in specs if spec.is_padded]
