"""Full parameters in the user's module for a while, or for good."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zcompile.errors import ShardingError
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.shards import ParameterShards


def _tables(module: nn.Module, shards: ParameterShards) -> Iterator[tuple[dict[str, nn.Parameter | None], str, str]]:
    """Each place where a module holds one of our parameters: the table, the key, the canonical name."""
    for spec in shards.specs.values():
        for name in spec.names:
            owner, _, leaf = name.rpartition(".")
            yield module.get_submodule(owner)._parameters, leaf, spec.name


def put_full(module: nn.Module, shards: ParameterShards) -> dict[str, nn.Parameter]:
    """Replace every parameter of ``module`` by a full plain one; collective. Returns them by canonical name."""
    full: dict[str, nn.Parameter] = {}
    for name, value in shards.iter_full():
        full[name] = nn.Parameter(value, requires_grad=shards.parameter(name).requires_grad)
    for table, leaf, name in _tables(module, shards):
        table[leaf] = full[name]
    return full


def put_shards(module: nn.Module, shards: ParameterShards) -> None:
    """Put the sharded parameters back."""
    for table, leaf, name in _tables(module, shards):
        table[leaf] = shards.parameter(name)


@contextlib.contextmanager
def unsharded(module: nn.Module, shards: ParameterShards, modifier_rank: int | None) -> Iterator[None]:
    """``module`` has full parameters inside; what ``modifier_rank`` changed in place is kept.

    Collective, on entry and (with a modifier) on exit.

    Raises:
        ShardingError: on exit, if a parameter was added, removed or has another shape.
    """
    if not shards.mesh.is_distributed and shards.hosting.home == shards.mesh.device:
        yield
        return
    size = shards.mesh.size
    if modifier_rank is not None and not 0 <= modifier_rank < size:
        raise ShardingError(
            f"modifier_rank is {modifier_rank}; it must be None or one of the {size} ranks, 0 to {size - 1}"
        )
    full = put_full(module, shards)
    try:
        yield
        problem = _changed_structure(module, shards, full)
    finally:
        put_shards(module, shards)
    if problem:
        raise ShardingError(
            f"{problem} inside unsharded(); change values in place, and the structure only after zcompile.unwrap(model)"
        )
    if modifier_rank is not None:
        with torch.no_grad():
            for name, value in full.items():
                full_tensors.broadcast(shards.mesh, [value.detach()], root=modifier_rank)
                shards.fill(name, value.detach())


def _changed_structure(module: nn.Module, shards: ParameterShards, full: dict[str, nn.Parameter]) -> str:
    now = dict(module.named_parameters(remove_duplicate=False))
    known = {name: spec for spec in shards.specs.values() for name in spec.names}
    if extra := sorted(now.keys() ^ known.keys()):
        return f"parameters were added or removed: {', '.join(extra[:5])}"
    for name, spec in known.items():
        if tuple(now[name].shape) != spec.shape:
            return f"parameter '{name}' changed its shape from {list(spec.shape)} to {list(now[name].shape)}"
        if now[name] is not full[spec.name]:
            full[spec.name] = now[name]
    return ""
