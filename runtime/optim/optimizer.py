"""AdamW over flat memory: torch's update, signature and state keys, without work for each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import getitem, is_
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile import compat
from zcompile.errors import OptimizerError
from zcompile.runtime.offload.hosted_update import HostedUpdate
from zcompile.runtime.optim.adamw_update import AdamWOptions, adamw_, update
from zcompile.runtime.optim.moments import Cell, MomentArena
from zcompile.runtime.sharding.gradients import Gradient
from zcompile.runtime.sharding.placed import local_of, placement_problem
from zcompile.runtime.sharding.shards import ParameterShards, Slot


class Member(NamedTuple):
    """A parameter with a flat gradient and flat state as they were when a plan was made.

    Gradients themselves are not kept: they come and go with the memory that they lie in.
    """

    parameter: Tensor
    prepared: Sequence[Gradient | None]
    place: int
    cell: Cell
    state: dict[str, Any]


class Plan:
    """How the parameters of one group are updated, for as long as nothing changes but numbers.

    Whether it holds is asked in every step: of all parameters at once, in C.

    Args:
        group: as it is.
        members: its parameters whose gradients are flat.
        single: its parameters that are updated on their own.

    Attributes:
        flat: state arenas with the positions to update.
        single: as given.
    """

    def __init__(self, group: dict[str, Any], members: Sequence[Member], single: Sequence[Tensor]) -> None:
        self.single = single
        positions: dict[MomentArena, list[int]] = {}
        for member in members:
            positions.setdefault(member.cell.arena, []).append(member.cell.position)
        self.flat = [(arena, tuple(found)) for arena, found in positions.items()]
        self._options = _structure(group)
        self._all = list(group["params"])
        self._parameters, self._prepared, self._places, _, self._states = (
            zip(*members, strict=True) if members else ((),) * 5
        )
        flat = set(self._parameters)
        self._bare = [parameter for parameter in self._all if parameter not in flat]
        seen = [(member.state, key, tensor) for member in members for key, tensor in member.cell.seen.items()]
        self._owners, self._keys, self._seen = zip(*seen, strict=True) if seen else ((), (), ())

    def holds(self, group: dict[str, Any], state: Mapping[Tensor, Any]) -> bool:
        """Whether parameters, gradients, state and options are those of the plan."""
        if self._options != _structure(group) or len(group["params"]) != len(self._all):
            return False
        prepared = map(getitem, self._prepared, self._places)
        return (
            all(map(is_, group["params"], self._all))
            and all(
                map(is_, compat.gradients(self._parameters), map(getattr, prepared, repeat("tensor"), repeat(GONE)))
            )
            and all(map(is_, compat.gradients(self._bare), repeat(None)))
            and all(map(is_, map(state.get, self._parameters), self._states))
            and all(map(is_, map(dict.get, self._owners, self._keys), self._seen))
        )


#: in place of a gradient that was forgotten
GONE = object()


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2), as ``torch.optim.AdamW``.

    Parameters of a compiled model are updated in a few passes over flat memory; their state lies in flat arenas too and
    is seen in ``state`` as DTensors under torch's keys ``step``, ``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``.
    Any other parameter is updated on its own, with the same formula. State is allocated for the parameters that have a
    gradient when they have their first one; a parameter without a gradient is skipped and its step does not advance.

    ``foreach`` and ``fused`` are accepted and make no difference.

    Raises:
        OptimizerError: an option out of range, ``capturable`` or ``differentiable``; in ``step``, a sparse gradient or
            one that is placed differently from its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        for name, value, good in (
            ("lr", lr, float(lr) >= 0),
            ("eps", eps, eps >= 0),
            ("betas", betas, 0 <= betas[0] < 1 and 0 <= betas[1] < 1),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not good:
                raise OptimizerError(
                    f"{name} is {value}; pass a value in its range (betas in [0, 1), others not negative)"
                )
        for name, value in (("capturable", capturable), ("differentiable", differentiable)):
            if value:
                raise OptimizerError(f"{name}=True is not supported here; use torch.optim.AdamW({name}=True)")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        self._cells: dict[Tensor, Cell] = {}
        self._plans: dict[int, Plan] = {}
        super().__init__(params, defaults)

    @property
    def state(self) -> Any:
        """The state of each parameter, as torch's optimizers have it. States on the host are all there when this returns."""
        for hosted in {cell.arena.hosted for cell in self._cells.values()}:
            if hosted is not None:
                hosted.settle()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._state = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "state" in self.__dict__:  # what torch put there does not go through the property
            self._state = self.__dict__.pop("state")
        self._plans = {}
        self.__dict__.setdefault("_cells", {})  # a copy starts without; load_state_dict comes here too and keeps them
        for group in self.param_groups:
            for key, value in (("amsgrad", False), ("maximize", False)):
                group.setdefault(key, value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; values are copied into the flat state that is there already, and states on the host never leave it."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        hosted: dict[Tensor, dict[str, Any]] = {}
        rest = dict(state_dict["state"])
        for number, parameter in zip(numbers, parameters, strict=False):  # torch says so if they differ
            found = Slot.of(parameter)
            if number in rest and found is not None and found[0].hosting.hosts_states(found[1]):
                entry = rest[number]
                hosted[parameter] = {k: v for k, v in entry.items() if isinstance(v, Tensor) and v.dim()}
                rest[number] = {k: v for k, v in entry.items() if k not in hosted[parameter]}
        super().load_state_dict({**state_dict, "state": rest})
        for parameter, entry in hosted.items():
            self.state[parameter].update(entry)
        for parameter, cell in self._cells.items():
            if parameter in self.state:
                cell.take(self.state[parameter])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, in place.

        Args:
            closure: computes the loss anew; called once, with gradients enabled.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun: set[HostedUpdate] = set()
        for number, group in enumerate(self.param_groups):
            plan = self._plans.get(number)
            if plan is None or not plan.holds(group, self._state):
                with self._explaining_memory(group):
                    plan = self._make_plan(group)
                if plan.single:  # it cannot tell when they become flat
                    self._plans.pop(number, None)
                else:
                    self._plans[number] = plan
            options = _OptionsByStep(group)
            for arena, positions in plan.flat:
                parts = [
                    (arena.segments(together, group["amsgrad"]), options[count])
                    for count, together in arena.advance(positions)
                ]
                if arena.hosted is None:
                    update(parts, grad=arena.grad)
                    continue
                if arena.hosted not in begun:
                    arena.hosted.begin()
                    begun.add(arena.hosted)
                arena.hosted.update(parts, grad=arena.grad)
            for parameter in plan.single:
                with self._explaining_memory(group):
                    self._step_single(group, parameter)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, which asks each parameter several things first."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            compat.set_gradients(group["params"], [None] * len(group["params"]))

    def _explaining_memory(self, group: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Where state is allocated: an out-of-memory error says what takes the memory."""
        found = (slot[0] for parameter in group["params"] if (slot := Slot.of(parameter)) is not None)
        shards = next(found, None)
        return contextlib.nullcontext() if shards is None else shards.explaining_memory("the optimizer step")

    def _make_plan(self, group: dict[str, Any]) -> Plan:
        """Sort a group's parameters by how they are updated, and give flat state to those that need it."""
        amsgrad = group["amsgrad"]
        flat: list[tuple[Tensor, ParameterShards, int]] = []
        single: list[Tensor] = []
        homeless: list[tuple[Tensor, ParameterShards, int]] = []
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            # With eps == 0 the zeros outside the parameters would become 0/0: only logical rows may be touched then.
            found = Slot.of(parameter) if group["eps"] != 0 else None
            if found is None or not found[0].gradients.is_flat(found[1], grad):
                problem = placement_problem(parameter, grad)
                if problem:
                    raise OptimizerError(f"parameter of shape {list(parameter.shape)} {problem}")
                single.append(parameter)
                continue
            shards, index = found
            cell = self._cells.get(parameter)
            if cell is None or not cell.serves(amsgrad):
                homeless.append((parameter, shards, index))
            elif not cell.is_in(self.state[parameter]):
                cell.take(self.state[parameter])
            flat.append((parameter, shards, index))
        self._make_home(homeless, amsgrad)
        members = [Member(p, shards.gradients.prepared, i, self._cells[p], self.state[p]) for p, shards, i in flat]
        return Plan(group, members, single)

    def _make_home(self, members: Sequence[tuple[Tensor, ParameterShards, int]], amsgrad: bool) -> None:
        """Flat state for these parameters, with the values that they have already."""
        wanted: dict[tuple[ParameterShards, Any, bool], list[tuple[Tensor, int]]] = {}
        for parameter, shards, index in members:
            place = shards.layout.places[index]
            assert place is not None, "flat gradients have elements"
            home = (shards, place.key, shards.hosting.hosts_states(index))
            wanted.setdefault(home, []).append((parameter, index))
        for (shards, key, _), group in wanted.items():
            group.sort(key=lambda member: shards.layout.places[member[1]].start)  # type: ignore[union-attr]
            arena = MomentArena(shards, key, [index for _, index in group], amsgrad=amsgrad)
            for cell, (parameter, _) in zip(arena.cells, group, strict=True):
                cell.take(self.state[parameter])
                self._cells[parameter] = cell

    @torch.no_grad()
    def move_states(self) -> None:
        """Put states that there are where those of the shards are from now on, such as the host."""
        self._plans.clear()
        for group in self.param_groups:
            found = [(p, slot) for p in group["params"] if self._state.get(p) and (slot := Slot.of(p)) is not None]
            places = [(p, shards, i) for p, (shards, i) in found if shards.layout.places[i] is not None]
            if group["eps"] != 0:
                self._make_home(places, group["amsgrad"])

    # Any other parameter. ---------------------------------------------------------------------------------------------

    def _step_single(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        grad = parameter.grad
        assert grad is not None, "step skips parameters without a gradient"
        param, grad, first, second = (
            _real(local_of(t)) for t in (parameter, grad, state["exp_avg"], state["exp_avg_sq"])
        )
        maxima = _real(local_of(state["max_exp_avg_sq"])) if group["amsgrad"] else None
        if param.numel():
            adamw_([(param, grad, first, second, maxima)], _options(group, state["step"].item()))


def _structure(group: dict[str, Any]) -> tuple[bool, bool]:
    """The options that a plan depends on."""
    return group["amsgrad"], group["eps"] != 0


class _OptionsByStep(dict[float, AdamWOptions]):
    """The numbers of one group's updates in one step, by what the parameters' counts are."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__()
        self._group = group

    def __missing__(self, count: float) -> AdamWOptions:
        options = self[count] = _options(self._group, count)
        return options


def _options(group: dict[str, Any], step: float) -> AdamWOptions:
    beta1, beta2 = group["betas"]
    return AdamWOptions(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        step=step,
        maximize=group["maximize"],
    )


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
