"""What the model returns comes back in the user's own types, attached to autograd as it was, sharing memory as it did."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import zcompile
from tests.capture.compare import agree, assert_same, build, compiled, total
from tests.capture.test_inputs import X, Y, net
from zcompile.errors import BackwardError, CaptureError, ConfigError


class Result(NamedTuple):
    loss: Tensor
    logits: Any = None


@dataclass
class Record:
    logits: Tensor
    loss: Tensor | None = None
    note: str = "fine"


class Cache:
    """A plain object with attributes, as transformers' caches are."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen = 0


class Node:
    def __init__(self, value: Any) -> None:
        self.value = value


class Registered(Node):
    """A type that is registered with pytree."""


_pytree.register_pytree_node(
    Registered, lambda r: ([r.value], None), lambda children, _: Registered(next(iter(children)))
)


def cached(f: Any, x: Tensor) -> tuple[Tensor, Cache]:
    cache = Cache()
    for _ in range(2):
        cache.keys.append(f(x))
        cache.seen += len(x)
    return cache.keys[0] * cache.keys[1], cache


RULES: dict[str, Any] = {
    "tensor": lambda f, x: f(x),
    "tuple": lambda f, x: (f(x), x.sum()),
    "list": lambda f, x: [f(x), f(x) * 2],
    "dict": lambda f, x: {"b": f(x), "a": f(x).sum(), 3: x.exp()},
    "ordered dict": lambda f, x: collections.OrderedDict(b=f(x), a=f(x).sum()),
    "default dict": lambda f, x: collections.defaultdict(list, b=f(x)),
    "namedtuple": lambda f, x: Result(f(x).sum(), f(x).detach()),
    "structseq": lambda f, x: f(x).max(1),
    "dataclass": lambda f, x: Record(f(x)),
    "dataclass with loss": lambda f, x: Record(f(x).detach(), f(x).sum(), "other"),
    "nested": lambda f, x: {"a": [f(x), None, 3, "text", (x.mean(), {})], "b": (), "c": 2.5},
    "registered": lambda f, x: (Registered(f(x)), 1),
    "object": cached,
    "same tensor twice": lambda f, x: (lambda y: (y, {"again": y}))(f(x)),
    "views of one tensor": lambda f, x: (lambda y: (y, y.view(-1), y.t(), y[0]))(f(x)),
    "splits of one tensor": lambda f, x: f(x).unbind(0),
    "input": lambda f, x: (f(x), x),
    "views of an input": lambda f, x: (f(x), x.view(-1), x.t(), x[1:3, ::2], x[None].expand(2, 5, 4)),
    "only an input": lambda f, x: x,
    "input seen as another dtype": lambda f, x: (f(x), x.view(torch.int32)),
    "input seen as complex": lambda f, x: (f(x), torch.view_as_complex(x.unflatten(1, (2, 2)))),
    "constant": lambda f, x: (f(x), torch.arange(3), torch.tensor(2.5)),
    "no tensor": lambda f, x: {"n": 3},
    "none": lambda f, x: None,
    "no parameter": lambda f, x: x.exp(),
    "integers": lambda f, x: (f(x), f(x).argmax(-1), f(x) > 0),
    "complex": lambda f, x: torch.complex(f(x), f(x) * 2),
    "0-dim": lambda f, x: f(x).mean(),
    "empty": lambda f, x: (f(x[:0]), f(x)[:, :0]),
    "not contiguous": lambda f, x: f(x).t(),
    "expanded": lambda f, x: f(x).sum(0).expand(7, 3),
    "double": lambda f, x: f(x).double(),
    "detached": lambda f, x: (f(x), f(x).detach()),
    "device and dtype": lambda f, x: (f(x), x.dtype, x.device, x.shape),
    "slice": lambda f, x: (f(x), slice(1, 2), range(3), {1, 2}),
}


@pytest.mark.parametrize("case", RULES)
def test_kind_of_output(case: str) -> None:
    agree(net(RULES[case]), X)


@pytest.mark.parametrize(
    "case", ["input", "views of an input", "only an input", "same tensor twice", "input seen as complex"]
)
def test_input_that_requires_grad_in_the_output(case: str) -> None:
    agree(net(RULES[case]), X.clone().requires_grad_())


