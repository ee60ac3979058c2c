"""Which optimizers may step sharded parameters, and optimizers that were built before the model was compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.errors import OptimizerError
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.adopt import Replaced
from zcompile.runtime.shards import ParameterShards, Slot

#: torch optimizers that do not work on shards, and why
UNSUPPORTED = {
    "Adafactor": "its factored moments are sums over rows and columns that lie on several ranks",
    "LBFGS": "its line search takes dot products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "Rprop": "it indexes with masks, which DTensors do not support",
    "SparseAdam": "it needs sparse gradients",
}


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would fail or give wrong results on the sharded parameters that it holds.

    Elementwise optimizers are right on shards. Only exact torch classes are known; a subclass is its author's business.

    Raises:
        OptimizerError: names the optimizer, a parameter and what to use instead.
    """
    reason = UNSUPPORTED.get(type(optimizer).__name__) if type(optimizer).__module__.startswith("torch.") else None
    if reason is None and type(optimizer) is torch.optim.SGD and any(g.get("fused") for g in optimizer.param_groups):
        reason = "torch's fused SGD kernel does not take DTensors with uneven shards"
    if reason is None:
        return
    for shards, index in _managed(optimizer):
        if shards.mesh.is_distributed:
            raise OptimizerError(
                f"optimizer {type(optimizer).__name__} cannot step the sharded parameter {shards.names[index]!r}: {reason}; "
                "use an elementwise one, such as zcompile.optim.AdamW or torch.optim.AdamW, or SGD with fused=False"
            )


def watch_optimizers(shards: ParameterShards, accumulation: Accumulation) -> None:
    """Check every ``step`` of any torch optimizer, for as long as ``shards`` lives: ``check_optimizer``, and that no gradient
    of its parameters was added up without having come to ``.grad``.

    torch offers this hook for the whole process; it costs one look at the optimizer's class.
    """
    watched = weakref.ref(shards)

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_optimizer(optimizer)
        if names := accumulation.names():
            _check_complete(optimizer, watched(), names, accumulation)

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(shards, handle.remove)


def _check_complete(
    optimizer: Optimizer, shards: ParameterShards | None, names: list[str], accumulation: Accumulation
) -> None:
    """Refuse a step that would leave gradients behind.

    Raises:
        OptimizerError: names a parameter, and the ways to complete its gradient.
    """
    mine = {owner.names[index] for owner, index in _managed(optimizer) if owner is shards}
    missed = [name for name in names if name in mine]
    if missed:
        window = f", {accumulation.position} of {accumulation.steps} of the declared window" * (accumulation.steps > 1)
        raise OptimizerError(
            f"optimizer {type(optimizer).__name__} would step without the gradients of {len(missed)} parameters ('{missed[0]}' "
            f"first) that backward calls left out of .grad{window}; step after a backward outside of no_sync that ends the "
            "window, call model.sync_gradients() first, or model.zero_grad() to drop them"
        )


def repoint(shards: ParameterShards, replaced: Replaced) -> int:
    """Put the new Parameters into every living optimizer that holds the old ones; its state is sharded along.

    Finds them through the garbage collector, so it takes about a tenth of a second. Group options and schedulers stay.

    Args:
        shards: what the new Parameters belong to.
        replaced: what ``adopt`` returned.

    Returns:
        How many optimizers were changed.

    Raises:
        OptimizerError: an optimizer has state for an old parameter that cannot be divided.
    """
    if not replaced:
        return 0
    new_of = {id(old): new for old, new in replaced}
    count = 0
    for optimizer in _living_optimizers():
        touched = False
        for group in optimizer.param_groups:
            for position, old in enumerate(group["params"]):
                new = new_of.get(id(old))
                if new is not None:
                    group["params"][position] = new
                    _move_state(shards, optimizer, old, new)
                    touched = True
        count += touched
    return count


def optimizers_of(shards: ParameterShards) -> list[Optimizer]:
    """The living optimizers that step a parameter of these shards. Takes about a tenth of a second, as ``repoint`` does."""
    return [o for o in _living_optimizers() if any(found is shards for found, _ in _managed(o))]


def _living_optimizers() -> Iterator[Optimizer]:
    for candidate in gc.get_objects():
        # type(), not isinstance: proxies of other libraries answer __class__ with side effects
        if issubclass(type(candidate), Optimizer) and hasattr(candidate, "param_groups"):
            yield candidate


def _move_state(shards: ParameterShards, optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    state = optimizer.state.pop(old, None)
    if not state:
        return
    name = shards.name_of(new)
    assert name is not None, "adopt returns our own Parameters"
    shape = shards.specs[name].shape
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if tuple(value.shape) != shape:
                raise OptimizerError(
                    f"optimizer {type(optimizer).__name__} holds state {key!r} of shape {list(value.shape)} for parameter "
                    f"{name!r} of shape {list(shape)}, which cannot be divided; build the optimizer after compile"
                )
            state[key] = shards.shard_like(name, value)
    optimizer.state[new] = state


def _managed(optimizer: Optimizer) -> Iterator[tuple[ParameterShards, int]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = Slot.of(parameter)
            if found is not None:
                yield found
