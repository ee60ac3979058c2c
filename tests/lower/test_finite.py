"""debug_nonfinite: the first operator, argument or parameter that is not finite is named, and masks are left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcompile
from zcompile.errors import NonFiniteError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, power: float) -> Tensor:
        return self.up(x) * 10.0**power


class Blocks(nn.Module):
    """Three equal blocks, of which calls share one region, and lines that are not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, way: str = "") -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, 0.0)
        z = self.head(self.drop(x))
        if way == "log":
            z = (z - z.amax(-1, keepdim=True)).log()  # LOG
        if way == "sqrt":
            z = (z - z.detach()).abs().sqrt()  # SQRT
        if way == "dropout":
            z = self.drop(z).reciprocal()  # DROPOUT
        return {"loss": (z * y).sum()}


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return zcompile.compile(model or Blocks(), backend="eager", verify="off", debug_nonfinite=True, **options)


def line_of(mark: str) -> str:
    with open(__file__) as file:
        return f"{__file__}:{next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f'# {mark}'))}"


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def message(call: Any) -> list[str]:
    with pytest.raises(NonFiniteError) as caught:
        call()
    return str(caught.value).splitlines()


def test_a_finite_step_is_as_without() -> None:
    x, y = data()
    grads = []
    for model in (compiled(), zcompile.compile(Blocks(), backend="eager", verify="off")):
        torch.manual_seed(3)
        model(x, y)["loss"].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_the_operator_and_its_line_in_forward() -> None:
    x, y = data()
    first, *graph = message(lambda: compiled()(x, y, way="log"))
    assert first.startswith("forward: aten.log gives ") and "inf in 8 values" in first
    assert line_of("LOG") in first and "(region forward_" in first and "of unit 'head'" in first
    assert any(line.startswith("  > %log: f32[2, 4] = aten.log(") for line in graph)


def test_the_operator_in_backward() -> None:
    x, y = data()
    loss = compiled()(x, y, way="sqrt")["loss"]
    assert loss == 0
    first, *_ = message(loss.backward)
    assert first.startswith("backward: aten.") and " at " + line_of("SQRT") in first


def test_random_numbers_are_drawn_again_and_no_more() -> None:
    """The rerun drops what the run dropped; a step with a legitimate infinity leaves the random stream alone."""
    x, y = data()
    model = compiled()
    torch.manual_seed(5)
    first, *_ = message(lambda: model(x, y, way="dropout"))
    assert "aten.reciprocal gives" in first and line_of("DROPOUT") in first


@pytest.mark.parametrize("index", [0, 2])
def test_the_module_among_equal_ones(index: int) -> None:
    """One region serves all blocks; the error is about the call of it."""
    x, y = data()
    model = Blocks()
    with torch.no_grad():
        model.layers[index].up.weight.fill_(3e38)
    first, *_ = message(lambda: compiled(model)(1000 * x, y))
    assert f" in module 'layers.{index}.up' at " in first and f"of unit 'layers.{index}'" in first, first


def test_the_parameter() -> None:
    x, y = data()
    model = Blocks()
    with torch.no_grad():
        model.layers[1].up.bias[2] = math.nan
    first, *_ = message(lambda: compiled(model)(x, y))
    assert first.startswith(
        "forward: parameter 'layers.1.up.bias' has 1 nan in 4 values, which aten.addmm reads in module"
    )


@pytest.mark.parametrize(("bad", "text"), [(math.nan, "1 nan"), (math.inf, "1 inf")])
@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_the_argument(bad: float, text: str, how: str) -> None:
    x, y = data()
    y[1, 2] = bad
    call = (lambda: compiled()(x, y)) if how == "positional" else (lambda: compiled()(x=x, y=y))
    first, *_ = message(call)
    name = "[1]" if how == "positional" else "y"
    assert first.startswith(f"forward: argument {name} has {text} in 8 values, which aten.mul.Tensor reads at "), first


def test_the_gradient_that_arrives() -> None:
    x, y = data()
    loss = compiled()(x, y)["loss"]
    first, *_ = message(lambda: (loss * math.inf).backward())
    assert first.startswith("backward: the gradient that arrives at output 0 has 1 inf in 1 value")


class Attention(nn.Module):
    """Masks of every kind, made inside or passed in, shared by layers and saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(4, 12) for _ in range(2))
        self.register_buffer("triangle", torch.full((5, 5), -math.inf).triu(1))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, way: str, given: Tensor | None = None) -> dict[str, Tensor]:
        if way == "full":
            mask = torch.full((5, 5), -math.inf).triu(1)
        elif way == "fill":
            mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf)
        elif way == "where":
            mask = torch.where(torch.arange(5) > torch.arange(5)[:, None], -math.inf, 0.0)
        elif way == "summed":
            most = torch.finfo(torch.float32).min
            mask = torch.full((5, 5), most).triu(1) + torch.full((5, 5), most).triu(1)
        else:
            mask = self.triangle if given is None else given
        for layer in self.qkv:
            q, k, v = layer(x).chunk(3, -1)
            if way == "sdpa":
                x = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]
            else:
                scores = q @ k.transpose(-1, -2) + mask
                x = torch.softmax(scores, -1) @ v
        return {"loss": self.head(x).square().mean(), "scores": scores if way != "sdpa" else x}


@pytest.mark.parametrize("way", ["full", "fill", "where", "summed", "buffer", "given", "sdpa"])
def test_masks_are_left_alone(way: str) -> None:
    model, plain = compiled(Attention()), Attention()
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    given = plain.triangle.clone() if way == "given" else None
    for each in (model, plain):
        each(x, way, given)["loss"].backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)


def test_a_row_that_is_masked_altogether() -> None:
    """NaN from a mask is no mask."""
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.full((5, 5), -math.inf)
    first, *_ = message(lambda: compiled(Attention())(x, "given", mask))
    assert ("nan" in first and "softmax" in first.lower()) or "aten.sub" in first or "aten.exp" in first, first


class MaskedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.head(x).masked_fill(torch.arange(4) == 2, -math.inf)  # MASK
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


def test_an_infinite_loss_is_reported_although_it_comes_from_a_mask() -> None:
    x = torch.randn(3, 4)
    model = compiled(MaskedLoss())
    model(x, torch.tensor([0, 1, 3]))["loss"].backward()
    first, *_ = message(lambda: model(x, torch.tensor([0, 2, 3])))
    assert first.startswith("forward: aten.") and " inf in 1 value" in first
    assert f" at {line_of('MASK')}" in first.partition("; infinities begin in aten.")[2], first


class Log(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).log()  # INDUCTOR


def test_under_inductor() -> None:
    model = zcompile.compile(Log(), backend="inductor", verify="off", debug_nonfinite=True)
    with torch.no_grad():
        model(torch.ones(4))
        first, *_ = message(lambda: model(-torch.ones(4)))
    assert first.startswith("forward: aten.log gives 4 nan in 4 values") and line_of("INDUCTOR") in first


def test_off_it_runs_the_same_program() -> None:
    x, y = data()
    plain = zcompile.compile(Blocks(), backend="eager", verify="off")
    assert not plain(x, y, way="log")["loss"].isfinite()
    names = [ins.body for ins in plain._session.latest.program.forward.program.instructions]
    assert set(names) == set(plain.graphs.forward.regions), "calls share regions"
