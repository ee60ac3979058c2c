"""Which optimizers may step sharded parameters, and optimizers that were built before the model was compiled."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.errors import OptimizerError
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.sharding.adopt import Replaced
from zcompile.runtime.sharding.shards import ParameterShards, Slot

#: torch optimizers that do not work on shards, and why
UNSUPPORTED = {
    "Adafactor": "its factored moments are sums over rows and columns that lie on several ranks",
    "LBFGS": "its line search takes dot products over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "Rprop": "it indexes with masks, which DTensors do not support",
    "SparseAdam": "it needs sparse gradients",
}

#: between a scaler's step and the check are its own helper, torch's hooks, a scheduler's counter and perhaps a wrapper or two
MAX_CALLERS = 16


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


def check_scaler(optimizer: Optimizer) -> None:
    """Refuse a step that torch's own gradient scaler makes on sharded parameters.

    It looks for overflows in the gradients of this rank, and asks the other ranks only if the first gradient of its list is
    sharded: behind a small replicated parameter, some ranks would make a step that others skip, and no error would show it.
    A subclass with an ``unscale_`` of its own, such as FSDP's ShardedGradScaler, is its author's business.

    Raises:
        OptimizerError: names the scaler, a parameter and what to use instead. As no rank can step, parameters stay the same.
    """
    scaler = _torch_scaler()
    if scaler is None or not scaler.is_enabled():
        return
    for shards, index in _managed(optimizer):
        if shards.mesh.size > 1 and shards.spec(index).is_sharded:
            error = OptimizerError(
                f"torch.amp.GradScaler steps the sharded parameter {shards.names[index]!r}: it decides on each rank by itself "
                "whether gradients overflow; use zcompile.GradScaler, which takes the same arguments and states"
            )
            if shards.mesh.agreement is not None:
                shards.mesh.agreement.raised(error)
            raise error


def check_hosted(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose states would stay on the device although they are to be on the host.

    Raises:
        OptimizerError: names the optimizer, and the ways out.
    """
    if isinstance(optimizer, AdamW):
        return
    for shards, _ in _managed(optimizer):
        if shards.hosting.update is not None and not shards.hosting.parameters:
            raise OptimizerError(
                f"optimizer {type(optimizer).__name__} keeps its states on the device and offload='optimizer' puts none of them "
                "on the host; use zcompile.optim.AdamW, or offload='parameters', with which every optimizer runs on the host"
            )


def _torch_scaler() -> torch.amp.GradScaler | None:
    """The scaler with torch's own ``unscale_`` whose ``step`` is running now, found among the nearest callers."""
    frame = inspect.currentframe()
    for _ in range(MAX_CALLERS):
        if frame is None:
            return None
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            return scaler if type(scaler).unscale_ is torch.amp.GradScaler.unscale_ else None
        frame = frame.f_back
    return None


def watch_optimizers(shards: ParameterShards, accumulation: Accumulation) -> None:
    """Check every ``step`` of any torch optimizer, for as long as ``shards`` lives: ``check_optimizer``, ``check_scaler``, and
    that no gradient of its parameters was added up without having come to ``.grad``. In a declared window updates are counted.

    torch offers this hook for the whole process; it costs one look at the optimizer's class and one at each near caller.
    """
    shards.accumulation = accumulation
    watched = weakref.ref(shards)

    def check(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_optimizer(optimizer)
        check_scaler(optimizer)
        check_hosted(optimizer)
        mine = watched() if accumulation.steps > 1 or accumulation.names() else None
        if mine is not None:
            check_complete(optimizer, mine)
            mine.updates += any(owner is mine for owner, _ in _managed(optimizer))
        return _with_checked_closure(optimizer, args, kwargs, watched)

    handle = register_optimizer_step_pre_hook(check)
    weakref.finalize(shards, handle.remove)


def _with_checked_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], watched: Callable[[], ParameterShards | None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of a step whose closure, with a backward of its own, is followed by ``check_complete``; None without one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None

    def checked() -> Any:
        loss = closure()
        if (mine := watched()) is not None:
            check_complete(optimizer, mine)
        return loss

    if "closure" in kwargs:
        return args, kwargs | {"closure": checked}
    return (*args[:1], checked, *args[2:]), kwargs


def check_complete(optimizer: Optimizer, shards: ParameterShards) -> None:
    """Refuse a step that would leave gradients behind.

    Raises:
        OptimizerError: names a parameter, and the ways to complete its gradient.
    """
    accumulation = shards.accumulation
    names = [] if accumulation is None else accumulation.names()
    mine = {owner.names[index] for owner, index in _managed(optimizer) if owner is shards} if names else ()
    missed = [name for name in names if name in mine]
    if accumulation is not None and missed:
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
