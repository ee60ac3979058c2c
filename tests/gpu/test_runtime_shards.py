"""Sharded storage, norm, optimizers and full state on CUDA, over NCCL where there are two devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from tests.runtime.models import Odd, full_gradients, reduced, set_gradients, shard
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.norm import clip_grad_norm_
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.sharding.state import full_optimizer_state_dict, full_state_dict, load_full_optimizer_state_dict

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "ours": (lambda p: AdamW(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "ours, amsgrad": (lambda p: AdamW(p, lr=0.1, amsgrad=True), lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True)),
    "fused": (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "default": (lambda p: torch.optim.AdamW(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ),
}


def work(rank: int, world_size: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, device_id=device)
    mesh = Mesh.create(device=device, timeout=60)
    for name, (make, make_reference) in OPTIMIZERS.items():
        torch.manual_seed(rank)
        model = Odd().to(device)
        shards = shard(model, mesh)
        plain = Odd()
        plain.load_state_dict(full_state_dict(shards, dict(model.named_buffers()), device="cpu"))
        optimizer = make([p for p in model.parameters() if p.requires_grad and p.numel()])
        reference = make_reference([p for p in plain.parameters() if p.requires_grad and p.numel()])
        for seed in range(4):
            gradients = full_gradients(plain, seed, skip=("nothing",))
            set_gradients(plain, gradients)
            shards.accumulate_many(*reduced(shards, gradients))
            for order in (2.0, float("inf")):
                expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.9, order)
                theirs = nn.utils.clip_grad_norm_(model.parameters(), 1e9, 2.0)
                assert theirs.full_tensor().isfinite()
                torch.testing.assert_close(clip_grad_norm_(shards, mesh, 0.9, order).cpu(), expected)
            reference.step()
            optimizer.step()
            optimizer.zero_grad()
            if seed == 2:
                state = full_optimizer_state_dict(shards, optimizer, device="cpu")
                optimizer = make([p for p in model.parameters() if p.requires_grad and p.numel()])
                load_full_optimizer_state_dict(shards, optimizer, state)
        for key, value in full_state_dict(shards, device="cpu").items():
            torch.testing.assert_close(value, plain.state_dict()[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
        assert all(not hole.any() for key in shards.gradient_arenas() for hole in shards.holes(key))
    mesh.close()
    dist.destroy_process_group()


def test_equal_to_plain_pytorch(tmp_path: Path) -> None:
    world_size = min(2, torch.cuda.device_count())
    multiprocessing.spawn(work, (world_size, str(tmp_path)), nprocs=world_size)
