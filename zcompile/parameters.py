"""How the parameters of a model are divided and computed, from the model and the options alone: no process group, no storage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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
    whole = []
    for key, (first, *aliases) in names.items():
        p = params[key]
        dtype = torch.float32 if config.compute_dtype is not None and p.is_floating_point() else p.dtype
        whole.append(ParamSpec(first, tuple(aliases), tuple(p.shape), dtype, p.requires_grad, None, 1))
    return divided(whole, config, world_size)


def divided(specs: Iterable[ParamSpec], config: Config, world_size: int) -> list[ParamSpec]:
    """The same parameters as these options divide them over so many ranks."""
    result = []
    for spec in specs:
        ignored = any(fnmatchcase(n, pattern) for n in spec.names for pattern in config.ignore)
        dim = (
            choose_shard_dim(spec.shape, spec.dtype, world_size, stage=config.stage, ignored=ignored)
            if world_size > 1
            else None
        )
        result.append(replace(spec, shard_dim=dim, world_size=world_size))
    return result


def compute_dtype(spec: ParamSpec, config: Config) -> torch.dtype:
    """The dtype that a parameter is gathered and computed in."""
    if config.compute_dtype is None or not spec.dtype.is_floating_point:
        return spec.dtype
    keep = any(fnmatchcase(n, pattern) for n in spec.names for pattern in config.keep_fp32)
    return torch.float32 if keep else config.compute_dtype
