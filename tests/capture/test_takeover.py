"""The compiled module as an object: what can be read from it, loaded into it, and what it refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.capture.compare import assert_same, assert_same_state, build, compiled
from zcompile.errors import ShardingError, StateError, UnfilledError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Config:
    width = 4


class Net(nn.Module):
    kind = "net"

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.options = {"a": 1}
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        self.more = nn.ModuleDict({"norm": nn.BatchNorm1d(3)})

    @property
    def depth(self) -> int:
        return len(self.layers)

    def describe(self, word: str) -> str:
        return f"{word} {self.depth}"

    def forward(self, x: Tensor) -> Tensor:
        return self.more["norm"](self.layers(x))


def test_attributes_and_methods_are_readable() -> None:
    model = compiled(Net)
    assert model.config.width == 4 and model.options == {"a": 1} and model.kind == "net"
    assert model.depth == 3 and model.describe("depth") == "depth 3"
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = model.nothing_like_this
    assert not hasattr(model, "nothing_like_this")


def test_submodules() -> None:
    model, plain = compiled(Net), build(Net)
    assert len(model.layers) == 3 and [type(m) for m in model.layers] == [nn.Linear, nn.Tanh, nn.Linear]
    assert isinstance(model.layers[0], nn.Linear) and isinstance(model, nn.Module)
    assert "norm" in model.more and list(model.more) == ["norm"]
    names = [n for n, _ in model.named_modules()]
    assert names == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in model.named_children()] == ["layers", "more"]
    assert model.get_submodule("layers.2") is model.layers[2]
    assert str(model.layers[0]) == "Linear(in_features=4, out_features=4, bias=True)"
    assert "Linear" in repr(model)


def test_container_as_the_model() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    model = compiled(make)
    assert len(model) == 3 and isinstance(model[0], nn.Linear)
    assert [type(m) for m in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert bool(compiled(lambda: nn.Linear(4, 3)))
    with pytest.raises(TypeError):
        len(compiled(lambda: nn.Linear(4, 3)))


def test_calls_of_submodules_by_the_user() -> None:
    """One process has full parameters, so a part of the model can be called as it is."""
    model, plain = compiled(Net), build(Net)
    assert_same(model.layers(X), plain.layers(X))


def test_state_dict_round_trip() -> None:
    model, plain = compiled(Net), build(Net, seed=5)
    assert_same(dict(model.state_dict()), dict(build(Net).state_dict()))
    result = model.load_state_dict(plain.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert_same(model(X), plain(X), exact=False)
    assert_same_state(model, plain, exact=False)
    other = build(Net, seed=7)
    other.load_state_dict(model.state_dict())
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_state_dict_that_does_not_fit() -> None:
    model = compiled(Net)
    state = dict(model.state_dict())
    state["wrong"] = state.pop("layers.0.weight")
    with pytest.raises(StateError, match=r"missing \['layers.0.weight'\], unexpected \['wrong'\]"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.0.weight"] and result.unexpected_keys == ["wrong"]
    state = dict(model.state_dict())
    state["layers.0.weight"] = torch.zeros(2, 2)
    with pytest.raises((StateError, RuntimeError), match=r"layers.0.weight"):
        model.load_state_dict(state)
    state = dict(model.state_dict())
    del state["more.norm.running_mean"]
    with pytest.raises(StateError, match="running_mean"):
        model.load_state_dict(state)
    with pytest.raises(StateError, match="assign"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_extra_state() -> None:
    class Extra(nn.Linear):
        value = 1

        def get_extra_state(self) -> Any:
            return {"value": self.value}

        def set_extra_state(self, state: Any) -> None:
            self.value = state["value"]

    model, plain = compiled(lambda: Extra(4, 3)), build(lambda: Extra(4, 3))
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.value = 9
    model.load_state_dict(plain.state_dict())
    assert model.value == 9


def test_moves_and_copies_are_refused() -> None:
    model = compiled(Net)
    for move in (
        lambda: model.to("cpu"),
        lambda: model.half(),
        lambda: model.double(),
        lambda: model.cuda(),
        lambda: model.to(torch.bfloat16),
        lambda: model.to_empty(device="cpu"),
    ):
        with pytest.raises(ShardingError, match=r"before zcompile.compile"):
            move()
    with pytest.raises(ShardingError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(ShardingError, match="cannot be pickled"):
        pickle.dumps(model)
    with pytest.raises(ShardingError, match="cannot be pickled"):
        torch.save(model, "/dev/null")
    assert model(X).shape == (5, 3)


def test_other_memory_behind_a_parameter_is_refused() -> None:
    def assign(m: Any) -> None:
        m.layers[0].weight.data = torch.zeros(4, 4)

    for change in (lambda m: m.layers.double(), lambda m: m.layers[0].to(torch.bfloat16), assign):
        model = compiled(Net)
        model(X)
        change(model)
        with pytest.raises(ShardingError, match=r"'layers.0.weight' was given other memory.*in place"):
            model(X)


def test_meta_model_is_filled() -> None:
    with torch.device("meta"):
        made = Net()
    model = zcompile.compile(made, backend="eager")
    with pytest.raises(UnfilledError, match=r"parameter 'layers.0.weight' has no value yet \(6 in all\)"):
        model(X)
    plain = build(Net)
    partial = {n: t for n, t in plain.state_dict().items() if not n.startswith("layers.2")}
    model.load_state_dict(partial, strict=False)
    with pytest.raises(UnfilledError, match=r"parameter 'layers.2.weight' has no value yet \(2 in all\)"):
        model(X)
    model.load_state_dict(plain.state_dict())
    for m in (plain, model):
        (m(X) * X[:, :3]).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_unwrap_gives_the_eager_model_back() -> None:
    model, plain = compiled(Net), build(Net)
    for m in (plain, model):
        m(X).sum().backward()
        m.zero_grad()
    eager = zcompile.unwrap(model)
    assert type(eager) is Net
    assert_same(eager(X), plain(X))
    again = zcompile.compile(eager, backend="eager")
    assert_same(again(X), plain(X), exact=False)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "group", "flat"])
def test_optimizers_train_it(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def optimizer(m: Any) -> Any:
        if name == "SGD":
            return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        if name == "group":
            return torch.optim.Adam([{"params": list(m.parameters())[:2], "lr": 0.2}])
        kind = zcompile.optim.AdamW if name == "flat" and m is model else torch.optim.AdamW
        return kind(m.parameters(), lr=0.1)

    plain, model = build(make), compiled(make)
    optimizers = optimizer(plain), optimizer(model)
    for _ in range(3):
        for m, each in zip((plain, model), optimizers, strict=True):
            m(X).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            each.step()
            each.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unwrapped", [False, True])
def test_nothing_keeps_a_model_that_nobody_has(unwrapped: bool) -> None:
    model = compiled(Net)
    optimizer = zcompile.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    alive = [weakref.ref(x) for x in (model, model.original, model.original.layers, model._session.runner.shards)]
    if unwrapped:
        zcompile.unwrap(model)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
