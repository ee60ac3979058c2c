"""What torchrun starts in test_torchrun.py: ``torchrun_program.py STEPS FOLDER``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.dist.models import rows


def main() -> None:
    torch.set_num_threads(1)
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = zcompile.compile(nn.Linear(7, 7), backend="eager", verify="off", timeout=20.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x = rows(step, rank)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 3:
            (folder / f"trains{rank}").write_text(repr(losses))
        if step > 3:
            time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
