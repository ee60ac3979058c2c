"""Stop a run, and go on as if nothing had happened.

``STEPS=8 torchrun --nproc_per_node=2 examples/resume.py run/last``, then the same without ``STEPS``: it ends with the loss of
a run of 20 steps.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import zcompile

STEPS = int(os.environ.get("STEPS", "20"))  # a first run may stop early: STEPS=8


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))


def main(path: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = zcompile.compile(new_model(), stage=3, backend="eager")
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    torch.manual_seed(1 + rank)  # each rank draws its own data and dropout
    first = 0
    if os.path.exists(path):
        first = zcompile.load_checkpoint(path, model, optimizer, scheduler=scheduler).step
    loss = torch.zeros(())
    for _ in range(first, STEPS):
        x = torch.randn(8, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    zcompile.save_checkpoint(path, model, optimizer, scheduler=scheduler, step=STEPS)
    if rank == 0:
        print(f"steps {first} to {STEPS}: loss {loss.item()!r}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
