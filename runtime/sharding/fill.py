"""Values for a model on ``meta``, module by module, from a function that initialises one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.shards import ParameterShards


@torch.no_grad()
def fill(shards: ParameterShards, model: nn.Module, init: Callable[[nn.Module], Any], *, sync: bool) -> None:
    """Call ``init`` on every module that owns a parameter or buffer without a value, children first as ``Module.apply`` does.

    The module's own parameters and buffers are full tensors for the time of the call; only one module's are at any time.
    Everything is filled with NaN before: what ``init`` does not write stays without a value. Random numbers are drawn as they
    would be on the plain module, and the random state is as before afterwards. Collective.

    Args:
        shards: of the model; installed in it.
        init: such as ``lambda module: module.reset_parameters()``; writes in place.
        sync: take rank 0's values; else each rank keeps its part of its own.
    """
    device = shards.mesh.device
    missing = set(shards.unfilled())  # a tied one is written by each module that has it
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for module in _children_first(model):
            own = [(leaf, shards.name_of(p)) for leaf, p in module._parameters.items() if p is not None]
            buffers = [leaf for leaf, b in module._buffers.items() if b is not None and b.is_meta]
            if buffers or any(name in missing for _, name in own):
                _fill_module(shards, module, init, own, buffers, sync)


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) not in seen:
            seen.add(id(module))
            for child in module.children():
                yield from walk(child)
            yield module

    yield from walk(model)


def _fill_module(
    shards: ParameterShards,
    module: nn.Module,
    init: Callable[[nn.Module], Any],
    own: list[tuple[str, str | None]],
    buffers: list[str],
    sync: bool,
) -> None:
    mesh = shards.mesh
    missing = set(shards.unfilled())
    sharded = dict(module._parameters)
    on_meta = {leaf: module._buffers[leaf] for leaf in buffers}
    for leaf, name in own:
        if name is not None:
            spec = shards.specs[name]
            value = (
                _without_value(torch.empty(spec.shape, dtype=spec.dtype, device=mesh.device))
                if name in missing
                else shards.gather_full(name)
            )
            module._parameters[leaf] = nn.Parameter(value, requires_grad=spec.requires_grad)
    for leaf, buffer in on_meta.items():
        assert buffer is not None
        module._buffers[leaf] = _without_value(torch.empty_like(buffer, device=mesh.device))
    try:
        init(module)
        values = {name: module._parameters[leaf] for leaf, name in own if name is not None}
        fulls = {name: p.detach() for name, p in values.items() if p is not None}
        new = [b for leaf in buffers if (b := module._buffers[leaf]) is not None]
        if sync:
            full_tensors.broadcast(mesh, [*fulls.values(), *new])
        for name, value in fulls.items():
            shards.fill(name, value)
            if _has_no_value(value):
                shards.mark_unfilled(name)
    finally:
        module._parameters.update(sharded)
        for leaf, buffer in on_meta.items():
            filled = module._buffers[leaf]
            if filled is None or _has_no_value(filled):
                module._buffers[leaf] = buffer


def _without_value(tensor: Tensor) -> Tensor:
    """Fill with what no initialisation writes everywhere."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True) if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).min)


def _has_no_value(tensor: Tensor) -> bool:
    """Whether some of a tensor was not written; of integers, whether nothing was."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return (
        tensor.dtype is not torch.bool and tensor.numel() > 0 and bool((tensor == torch.iinfo(tensor.dtype).min).all())
    )
