"""AdamW over flat memory: torch's update, signature and state keys, without work for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.errors import OptimizerError
from zcompile.runtime.adamw_update import AdamWOptions, adamw_
from zcompile.runtime.moments import Cell, MomentArena
from zcompile.runtime.shards import ParameterShards, Slot, local_of, placement_problem


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
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_cells", {})  # a copy starts without; load_state_dict comes here too and keeps them
        for group in self.param_groups:
            for key, value in (("amsgrad", False), ("maximize", False)):
                group.setdefault(key, value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; values are copied into the flat state that is there already."""
        super().load_state_dict(state_dict)
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
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        flat: list[tuple[Tensor, ParameterShards, int]] = []
        single: list[Tensor] = []
        # With eps == 0 the zeros outside the parameters would become 0/0: only logical rows may be touched then.
        may_be_flat = group["eps"] != 0
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            found = Slot.of(parameter) if may_be_flat else None
            if found is not None and found[0].is_flat(found[1], grad):
                flat.append((parameter, *found))
            else:
                problem = placement_problem(parameter, grad)
                if problem:
                    raise OptimizerError(f"parameter of shape {list(parameter.shape)} {problem}")
                single.append(parameter)
        if flat:
            self._step_flat(group, flat)
        for parameter in single:
            self._step_single(group, parameter)

    # Parameters in arenas. --------------------------------------------------------------------------------------------

    def _step_flat(self, group: dict[str, Any], members: list[tuple[Tensor, ParameterShards, int]]) -> None:
        amsgrad = group["amsgrad"]
        homeless = []
        for member in members:
            cell = self._cells.get(member[0])
            if cell is None or not cell.serves(amsgrad):
                homeless.append(member)
            elif not cell.is_in(state := self.state[member[0]]):
                cell.take(state)
        if homeless:
            self._make_home(homeless, amsgrad)
        positions: dict[MomentArena, list[int]] = {}
        for parameter, _, _ in members:
            cell = self._cells[parameter]
            positions.setdefault(cell.arena, []).append(cell.position)
        for arena, members_here in positions.items():
            for step, together in arena.advance(members_here):
                adamw_(arena.segments(together, amsgrad), _options(group, step))

    def _make_home(self, members: Sequence[tuple[Tensor, ParameterShards, int]], amsgrad: bool) -> None:
        """Flat state for these parameters, with the values that they have already."""
        wanted: dict[tuple[ParameterShards, Any], list[tuple[Tensor, int]]] = {}
        for parameter, shards, index in members:
            place = shards.layout.places[index]
            assert place is not None, "flat gradients have elements"
            wanted.setdefault((shards, place.key), []).append((parameter, index))
        for (shards, key), group in wanted.items():
            group.sort(key=lambda member: shards.layout.places[member[1]].start)  # type: ignore[union-attr]
            arena = MomentArena(shards, key, [index for _, index in group], amsgrad=amsgrad)
            for cell, (parameter, _) in zip(arena.cells, group, strict=True):
                cell.take(self.state[parameter])
                self._cells[parameter] = cell

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
