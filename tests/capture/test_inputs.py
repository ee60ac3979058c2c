"""Arguments of every kind reach the model as the user gave them."""

from __future__ import annotations

import collections
import copy
import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import agree, assert_same, assert_same_state, build, compiled
from zcompile.errors import CaptureError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    a: Tensor
    b: Any = None


@dataclass
class Batch:
    x: Tensor
    scale: float = 1.0
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: float = 1.0


class Opaque:
    """Hashable by identity, without attributes."""

    __slots__ = ()


class Net(nn.Module):
    """Applies ``rule`` to its layer and its arguments, so that a test says what a forward does in one line."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.rule = rule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.rule(self.layer, *args, **kwargs)


def net(rule: Any) -> Any:
    return lambda: Net(rule)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


class Signatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, /, y: Tensor | None = None, *rest: Tensor, scale: float = 2.0, **named: Any) -> Tensor:
        out = self.layer(x) * scale
        if y is not None:
            out = out + self.layer(y)
        for r in rest:
            out = out - r.sum()
        for key in sorted(named):
            out = out + named[key]
        return out


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((X,), {}),
        ((X, Y), {}),
        ((X,), {"y": Y}),
        ((X, None), {"scale": 3}),
        ((X, Y, Y, X), {"scale": 0.5}),
        ((X,), {"beta": torch.ones(3), "alpha": 2}),
        ((X,), {"alpha": True, "scale": torch.tensor(4.0)}),
    ],
)
def test_positional_keyword_and_variadic(args: Any, kwargs: Any) -> None:
    agree(Signatures, *args, **kwargs)


RULES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "nested": (lambda f, d: f(d["a"][0]) + f(d["b"][1]["c"]), ({"a": [X, 1], "b": (None, {"c": Y})},)),
    "namedtuple": (lambda f, p: f(p.a) * p.b, (Pair(X, 3),)),
    "dataclass": (lambda f, b: f(b.x) * b.scale + (0 if b.extra is None else 1), (Batch(X, 0.5),)),
    "frozen dataclass": (lambda f, b: f(b.x) * b.scale, (Frozen(X, 0.5),)),
    "none": (lambda f, x, m: f(x) if m is None else x, (X, None)),
    "int": (lambda f, x, n: f(x) * n + f(x)[:n].sum(), (X, 2)),
    "float": (lambda f, x, n: f(x) * n, (X, 0.25)),
    "nan": (lambda f, x, n: f(x) * (1 if n == n else 2), (X, float("nan"))),
    "infinity": (lambda f, x, n: f(x).clamp(max=n), (X, float("inf"))),
    "complex": (lambda f, x, n: f(x) * n.real, (X, 2 + 1j)),
    "bool": (lambda f, x, n: f(x) if n else -f(x), (X, False)),
    "str": (lambda f, x, s: f(x).sum() if s == "sum" else f(x), (X, "sum")),
    "bytes": (lambda f, x, s: f(x) * len(s), (X, b"abc")),
    "enum": (lambda f, x, c: f(x) * c.value if c is Color.BLUE else f(x), (X, Color.BLUE)),
    "dtype": (lambda f, x, t: f(x).to(t), (X, torch.float64)),
    "device": (lambda f, x, d: f(x.to(d)), (X, torch.device("cpu"))),
    "size": (lambda f, x, s: f(x).reshape(s), (X, torch.Size([3, 5]))),
    "slice": (lambda f, x, s: f(x[s]), (X, slice(1, 3))),
    "ellipsis": (lambda f, x, s: f(x[s]), (X, ...)),
    "range": (lambda f, x, r: f(x) * len(r), (X, range(3))),
    "set": (lambda f, x, s: f(x) * (2 if "a" in s else 1), (X, {"a", "b"})),
    "frozenset": (lambda f, x, s: f(x) * len(s), (X, frozenset({1, 2}))),
    "type": (lambda f, x, t: f(x) * (2 if t is int else 1), (X, int)),
    "empty containers": (lambda f, x, a, b, c: f(x) * (1 + len(a) + len(b) + len(c)), (X, [], {}, ())),
    "ordered dict": (
        lambda f, d: f(d["x"]) - f(d["y"]),
        (collections.OrderedDict(x=X, y=Y),),
    ),
    "default dict": (lambda f, d: f(d["x"]), (collections.defaultdict(list, x=X),)),
    "deque": (lambda f, d: f(d[0]) + f(d[1]), (collections.deque([X, Y]),)),
    "integer keys": (lambda f, d: f(d[0]) + f(d[7]), ({0: X, 7: Y},)),
    "not contiguous": (lambda f, x: f(x), (torch.randn(4, 5).t(),)),
    "expanded": (lambda f, x: f(x), (torch.randn(1, 4).expand(5, 4),)),
    "sliced": (lambda f, x: f(x), (torch.randn(10, 9)[::2, 1:5],)),
    "channels last": (lambda f, x: f(x.mean((1, 2))), (torch.randn(2, 4, 3, 5).permute(0, 2, 3, 1),)),
    "0-dim": (lambda f, x, s: f(x) * s, (X, torch.tensor(3.0))),
    "empty batch": (lambda f, x: f(x), (torch.randn(0, 4),)),
    "integer tensor": (lambda f, x, i: f(x)[i], (X, torch.tensor([4, 0, 1]))),
    "bool tensor": (lambda f, x, m: torch.where(m, f(x), 0.0), (X, torch.tensor([True, False, True]))),
    "complex tensor": (lambda f, x, z: (f(x) * z).abs(), (X, torch.tensor([1 + 2j, 2, -1j]))),
    "double": (lambda f, x: f(x.float()), (X.double(),)),
    "bfloat16": (lambda f, x: f(x.float()), (X.bfloat16(),)),
}


@pytest.mark.parametrize("case", RULES)
def test_kind_of_argument(case: str) -> None:
    rule, args = RULES[case]
    model, _ = agree(net(rule), *args)
    assert model._session.num_captures == 1, "the same arguments again must not capture again"


@pytest.mark.parametrize("value", [np.array([1.0, 2.0, 3.0]), np.float32(2.0), np.float64(2.0), np.int64(2)])
def test_numpy_is_refused(value: Any) -> None:
    with pytest.raises(CaptureError, match=f"{type(value).__name__}.*torch.from_numpy"):
        compiled(net(lambda f, x, n: f(x) * float(n)))(X, value)


def test_values_that_are_not_tensors_are_part_of_the_signature() -> None:
    plain, model = build(net(lambda f, x, n: f(x) * n)), compiled(net(lambda f, x, n: f(x) * n))
    for n in (1, True, 1.0, 2, 2.0, 0.0, -0.0, False):
        assert_same(model(X, n), plain(X, n))


def test_opaque_object() -> None:
    seen = Opaque()
    rule = net(lambda f, x, o: f(x) * (2 if o is seen else 1))
    plain, model = build(rule), compiled(rule)
    for o in (seen, Opaque(), seen):
        assert_same(model(X, o), plain(X, o))


def test_mutable_argument_that_is_changed_between_calls() -> None:
    rule = net(lambda f, x, names: f(x) * (2 if "double" in names else 1))
    plain, model = build(rule), compiled(rule)
    names: set[str] = set()
    assert_same(model(X, names), plain(X, names))
    names.add("double")
    assert_same(model(X, names), plain(X, names))


def test_unhashable_objects_do_not_get_mixed_up() -> None:
    """An object's identity may come back after it is gone."""

    class Tag:
        __slots__ = ("n",)
        __hash__ = None  # type: ignore[assignment]

        def __init__(self, n: int) -> None:
            self.n = n

        def __eq__(self, other: object) -> bool:
            return False

    rule = net(lambda f, x, tag: f(x) * tag.n)
    model = compiled(rule)
    with pytest.raises(CaptureError, match="Tag"):
        model(X, Tag(1))


