"""Calls and backwards in every mode and order."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import agree, assert_same, assert_same_state, build, compiled
from tests.capture.test_inputs import net
from zcompile.errors import BackwardError, CaptureError, SignatureError

G = torch.Generator().manual_seed(1)
X = torch.randn(5, 4, generator=G)
Y = torch.randn(5, 4, generator=G)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(self.norm(self.a(x)).tanh()))


def both() -> tuple[nn.Module, Any]:
    return build(Net), compiled(Net)


def step(model: Any, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return model(x)


# Modes. ---------------------------------------------------------------------------------------------------------------


def test_train_eval_and_no_grad_in_turn() -> None:
    plain, model = both()
    for mode in ("train", "eval", "no_grad", "eval no_grad", "train", "no_grad"):
        for m in (plain, model):
            m.train("eval" not in mode)
        with torch.set_grad_enabled("no_grad" not in mode):
            have, want = step(model, X), step(plain, X)
        assert_same(have, want, mode, exact=False)
        if want.requires_grad:
            have.square().sum().backward()
            want.square().sum().backward()
        assert_same_state(model, plain, exact=False)
    assert model._session.num_captures == 4


def test_no_grad_has_no_backward() -> None:
    model = compiled(Net)
    with torch.no_grad():
        model(X)
    assert model.graphs.backward is None


def test_inference_mode() -> None:
    plain, model = both()
    for m in (plain, model):
        m.eval()
    with torch.inference_mode():
        have, want = model(X), plain(X)
    assert_same(have, want, exact=False)
    assert have.is_inference()
    for m in (plain, model):
        m.train()
    have, want = step(model, X), step(plain, X)
    have.sum().backward()
    want.sum().backward()
    assert_same_state(model, plain, exact=False)


def test_inference_mode_in_training_mode() -> None:
    plain, model = both()
    with torch.inference_mode():
        have, want = step(model, X), step(plain, X)
    assert_same(have, want, exact=False)
    assert_same_state(model, plain, exact=False)
    for m in (plain, model):
        step(m, X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_one_submodule_in_eval() -> None:
    plain, model = both()
    for m in (plain, model):
        m.norm.eval()
        step(m, X).sum().backward()
        m.drop.eval()
        step(m, X).sum().backward()
    assert_same_state(model, plain, exact=False)
    assert model._session.num_captures == 2


def test_training_flag_of_the_compiled_model() -> None:
    model = compiled(Net)
    assert model.training and model.original.training
    assert model.eval() is model and not model.original.training and not model.norm.training
    model.training = True
    assert model.original.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 3))

    plain, model = build(make), compiled(make)
    for enabled in (True, False, True):
        for m in (plain, model):
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                out = m(X)
            assert out.dtype is (dtype if enabled else torch.float32)
            out.float().square().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad.dtype is b.grad.dtype
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-2, atol=1e-3)
    assert model._session.num_captures == 2


class Island(nn.Module):
    """Part of it is not for autocast: a product in float32, and one that autocast would take to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            narrow = y.to(torch.bfloat16).prod(-1, keepdim=True)
            y = (y.float() @ self.last.weight) * 1e-2 + narrow
        return self.last(y)


def test_autocast_stays_outside_of_what_was_captured() -> None:
    """An operator of the graph is in the caller's autocast no second time: when it is checked, run, or run backward."""
    plain, model = build(Island), compiled(Island)
    losses = []
    for m in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = m(X).float().square().sum()
            if m is model:  # which makes plain PyTorch cast what it computes in float32
                loss.backward()
        if m is plain:
            loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=5e-3)


def test_autocast_for_another_device_type_does_not_count() -> None:
    model = compiled(lambda: nn.Linear(4, 3))
    model(X)
    with torch.autocast("cuda", enabled=False):
        assert model(X).dtype is torch.float32
    assert model._session.num_captures == 1


def test_default_dtype_and_device_contexts() -> None:
    rule = net(lambda f, x: f(x) + torch.zeros(3))
    plain, model = build(rule), compiled(rule)
    assert_same(model(X), plain(X))
    with torch.device("cpu"):
        assert_same(model(X), plain(X))


