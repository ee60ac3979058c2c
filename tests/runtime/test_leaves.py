"""Gradients that a step does not accumulate itself reach the parameters as they do in plain PyTorch."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import build, compiled
from zcompile import compat

G = torch.Generator().manual_seed(1)
X, Y = torch.randn(5, 4, generator=G), torch.randn(5, 4, generator=G)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square().sum()


def both(of: Callable[[Any], Any]) -> None:
    """What ``of`` makes of a model is what it makes of the plain one, and so are the gradients that it leaves."""
    plain, model = build(Net), compiled(Net)
    want, have = of(plain), of(model)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def test_a_hook_is_called_once_with_the_sum_of_two_steps() -> None:
    def steps(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        model.a.weight.register_hook(lambda g: seen.append(g.clone()))
        (model(X) + 2 * model(Y)).backward()
        assert len(seen) == 1
        return seen

    both(steps)


def test_gradients_of_two_steps() -> None:
    both(lambda model: torch.autograd.grad(model(X) + 2 * model(Y), list(model.parameters())))


def test_a_step_beside_another_use_of_a_parameter() -> None:
    def steps(model: Any) -> tuple[Tensor, ...]:
        (model(X) + model.a.weight.square().sum()).backward()
        return torch.autograd.grad(model(Y) + model.b.weight.square().sum(), [model.b.weight, model.a.bias])

    both(steps)


def test_gradients_of_an_input_alone_leave_nothing_behind() -> None:
    def steps(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        model.a.weight.register_hook(lambda g: seen.append(g.clone()))
        x = X.clone().requires_grad_()
        loss = model(x)
        (first,) = torch.autograd.grad(loss, [x], retain_graph=True)
        assert not seen
        loss.backward()
        assert len(seen) == 1
        return [first, *seen]

    both(steps)


class Fails(torch.autograd.Function):
    """Its backward raises, the first time."""

    failed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not Fails.failed:
            Fails.failed = True
            raise KeyError("mine")
        return grad


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    """Upstream of the step, before its gradients have come to the leaves."""

    def steps(model: Any) -> list[Tensor]:
        Fails.failed = False
        seen: list[Tensor] = []
        model.a.weight.register_hook(lambda g: seen.append(g.clone()))
        x = X.clone().requires_grad_()
        with pytest.raises(KeyError, match="mine"):
            model(Fails.apply(x)).backward()
        model.zero_grad()
        seen.clear()
        x.grad = None
        model(Fails.apply(x)).backward()
        assert len(seen) == 1 and x.grad is not None
        return [x.grad, *seen]

    both(steps)


def test_a_backward_inside_of_a_backward() -> None:
    """Between two steps of a backward somebody asks for gradients of a third, while those of the first wait for the second."""

    def steps(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []

        def ask(gradient: Tensor) -> None:
            seen.append(gradient.clone())
            with torch.enable_grad():
                seen.extend(torch.autograd.grad(model(Y), [model.b.weight, model.b.bias]))

        model.a.bias.register_hook(lambda g: seen.append(g.clone()))
        second = model(Y)
        between = X.clone().requires_grad_() * 1
        between.register_hook(ask)
        (model(between) + second).backward()
        assert len(seen) == 4
        return seen

    both(steps)


def test_leaves_come_before_what_is_upstream() -> None:
    def steps(model: Any) -> list[Tensor]:
        order: list[str] = []
        x = X.clone().requires_grad_() * 1
        x.register_hook(lambda g: order.append("input"))
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
        model(x).backward()
        return [torch.tensor(order.index("input") == len(order) - 1)]

    both(steps)


def test_a_graph_is_run_twice() -> None:
    def steps(model: Any) -> list[Tensor]:
        seen: list[Tensor] = []
        model.b.bias.register_hook(lambda g: seen.append(g.clone()))
        loss = model(X)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        assert len(seen) == 2
        return seen

    both(steps)


def test_a_parameter_is_frozen_and_thawed() -> None:
    def steps(model: Any) -> list[Tensor]:
        model(X).backward()
        model.a.weight.requires_grad_(False)
        model(Y).backward()
        model.a.weight.requires_grad_(True)
        model(X).backward()
        return []

    both(steps)


def test_a_parameter_is_frozen_between_forward_and_backward() -> None:
    """The engine gives a leaf nothing that does not require grad when it comes there, whatever it was in the forward."""

    def steps(model: Any) -> list[Tensor]:
        model(X).backward()
        loss, later = model(Y), model(2 * Y)
        model.a.weight.requires_grad_(False)
        loss.backward()
        kept = model.a.weight.grad.clone()
        model.a.weight.requires_grad_(True)
        later.backward()
        return [kept]

    both(steps)


def test_threads_run_backwards_of_one_model_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = compat.gradients

    def slowly(tensors: Any) -> list[Tensor | None]:
        found = read(tensors)
        time.sleep(0.02)  # another thread has its turn before what was found is used
        return found

    monkeypatch.setattr(compat, "gradients", slowly)

    def steps(model: Any) -> list[Tensor]:
        losses = [model(X * number) for number in range(1, 5)]
        ready = threading.Barrier(len(losses), timeout=30)

        def backward(loss: Tensor) -> None:
            ready.wait()
            loss.backward()

        with ThreadPoolExecutor(len(losses)) as threads:
            list(threads.map(backward, losses, timeout=30))
        return []

    both(steps)


def test_a_graph_outlives_its_model_and_nothing_outlives_the_graph() -> None:
    model = compiled(Net)
    parameter, loss = model.a.weight, model(X)
    runner = weakref.ref(model._session.runner)
    del model
    gc.collect()
    loss.backward()
    assert parameter.grad is not None
    del loss, parameter
    gc.collect()
    assert runner() is None
