"""Models and shards that several tests of the runtime use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zcompile.placement import ParamSpec, choose_shard_dim
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.adopt import adopt, install
from zcompile.runtime.sharding.shards import ParameterShards


class Odd(nn.Module):
    """Sizes that pad, shard on dimension 1, replicate, tie and freeze at 2 to 4 ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 13)
        self.wide = nn.Linear(12, 2, bias=False)  # rows for two ranks only
        self.norm = nn.LayerNorm(2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(9, 3), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("count", torch.tensor(3))
        self.to(dtype)


def plan(model: nn.Module, world_size: int, stage: int = 3) -> list[ParamSpec]:
    """The specs of a model, as the compiler makes them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [
        ParamSpec(
            name=first,
            aliases=tuple(others),
            shape=tuple(p.shape),
            dtype=p.dtype,
            requires_grad=p.requires_grad,
            shard_dim=choose_shard_dim(p.shape, p.dtype, world_size, stage=stage, ignored=False),
            world_size=world_size,
        )
        for p, (first, *others) in names.items()
    ]


def shard(model: nn.Module, mesh: Mesh, *, stage: int = 3, sync_init: bool = True) -> ParameterShards:
    """Shard a model in place."""
    shards = ParameterShards(plan(model, mesh.size, stage), mesh)
    adopt(shards, dict(model.named_parameters()), sync_init=sync_init)
    install(shards, model)
    return shards


def full_gradients(model: nn.Module, seed: int, *, skip: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """A full gradient for every trainable parameter, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad and name not in skip
    }


def reduced(shards: ParameterShards, gradients: dict[str, Tensor]) -> tuple[list[str], list[Tensor]]:
    """Full gradients as the reduction leaves them: padded shards with zero padding."""
    out = []
    for name, full in gradients.items():
        spec = shards.specs[name]
        padded = torch.full(spec.padded_local_shape, float("nan"), dtype=full.dtype)
        full_tensors.write_shard(spec, padded, full, shards.mesh.rank)
        out.append(padded)
    return list(gradients), out


def set_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    """The same gradients on a plain model."""
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone() if name in gradients else None


def cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model of a few hundred elements have several chunks, and drop its gradient memory, as a large one does."""
    monkeypatch.setattr("zcompile.runtime.sharding.arenas.CHUNK_BYTES", 600)
    monkeypatch.setattr("zcompile.runtime.sharding.gradients.KEEP_BYTES", 0)
