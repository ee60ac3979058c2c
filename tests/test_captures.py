"""Tests share a capture between equal models, and only between these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.captures import shared_captures


class Settings:
    def __init__(self, power: int) -> None:
        self.power = power


class Small(nn.Module):
    def __init__(self, width: int = 3, power: int = 2, scale: float = 1.0, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, width), nn.Linear(width, 3)
        if tied:
            self.b.weight = self.a.weight
        self.register_buffer("shift", torch.zeros(width))
        self.scale, self.settings = scale, Settings(power)

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return self.b(self.a(x).pow(self.settings.power) * self.scale) * times + self.shift.sum()


class Other(Small):
    pass


def frozen() -> nn.Module:
    model = Small()
    model.a.bias.requires_grad_(False)
    return model


def captured(make: Callable[[], nn.Module], *args: Any, evaluates: bool = False, **options: Any) -> Any:
    model: Any = zcompile.compile(make().train(not evaluates), backend="eager", **options)
    model(torch.ones(2, 3) if not args else args[0], *args[1:])
    return model._session.latest.captured


OTHERS: dict[str, Callable[[], Any]] = {
    "sizes": lambda: captured(lambda: Small(width=4)),
    "an attribute": lambda: captured(lambda: Small(scale=2.0)),
    "an attribute of an object": lambda: captured(lambda: Small(power=3)),
    "ties": lambda: captured(lambda: Small(tied=True)),
    "a class": lambda: captured(Other),
    "what trains": lambda: captured(frozen),
    "a mode": lambda: captured(Small, evaluates=True),
    "rows": lambda: captured(Small, torch.ones(3, 3)),
    "a plain argument": lambda: captured(Small, torch.ones(2, 3), 2),
    "an input that wants a gradient": lambda: captured(Small, torch.ones(2, 3, requires_grad=True)),
    "a dtype of computation": lambda: captured(Small, precision="bf16"),
    "what is differentiable": lambda: captured(Small, differentiable=[0]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_only_equal_models_share(other: str) -> None:
    with shared_captures():
        first = captured(Small)
        assert captured(Small, stage=1) is first
        assert OTHERS[other]() is not first
    assert captured(Small) is not first


def test_what_shares_a_capture_has_weights_of_its_own() -> None:
    x = torch.arange(6.0).view(2, 3)
    with shared_captures():
        for seed in (1, 2):
            torch.manual_seed(seed)
            plain = Small()
            torch.manual_seed(seed)
            model = zcompile.compile(Small(), backend="eager")
            plain(x).sum().backward()
            model(x).sum().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