def test_anomaly_mode() -> None:
    plain, model = both()
    with torch.autograd.detect_anomaly(check_nan=True):
        for m in (plain, model):
            step(m, X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        agree(Net, X, exact=False)
    finally:
        torch.use_deterministic_algorithms(False)


# Backwards. -----------------------------------------------------------------------------------------------------------


def test_two_forwards_one_backward() -> None:
    plain, model = both()
    for m in (plain, model):
        (step(m, X, 1).sum() + 2 * step(m, Y, 2).square().sum()).backward()
    assert_same_state(model, plain, exact=False)


def test_backwards_in_the_other_order() -> None:
    plain, model = both()
    for m in (plain, model):
        a, b = step(m, X, 1), step(m, Y, 2)
        b.square().sum().backward()
        a.sum().backward()
    assert_same_state(model, plain, exact=False)


def test_retain_graph() -> None:
    plain, model = both()
    for m in (plain, model):
        loss = step(m, X).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_state(model, plain, exact=False)


def test_backward_twice_without_retain_graph() -> None:
    model = compiled(Net)
    out = step(model, X)
    out.sum().backward()
    with pytest.raises(BackwardError, match=r"second time.*retain_graph=True"):
        out.sum().backward()
    step(model, X).sum().backward()


def test_gradients_accumulate_until_zero_grad() -> None:
    plain, model = both()
    for set_to_none in (True, False):
        for m in (plain, model):
            for seed in range(3):
                (step(m, X, seed).sum() / 3).backward()
        assert_same_state(model, plain, exact=False)
        for m in (plain, model):
            m.zero_grad(set_to_none=set_to_none)


def test_autograd_grad_of_parameters_and_inputs() -> None:
    plain, model = both()
    for m in (plain, model):
        m.requires_grad_(True)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    have = torch.autograd.grad(step(model, x).square().sum(), [x, *model.parameters()])
    want = torch.autograd.grad(step(plain, y).square().sum(), [y, *plain.parameters()])
    for a, b in zip(have, want, strict=True):
        assert_same(a, b, exact=False)
    assert all(p.grad is None for p in model.parameters()) and x.grad is None
    (have,) = torch.autograd.grad(step(model, x).square().sum(), [x])
    (want,) = torch.autograd.grad(step(plain, y).square().sum(), [y])
    assert_same(have, want, exact=False)
    assert all(p.grad is None for p in model.parameters())


def test_backward_for_some_inputs_only() -> None:
    plain, model = both()
    for m in (plain, model):
        step(m, X).square().sum().backward(inputs=[m.a.weight, m.b.bias])
    assert_same_state(model, plain, exact=False)


def test_create_graph_is_refused() -> None:
    model = compiled(Net)
    with pytest.raises(BackwardError, match=r"create_graph=True.*uncompiled"):
        step(model, X).sum().backward(create_graph=True)
    x = X.clone().requires_grad_()
    with pytest.raises(BackwardError, match="create_graph=True"):
        torch.autograd.grad(step(model, x).sum(), [x], create_graph=True)
    step(model, X).sum().backward()


def test_explicit_gradient() -> None:
    plain, model = both()
    for m in (plain, model):
        step(m, X).backward(torch.linspace(0, 1, 15).view(5, 3))
        step(m, X).backward(gradient=torch.ones(3, 5).t())
    assert_same_state(model, plain, exact=False)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        step(model, X).backward()


def test_one_of_two_outputs_gets_a_gradient() -> None:
    rule = net(lambda f, x: (f(x), f(x).exp()))
    for pick in (0, 1):
        plain, model = build(rule), compiled(rule)
        for m in (plain, model):
            out = m(X)
            out[pick].sum().backward()
        assert_same_state(model, plain, exact=False)


def test_outputs_backward_one_after_the_other() -> None:
    rule = net(lambda f, x: (f(x), f(x).exp()))
    plain, model = build(rule), compiled(rule)
    for m in (plain, model):
        a, b = m(X)
        a.sum().backward(retain_graph=True)
        b.sum().backward()
    assert_same_state(model, plain, exact=False)


def test_gradient_flows_on_into_a_model_before() -> None:
    plain, model = both()
    heads = build(lambda: nn.Linear(4, 4)), build(lambda: nn.Linear(4, 4))
    for m, head in zip((plain, model), heads, strict=True):
        (step(m, head(X)) * 0.5).square().sum().backward()
    assert_same_state(model, plain, exact=False)
    assert_same(heads[1].weight.grad, heads[0].weight.grad, exact=False)


def test_model_called_on_its_own_output() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    plain, model = build(make), compiled(make)
    for m in (plain, model):
        m(m(m(X))).square().sum().backward()
    assert_same_state(model, plain, exact=False)


def test_loss_outside_is_scaled_detached_and_reused() -> None:
    plain, model = both()
    for m in (plain, model):
        out = step(m, X)
        weight = out.detach().abs().sum()
        (out.sum() * 0.1 / weight + (out * out).mean()).backward()
    assert_same_state(model, plain, exact=False)


def test_forward_without_backward() -> None:
    plain, model = both()
    for m in (plain, model):
        for seed in range(3):
            step(m, X, seed)
        step(m, X).sum().backward()
    assert_same_state(model, plain, exact=False)


def test_backward_under_no_grad() -> None:
    plain, model = both()
    for m in (plain, model):
        loss = step(m, X).sum()
        with torch.no_grad():
            loss.backward()
    assert_same_state(model, plain, exact=False)


def test_backward_in_a_thread() -> None:
    import threading

    plain, model = both()
    for m in (plain, model):
        loss = step(m, X).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert_same_state(model, plain, exact=False)


def test_nan_and_infinity_pass_through() -> None:
    agree(lambda: nn.Linear(4, 3), torch.full((2, 4), float("inf")))
    agree(lambda: nn.Linear(4, 3), torch.full((2, 4), float("nan")), loss=lambda out: None)


def test_garbage_collection_is_left_as_it_was() -> None:
    for enabled in (True, False):
        try:
            (gc.enable if enabled else gc.disable)()
            compiled(lambda: nn.Linear(4, 3))(X)
            assert gc.isenabled() is enabled
            with pytest.raises(CaptureError):
                compiled(net(lambda f, x: f(x) * x.sum().item()))(X)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


# Captures. ------------------------------------------------------------------------------------------------------------


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "zcompile"]


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = 2.0
        self._private = 1
        self.options = {"bias": 1.0, "list": [1, 2]}
        self.config = type("Config", (), {})()
        self.config.power = 1
        self.activation = torch.tanh
        self.frozen = (1, 2)

    def forward(self, x: Tensor, n: int = 1) -> Tensor:
        y = self.layer(x) * self.scale * self._private + self.options["bias"] + sum(self.options["list"])
        return self.activation(y) ** self.config.power * n + self.frozen[0]


