"""Training with zcompile on every rank, training with plain PyTorch in one process, and what equal means."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zcompile
from tests.dist.models import CASES, Batch, Case

LR = 1e-3
STEPS = 20


@dataclass
class Trained:
    """What a training run gave.

    Attributes:
        losses: the loss of each step, the mean over ranks.
        state: the full state in the end.
        idle: for each step the parameters that had no gradient.
    """

    losses: list[float]
    state: dict[str, Tensor]
    idle: list[list[str]] = field(default_factory=list)


def world_size() -> int:
    """Ranks of the default group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """This process's rank; 0 without a group."""
    return dist.get_rank() if dist.is_initialized() else 0


def over_ranks(value: Any) -> list[Any]:
    """A picklable value of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """The mean over ranks of each number."""
    return torch.tensor(over_ranks(list(values)), dtype=torch.float64).mean(0).tolist()


def seed(step: int, rank: int) -> None:
    """The random numbers that a rank draws in a step."""
    torch.manual_seed(7919 * step + rank)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    return (case.optimizer or adamw)(model)


def without_gradient(model: nn.Module) -> list[str]:
    """The names of the parameters whose ``.grad`` is None."""
    return [name for name, p in model.named_parameters() if p.grad is None]


def train(
    model: nn.Module,
    case: Case,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = STEPS,
    idle: list[list[str]] | None = None,
) -> list[float]:
    """Train a compiled model on this rank's batches; returns the loss of each step, as this rank sees it.

    ``idle`` is given for each step the parameters that had no gradient.
    """
    optimizer = optimizer or optimizer_of(case, model)
    losses = []
    for step in range(steps):
        seed(step, this_rank())
        loss = case.loss(model(**case.data(step, this_rank())))
        loss.backward()
        if idle is not None:
            idle.append(without_gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_case(name: str, *, steps: int = STEPS, poison: bool = False, **options: Any) -> tuple[Trained, Any, Any]:
    """Compile a case and train it; returns the result, the compiled model and its optimizer. Collective."""
    return compile_and_train(CASES[name], steps=steps, poison=poison, **options)


def compile_and_train(
    case: Case, *, steps: int = STEPS, poison: bool = False, **options: Any
) -> tuple[Trained, Any, Any]:
    """``train_case`` of a case that has no name."""
    model = zcompile.compile(case.build(), **{"backend": "eager", **options})
    model._session.runner.executor.buffers.poison = poison
    optimizer = optimizer_of(case, model)
    idle: list[list[str]] = []
    losses = mean_over_ranks(train(model, case, optimizer=optimizer, steps=steps, idle=idle))
    return Trained(losses, model.full_state_dict(), idle), model, optimizer


def plain(case: Case, world: int, steps: int = STEPS) -> Trained:
    """The same training in this process alone with plain PyTorch."""
    return replicas(case, world, steps) if case.replicas else one_model(case, world, steps)


def one_model(case: Case, world: int, steps: int) -> Trained:
    """One model on the concatenated batches of all ranks."""
    model = case.reference(case.build())
    optimizer = optimizer_of(case, model)
    losses, idle = [], []
    for step in range(steps):
        loss = case.loss(model(**concatenated(case, step, world)))
        loss.backward()
        idle.append(without_gradient(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, detached(model), idle)


def replicas(case: Case, world: int, steps: int) -> Trained:
    """One replica a rank, each on its own batches with its own random numbers and buffers; averaged gradients."""
    models = [case.reference(case.build()) for _ in range(world)]
    optimizers = [optimizer_of(case, model) for model in models]
    losses, idle = [], []
    for step in range(steps):
        each = []
        for rank, model in enumerate(models):
            seed(step, rank)
            loss = case.loss(model(**case.data(step, rank)))
            loss.backward()
            each.append(loss.item())
        average_gradients(models)
        idle.append(without_gradient(models[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(sum(each) / world)
    return Trained(losses, detached(models[0]), idle)


def concatenated(case: Case, step: int, world: int) -> Batch:
    """The batches of all ranks in one; what is no tensor is the same on all."""
    parts = [case.data(step, rank) for rank in range(world)]
    return {
        key: torch.cat([part[key] for part in parts]) if isinstance(value, Tensor) else value
        for key, value in parts[0].items()
    }


def average_gradients(models: Sequence[nn.Module]) -> None:
    """Give every replica the mean of the replicas' gradients; a parameter that none of them used keeps None."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        grads = [p.grad for p in parameters]
        if all(g is None for g in grads):
            continue
        mean = torch.stack(
            [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        ).mean(0)
        for p in parameters:
            p.grad = mean.clone()


def detached(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a plain model's state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal_training(mine: Trained, reference: Trained, loose: Sequence[str] = (), lr: float = LR) -> None:
    """Losses within 1e-5 relative, parameters and buffers within ``1e-5*|p| + 1e-2*lr``.

    Args:
        mine: what zcompile gave.
        reference: what plain PyTorch gave.
        loose: patterns of parameters whose true gradient is zero, which may be ``STEPS`` updates apart: ``name`` or
            ``name[first:past_last]`` for some rows.
        lr: the learning rate of both.
    """
    for step, (a, b) in enumerate(zip(mine.losses, reference.losses, strict=True)):
        assert abs(a - b) <= 1e-5 * abs(b), (
            f"loss of step {step}: {a!r}, plain PyTorch {b!r}, relative {abs(a - b) / abs(b):.1e}"
        )
    assert mine.idle == reference.idle, "gradients of other parameters are None than in plain PyTorch"
    assert list(mine.state) == list(reference.state)
    for name, b in reference.state.items():
        a = mine.state[name]
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"{name}: {a.dtype} {a.shape}, plain PyTorch {b.dtype} {b.shape}"
        )
        bound = 1e-5 * b.abs() + 1e-2 * lr
        for pattern in loose:
            glob, _, rows = re.fullmatch(r"(.*?)(\[(\d+:\d+)\])?", pattern).group(1, 2, 3)
            if fnmatch.fnmatch(name, glob):
                first, last = map(int, rows.split(":")) if rows else (0, len(b))
                bound[first:last] = 2 * STEPS * lr
        worst = ((a.double() - b.double()).abs() / bound).max().item() if b.numel() else 0.0
        assert worst <= 1.0, f"{name} is {worst:.2f} times the allowed distance from plain PyTorch's"


def assert_same_bits(a: Trained, b: Trained) -> None:
    """The very same numbers."""
    assert a.losses == b.losses
    assert list(a.state) == list(b.state)
    for name, value in a.state.items():
        assert torch.equal(value, b.state[name]), name


def full(tensor: Tensor | None) -> Tensor | None:
    """A copy of a tensor, of a DTensor at full size. Collective for DTensors."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The full gradient of every parameter. Collective."""
    return {name: full(p.grad) for name, p in model.named_parameters()}


def assert_close_gradients(mine: dict[str, Tensor | None], reference: nn.Module | dict[str, Tensor | None]) -> None:
    """The gradients of a plain model, and None where that one has none."""
    if isinstance(reference, nn.Module):
        reference = {name: p.grad for name, p in reference.named_parameters()}
    assert mine.keys() == reference.keys()
    for name, b in reference.items():
        a = mine[name]
        assert (a is None) == (b is None), f"gradient of {name}: {a}, plain PyTorch {b}"
        if a is not None and b is not None:
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"gradient of {name}: {text}"
            )


def copies(model: nn.Module, count: int) -> list[nn.Module]:
    """Replicas of a plain model."""
    return [copy.deepcopy(model) for _ in range(count)]
