"""Taking a model over: values go into shards, Parameters are replaced, full storage is released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zcompile import compat
from zcompile.errors import ShardingError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.shards import ParameterShards

#: broadcasts of about this many bytes are in flight at once
SYNC_BATCH_BYTES = 64 << 20

Replaced = list[tuple[nn.Parameter, nn.Parameter]]


@torch.no_grad()
def adopt(shards: ParameterShards, parameters: Mapping[str, nn.Parameter], *, sync_init: bool) -> Replaced:
    """Move the values of a model's parameters into shards and release the full tensors, a few at a time.

    Without a process group the user's Parameter objects stay (their memory becomes the shard). A DTensor has another
    object layout than a Parameter, so with one they are replaced: put the new ones in place with ``install``, and in
    optimizers with ``optimizer_guard.repoint``. Attributes, ``requires_grad``, tensor hooks and post-accumulate hooks
    go along.

    Collective with ``sync_init``: every rank gets rank 0's values. A parameter on the ``meta`` device (with
    ``sync_init``: on rank 0) leaves its shard unfilled.

    Args:
        shards: made for exactly these parameters.
        parameters: by canonical name. Their tensors have no elements afterwards.
        sync_init: start from rank 0's values; else each rank keeps its own part of its own.

    Returns:
        (old, new) for every Parameter that was replaced.

    Raises:
        ShardingError: a parameter that cannot be taken over; nothing has changed then.
    """
    for name in shards.names:
        if name not in parameters:
            raise ShardingError(f"parameter {name!r} was planned and is not in the model; plan the model as it is now")
        _check(shards, name, parameters[name])
    replaced: Replaced = []
    on_meta = _meta_flags(shards, parameters, sync_init)
    for batch in _batches(shards):
        values = {name: _value(shards, name, parameters[name]) for name in batch if not on_meta[name]}
        if sync_init:
            full_tensors.broadcast(shards.mesh, values.values())
        for name in batch:
            if name in values:
                shards.fill(name, values.pop(name))
            index = shards.index(name)
            new = _replace(shards, index, parameters[name])
            if new is not parameters[name]:
                replaced.append((parameters[name], new))
    return replaced


def install(shards: ParameterShards, module: nn.Module) -> None:
    """Put the shards' Parameters into a module, under every name."""
    for spec in shards.specs.values():
        for name in spec.names:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_parameter(leaf, shards.parameter(name))


def sync_buffers(mesh: Mesh, buffers: Mapping[str, Tensor]) -> None:
    """Overwrite buffers with rank 0's, in place. Collective; buffers on ``meta`` are left alone."""
    full_tensors.broadcast(mesh, [b for b in buffers.values() if not b.is_meta])


def _check(shards: ParameterShards, name: str, parameter: nn.Parameter) -> None:
    """Refuse what would be lost or wrong."""
    spec = shards.specs[name]
    problem = None
    if is_lazy(parameter):
        problem = "is not initialised (a lazy module); run one forward call first"
    elif isinstance(parameter, DTensor):
        problem = "is a DTensor already; pass the model before any other wrapper shards it"
    elif parameter.layout is not torch.strided:
        problem = f"has layout {parameter.layout}; only dense parameters can be sharded"
    elif tuple(parameter.shape) != spec.shape or not _converts(parameter.dtype, spec.dtype):
        problem = (
            f"is {parameter.dtype} of shape {list(parameter.shape)} and was planned as {spec.dtype} of shape "
            f"{list(spec.shape)}; plan the model as it is now"
        )
    elif parameter.grad is not None:
        problem = "has a gradient that would be lost; call zero_grad(set_to_none=True) first"
    if problem:
        raise ShardingError(f"parameter {name!r} {problem}")


def _converts(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether a shard may have another dtype than its parameter had: masters may."""
    return dtype == stored or (dtype.is_floating_point and stored.is_floating_point)


def _meta_flags(shards: ParameterShards, parameters: Mapping[str, nn.Parameter], sync_init: bool) -> dict[str, bool]:
    """Which parameters have no value to start from; with ``sync_init`` rank 0 decides for all."""
    flags = torch.tensor(
        [parameters[name].is_meta for name in shards.names], dtype=torch.uint8, device=shards.mesh.device
    )
    if sync_init:
        full_tensors.broadcast(shards.mesh, [flags])
    return dict(zip(shards.names, map(bool, flags.tolist()), strict=True))


def _batches(shards: ParameterShards) -> Iterator[list[str]]:
    batch: list[str] = []
    num_bytes = 0
    for name, spec in shards.specs.items():
        if batch and num_bytes + spec.num_bytes > SYNC_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += spec.num_bytes
    if batch:
        yield batch


def _value(shards: ParameterShards, name: str, parameter: nn.Parameter) -> Tensor:
    """The full value: the user's own tensor, or room for rank 0's where this rank has none."""
    if parameter.is_meta:
        return torch.empty(shards.specs[name].shape, dtype=parameter.dtype, device=shards.mesh.device)
    return parameter.detach()


def _replace(shards: ParameterShards, index: int, old: nn.Parameter) -> nn.Parameter:
    """Give ``old`` the shard's memory, or give its attributes and hooks to the shard's Parameter and empty it."""
    if not shards.mesh.is_distributed and not old.is_meta:
        old.data = shards.view(index)
        shards.replace_parameter(index, old)
        return old
    new = shards.parameters[index]
    attributes: dict[str, Any] = {k: v for k, v in vars(old).items() if k not in vars(new)}
    vars(new).update(attributes)
    compat.move_tensor_hooks(old, new)
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    return new
