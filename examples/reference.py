"""The same training in one process of plain PyTorch, to compare with."""

import argparse

import torch
from corpus import Batches
from torch import nn


def plain_losses(model: nn.Module, batches: Batches, *, steps: int, world_size: int, lr: float) -> list[float]:
    """The losses of the first steps, with every rank's micro-batch in one batch; trains ``model``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        parts = [batches.get(step, rank) for rank in range(world_size)]
        tokens, labels = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
        loss = model(tokens, labels=labels)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_difference(
    losses: list[float], model: nn.Module, batches: Batches, args: argparse.Namespace, world_size: int
) -> float:
    """Print and return the largest relative difference of the first losses from plain PyTorch's."""
    steps = min(args.check_steps, len(losses))
    expected = plain_losses(model, batches, steps=steps, world_size=world_size, lr=args.lr)
    got, want = torch.tensor([losses[:steps], expected], dtype=torch.float64)
    difference = (got / want - 1).abs().max().item()  # a NaN stays a NaN
    print(f"check: {steps} steps against plain PyTorch in one process: losses differ by {difference:.2e} at most")
    return difference