def test_object_with_attributes() -> None:
    class Info:
        def __init__(self, x: Tensor, n: int) -> None:
            self.x, self.n = x, n

    rule = net(lambda f, i: f(i.x) * i.n)
    plain, model = build(rule), compiled(rule)
    for n in (1, 2, 1):
        assert_same(model(Info(X, n)), plain(Info(X, n)))
    assert model._session.num_captures == 2


def test_same_tensor_twice() -> None:
    x = X.clone().requires_grad_()
    agree(net(lambda f, a, b, c: f(a) + f(b) * f(c["x"])), x, x, {"x": x})


def test_same_tensor_twice_then_two_tensors() -> None:
    rule = net(lambda f, a, b: f(a) + (1 if a is b else 0) * f(b))
    plain, model = build(rule), compiled(rule)
    assert_same(model(X, X), plain(X, X))
    assert_same(model(X, Y), plain(X, Y))


def test_leaf_inputs_get_gradients() -> None:
    agree(
        net(lambda f, a, b: f(a * 2) + f(b["y"]).exp()),
        X.clone().requires_grad_(),
        {"y": Y.t().contiguous().t().requires_grad_()},
    )


def test_other_inputs_get_gradients() -> None:
    rule = net(lambda f, a, b: f(a) * f(b))
    plain, model = build(rule), compiled(rule)
    have, want = X.clone().requires_grad_(), X.clone().requires_grad_()
    for m, x in ((model, have), (plain, want)):
        for _ in range(2):
            m(x.exp(), x.view(5, 4)).square().sum().backward()
    assert_same(have.grad, want.grad)
    assert_same_state(model, plain)


