"""What the tests of checkpoints train: a model with every kind of parameter, and everything that a run has beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zcompile
from tests.dist.training import this_rank

#: of the model's large vector parameter: at 4 ranks no dimension divides evenly, and the last rank of dimension 0 is empty
BROAD = 60001


class Counting(nn.Linear):
    """A layer that saves something of its own."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "rows": torch.arange(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Every(nn.Module):
    """Parameters that are uneven, sharded on another dimension, replicated, without dimensions, without elements, empty on
    some rank, tied, frozen, ignored and unused; buffers that differ between ranks; dropout; extra state."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.mix = Counting(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.wide = nn.Parameter(torch.randn(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.broad = nn.Parameter(torch.randn(5, BROAD) * 1e-3)
        self.ignored = nn.Linear(6, 5)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.wide
        x = x + self.drop(torch.tanh(self.norm(self.mix(x))))
        x = self.frozen(x) * self.scale + self.nothing.sum()
        small = self.ignored(x) @ self.broad[:, :7]
        return F.cross_entropy(self.head(x), tokens) + small.square().mean()


def every(tied: bool = True) -> Every:
    torch.manual_seed(5)
    return Every(tied)


class Position:
    """Where a rank is in its data."""

    def __init__(self, start: int = 0) -> None:
        self.at = start

    def next(self) -> Tensor:
        """A batch; ranks at the same position draw different ones."""
        self.at += 1
        return torch.randint(13, (9,), generator=torch.Generator().manual_seed(1000 * self.at + this_rank()))

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ours": lambda groups: zcompile.optim.AdamW(groups, lr=1e-2),
    "torch": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


class Run:
    """A training run with all that a checkpoint holds.

    Args:
        stage: of the model.
        kind: of the optimizer.
        start: where each rank begins in its data.
        model: instead of ``every()``.
    """

    def __init__(self, stage: int = 3, kind: str = "ours", start: int = 0, model: nn.Module | None = None) -> None:
        options: dict[str, Any] = {"backend": "eager", "verify": "off", "ignore": "ignored.*", "timeout": 60.0}
        self.model = zcompile.compile(model or every(), stage=stage, **options)
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if "embed" in n], "weight_decay": 0.1},
            {"params": [p for n, p in named if "embed" not in n], "weight_decay": 0.0, "lr": 2e-2},
        ]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.scaler = zcompile.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.data = Position(start)

    def parts(self) -> dict[str, Any]:
        """The arguments of ``save_checkpoint`` and ``load_checkpoint``."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": self.data,
        }

    def step(self) -> float:
        """One step; draws random numbers of every kind."""
        loss = self.model(self.data.next()) * (1 + 0.1 * random.random() + 0.1 * torch.rand(()).item())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.model.original.mix.seen += 1 + this_rank()
        return loss.item()

    def everything(self) -> dict[str, Any]:
        """All numbers that must be the same after a resume, of this rank."""
        model = self.model
        full = model.full_optimizer_state_dict(self.optimizer)
        return {
            "parameters": {n: v for n, v in model.full_state_dict().items() if not n.endswith("_extra_state")},
            "buffers": {n: b.clone() for n, b in model.named_buffers()},
            "seen": model.original.mix.seen,
            "optimizer": full["state"],
            "groups": full["param_groups"],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": self.data.at,
        }


def scramble() -> None:
    """Random generators anywhere else."""
    import numpy as np

    random.seed(987)
    np.random.seed(987)
    torch.manual_seed(987 + this_rank())


def draws() -> list[float]:
    """The next random number of each generator."""
    import numpy as np

    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """The very same numbers and structure."""
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {a.keys()} {b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    else:
        assert a == b, f"{where}: {a} {b}"


def padding_is_zero(model: Any) -> bool:
    """Whether what lies beside the parameters in their memory is zero."""
    shards = model._session.runner.shards
    for spec in shards.specs.values():
        if spec.shard_dim is not None:
            local = shards.local(spec.name)
            start, stop = spec.rows(this_rank())
            rows = stop - start
            if local.narrow(spec.shard_dim, rows, spec.chunk - rows).any():
                return False
    return True
