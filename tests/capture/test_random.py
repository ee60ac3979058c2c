"""Random numbers: the stream of plain PyTorch, with captures that leave it untouched."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.capture.compare import agree, assert_same, assert_same_state, build, compiled
from tests.capture.test_inputs import net
from zcompile.errors import CaptureError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def blocks(use_reentrant: bool | None) -> Any:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.4)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    return Blocks


RULES: dict[str, Any] = {
    "dropout": lambda f, x: F.dropout(f(x), 0.3),
    "dropout twice": lambda f, x: F.dropout(F.dropout(x, 0.2) @ f.weight.t(), 0.5),
    "dropout that nobody reads": lambda f, x: F.dropout(f(x), 0.3) + 0 * len(F.dropout(f(x * 2), 0.5)),
    "dropout of channels": lambda f, x: F.dropout1d(f(x)[None], 0.5),
    "alpha dropout": lambda f, x: F.alpha_dropout(f(x), 0.3, training=True),
    "rand": lambda f, x: f(x) * torch.rand(8, 3),
    "randn_like": lambda f, x: f(x) + torch.randn_like(f(x)) * 0.1,
    "randint": lambda f, x: f(x)[torch.randint(0, 8, (4,))],
    "randperm": lambda f, x: f(x)[torch.randperm(8)],
    "bernoulli": lambda f, x: f(x) * torch.bernoulli(torch.full((8, 3), 0.5)),
    "multinomial": lambda f, x: f(x)[torch.multinomial(torch.ones(8), 4)],
    "normal in place": lambda f, x: f(x) + torch.empty(8, 3).normal_(),
    "uniform in place": lambda f, x: f(x) + torch.empty(8, 3).uniform_(-1, 1),
    "exponential": lambda f, x: f(x) + torch.empty(8, 3).exponential_(),
    "gumbel": lambda f, x: F.gumbel_softmax(f(x)),
    "rrelu": lambda f, x: F.rrelu(f(x), training=True),
    "attention": lambda f, x: F.scaled_dot_product_attention(f(x)[None], f(x)[None], f(x)[None], dropout_p=0.3),
}


@pytest.mark.parametrize("case", RULES)
def test_same_stream(case: str) -> None:
    agree(net(RULES[case]), X, exact=case not in ("gumbel", "attention"))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_checkpoint(use_reentrant: bool | None) -> None:
    agree(blocks(use_reentrant), X.clone().requires_grad_(), calls=3, exact=False)


def test_checkpoint_of_a_function_with_randomness_and_arguments() -> None:
    def rule(f: Any, x: Tensor) -> Tensor:
        def part(y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
            return F.dropout(f(y) * scale, 0.5).exp(), y * 2

        a, b = checkpoint(part, x, 0.5, use_reentrant=False)
        return a.sum(-1) + F.dropout(b, 0.5).sum(-1)

    agree(net(rule), X, exact=False)


def test_dropout_in_eval_mode_draws_nothing() -> None:
    agree(blocks(None), X, train=False, exact=False)


def test_two_forwards_then_backwards() -> None:
    plain, model = build(blocks(None)), compiled(blocks(None))
    for m in (plain, model):
        torch.manual_seed(3)
        a, b = m(X), m(X * 2)
        (a.sum() * 2 + b.square().sum()).backward()
    assert_same_state(model, plain, exact=False)


def test_retained_graph_uses_the_same_mask() -> None:
    plain, model = build(blocks(False)), compiled(blocks(False))
    for m in (plain, model):
        torch.manual_seed(3)
        out = m(X).sum()
        out.backward(retain_graph=True)
        torch.rand(7)
        out.backward()
    assert_same_state(model, plain, exact=False)


def test_capture_leaves_every_stream_untouched() -> None:
    for mode in (True, False):
        model = compiled(blocks(None)).train(mode)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
        model(X)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
        after = torch.rand(())
        torch.manual_seed(5)
        model(X)
        assert torch.equal(torch.rand(()), after)


def test_failed_capture_leaves_the_streams_untouched() -> None:
    def rule(f: Any, x: Tensor) -> Tensor:
        torch.rand(3)
        random.random()
        raise ValueError("mine")

    torch.manual_seed(5)
    random.seed(5)
    python, stream = random.getstate(), torch.get_rng_state()
    with pytest.raises(ValueError, match="mine"):
        compiled(net(rule))(X)
    assert random.getstate() == python and torch.equal(torch.get_rng_state(), stream)


def test_compile_leaves_the_stream_untouched() -> None:
    made = build(blocks(None))
    import zcompile

    stream = torch.get_rng_state()
    zcompile.compile(made, backend="eager")
    assert torch.equal(torch.get_rng_state(), stream)


def test_python_random_in_forward_is_refused_or_not_baked_in() -> None:
    rule = net(lambda f, x: f(x) * random.random())
    model, plain = compiled(rule), build(rule)
    try:
        random.seed(1)
        have = [model(X) for _ in range(3)]
    except CaptureError as error:
        assert "random" in str(error)
        return
    random.seed(1)
    for a in have:
        assert_same(a, plain(X))


@pytest.mark.parametrize("where", ["attribute", "argument", "global"])
def test_generator_of_the_user(where: str) -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return self.layer(x) + torch.rand(3, generator=generator or self.generator)

    plain, model = build(Seeded), compiled(Seeded)
    args = [(torch.Generator().manual_seed(3),) if where == "argument" else () for _ in range(2)]
    try:
        have = [model(X, *args[0]) for _ in range(3)]
    except CaptureError as error:
        assert "enerator" in str(error)
        return
    for a in have:
        assert_same(a, plain(X, *args[1]))
