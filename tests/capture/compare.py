"""A model compiled for one process beside the same model in plain PyTorch: everything a user can see must be equal."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zcompile


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model from a seed of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def compiled(make: Callable[[], nn.Module], **options: Any) -> Any:
    """The model compiled with the reference backend."""
    return zcompile.compile(build(make), backend="eager", **options)


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_of(v)]
    if isinstance(value, (list, tuple, collections.deque)):
        return [t for v in value for t in tensors_of(v)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for f in dataclasses.fields(value) for t in tensors_of(getattr(value, f.name))]
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value):
        return [t for v in vars(value).values() for t in tensors_of(v)]
    return []


def total(out: Any) -> Tensor | None:
    """A loss that gives every element of every differentiable output another gradient."""
    terms = []
    for index, t in enumerate(tensors_of(out)):
        if t.requires_grad:
            t = torch.view_as_real(t) if t.is_complex() else t
            weights = torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).reshape(t.shape) + index
            terms.append((t.double() * weights).sum())
    return torch.stack(terms).sum() if terms else None


def assert_same(have: Any, want: Any, what: str = "result", *, exact: bool = True) -> None:
    """Equal in type, structure, values, dtype, requires_grad."""
    assert type(have) is type(want) or isinstance(want, nn.Parameter), f"{what}: {type(have)} instead of {type(want)}"
    if isinstance(want, Tensor):
        assert have.shape == want.shape and have.dtype == want.dtype, f"{what}: {have.shape} {have.dtype}"
        assert have.requires_grad == want.requires_grad, f"{what}: requires_grad is {have.requires_grad}"
        if exact:
            assert torch.equal(have, want) or bool(have.isnan().any()), f"{what}:\n{have}\n{want}"
        torch.testing.assert_close(have, want, equal_nan=True, msg=lambda m: f"{what}: {m}")
    elif isinstance(want, Mapping):
        assert list(have) == list(want), f"{what}: keys {list(have)} instead of {list(want)}"
        for key in want:
            assert_same(have[key], want[key], f"{what}[{key!r}]", exact=exact)
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(have) == len(want), f"{what}: {len(have)} members instead of {len(want)}"
        for i, (a, b) in enumerate(zip(have, want, strict=True)):
            assert_same(a, b, f"{what}[{i}]", exact=exact)
    elif type(want).__module__ != "builtins" and hasattr(want, "__dict__") and not callable(want):
        assert_same(dict(vars(have)), dict(vars(want)), what, exact=exact)
    else:
        assert have == want or have is want, f"{what}: {have!r} instead of {want!r}"


def assert_same_state(model: Any, plain: nn.Module, *, exact: bool = True) -> None:
    """Equal parameters, gradients and buffers."""
    for (name, p), (want_name, want) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == want_name
        assert (p.grad is None) == (want.grad is None), f"gradient of {name}: {p.grad} instead of {want.grad}"
        if want.grad is not None:
            assert_same(p.grad, want.grad, f"gradient of {name}", exact=exact)
        assert_same(p.detach(), want.detach(), f"parameter {name}")
    for (name, b), (want_name, want) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == want_name
        assert_same(b, want, f"buffer {name}", exact=exact)


def agree(
    make: Callable[[], nn.Module],
    *args: Any,
    loss: Callable[[Any], Tensor | None] = total,
    calls: int = 2,
    train: bool = True,
    exact: bool = True,
    options: Mapping[str, Any] = {},
    **kwargs: Any,
) -> tuple[Any, nn.Module]:
    """Run both models on copies of the same arguments, backward included, and compare what can be seen.

    Returns:
        the compiled and the plain model, for further checks.
    """
    plain = build(make).train(train)
    model = compiled(make, **options).train(train)
    for call in range(calls):
        mine, theirs = copy.deepcopy((args, kwargs)), copy.deepcopy((args, kwargs))
        torch.manual_seed(call)
        want = plain(*theirs[0], **theirs[1])
        want_random = torch.rand(())
        torch.manual_seed(call)
        have = model(*mine[0], **mine[1])
        assert torch.equal(torch.rand(()), want_random), "the random stream goes on from somewhere else"
        assert_same(have, want, exact=exact)
        want_loss, have_loss = loss(want), loss(have)
        assert (want_loss is None) == (have_loss is None)
        if want_loss is not None:
            want_loss.backward()
            have_loss.backward()
        assert_same(mine, theirs, "arguments")
        for a, b in zip(tensors_of(mine), tensors_of(theirs), strict=True):
            assert (a.grad is None) == (b.grad is None), f"gradient of an argument: {a.grad} instead of {b.grad}"
            if b.grad is not None:
                assert_same(a.grad, b.grad, "gradient of an argument", exact=exact)
        assert_same_state(model, plain, exact=exact)
    return model, plain
