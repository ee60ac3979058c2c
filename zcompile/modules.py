"""Which modules can be taken over, and what is to be done about those that cannot."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from zcompile import compat
from zcompile.errors import ConfigError, ShardingError
from zcompile.module import CompiledModule
from zcompile.runtime.sharding.shards import Slot

#: what communicates on its own, and so cannot be inside of what zcompile communicates for
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


def check_modules(model: nn.Module) -> None:
    """Refuse modules that cannot be taken over.

    Raises:
        ConfigError: a module that is compiled already or in another data-parallel wrapper, as a whole or in part.
        ShardingError: a scripted module, a parameter that has no shape yet, or one that shares memory with another tensor.
    """
    for path, module in model.named_modules():
        if isinstance(module, CompiledModule):
            raise ConfigError(f"{repr(path) if path else 'the model'} is compiled already; pass the plain module")
        if isinstance(module, _WRAPPERS):
            wrapper = next(kind for kind in _WRAPPERS if isinstance(module, kind))
            how = "was given to fully_shard" if wrapper is FSDPModule else f"is wrapped in {wrapper.__name__}"
            raise ConfigError(
                f"{repr(path) if path else 'the model'} {how}, which shards or averages by itself; pass the plain module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ShardingError(
                f"'{path}' is a torch.jit.ScriptModule, which cannot be captured; use the module it was made from"
            )
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(p):
            raise ShardingError(
                f"'{name}' is lazy and has no shape yet; call the plain model once before zcompile.compile"
            )
        if Slot.of(p) is not None:
            raise ConfigError(
                f"'{name}' belongs to a compiled model already; use that one, or end it with zcompile.unwrap first"
            )
    _check_memory(model)


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters whose elements are somebody else's too: as shards they would be numbers of their own."""
    ends: dict[int, list[tuple[int, int, str]]] = {}
    parameters = {id(p) for p in model.parameters()}
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        if p.is_meta or p.numel() == 0 or p.layout is not torch.strided:
            continue
        if id(p) in parameters and any(
            stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)
        ):
            raise ShardingError(
                f"parameter '{name}' of shape {list(p.shape)} is expanded, so that several elements are one number in memory, which "
                "no optimizer can step; make it from tensor.contiguous()"
            )
        first = int(p.storage_offset()) * p.element_size()
        last = (
            first
            + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)) * p.element_size()
        )
        for other_first, other_last, other in ends.setdefault(compat.storage_id(p), []):
            if first <= other_last and other_first <= last:
                kind = "parameter" if id(p) in parameters else "buffer"
                raise ShardingError(
                    f"parameter '{other}' and {kind} '{name}' share memory, which sharding would end; tie parameters by assigning one "
                    "Parameter object to both names, take views of it in forward, or make one a clone"
                )
        if id(p) in parameters:
            ends[compat.storage_id(p)].append((first, last, name))
