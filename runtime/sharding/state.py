"""Full state dicts of model and optimizer: by name, full size, independent of world size and stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zcompile.errors import StateError
from zcompile.placement import ParamSpec
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.placed import local_of, placement
from zcompile.runtime.sharding.shards import ParameterShards

#: optimizer state that is one number for a parameter, whatever the parameter's shape
SCALAR_KEYS = frozenset({"step", "mu_product", "eta", "mu"})

Device = torch.device | str | None


def full_state_dict(
    shards: ParameterShards, buffers: Mapping[str, Tensor] | None = None, *, device: Device = None
) -> dict[str, Tensor]:
    """Every parameter at full size, under every name, then the buffers: the same on every rank.

    Collective. Aliases of a tied weight share one tensor, as in the plain model's state dict.

    Args:
        shards: the model's parameters.
        buffers: added as copies; rank 0's if ranks should agree is the caller's business.
        device: where the tensors go, one at a time (``"cpu"`` bounds device memory); None: they stay.

    Returns:
        Fresh tensors: changing them changes nothing in the model.
    """
    state: dict[str, Tensor] = {}
    for name, value in shards.iter_full():
        value = value.to(device)
        for alias in shards.specs[name].names:
            state[alias] = value
    for name, buffer in (buffers or {}).items():
        state[name] = buffer.detach().to(device, copy=True)
    return state


def load_full_state(
    shards: ParameterShards, state: Mapping[str, Tensor], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Fill parameters from full tensors: each rank takes its own part, without communication.

    A tied weight may be given under any of its names. DTensors are gathered first (collective then).

    Returns:
        Names without a value, and names that are no parameter (buffers are among them).

    Raises:
        StateError: with ``strict``, a parameter without a value; always, one of another shape.
    """
    missing: list[str] = []
    for name, spec in shards.specs.items():
        given = next((alias for alias in spec.names if alias in state), None)
        if given is None:
            missing.append(name)
            continue
        value = state[given]
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if tuple(value.shape) != spec.shape:
            raise StateError(
                f"parameter {given!r} has shape {list(spec.shape)} and the state dict has {list(value.shape)}; "
                "load a state dict of the same model"
            )
        shards.fill(name, value)
    if strict and missing:
        raise StateError(f"state dict has no value for {missing}; pass strict=False to keep what they hold")
    known = {alias for spec in shards.specs.values() for alias in spec.names}
    return missing, [name for name in state if name not in known]


@torch.no_grad()
def full_optimizer_state_dict(
    shards: ParameterShards, optimizer: Optimizer, *, device: Device = None
) -> dict[str, Any]:
    """Optimizer state by parameter name with full, unpadded tensors: the same on every rank, loads at any world size.

    Collective. The form of DCP's full optimizer state: ``{"state": {name: {key: value}}, "param_groups": [{"params":
    [names],
    option: value}]}``. Parameters without state (never stepped) are not in ``state``.

    Raises:
        StateError: the optimizer holds parameters of another model, or state whose placement is unknown.
    """
    names = parameter_names(shards, optimizer)
    state: dict[str, dict[str, Any]] = {}
    where: list[tuple[str, str]] = []
    items: list[tuple[ParamSpec, Callable[[], Tensor]]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = optimizer.state.get(parameter)
            if not entry:
                continue
            name = names[parameter]
            state[name] = dict.fromkeys(entry)
            for key in sorted(entry, key=str):  # the same order on every rank, however the state came to be
                value = entry[key]
                if not isinstance(value, Tensor):
                    state[name][key] = value
                elif value.dim() == 0:
                    state[name][key] = local_of(value).to(device, copy=True)
                else:
                    where.append((name, key))
                    spec = check_placed(shards, name, key, value)
                    items.append((spec, lambda s=spec, v=value: full_tensors.pad(s, local_of(v), shards.mesh.rank)))
    for (name, key), value in zip(where, full_tensors.gather(shards.mesh, items), strict=True):
        state[name][key] = value.to(device)
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def load_full_optimizer_state_dict(
    shards: ParameterShards, optimizer: Optimizer, state: Mapping[str, Any], *, placed: bool = False
) -> None:
    """Load what ``full_optimizer_state_dict`` gave, saved at any world size and stage; no communication.

    The optimizer keeps its groups; their options come from the saved group of their parameters.

    Args:
        shards: the model's parameters.
        optimizer: over all or some of them.
        state: what was saved.
        placed: tensors are this rank's parts already, as the optimizer holds them; they are taken without a copy.

    Raises:
        StateError: the parameters of optimizer and state dict differ, or the saved options of one group do.
    """
    saved = {_canonical(shards, name): entry for name, entry in state["state"].items()}
    packed: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for names, options in matching_groups(shards, optimizer, state["param_groups"]):
        groups.append({**options, "params": list(range(position, position + len(names)))})
        for name in names:
            if saved.get(name):
                entry = saved[name]
                packed[position] = {key: _sharded(shards, name, key, v, placed) for key, v in entry.items()}
            position += 1
    optimizer.load_state_dict({"state": packed, "param_groups": groups})


def matching_groups(
    shards: ParameterShards, optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]
) -> list[tuple[list[str], dict[str, Any]]]:
    """For each group of the optimizer, its parameters' names and the options that were saved with them.

    Raises:
        StateError: the parameters of the optimizer and of the saved groups differ, or the saved options of one group do.
    """
    names = parameter_names(shards, optimizer)
    saved = {_canonical(shards, n): group for group in saved_groups for n in group["params"]}
    held = {names[p] for group in optimizer.param_groups for p in group["params"]}
    if held != saved.keys():
        missing, extra = sorted(held - saved.keys()), sorted(saved.keys() - held)
        raise StateError(
            f"optimizer state was saved for other parameters: missing {missing}, not in the optimizer {extra}; "
            "build the optimizer over the parameters that it was saved with"
        )
    members = [([names[p] for p in group["params"]], group) for group in optimizer.param_groups]
    return [(group_names, _options(saved, group_names, group)) for group_names, group in members]


