"""A small network on ``meta`` for plans: linear layers whose sizes make collectives worth moving."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from zcompile.planner.trace import Traced, trace


class Tower(nn.Module):
    """Blocks of two matmuls, and a scalar loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.head = nn.Linear(width, 8, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + functional.relu(block(x))
        return functional.cross_entropy(self.head(x), labels)


def tower(rows: int = 4096, width: int = 4096, layers: int = 3) -> tuple[Tower, tuple[Tensor, Tensor]]:
    """The network and what one rank feeds it; also a factory for ``--model``."""
    with torch.device("meta"):
        return Tower(width, layers), (torch.empty(rows, width), torch.empty(rows, dtype=torch.int64))


def small(micro_batch: int = 4, layers: int = 2) -> tuple[Tower, tuple[Tensor, Tensor]]:
    """A factory that takes sizes."""
    return tower(1024 * micro_batch, 4096, layers)


@cache
def traced(stage: int = 3, layers: int = 3) -> Traced:
    """A tower for two ranks, traced once a session."""
    model, inputs = tower(layers=layers)
    return trace(model, inputs, world_size=2, stage=stage, policy="none", precision="bf16")
