"""Lion, which torch.optim does not have: elementwise, so it steps shards as it steps whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.errors import OptimizerError
from zcompile.runtime.sharding.placed import local_of, placement_problem


class Lion(Optimizer):
    """Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675, program 1), with decoupled weight decay.

    With gradient ``g`` and momentum ``m`` (state ``exp_avg``, placed and typed as the parameter)::

        p <- p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m <- beta2 * m + (1 - beta2) * g

    A parameter without a gradient is skipped.

    Args:
        params: parameters or groups, plain tensors or DTensors.
        lr: the step size, which is the change of every element; about a tenth of AdamW's.
        betas: weights of the momentum in the update, and in the next momentum.
        weight_decay: the decay, multiplied with ``lr``.

    Raises:
        OptimizerError: an option out of range; in ``step``, a gradient that is sparse or placed differently from its parameter.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if float(lr) < 0 or weight_decay < 0:
            raise OptimizerError(f"lr is {lr} and weight_decay is {weight_decay}; neither may be negative")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise OptimizerError(f"betas are {betas}; pass two numbers in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

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
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None:
                    continue
                if problem := placement_problem(parameter, grad):
                    raise OptimizerError(f"parameter of shape {list(parameter.shape)} {problem}")
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                value, grad, momentum = (local_of(t) for t in (parameter, grad, state["exp_avg"]))
                value.mul_(1 - lr * group["weight_decay"])
                value.add_(torch.lerp(grad, momentum, beta1).sign_(), alpha=-lr)
                momentum.lerp_(grad, 1 - beta2)
        return loss