def parameter_names(shards: ParameterShards, optimizer: Optimizer) -> dict[Tensor, str]:
    """The canonical name of every parameter that the optimizer holds."""
    names: dict[Tensor, str] = {}
    num_unknown = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = shards.name_of(parameter)
            if name is None:
                num_unknown += 1
            else:
                names[parameter] = name
    if num_unknown:
        raise StateError(
            f"optimizer holds {num_unknown} parameters that are not this model's, beside {len(names)} that are; "
            "use one optimizer for each compiled model, built from its parameters()"
        )
    return names


def _canonical(shards: ParameterShards, name: str) -> str:
    if name not in shards:
        raise StateError(f"optimizer state has the parameter {name!r}, which the model does not have")
    return shards.names[shards.index(name)]


def check_placed(shards: ParameterShards, name: str, key: str, value: Tensor) -> ParamSpec:
    """The spec of a parameter, after checking that a state tensor is placed as the parameter is.

    Raises:
        StateError: it is not, so nobody knows which part of what it is.
    """
    spec = shards.specs[name]
    fits = tuple(value.shape) == spec.shape
    if isinstance(value, DTensor):
        fits = fits and tuple(value.placements) == (placement(spec),)
    else:
        fits = fits and not shards.mesh.is_distributed
    if not fits:
        raise StateError(
            f"optimizer state {key!r} of parameter {name!r} has shape {list(value.shape)} and is not placed like the parameter "
            f"of shape {list(spec.shape)}, so it cannot be put together; save the optimizer with its own state_dict()"
        )
    return spec


def _options(
    saved_group: Mapping[str, Mapping[str, Any]], names: list[str], current: Mapping[str, Any]
) -> dict[str, Any]:
    """The options for a group: those saved with its parameters, which must agree."""
    options: dict[str, Any] | None = None
    for name in names:
        found = {key: value for key, value in saved_group[name].items() if key not in ("params", "param_names")}
        if options is not None and not _equal(options, found):
            raise StateError(
                f"optimizer group with {names[0]!r} and {name!r} was saved as two groups with different options; "
                "build the optimizer with the groups that it was saved with"
            )
        options = found
    if options is None:
        options = {key: value for key, value in current.items() if key not in ("params", "param_names")}
    if "param_names" in current:
        options["param_names"] = current["param_names"]
    return options


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(bool(a[key] == b[key]) for key in a)


def _sharded(shards: ParameterShards, name: str, key: str, value: Any, placed: bool) -> Any:
    """One saved value as the optimizer's state holds it on this rank."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() == 0 and (shards.specs[name].shape != () or key in SCALAR_KEYS):
        return value.clone()
    if tuple(value.shape) != shards.specs[name].shape:
        raise StateError(
            f"optimizer state {key!r} of parameter {name!r} has shape {list(value.shape)} and the parameter has "
            f"{list(shards.specs[name].shape)}; load a state of the same model"
        )
    return value if placed and value.dim() else shards.shard_like(name, value)
