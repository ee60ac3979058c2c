"""What the ranks of the GPU tests train, and how."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from examples.llama import Llama, LlamaConfig

#: odd sizes, so that rows are padded at two ranks
SMALL = LlamaConfig(vocab_size=509, hidden=256, layers=4, heads=4, kv_heads=2, ffn=515, max_seq=64)
LARGE = LlamaConfig(vocab_size=4096, hidden=1024, layers=8, heads=8, kv_heads=8, ffn=4096, max_seq=64)
MIDDLE = LlamaConfig(vocab_size=2048, hidden=512, layers=4, heads=8, kv_heads=8, ffn=2048, max_seq=64)
STEPS, ROWS, LR, MAX_NORM = 10, 4, 1e-3, 1.0
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HERE = range(RANK, RANK + 1)


def data(config: LlamaConfig, step: int, ranks: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels of some ranks in a step: something that can be learned."""
    rows = [
        torch.randint(config.vocab_size, (ROWS, config.max_seq), generator=torch.Generator().manual_seed(97 * step + r))
        for r in ranks
    ]
    tokens = torch.cat(rows).to(device)
    return tokens, (7 * tokens + 3) % config.vocab_size


def build(config: LlamaConfig, device: torch.device) -> Llama:
    torch.manual_seed(0)
    return Llama(config).to(device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Any,
    config: LlamaConfig,
    ranks: range,
    device: torch.device,
    steps: int = STEPS,
) -> list[float]:
    """The loss of each step, as this rank sees it."""
    losses = []
    for step in range(steps):
        loss = model(*data(config, step, ranks, device))["loss"]
        loss.backward()
        clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def mean(values: list[float], device: torch.device) -> list[float]:
    """Over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if WORLD_SIZE > 1:
        dist.all_reduce(tensor)
    return (tensor / WORLD_SIZE).tolist()


def compiled(
    config: LlamaConfig, device: torch.device, backend: str, stage: int, precision: str | None, **options: Any
) -> tuple[zcompile.CompiledModule, Any]:
    model = zcompile.compile(
        build(config, device), stage=stage, precision=precision, backend=backend, timeout=20.0, **options
    )
    return model, zcompile.optim.AdamW(model.parameters(), lr=LR)


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