def test_reasons_of_captures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zcompile"):
        model = compiled(Options)
        for call in (
            lambda: model(X),
            lambda: model(X[:3]),
            lambda: model(X.t().contiguous().t()),
            lambda: model(X.clone().requires_grad_()),
            lambda: model(X, 2),
            lambda: model.eval()(X),
            lambda: torch.no_grad()(model)(X),
        ):
            call()
        model.train()
        model.layer.bias.requires_grad_(False)
        model(X)
        model.layer.bias.requires_grad_(True)
        model.scale = 3.0
        model(X)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(X)
        model(X)
    assert [r.split(": ", 1)[1] for r in reasons(caplog)] == [
        "first call",
        "shape of tensor argument 0 is [3, 4] instead of [5, 4]",
        "strides of tensor argument 0 is [1, 5] instead of [4, 1]",
        "requires_grad of tensor argument 0 is True instead of False",
        "the arguments have another structure, or other values that are not tensors",
        "modules changed between train() and eval()",
        "gradients are not recorded",
        "requires_grad of parameters changed",
        "attribute 'scale' has another value",
        "autocast is torch.bfloat16 instead of None",
    ]


CHANGES: dict[str, Any] = {
    "number": lambda m: setattr(m, "scale", 3.0),
    "type of a number": lambda m: setattr(m, "scale", 2),
    "private": lambda m: setattr(m, "_private", 5),
    "member of a dict": lambda m: m.options.update(bias=7.0),
    "member of a list in a dict": lambda m: m.options["list"].append(9),
    "list replaced": lambda m: m.options.update(list=[4]),
    "attribute of an object": lambda m: setattr(m.config, "power", 2),
    "object replaced": lambda m: setattr(m, "config", type("C", (), {"power": 3})()),
    "function": lambda m: setattr(m, "activation", torch.sin),
    "tuple": lambda m: setattr(m, "frozen", (5, 2)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_attributes_changed_between_calls(case: str) -> None:
    plain, model = build(Options), compiled(Options)
    assert_same(model(X), plain(X))
    for m in (plain, model):
        CHANGES[case](m)
    assert_same(model(X), plain(X))
    assert_same(model(X), plain(X))
    assert model._session.num_captures == 2


def test_attributes_that_are_set_back_need_no_capture() -> None:
    plain, model = build(Options), compiled(Options)
    for value in (2.0, 3.0, 2.0, 3.0):
        for m in (plain, model):
            m.scale = value
        assert_same(model(X), plain(X))
    assert model._session.num_captures == 2


def test_attribute_added_between_calls() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * getattr(self, "factor", 1)

    plain, model = build(Looks), compiled(Looks)
    assert_same(model(X), plain(X))
    for m in (plain, model):
        m.factor = 5
    assert_same(model(X), plain(X))
    for m in (plain, model):
        del m.factor
    assert_same(model(X), plain(X))


def test_method_replaced_between_calls() -> None:
    plain, model = build(Options), compiled(Options)
    assert_same(model(X), plain(X))
    for m in (plain, model):
        m.layer.forward = lambda x, layer=m.layer: torch.nn.functional.linear(x, layer.weight) * 2
    assert_same(model(X), plain(X))


def test_too_many_captures() -> None:
    model = compiled(lambda: nn.Linear(4, 3), max_captures=2)
    model(X)
    model(X[:2])
    with pytest.raises(
        SignatureError, match=r"capture 3 and max_captures is 2.*shape of tensor argument 0 is \[1, 4\]"
    ):
        model(X[:1])
    model(X)


# Errors. --------------------------------------------------------------------------------------------------------------


class Mine(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@pytest.mark.parametrize("grad", [True, False])
def test_exception_of_the_user(grad: bool) -> None:
    def rule(f: Any, x: Tensor, bad: bool = False) -> Tensor:
        if bad:
            raise Mine(7, "not like this")
        return f(x)

    plain, model = build(net(rule)), compiled(net(rule))
    assert_same(model(X), plain(X))
    with torch.set_grad_enabled(grad), pytest.raises(Mine, match=r"^not like this$") as caught:
        model(X, bad=True)
    assert caught.value.code == 7
    assert any(frame.name == "rule" for frame in traceback.extract_tb(caught.value.__traceback__))
    assert_same(model(X), plain(X))
    assert_same(model(X[:2]), plain(X[:2]))


def test_errors_of_torch_in_forward() -> None:
    model = compiled(lambda: nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match=r"\[2, 5\] X \[4, 3\]"):
        model(torch.randn(2, 5))
    assert model(X).shape == (5, 3)
    embedding = compiled(lambda: nn.Embedding(5, 3))
    with pytest.raises(IndexError, match="out of range"):
        embedding(torch.tensor([7]))


VALUES: dict[str, Any] = {
    "if": lambda f, x: f(x) if x.sum() > 0 else -f(x),
    "item": lambda f, x: f(x) * x.sum().item(),
    "tolist": lambda f, x: f(x) * x.tolist()[0][0],
    "int": lambda f, x: f(x) * int(x[0, 0]),
    "nonzero": lambda f, x: f(x)[x[:, 0].nonzero()],
    "mask": lambda f, x: f(x)[x[:, 0] > 0],
    "while": lambda f, x: _while(f(x)),
    "unique": lambda f, x: f(x) * x.unique().sum(),
    "numpy": lambda f, x: f(x) * float(x.numpy()[0, 0]),
    "assert": lambda f, x: _assert(f, x),
    "iteration": lambda f, x: f(x) * sum(float(v) for v in x[0]),
}


def _while(y: Tensor) -> Tensor:
    while y.sum() < 10:
        y = y + 1
    return y


def _assert(f: Any, x: Tensor) -> Tensor:
    assert x.abs().max() < 100
    return f(x)


@pytest.mark.parametrize("case", VALUES)
def test_what_depends_on_values_is_refused(case: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_calls.py:\d+") as caught:
        compiled(net(VALUES[case]))(X)
    assert "tensor operators" in str(caught.value)


COUNT = 0
SEEN: list[int] = []


LOGGER = logging.getLogger("mine")


class Log:
    total = 0


def _counts() -> None:
    global COUNT
    COUNT += 1


EFFECTS: dict[str, tuple[Any, str]] = {
    "print": (lambda f, x: (print("hello"), f(x))[1], "print"),
    "print of a tensor": (lambda f, x: (print(x), f(x))[1], "print"),
    "global": (lambda f, x: (_counts(), f(x))[1], "a global of tests.capture.test_calls"),
    "global list": (lambda f, x: (SEEN.append(1), f(x))[1], "SEEN"),
    "class": (lambda f, x: (setattr(Log, "total", Log.total + 1), f(x))[1], "Log|setattr"),
    "file": (lambda f, x: (open(__file__).close(), f(x))[1], "open"),
    "clock": (lambda f, x: (time.time(), f(x))[1], "time"),
}


@pytest.mark.parametrize("case", EFFECTS)
def test_side_effects_are_refused(case: str) -> None:
    rule, word = EFFECTS[case]
    with pytest.raises(CaptureError, match=word):
        compiled(net(rule))(X)


class Effects(nn.Module):
    def __init__(self, effect: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps = 0
        self.seen: list[Any] = []
        self.table: dict[str, Any] = {}
        self.helper = Log()
        self.effect = effect

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.effect(self, y)
        return y


ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "number": (lambda m, y: setattr(m, "steps", m.steps + 1), "'steps'"),
    "tensor": (lambda m, y: setattr(m, "last", y), "'last'"),
    "list": (lambda m, y: m.seen.append(1), "'seen'"),
    "dict": (lambda m, y: m.table.update(a=1), "'table'"),
    "attribute of a submodule": (lambda m, y: setattr(m.layer, "called", True), "'layer.called'"),
    "attribute of an object": (lambda m, y: setattr(m.helper, "total", m.helper.total + 1), "helper"),
    "mode": (lambda m, y: m.layer.eval(), "'layer.training'"),
    "new module": (lambda m, y: setattr(m, "more", nn.Linear(2, 2)), "'more'"),
    "new parameter": (lambda m, y: setattr(m, "w", nn.Parameter(torch.ones(2))), "'w'"),
    "requires_grad": (lambda m, y: m.layer.requires_grad_(False), "'layer._parameters'"),
    "deleted": (lambda m, y: delattr(m, "steps"), "'steps'"),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_changes_of_attributes_are_refused_and_undone(case: str) -> None:
    effect, name = ATTRIBUTES[case]
    model = compiled(lambda: Effects(effect))
    before = sorted(vars(model.original)), sorted(vars(model.layer)), list(model.original._parameters)
    with pytest.raises(CaptureError, match=name):
        model(X)
    assert (sorted(vars(model.original)), sorted(vars(model.layer)), list(model.original._parameters)) == before
    assert model.steps == 0 and model.seen == [] and model.table == {} and model.layer.training
    assert model.layer.weight.requires_grad


def test_caches_that_are_filled_before_are_fine() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.scale: float | None = 0.5

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = 0.5
            self.ready = False
            self.ready = True
            del self.ready
            return self.layer(x) * self.scale

    agree(Caches, X)


def test_warnings_and_logging_are_not_in_the_way() -> None:
    import warnings

    def rule(f: Any, x: Tensor) -> Tensor:
        warnings.warn("careful", stacklevel=1)
        LOGGER.info("called with %s", x.shape)
        return f(x)

    model = compiled(net(rule))
    with pytest.warns(UserWarning, match="careful"):
        assert_same(model(X), build(lambda: nn.Linear(4, 3))(X))
