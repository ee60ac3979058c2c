"""Lion against its formula in float64, over several steps, groups and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zcompile.errors import OptimizerError
from zcompile.runtime.optim.lion import Lion


def gradients(step: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.5, 0.999), (0.0, 0.0)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_formula(betas: tuple[float, float], weight_decay: float) -> None:
    shapes = (3, 4), (5,)
    params = [nn.Parameter(t) for t in gradients(100, *shapes)]
    optimizer = Lion([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], 0.01, betas, weight_decay)
    expected = [p.detach().double() for p in params]
    momenta = [torch.zeros_like(p) for p in expected]
    for step in range(6):
        for p, g in zip(params, gradients(step, *shapes), strict=True):
            p.grad = g.clone()
        optimizer.step()
        for i, (lr, g) in enumerate(zip((0.01, 0.02), gradients(step, *shapes), strict=True)):
            update = torch.sign(betas[0] * momenta[i] + (1 - betas[0]) * g.double())
            expected[i] = expected[i] * (1 - lr * weight_decay) - lr * update
            momenta[i] = betas[1] * momenta[i] + (1 - betas[1]) * g.double()
    for p, value, momentum in zip(params, expected, momenta, strict=True):
        torch.testing.assert_close(p.detach().double(), value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), momentum, rtol=1e-5, atol=1e-6)


def test_every_element_moves_by_lr() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.tensor([5.0, -1e-3, 0.0])
    Lion([p], lr=0.1).step()
    assert p.tolist() == pytest.approx([-0.1, 0.1, 0.0])


def test_no_gradient_no_change() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Lion([used, unused], weight_decay=0.5)
    used.grad = torch.ones(2)
    loss = optimizer.step(lambda: torch.tensor(3.0))
    assert loss == 3.0
    assert unused.tolist() == [1.0, 1.0] and unused not in optimizer.state


def test_state_dict() -> None:
    runs = []
    for resume in (False, True):
        p = nn.Parameter(torch.ones(4))
        optimizer = Lion([p], lr=0.1)
        for step in range(6):
            if resume and step == 3:
                saved = optimizer.state_dict()
                optimizer = Lion([p], lr=0.5)
                optimizer.load_state_dict(saved)
            (p.grad,) = gradients(step, (4,))
            optimizer.step()
        runs.append(p.detach().clone())
    assert torch.equal(*runs)


def test_refused() -> None:
    p = nn.Parameter(torch.ones(2))
    for options in ({"lr": -1.0}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}):
        with pytest.raises(OptimizerError):
            Lion([p], **options)
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,))
    with pytest.raises(OptimizerError, match="dense gradients are supported"):
        Lion([p]).step()
