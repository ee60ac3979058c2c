"""How the parameters of a model are divided and computed, from the model and the options alone: no process group, no storage."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from zcompile.config import Config
from zcompile.placement import ParamSpec, choose_shard_dim


def parameter_specs(model: nn.Module, config: Config, world_size: int) -> list[ParamSpec]:
    """How each parameter is divided, in the model's order; tied parameters once, with all their names."""
    names: dict[int, list[str]] = {}
    params: dict[int, nn.Parameter] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
        params[id(p)] = p
    specs = []
    for key, (first, *aliases) in names.items():
        p = params[key]
        dtype = torch.float32 if config.compute_dtype is not None and p.is_floating_point() else p.dtype
        ignored = any(fnmatchcase(n, pattern) for n in (first, *aliases) for pattern in config.ignore)
        dim = (
            choose_shard_dim(p.shape, dtype, world_size, stage=config.stage, ignored=ignored)
            if world_size > 1
            else None
        )
        specs.append(ParamSpec(first, tuple(aliases), tuple(p.shape), dtype, p.requires_grad, dim, world_size))
    return specs


def compute_dtype(spec: ParamSpec, config: Config) -> torch.dtype:
    """The dtype that a parameter is gathered and computed in."""
    if config.compute_dtype is None or not spec.dtype.is_floating_point:
        return spec.dtype
    keep = any(fnmatchcase(n, pattern) for n in spec.names for pattern in config.keep_fp32)
    return torch.float32 if keep else config.compute_dtype
