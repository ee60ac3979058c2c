"""Jobs of the GPU tests whose steps are replayed for long, or cannot be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from tests.gpu.trainees import HERE, SMALL, compiled, train

MANY_STEPS = 500


def long(device: torch.device, backend: str) -> dict[str, Any]:
    """Many steps three times: twice issued, then replayed; with algorithms that give the same bits, where there are such."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    courses, replays = [], []
    try:
        for replays_steps in (False, False, True):
            model, optimizer = compiled(SMALL, device, backend, 3, None, cuda_graphs=replays_steps)
            courses.append(train(model, optimizer, model.clip_grad_norm_, SMALL, HERE, device, steps=MANY_STEPS))
            replays.append(model.report().replays)
            model.close()
    finally:
        torch.use_deterministic_algorithms(False)
    return {"courses": courses, "replays": replays}


@torch.library.custom_op("zcompile_tests::asking", mutates_args=())
def asking(x: Tensor) -> Tensor:
    """Doubles what a number on the host, asked of the device, says: no graph can hold that."""
    return x * (2.0 if x.abs().max().item() >= 0 else 1.0)


asking.register_fake(torch.empty_like)
asking.register_autograd(lambda ctx, grad: 2 * grad)


class Asking(nn.Module):
    """A model whose forward waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(asking(self.first(x))).square().mean()}


def asks(device: torch.device, backend: str) -> dict[str, Any]:
    """Losses beside those of plain PyTorch; ``cuda_graphs`` has nothing that it could replay."""
    courses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = Asking().to(device)
        if compiles:
            model = zcompile.compile(model, backend=backend, timeout=20.0, cuda_graphs=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 16, device=device)
        losses = []
        for _ in range(6):
            loss = model(x)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        courses.append(losses)
    result = {"losses": courses[1], "plain": courses[0], "replays": model.report().replays}
    zcompile.unwrap(model)
    return result