def test_only_inputs_require_grad() -> None:
    def make() -> nn.Module:
        return Net(lambda f, x: f(x)).requires_grad_(False)

    agree(make, X.clone().requires_grad_())


def test_integer_input_beside_gradients() -> None:
    agree(net(lambda f, a, i: f(a)[i]), X.clone().requires_grad_(), torch.tensor([1, 1, 0]))


def test_mutated_input() -> None:
    def rule(f: Any, x: Tensor, count: Tensor) -> Tensor:
        x.add_(1)
        y = f(x)
        count += 1
        count[0] *= 2
        return y * count.sum()

    agree(net(rule), X, torch.ones(2))


def test_mutated_input_whose_old_value_backward_reads() -> None:
    def rule(f: Any, x: Tensor, s: Tensor) -> Tensor:
        y = f(x) * (s * 2)
        s.add_(5)
        return y

    agree(net(rule), X, torch.ones(3))


def test_input_written_after_autograd_saved_it_is_refused() -> None:
    def rule(f: Any, x: Tensor, s: Tensor) -> Tensor:
        y = f(x) * s
        s.add_(5)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        build(net(rule))(X, torch.ones(3)).sum().backward()
    model = compiled(net(rule))
    with pytest.raises(CaptureError, match=r"writes in place.*backward needs"):
        model(X, torch.ones(3))
    with torch.no_grad():
        assert_same(model(X, torch.ones(3)), build(net(rule))(X, torch.ones(3)).detach())


def test_input_changed_by_the_user_between_forward_and_backward() -> None:
    """Autograd raises in plain PyTorch; a silently different gradient would be worse."""
    rule = net(lambda f, x, s: f(x) * s)
    plain, model = build(rule), compiled(rule)
    for m in (plain, model):
        s = torch.ones(3)
        out = m(X, s)
        s.add_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_mutated_input_that_requires_grad_is_refused() -> None:
    def rule(f: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        return f(x)

    model = compiled(net(rule))
    with pytest.raises((CaptureError, RuntimeError), match=r"in-place|in place"):
        model(X.clone().requires_grad_() * 1)


def test_input_mutated_with_a_value_that_needs_gradients_is_refused() -> None:
    def rule(f: Any, x: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(f(x))
        return cache * 2

    model = compiled(net(rule))
    with pytest.raises(CaptureError, match=r"argument.*detach"):
        model(X, torch.zeros(5, 3))


def test_overlapping_inputs_of_which_one_is_mutated_are_refused() -> None:
    def rule(f: Any, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return f(y)

    model = compiled(net(rule))
    x = X.clone()
    with pytest.raises(CaptureError, match=r"share.*memory"):
        model(x, x.view(5, 4))
    agree(net(rule), X, Y)


def test_containers_of_arguments_changed_in_forward_are_refused() -> None:
    def rule(f: Any, batch: dict[str, Tensor]) -> Tensor:
        y = batch.pop("y")
        return f(batch["x"]) + f(y)

    model = compiled(net(rule))
    with pytest.raises(CaptureError, match=r"argument.*changes|changes.*argument"):
        model({"x": X, "y": Y})


def test_user_dict() -> None:
    class Encoding(collections.UserDict):  # what transformers' BatchEncoding is
        def __getattr__(self, name: str) -> Any:
            try:
                return self.data[name]
            except KeyError:
                raise AttributeError(name) from None

    batch = Encoding({"x": X, "y": Y})
    agree(net(lambda f, x, y: f(x) * f(y)), **batch)
    plain, model = build(net(lambda f, b: f(b["x"]) + f(b.y))), compiled(net(lambda f, b: f(b["x"]) + f(b.y)))
    assert_same(model(batch), plain(batch))


def test_arguments_are_not_replaced() -> None:
    batch = {"x": X.clone(), "n": [1, 2]}
    before = copy.copy(batch)
    compiled(net(lambda f, b: f(b["x"])))(batch)
    assert batch.keys() == before.keys() and all(batch[k] is before[k] for k in batch)


def test_sparse_tensor_argument_is_refused() -> None:
    model = compiled(net(lambda f, x: f(x.to_dense())))
    with pytest.raises(CaptureError, match="sparse"):
        model(X.to_sparse())


def test_missing_and_unknown_arguments() -> None:
    model = compiled(Signatures)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model()
    model = compiled(lambda: nn.Linear(4, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model(X, y=Y)
    assert_same(model(X), build(lambda: nn.Linear(4, 3))(X))


def test_parameter_of_the_user_as_argument() -> None:
    w = nn.Parameter(torch.ones(3))
    rule = net(lambda f, x, w: f(x) * w)
    plain, model = build(rule), compiled(rule)
    model(X, w).sum().backward()
    have, w.grad = w.grad, None
    plain(X, w).sum().backward()
    assert_same(have, w.grad)