@pytest.mark.parametrize("grad", [False, True])
def test_identity_and_memory_of_inputs(grad: bool) -> None:
    model = compiled(net(lambda f, x, y: (f(x), x, y.view(-1), x[2:])))
    x, y = X.clone().requires_grad_(grad), Y.clone()
    for _ in range(2):
        _, same, view, part = model(x, y)
        assert same is x
        assert view.data_ptr() == y.data_ptr() and part.data_ptr() == x[2:].data_ptr()
    view.zero_()
    assert not y.any()


def test_view_of_an_input_with_an_offset() -> None:
    base = torch.arange(60.0).view(10, 6)
    for x in (base[3:8, 2:], base[3:8, 1:5], base.t()[1:5, 2:7].t()):
        model, plain = compiled(net(lambda f, x: x[1:, 1:])), build(net(lambda f, x: x[1:, 1:]))
        assert_same(model(x[:, :4]), plain(x[:, :4]))
        assert model(x[:, :4]).data_ptr() == plain(x[:, :4]).data_ptr()


def test_conjugated_input() -> None:
    z = torch.tensor([[1 + 2j, 3 - 1j]])
    agree(net(lambda f, x, z: (f(x), z.conj(), z.conj().imag, z.real)), X, z)
    agree(net(lambda f, x, z: (f(x), z * 2)), X, z.conj())


def test_an_input_that_forward_wrote_to_is_returned() -> None:
    def rule(f: Any, x: Tensor, c: Tensor) -> Any:
        c.add_(1)
        return f(x), c, c[0]

    agree(net(rule), X, torch.zeros(3))
    model, c = compiled(net(rule)), torch.zeros(3)
    assert model(X, c)[1] is c


def test_members_of_one_tensor_twice_are_one_tensor() -> None:
    out = compiled(net(RULES["same tensor twice"]))(X)
    assert out[0] is out[1]["again"]


def test_outputs_are_new_at_every_call() -> None:
    model = compiled(net(lambda f, x: {"y": [f(x)], "n": [1]}))
    a = model(X)
    a["n"].append(2)
    a["y"].append(3)
    b = model(X)
    assert b["n"] == [1] and len(b["y"]) == 1 and a["y"][0] is not b["y"][0]


def test_constants_are_new_at_every_call() -> None:
    model = compiled(net(lambda f, x: (f(x), torch.zeros(3), torch.tensor([1.0, 2.0]))))
    _, zeros, values = model(X)
    zeros += 1
    values += 1
    assert_same(model(X)[1:], (torch.zeros(3), torch.tensor([1.0, 2.0])))


def test_output_changed_in_place_by_the_user() -> None:
    model, plain = compiled(net(lambda f, x: f(x))), build(net(lambda f, x: f(x)))
    for m in (model, plain):
        m(X).mul_(2).add_(1).square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(a.grad, b.grad)


def test_output_that_backward_reads_changed_in_place_by_the_user() -> None:
    """Plain PyTorch raises; a compiled model may, or gives the right gradient because it saved something else."""
    rule = net(lambda f, x: (lambda y: (y, y * y))(f(x).exp().sum(0).softmax(0)))
    plain, model = build(rule), compiled(rule)
    for m in (plain, model):
        out, square = m(X)
        out.detach().mul_(2)
        try:
            square.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert m is model
            build(rule)
            want = build(rule)
            want(X)[1].sum().backward()
            for a, b in zip(model.parameters(), want.parameters(), strict=True):
                assert_same(a.grad, b.grad, exact=False)


def test_parameter_as_output_is_refused() -> None:
    for rule in (lambda f, x: (f(x), f.weight), lambda f, x: f.weight.t()):
        with pytest.raises(CaptureError, match=r"parameter 'layer.weight'.*clone"):
            compiled(net(rule))(X)
    agree(net(lambda f, x: (f(x), f.weight.clone(), f.bias * 1)), X)


def test_object_that_holds_itself() -> None:
    def rule(f: Any, x: Tensor) -> Node:
        node = Node(f(x))
        node.myself = node  # type: ignore[attr-defined]
        return node

    out = compiled(net(rule))(X)
    assert_same(out.value, build(net(rule))(X).value)


