"""Parameters of every kind, and models that use them in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import zcompile
from tests.capture.compare import agree, assert_same, assert_same_state, build, compiled
from zcompile.errors import CaptureError, ShardingError, ZCompileError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


class Kinds(nn.Module):
    """One parameter of a kind, used beside a layer."""

    def __init__(self, value: Tensor, use: Any, trainable: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.p = nn.Parameter(value.clone(), requires_grad=trainable)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.layer(x), self.p)


KINDS: dict[str, Any] = {
    "0-dim": lambda: Kinds(torch.tensor(2.0), lambda y, p: y * p),
    "zero elements": lambda: Kinds(torch.zeros(0, 3), lambda y, p: torch.cat([y, p])),
    "zero elements unused": lambda: Kinds(torch.zeros(3, 0), lambda y, p: y),
    "not contiguous": lambda: Kinds(torch.randn(3, 6).t(), lambda y, p: p @ y.t()),
    "sliced": lambda: Kinds(torch.randn(6, 6)[::2, 1:4], lambda y, p: y @ p),
    "channels last": lambda: Kinds(
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda y, p: y.sum() * p
    ),
    "complex": lambda: Kinds(torch.randn(3, dtype=torch.complex64), lambda y, p: (y * p).abs()),
    "double": lambda: Kinds(torch.randn(3, dtype=torch.float64), lambda y, p: y * p),
    "half": lambda: Kinds(torch.randn(3, dtype=torch.float16), lambda y, p: y * p.float()),
    "bf16": lambda: Kinds(torch.randn(3, dtype=torch.bfloat16), lambda y, p: y * p),
    "integer": lambda: Kinds(torch.tensor([2, 0, 1]), lambda y, p: y[:, p], False),
    "bool": lambda: Kinds(torch.tensor([True, False, True]), lambda y, p: torch.where(p, y, 0.0), False),
    "frozen": lambda: Kinds(torch.randn(3), lambda y, p: y * p, False),
    "unused": lambda: Kinds(torch.randn(3), lambda y, p: y),
    "detached": lambda: Kinds(torch.randn(3), lambda y, p: y * p.detach()),
    "no_grad": lambda: Kinds(torch.randn(3), lambda y, p: y * _no_grad(p)),
    "data": lambda: Kinds(torch.randn(3), lambda y, p: y * p.data),
    "used in an index": lambda: Kinds(torch.randn(7, 3), lambda y, p: y[0] * p[torch.tensor([1, 1, 2])]),
    "embedding": lambda: Kinds(torch.randn(7, 3), lambda y, p: F.embedding(torch.tensor([1, 1, 2]), p)),
    "high dimensional": lambda: Kinds(torch.randn(2, 1, 3, 1, 2), lambda y, p: y[0, 0] * p),
    "view": lambda: Kinds(torch.randn(6), lambda y, p: y @ p.view(3, 2)),
}


def _no_grad(p: Tensor) -> Tensor:
    with torch.no_grad():
        return p * 2


@pytest.mark.parametrize("case", KINDS)
def test_kind_of_parameter(case: str) -> None:
    agree(KINDS[case], X, exact=False)


def test_tied_under_three_names() -> None:
    model, _ = agree(Tied, X, exact=False)
    assert model.a.weight is model.b.weight is model.c.weight
    assert [n for n, _ in model.named_parameters()] == ["a.weight", "a.bias", "b.bias"]


def test_tied_in_another_shape() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)
            self.out.weight = self.emb.weight

        def forward(self, i: Tensor) -> Tensor:
            return self.out(self.emb(i)) @ self.emb.weight

    agree(Transposed, torch.tensor([1, 2, 2]), exact=False)


def test_names_and_order() -> None:
    plain, model = build(Tied), compiled(Tied)
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == [
        n for n, _ in plain.named_parameters(remove_duplicate=False)
    ]
    assert list(model.state_dict()) == list(plain.state_dict())


def test_frozen_then_trained_then_frozen() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))

    plain, model = build(make), compiled(make)
    for trainable in (False, True, False):
        for m in (plain, model):
            m.get_submodule("0").requires_grad_(trainable)
            m.zero_grad()
            m(X).square().sum().backward()
        assert_same_state(model, plain)
    assert model._session.num_captures == 2
    for m in (plain, model):
        m.requires_grad_(False)
        assert not m(X).requires_grad
    assert_same(model(X), plain(X))


def test_requires_grad_changed_by_the_parameter() -> None:
    plain, model = build(Tied), compiled(Tied)
    for m in (plain, model):
        m(X).sum().backward()
        m.zero_grad()
        m.get_parameter("a.bias").requires_grad = False
        m(X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_lists_and_dicts() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([torch.randn(4), torch.randn(4, 2)])
            self.dict = nn.ParameterDict({"a": torch.randn(2), "b-c": torch.randn(2)})
            self.layers = nn.ModuleDict({"x": nn.Linear(2, 2), "y": nn.ModuleList([nn.Linear(2, 2)])})

        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.list[0]) @ self.list[1] + self.dict["a"]
            for name, p in self.dict.items():
                y = y * p if name != "a" else y
            return self.layers["y"][0](self.layers["x"](y)) + sum(p.sum() for p in self.list)

    agree(Lists, X, exact=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
        lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4), use_trivialization=False)),
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)),
    ],
)
def test_parametrized(make: Any) -> None:
    agree(make, X, exact=False)


def test_weight_norm_by_hooks_is_refused() -> None:
    with pytest.warns(FutureWarning):
        model = compiled(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3))))
    with pytest.raises(CaptureError, match=r"changes attributes of modules.*'0.weight'"):
        model(X)


def test_lazy_parameter_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"'1.weight' is lazy"):
        zcompile.compile(nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2)), backend="eager")
    lazy = nn.LazyLinear(2)
    lazy(X)
    zcompile.compile(lazy, backend="eager")(X)


def test_parameter_of_another_module() -> None:
    class Borrows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.a(x), self.b.weight, self.a.bias) + self.b.weight.norm()

    agree(Borrows, X, exact=False)


def test_parameter_that_is_not_registered_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.hidden = [nn.Parameter(torch.ones(3))]

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.hidden[0]

    with pytest.raises(CaptureError, match=r"requires grad.*register"):
        compiled(Hidden)(X)
    with torch.no_grad():
        assert_same(compiled(Hidden)(X), build(Hidden)(X))


def test_global_parameter_is_refused() -> None:
    outside = nn.Parameter(torch.ones(3))

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * outside

    with pytest.raises(CaptureError, match=r"requires grad.*register"):
        compiled(Uses)(X)


def test_module_hidden_in_a_list_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.hidden = [nn.Linear(3, 2)]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](self.layer(x))

    with pytest.raises(CaptureError, match=r"requires grad.*register"):
        compiled(Hidden)(X)


def test_parameter_written_in_forward_is_refused() -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.mul_(0.9)
            return self.layer(x)

    with pytest.raises(CaptureError, match=r"parameter 'layer.weight'"):
        compiled(Decays)(X)


def test_parameter_replaced_after_compile_is_refused() -> None:
    for change in (
        lambda m: setattr(m.layer, "weight", nn.Parameter(torch.zeros(3, 4))),
        lambda m: setattr(m, "layer", nn.Linear(4, 3)),
        lambda m: setattr(m, "more", nn.Linear(4, 3)),
        lambda m: m.layer.register_parameter("extra", nn.Parameter(torch.zeros(1))),
        lambda m: delattr(m, "layer"),
    ):
        model = compiled(KINDS["frozen"])
        model(X)
        change(model)
        with pytest.raises(CaptureError, match=r"added, removed or replaced.*unwrap"):
            model(X)


def test_data_of_a_parameter_changed_by_the_user() -> None:
    plain, model = build(Tied), compiled(Tied)
    for m in (plain, model):
        m(X)
        with torch.no_grad():
            m.a.weight.mul_(2)
            m.b.bias.copy_(torch.arange(4.0))
            m.a.bias.data.fill_(1.0)
    assert_same(model(X), plain(X))


def test_gradients_set_by_the_user() -> None:
    plain, model = build(Tied), compiled(Tied)
    for m in (plain, model):
        m(X).sum().backward()
        m.a.weight.grad.zero_()
        m.a.bias.grad = torch.ones(4)
        m.b.bias.grad = None
        m(X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_optimizer_built_before_compile() -> None:
    plain = build(Tied)
    made = build(Tied)
    optimizers = torch.optim.AdamW(plain.parameters(), lr=0.1), torch.optim.AdamW(made.parameters(), lr=0.1)
    model = zcompile.compile(made, backend="eager")
    for _ in range(3):
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            m(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_compile_twice_is_refused() -> None:
    made = build(Tied)
    model = zcompile.compile(made, backend="eager")
    with pytest.raises(ZCompileError, match="the model is compiled already"):
        zcompile.compile(model, backend="eager")


def test_parameters_of_a_compiled_model_are_refused() -> None:
    """The plain module that a compiled one was made from, and another module that shares a parameter with it."""
    made = build(Tied)
    model = zcompile.compile(made, backend="eager")
    with pytest.raises(ZCompileError, match="belongs to a compiled model already; use that one, or end it with"):
        zcompile.compile(made, backend="eager")
    shares = nn.Linear(2, 2)
    shares.weight = next(model.parameters())
    with pytest.raises(ZCompileError, match=r"'0\.weight' belongs to a compiled model already"):
        zcompile.compile(nn.Sequential(shares), backend="eager")
    zcompile.compile(zcompile.unwrap(model), backend="eager")(X)


def test_compiled_model_inside_another_is_refused() -> None:
    inner = compiled(lambda: nn.Linear(4, 3))
    with pytest.raises(ZCompileError, match="'0' is compiled already"):
        zcompile.compile(nn.Sequential(inner, nn.Linear(3, 2)), backend="eager")


def test_parameters_that_share_memory_are_refused() -> None:
    """Two Parameter objects, or a parameter and a buffer, over the same numbers: each shard would go its own way."""
    weight = torch.randn(6, 4)
    for kind, second in {"parameter": nn.Parameter(weight.data), "buffer": weight[1:2]}.items():
        module = nn.Linear(4, 3)
        module.first = nn.Parameter(weight)
        module.register_buffer("second", second) if kind == "buffer" else module.register_parameter("second", second)
        with pytest.raises(ShardingError, match=rf"parameter 'first' and {kind} 'second' share memory.*one Parameter"):
            zcompile.compile(module, backend="eager")
    module = nn.Linear(4, 3)
    module.first, module.second = nn.Parameter(weight[:2]), nn.Parameter(weight[2:])  # one memory, no common element
    zcompile.compile(module, backend="eager")(X)


def test_expanded_parameter_is_refused() -> None:
    module = nn.Linear(4, 3)
    module.p = nn.Parameter(torch.randn(3).expand(4, 3))
    with pytest.raises(ShardingError, match=r"parameter 'p' of shape \[4, 3\] is expanded.*contiguous\(\)"):
        zcompile.compile(module, backend="eager")


def test_model_without_parameters() -> None:
    agree(lambda: nn.Tanh(), X)
    agree(lambda: nn.Tanh(), X.clone().requires_grad_(), exact=False)
