"""Hooks of tensors, parameters and modules: honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.capture.compare import assert_same, assert_same_state, build, compiled
from zcompile.errors import CaptureError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(self.a(x).tanh()) * scale


def both() -> tuple[nn.Module, Any]:
    return build(Net), compiled(Net)


def test_hook_on_an_output() -> None:
    plain, model = both()
    seen: dict[Any, list[Tensor]] = {plain: [], model: []}
    for m in (plain, model):
        out = m(X)
        out.register_hook(lambda g, m=m: seen[m].append(g) or g * 2)
        out.retain_grad()
        out.square().sum().backward()
        seen[m].append(out.grad)
    assert_same(seen[model], seen[plain], exact=False)
    assert_same_state(model, plain, exact=False)


def test_hook_on_an_input() -> None:
    plain, model = both()
    grads = []
    for m in (plain, model):
        x = X.clone().requires_grad_()
        x.register_hook(lambda g: g * 3)
        m(x).sum().backward()
        grads.append(x.grad)
    assert_same(grads[1], grads[0], exact=False)


def test_hooks_on_parameters() -> None:
    plain, model = both()
    order: dict[Any, list[str]] = {plain: [], model: []}
    for m in (plain, model):
        m.a.weight.register_hook(lambda g, m=m: order[m].append("hook") or g * 0.5)
        m.a.weight.register_hook(lambda g: g + 1)
        m.b.bias.register_post_accumulate_grad_hook(lambda p, m=m: order[m].append(f"after {p.grad.sum():.3f}"))
        m(X).sum().backward()
        m(X).sum().backward()
    assert sorted(order[model]) == sorted(order[plain])
    assert_same_state(model, plain, exact=False)


def test_optimizer_step_in_backward() -> None:
    plain, model = both()
    for m in (plain, model):
        for p in m.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def step(_: Any, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            m(X).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is None
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("before", [True, False])
def test_forward_hooks_of_the_model(before: bool) -> None:
    seen: dict[str, list[Any]] = {"plain": [], "model": []}

    def hook(m: Any, name: str) -> None:
        m.register_forward_pre_hook(lambda m, args: seen[name].append(len(args)) or (args[0] * 2,))
        m.register_forward_pre_hook(lambda m, args, kw: (args, {**kw, "scale": 0.5}), with_kwargs=True)
        m.register_forward_hook(lambda m, args, out: seen[name].append(tuple(out.shape)) or out + 1)
        m.register_forward_hook(lambda m, args, kw, out: seen[name].append(kw), with_kwargs=True)

    plain, made = build(Net), build(Net)
    hook(plain, "plain")
    if before:
        hook(made, "model")
    model = zcompile.compile(made, backend="eager")
    if not before:
        hook(model, "model")
    for m in (plain, model):
        for _ in range(2):
            m(X).sum().backward()
    assert_same(model(X), plain(X))
    assert seen["model"] == seen["plain"]
    assert_same_state(model, plain, exact=False)


def test_forward_hook_that_is_always_called() -> None:
    model = compiled(Net)
    calls: list[int] = []
    model.register_forward_hook(lambda m, args, out: calls.append(1), always_call=True)
    with pytest.raises(TypeError):
        model(X, nothing=1)
    assert calls == [1]


def test_removed_hook() -> None:
    plain, model = both()
    handle = model.register_forward_hook(lambda m, args, out: out * 0)
    assert not model(X).any()
    handle.remove()
    assert_same(model(X), plain(X))


@pytest.mark.parametrize("before", [True, False])
def test_backward_hooks_of_the_model(before: bool) -> None:
    seen: dict[str, list[Any]] = {"plain": [], "model": []}

    def hook(m: Any, name: str) -> None:
        m.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,))
        m.register_full_backward_hook(lambda m, gi, go: seen[name].extend([*gi, *go]))

    plain, made = build(Net), build(Net)
    hook(plain, "plain")
    if before:
        hook(made, "model")
    model = zcompile.compile(made, backend="eager")
    if not before:
        hook(model, "model")
    for m in (plain, model):
        m(X.clone().requires_grad_()).square().sum().backward()
    assert_same(seen["model"], seen["plain"], exact=False)
    assert_same_state(model, plain, exact=False)


PURE: dict[str, Any] = {
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "forward hook": lambda m: m.register_forward_hook(lambda m, args, out: out * 2),
    "with kwargs": lambda m: m.register_forward_hook(lambda m, args, kwargs, out: out * 2, with_kwargs=True),
    "requires grad": lambda m: m.register_forward_hook(lambda m, args, out: out.requires_grad_(True)),
}


@pytest.mark.parametrize("kind", PURE)
def test_forward_hooks_of_submodules_are_part_of_the_graph(kind: str) -> None:
    plain, model = both()
    for register in (True, False, True):
        handles = [PURE[kind](m.b) for m in (plain, model)] if register else []
        assert_same(model(X), plain(X))
        for m in (plain, model):
            m(X).square().sum().backward()
        assert_same_state(model, plain, exact=False)
        for handle in handles:
            handle.remove()


SEEN: dict[str, Tensor] = {}


@pytest.mark.parametrize("before", [True, False])
def test_forward_hooks_with_side_effects_are_refused(before: bool) -> None:
    seen: list[Tensor] = []
    effects: dict[Any, str] = {
        lambda m, args, out: seen.append(out): "what a forward hook of module 'b' holds",
        lambda m, args, out: SEEN.update(b=out.detach()): "a global of .*: SEEN",
        lambda m, args, out: setattr(m, "last", out): "'b.last'",
    }
    for hook, name in effects.items():
        plain, model = both()
        if not before:
            model(X)
        handle = model.b.register_forward_hook(hook)
        with pytest.raises(CaptureError, match=name):
            model(X)
        handle.remove()
        assert_same(model(X), plain(X))


HOOKS: dict[str, Any] = {
    "backward hook": lambda m: m.register_full_backward_hook(lambda m, gi, go: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda m, g: None),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("captured", [False, True])
def test_backward_hooks_of_submodules_are_refused(kind: str, captured: bool) -> None:
    plain, model = both()
    if captured:
        model(X)
    handle = HOOKS[kind](model.b)
    with pytest.raises(CaptureError, match=f"module 'b' has a {kind}"):
        model(X)
    handle.remove()
    assert_same(model(X), plain(X))


@pytest.mark.parametrize(
    "register",
    [
        lambda: nn.modules.module.register_module_forward_hook(lambda m, args, out: None),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda m, args: None),
        lambda: nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: None),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_hooks_of_all_modules_are_refused(register: Any, captured: bool) -> None:
    plain, model = both()
    if captured:
        model(X)
    handle = register()
    try:
        with pytest.raises(CaptureError, match="registered for all modules"):
            model(X)
    finally:
        handle.remove()
    assert_same(model(X), plain(X))


def test_saved_tensor_hooks() -> None:
    plain, model = both()
    for m in (plain, model):
        with torch.autograd.graph.save_on_cpu():
            m(X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_state_dict_hooks() -> None:
    plain, model = both()
    for m in (plain, model):
        m.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(extra=torch.ones(1)))
    assert list(model.state_dict()) == list(plain.state_dict())