# Which outputs may get a gradient. ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        lambda f, x: {"loss": f(x).sum(), "logits": f(x)},
        lambda f, x: Record(f(x), f(x).sum()),
        lambda f, x: Result(f(x).sum(), f(x)),
    ],
)
def test_loss_alone_is_differentiable(rule: Any) -> None:
    agree(net(rule), X, loss=lambda out: out["loss"] if isinstance(out, dict) else out.loss)
    model = compiled(net(rule))
    out = model(X)
    logits = out["logits"] if isinstance(out, dict) else out.logits
    assert logits.requires_grad
    with pytest.raises(BackwardError, match=r"logits.*differentiable=\[..., 'logits'\]"):
        (logits.sum() + (out["loss"] if isinstance(out, dict) else out.loss)).backward()
    agree(net(rule), X, options={"differentiable": ["loss", "logits"]})


def test_losses_that_are_no_float_scalar_do_not_count() -> None:
    agree(net(lambda f, x: {"loss": f(x), "logits": f(x) * 2}), X)
    agree(net(lambda f, x: {"loss": None, "logits": f(x) * 2}), X)
    agree(net(lambda f, x: {"loss": f(x).sum().detach(), "logits": f(x) * 2}), X)
    agree(net(lambda f, x: {"loss": 3.0, "logits": f(x) * 2}), X)
    agree(net(lambda f, x: {"inner": {"loss": f(x).sum()}, "logits": f(x) * 2}), X)


def test_loss_of_one_element() -> None:
    agree(net(lambda f, x: {"loss": f(x).sum().view(1), "x": x}), X)


def test_several_outputs_by_index_and_name() -> None:
    rule = net(lambda f, x: {"a": f(x), "b": f(x) * 2, "c": {"d": f(x) * 3}})
    model = compiled(rule, differentiable=["a", "c"])
    plain = build(rule)
    for m in (model, plain):
        out = m(X)
        (out["a"] * out["c"]["d"]).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(a.grad, b.grad)
    with pytest.raises(BackwardError, match=r"output b.*'b'"):
        model(X)["b"].sum().backward()
    model = compiled(rule, differentiable=["c.d"])
    model(X)["c"]["d"].sum().backward()
    model = compiled(net(lambda f, x: (f(x), f(x) * 2)), differentiable=[1])
    model(X)[1].sum().backward()
    with pytest.raises(BackwardError, match=r"output \[0\]"):
        model(X)[0].sum().backward()
    compiled(net(lambda f, x: (f(x), f(x) * 2)), differentiable=["[0]"])(X)[0].sum().backward()


def test_one_name_without_a_list() -> None:
    model = compiled(net(lambda f, x: {"loss": f(x).sum(), "logits": f(x)}), differentiable="logits")
    model(X)["logits"].sum().backward()


def test_unknown_name_is_refused() -> None:
    model = compiled(net(lambda f, x: {"loss": f(x).sum(), "logits": f(x)}), differentiable=["logit"])
    with pytest.raises(ConfigError, match=r"'logit' names no output; the outputs are loss, logits"):
        model(X)
    model = compiled(net(lambda f, x: (f(x), x)), differentiable=[7])
    with pytest.raises(ConfigError, match="7 names no output"):
        model(X)


def test_output_used_twice_and_partially() -> None:
    rule = net(lambda f, x: (f(x), f(x).exp(), x))
    for loss in (
        lambda out: (out[0] * out[0]).sum() + out[0].mean(),
        lambda out: out[1][2].sum(),
        lambda out: (out[0] * out[1].detach()).sum(),
    ):
        agree(rule, X, loss=loss)


def test_one_tensor_output_with_a_gradient_of_any_layout() -> None:
    for loss in (lambda y: y.sum(), lambda y: y.t().contiguous().view(-1)[::2].sum(), total, lambda y: y.mean() * 3):
        agree(net(lambda f, x: f(x).tanh()), X, loss=loss, exact=False)


@pytest.mark.slow
def test_gradient_of_any_layout_reaches_compiled_regions() -> None:
    for rule in (lambda f, x: f(x).tanh().t(), lambda f, x: f(x).sum(0).expand(7, 3)):
        plain, model = build(net(rule)), zcompile.compile(build(net(rule)), backend="inductor")
        for m in (plain, model):
            m(X).sum().backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(a.grad, b.grad, exact=False)
