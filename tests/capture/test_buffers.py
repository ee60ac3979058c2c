"""Buffers are read at every call and written as forward writes them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import agree, assert_same, assert_same_state, build, compiled
from zcompile.errors import BackwardError, CaptureError, UnfilledError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A layer and some buffers; ``rule`` is its forward."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(12.0).view(4, 3), persistent=False)
        self.rule = rule

    def forward(self, x: Tensor) -> Any:
        return self.rule(self, x)


def net(rule: Any) -> Any:
    return lambda: Net(rule)


def counted(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    m.scale.mul_(1.5)
    return m.layer(x) * m.scale + m.count


def running(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    if m.training:
        with torch.no_grad():
            m.scale.lerp_(y.mean(0), 0.1)
            m.table[0] = y[0].detach()
    return y - m.scale + m.table[0]


def old_value(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x) * (m.scale * 2)
    m.scale.add_(1)
    return y


def old_view(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x).mm(m.table.clone().t()).mm(m.table.clone())
    m.table.add_(1)
    return y


def written_twice(m: Any, x: Tensor) -> Tensor:
    m.scale.add_(1)
    y = m.layer(x) * m.scale.clone()
    m.scale.add_(1)
    return y * m.scale


RULES: dict[str, Any] = {
    "read": lambda m, x: m.layer(x) * m.scale + m.table.sum(),
    "counted": counted,
    "running": running,
    "old value": old_value,
    "old view": old_view,
    "written twice": written_twice,
    "returned": lambda m, x: (m.layer(x), m.scale, m.count),
    "view returned": lambda m, x: (m.layer(x), m.table.t(), m.table[1:]),
    "written and returned": lambda m, x: (m.layer(x), m.scale.add_(1), m.count.add_(1)),
    "only a buffer": lambda m, x: m.scale,
    "written and nothing returned": lambda m, x: (m.count.add_(1), None)[1],
}


@pytest.mark.parametrize("case", RULES)
@pytest.mark.parametrize("train", [True, False])
def test_rule(case: str, train: bool) -> None:
    agree(net(RULES[case]), X, calls=3, train=train)


def test_returned_buffer_is_the_buffer() -> None:
    model = compiled(net(RULES["written and returned"]))
    _, scale, count = model(X)
    assert scale is model.scale and count is model.count


def test_value_read_by_backward_and_written_by_the_same_call_is_refused() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x) * m.scale
        m.scale.add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        build(net(rule))(X).sum().backward()
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        compiled(net(rule))(X)
    agree(lambda: net(rule)().requires_grad_(False), X)


def test_two_forwards_before_two_backwards() -> None:
    plain, model = build(net(old_value)), compiled(net(old_value))
    for m in (plain, model):
        first, second = m(X), m(X * 2)
        second.sum().backward()
        (first * 3).sum().backward()
    assert_same_state(model, plain)


def test_buffer_changed_by_the_user_before_backward() -> None:
    plain, model = build(net(RULES["read"])), compiled(net(RULES["read"]))
    for m, error in ((plain, RuntimeError), (model, BackwardError)):
        out = m(X)
        m.scale.add_(1)
        with pytest.raises(error, match="modified by an inplace operation"):
            out.sum().backward()


def test_buffer_changed_between_calls() -> None:
    plain, model = build(net(counted)), compiled(net(counted))
    for m in (plain, model):
        m(X)
        m.scale.zero_()
        m.count += 5
    assert_same(model(X), plain(X))
    assert model._session.num_captures == 1


def test_buffer_replaced_between_calls() -> None:
    plain, model = build(net(counted)), compiled(net(counted))
    for value in (torch.ones(3), torch.full((3,), 2.0), torch.ones(1), torch.ones(5, 3), torch.ones(3, 5).t().double()):
        for m in (plain, model):
            m.scale = value.clone()
        try:
            want = plain(X)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=r"output with shape|must match|doesn't match"):
                model(X)
            assert error
        else:
            assert_same(model(X), want)
            assert_same(model.scale, plain.scale)


def test_buffer_replaced_in_a_submodule() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Net(counted), nn.BatchNorm1d(3))

    plain, model = build(make), compiled(make)
    for m in (plain, model):
        m(X)
        m.get_submodule("0").scale = torch.full((3,), 7.0)
        m.get_submodule("1").running_mean = torch.ones(3)
    assert_same(model(X), plain(X), exact=False)
    assert_same_state(model, plain, exact=False)


def test_buffer_assigned_in_forward_is_refused() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        m.count = m.count + 1
        return m.layer(x)

    model = compiled(net(rule))
    before = model.count
    with pytest.raises(CaptureError, match=r"'count'.*in place"):
        model(X)
    assert model.count is before and not model.count


def test_buffer_that_forward_makes_is_refused() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "cache"):
            m.register_buffer("cache", torch.ones(3))
        return m.layer(x) * m.cache

    model = compiled(net(rule))
    with pytest.raises(CaptureError, match="'cache'"):
        model(X)
    assert not hasattr(model, "cache")


def test_value_that_needs_gradients_written_to_a_buffer_is_refused() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        m.scale.copy_(y.mean(0))
        return y * m.scale

    with pytest.raises(CaptureError, match=r"'scale' in place.*detach"):
        compiled(net(rule))(X)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, momentum=0.3)),
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True, affine=True)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    ],
)
def test_modules_with_running_statistics(make: Any, train: bool) -> None:
    # In double precision: small batches cancel so much that two right results are further apart than float32's tolerance.
    agree(lambda: make().double(), X.double(), calls=3, train=train, exact=False)


def test_cumulative_batch_norm_is_refused() -> None:
    """It turns a counter into a Python number at every call."""
    with pytest.raises(CaptureError, match=r"depends on tensor values at .*batchnorm.py:\d+"):
        compiled(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)))(X)


def test_frozen_batch_norm_in_a_training_model() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    plain, model = build(make), compiled(make)
    for m in (plain, model):
        m.train()
        m(X).sum().backward()
        m.get_submodule("1").eval()
        m(X).square().sum().backward()
    assert_same_state(model, plain, exact=False)


def test_shared_buffers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.layer = nn.Module(), nn.Module(), nn.Linear(4, 3)
            both = torch.ones(3)
            self.a.register_buffer("s", both)
            self.b.register_buffer("s", both)

        def forward(self, x: Tensor) -> Tensor:
            self.a.s.add_(1)
            y = self.layer(x) * self.b.s.clone()
            self.b.s.mul_(2)
            return y + self.a.s

    model, _ = agree(Shared, X, calls=3)
    assert model.a.s is model.b.s


def test_buffers_that_are_views_of_one_tensor() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            whole = torch.arange(6.0)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[:3])

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(1)
            return self.layer(x) * self.part

    with pytest.raises(CaptureError, match=r"'whole' and 'part' share memory"):
        compiled(Views)(X)


def test_buffer_without_a_value() -> None:
    class Optional(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.layer(x) if m.mask is None else m.layer(x) * m.mask)
            self.register_buffer("mask", None)

    plain, model = build(Optional), compiled(Optional)
    assert_same(model(X), plain(X))
    for m in (plain, model):
        m.mask = torch.tensor([1.0, 0.0, 2.0])
    assert_same(model(X), plain(X))
    assert_same_state(model, plain)


def test_tensor_attribute_that_is_no_buffer() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.factor = torch.tensor([1.0, 2.0, 3.0])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.factor

    plain, model = build(Plain), compiled(Plain)
    for value in (None, torch.ones(3), torch.zeros(3)):
        for m in (plain, model):
            if value is not None:
                m.factor = value
        assert_same(model(X), plain(X))
    for m in (plain, model):
        m.factor.add_(3)
    assert_same(model(X), plain(X))


FACTOR = torch.ones(3)


def test_global_tensor() -> None:
    rule = net(lambda m, x: m.layer(x) * FACTOR)
    plain, model = build(rule), compiled(rule)
    assert_same(model(X), plain(X))
    FACTOR.add_(1)
    assert_same(model(X), plain(X))


def test_global_tensor_written_by_forward() -> None:
    def rule(m: Any, x: Tensor) -> Tensor:
        FACTOR.add_(1)
        return m.layer(x)

    with pytest.raises(CaptureError, match=r"neither an argument nor a registered buffer"):
        compiled(net(rule))(X)


def test_buffers_in_other_dtypes_and_layouts() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("b", torch.tensor([True, False, True]))
            self.register_buffer("h", torch.ones(3, dtype=torch.bfloat16))
            self.register_buffer("c", torch.ones(3, dtype=torch.complex64))
            self.register_buffer("t", torch.arange(12.0).view(3, 4).t())
            self.register_buffer("e", torch.ones(1).expand(3))
            self.register_buffer("z", torch.ones(0, 3))
            self.register_buffer("i", torch.tensor([2, 1, 0]))

        def forward(self, x: Tensor) -> Tensor:
            self.b.logical_not_()
            self.h.add_(1)
            y = self.layer(x @ self.t @ self.t.t().contiguous())[:, self.i]
            return torch.where(self.b, y, 0) * self.h.float() * self.e + self.c.abs() + self.z.sum()

    agree(Many, X, calls=3, exact=False)


def test_buffers_on_meta() -> None:
    with torch.device("meta"):
        made = Net(counted)
    import zcompile

    model = zcompile.compile(made, backend="eager")
    with pytest.raises(UnfilledError, match=r"parameter 'layer.weight'"):
        model(X)
    plain = build(net(counted))
    model.load_state_dict(plain.state_dict())
    with pytest.raises(UnfilledError, match="buffer 'table'"):
        model(X)
    model.table = copy.deepcopy(plain.table)
    assert_same(model(X), plain(X))
    assert_same_state(model, plain)
