"""What a process leaves for the next one: found only where all is equal, and then it trains the same bits."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zcompile
from tests.programs import Programs
from zcompile import scheduled, store
from zcompile.capture import joint
from zcompile.capture import key as keys
from zcompile.capture.key import NoKey, _target
from zcompile.config import Config
from zcompile.errors import BackwardError, CaptureError
from zcompile.store import Store

SCALE = 2.0


class Net(nn.Module):
    """Two equal blocks with dropout, a tied head, a buffer that forward writes, and a tensor made from Python values."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.rate = 0.25

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        for block in self.blocks:
            h = nn.functional.dropout(block(h), self.rate, self.training) + h
        h = self.norm(h) * torch.tensor([1.0, 2.0]).sum() * SCALE
        return {"loss": nn.functional.cross_entropy(self.head(h), x), "h": h}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that zcompile keeps things in."""
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts what was not found but made."""
    counts = {"captures": 0, "splits": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(joint, "_aot_joint", counted("captures", joint._aot_joint))
    monkeypatch.setattr(scheduled, "split_step", counted("splits", scheduled.split_step))
    return counts


def compiled(net: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return zcompile.compile(net(), **{"backend": "eager", **options})


def batch(step: int = 0) -> Tensor:
    return torch.arange(6).add(step).remainder(16)


def train(model: Any, steps: int = 2) -> dict[str, Any]:
    """What training comes to: losses, gradients and the whole state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(model(batch(step))["loss"])
        losses[-1].backward()
        optimizer.step()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": torch.stack(losses).detach(), "grads": grads, "state": dict(model.state_dict())}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert torch.equal(one, other)


# A second start. ------------------------------------------------------------------------------------------------------


def test_a_second_model_finds_the_step_of_the_first_and_trains_the_same_bits(
    folder: Path, made: dict[str, int]
) -> None:
    first = compiled()
    expected = train(first)
    assert made == {"captures": 1, "splits": 1} and len(list(folder.iterdir())) == 2
    second = compiled()
    assert_same(train(second), expected)
    assert made == {"captures": 1, "splits": 1}
    assert [(e.name, e.stats) for e in second.history] == [(e.name, e.stats) for e in first.history]
    assert made["splits"] == 1
    assert str(second.graphs) == str(first.graphs)
    assert made == {"captures": 1, "splits": 2}  # what came before the split was made again, because it was asked for
    for one, other in zip(second.history, first.history, strict=True):
        assert (one.before, one.after, one.diff()) == (other.before, other.after, other.diff())
    assert made == {"captures": 1, "splits": 2}


def test_a_second_start_does_not_read_the_graph_that_autograd_made(folder: Path, made: dict[str, int]) -> None:
    train(compiled())
    second = compiled()
    train(second)
    assert made["captures"] == 1
    assert "graph" not in vars(second._session.latest.captured)


def test_it_trains_like_plain_pytorch_without_a_store_as_well(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()(batch())
    with_store = train(compiled())
    monkeypatch.setenv(store.VARIABLE, "0")
    assert_same(train(compiled()), with_store)
    torch.manual_seed(0)
    plain = train(Net())
    for what in plain:
        torch.testing.assert_close(with_store[what], plain[what])


def test_another_process_finds_it(folder: Path, made: dict[str, int], programs: Programs, tmp_path: Path) -> None:
    expected = train(compiled())
    script = tmp_path / "second.py"
    script.write_text(
        "import os, sys, torch\n"
        "os.environ['ZCOMPILE_CACHE_DIR'] = sys.argv[1]\n"
        "from tests import test_store\n"
        "from zcompile.capture import joint\n"
        "joint._aot_joint = None\n"
        "torch.save(test_store.train(test_store.compiled()), sys.argv[2])\n"
    )
    programs(script, str(folder), str(tmp_path / "trained.pt"))
    assert_same(torch.load(tmp_path / "trained.pt"), expected)
    assert len(list(folder.iterdir())) == 2


def test_no_sync_and_eval_after_a_second_start(folder: Path, made: dict[str, int]) -> None:
    def accumulate() -> dict[str, Any]:
        model = compiled(stage=2)
        torch.manual_seed(1)
        with model.no_sync():
            model(batch())["loss"].backward()
        model(batch(1))["loss"].backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.eval()
        with torch.no_grad():
            return {"grads": grads, "h": model(batch())["h"]}

    expected = accumulate()
    before = dict(made)
    assert_same(accumulate(), expected)
    assert made == before


def test_a_budget_after_a_second_start(folder: Path, made: dict[str, int]) -> None:
    first = compiled(memory_budget="1GiB", verify="fast")
    expected = train(first)
    captures = made["captures"]
    second = compiled(memory_budget="1GiB", verify="fast")
    assert_same(train(second), expected)
    assert made["captures"] == captures
    assert str(second.report().decision) == str(first.report().decision)
    assert str(second.graphs) == str(first.graphs)


def test_a_dump_has_every_pass_also_after_a_second_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for number in (1, 2):
        monkeypatch.setenv("ZCOMPILE_DUMP", str(tmp_path / f"dump{number}"))
        compiled()(batch())
        names.append({path.name: path.read_text() for path in (tmp_path / f"dump{number}").rglob("*.txt")})
    assert names[0] == names[1] and len(names[0]) > 5


def test_plans_find_captures(folder: Path, made: dict[str, int]) -> None:
    first = zcompile.plan(Net(), batch(), world_size=2, advise=False)
    assert made["captures"] == 1
    assert str(zcompile.plan(Net(), batch(), world_size=2, advise=False)) == str(first)
    zcompile.plan(Net(), batch(), world_size=4, stage=1, advise=False)
    assert made["captures"] == 1


def test_errors_are_the_same_after_a_second_start(folder: Path) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.linear.bias.detach().add_(1)
            return self.linear(x).sum()

    messages = []
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            compiled(Writes)(torch.ones(2, 4))
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and not folder.exists()
    for _ in range(2):
        model = compiled()
        model(batch())
        with pytest.raises(BackwardError) as refused:
            model(batch())["h"].sum().backward()
        messages.append(str(refused.value))
    assert messages[2] == messages[3]


# Keys. ----------------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    """The key is known."""


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Callable[[Any], str]]:
    """The key of a model's capture, without the capture."""

    def find(store: Any, key: str, mode: Any) -> Any:
        raise _Stop(key)

    def key_of(model: Any, x: Tensor | None = None) -> str:
        with monkeypatch.context() as patched, pytest.raises(_Stop) as stopped:
            patched.setattr(joint.Joint, "find", staticmethod(find))
            model(batch() if x is None else x)
        return str(stopped.value)

    yield key_of


def _with(change: Callable[[Net], Any]) -> Callable[[], Net]:
    def make() -> Net:
        net = Net()
        change(net)
        return net

    return make


def _untie(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


def _hook(net: Net) -> None:
    net.norm.register_forward_hook(lambda module, args, result: result * 2)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "an attribute": lambda net: setattr(net, "rate", 0.5),
    "an attribute of a submodule": lambda net: setattr(net.norm, "eps", 1e-3),
    "a module": lambda net: net.blocks[1].__setitem__(1, nn.Sigmoid()),
    "dtype": lambda net: net.double(),
    "a frozen parameter": lambda net: net.blocks[0][0].weight.requires_grad_(False),
    "untied": _untie,
    "eval": lambda net: net.eval(),
    "one module in eval": lambda net: net.norm.eval(),
    "a buffer": lambda net: net.norm.register_buffer("running_mean", torch.zeros(8, dtype=torch.float64)),
    "a hook": _hook,
    "a name": lambda net: setattr(net, "renamed", net._modules.pop("norm")) or setattr(net, "norm", net.renamed),
}


def test_equal_models_have_equal_keys_and_others_have_others(key: Callable[..., str]) -> None:
    keys = {"": key(compiled())}
    assert key(compiled()) == keys[""] != ""
    for name, change in CHANGES.items():
        keys[name] = key(compiled(_with(change)))
    keys["width"] = key(compiled(lambda: Net(4)))
    keys["batch"] = key(compiled(), torch.arange(5))
    keys["precision"] = key(compiled(precision="bf16"))
    keys["a dtype of the batch"] = key(compiled(), batch().int())
    with torch.no_grad():
        keys["no_grad"] = key(compiled())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys["autocast"] = key(compiled())
    keys["differentiable"] = key(compiled(differentiable=["h"]))
    assert "" not in keys.values()
    assert len(set(keys.values())) == len(keys), keys


def test_a_global_a_closure_and_a_default_of_user_code_count(
    key: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closing(scale: float, default: float) -> Callable[[], nn.Module]:
        class Closing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: Tensor, shift: float = default) -> Tensor:
                return (self.linear(x) * scale + shift).sum()

        return Closing

    x = torch.ones(2, 4)
    keys = [key(compiled(closing(a, b)), x) for a, b in ((1.5, 1.0), (1.5, 1.0), (2.5, 1.0), (1.5, 2.0))]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    before = key(compiled())
    monkeypatch.setattr("tests.test_store.SCALE", 3.0)
    assert key(compiled()) != before


def test_settings_of_torch_and_code_of_zcompile_count(key: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    found = [key(compiled())]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found.append(key(compiled()))
    with config.patch(aggressive_recomputation=True):
        found.append(key(compiled()))
    with torch.nn.attention.sdpa_kernel(
        list(torch.nn.attention.SDPBackend.__members__.values())[:0:-1], set_priority=True
    ):
        found.append(key(compiled()))
    monkeypatch.setattr(keys, "_SOURCES", "another version")
    found.append(key(compiled()))
    assert len(set(found)) == len(found)


def test_every_option_of_a_pipeline_counts(folder: Path, made: dict[str, int]) -> None:
    compiled()(batch())
    options: list[dict[str, Any]] = [
        {"stage": 1},
        {"policy": "keep{units=2},prefetch"},
        {"recompute": "full"},
        {"verify": "fast"},
        {"offload": "activations"},
        {"reduce_dtype": "bf16"},
    ]
    for number, given in enumerate(options):
        compiled(**given)(batch())
        assert made == {"captures": 1, "splits": number + 2}, given
        compiled(**given)(batch())
        assert made == {"captures": 1, "splits": number + 2}, given


def test_functions_of_torch_that_are_made_by_others_have_names(key: Callable[..., str]) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.max_pool1d(self.linear(x), 2).tanh().sum()

    assert key(compiled(Pools), torch.ones(2, 4)) != ""


# What has no key. -----------------------------------------------------------------------------------------------------


GLOBAL = torch.ones(4)


@torch.library.custom_op("zcompile_test_store::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * 2)


class _Reads(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.plain = torch.ones(4)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.what == "a plain attribute":
            h = h + self.plain
        elif self.what == "a global":
            h = h + GLOBAL
        else:
            h = twice(h)
        return h.sum()


@pytest.mark.parametrize("what", ["a plain attribute", "a global", "an operator"])
def test_what_has_no_value_to_compare_is_captured_anew(
    what: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "zcompile"):
        compiled(lambda: _Reads(what))(torch.ones(2, 4)).backward()
    assert not folder.exists()
    expected = "zcompile_test_store::twice" if what == "an operator" else "no argument, parameter or buffer"
    assert expected in caplog.text


def test_a_function_under_the_name_of_one_of_torch_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: Any = nn.functional
    assert _target(functions.silu) == "torch.nn.functional silu"
    monkeypatch.setattr(functions, "silu", functools.wraps(functions.silu)(lambda x: x * 2))
    with pytest.raises(NoKey, match="is not torch's"):
        _target(functions.silu)


class _Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _mode() -> Iterator[None]:
    with _Doubles():
        yield


@contextlib.contextmanager
def _decomposition() -> Iterator[None]:
    from torch._inductor.decomposition import decompositions as table

    operator = torch.ops.aten.tanh_backward.default
    before = table[operator]
    table[operator] = lambda grad, y: grad * y
    try:
        yield
    finally:
        table[operator] = before


@contextlib.contextmanager
def _kernel() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", lambda x: x.sin(), "AutogradCPU")
        yield


@pytest.mark.parametrize("change", [_mode, _decomposition, _kernel])
def test_where_operators_of_torch_do_something_else_nothing_has_a_key(
    change: Callable[[], Any], key: Callable[..., str]
) -> None:
    """Dynamo's graph is the same, and what autograd makes of it is not."""
    assert key(compiled()) != ""
    with change():
        assert key(compiled()) == ""
    assert key(compiled()) != ""


def test_code_that_is_edited_after_the_start_is_not_the_code_that_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "compat.py").write_text("edited")
    monkeypatch.setattr("zcompile.compat.__file__", str(tmp_path / "compat.py"))
    assert keys._sources() not in next(keys._world())


def test_a_pass_of_ones_own_is_run_every_time(folder: Path, made: dict[str, int]) -> None:
    from zcompile import passes
    from zcompile.pipeline import Pipeline, Stats, StepPass

    class Mine(StepPass):
        name = "mine"

        def run(self, target: Any, stats: Stats) -> None:
            stats["runs"] += 1

    pipeline = Pipeline((*passes.default_pipeline(Config(), size=1).passes, Mine()))
    for number in (1, 2):
        model = compiled(pipeline=pipeline)
        model(batch())
        assert model.history["mine"].stats == {"runs": 1}
        assert made == {"captures": 1, "splits": number}


# The folder. ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:-9] + b"123456789"])
def test_a_damaged_entry_is_made_anew(
    damage: Callable[[bytes], bytes], folder: Path, made: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(compiled())
    for path in folder.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "zcompile"):
        assert_same(train(compiled()), expected)
    assert caplog.text.count("it is damaged") == 2 and made["captures"] == 2
    train(compiled())
    assert made["captures"] == 2


def test_an_entry_that_is_no_pickle_is_made_anew(folder: Path, made: dict[str, int]) -> None:
    compiled()(batch())
    for path in folder.iterdir():
        Store(folder).put(path.stem, b"nonsense")
    compiled()(batch())
    assert made["captures"] == 2


def test_what_others_may_write_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Store(tmp_path / "kept")
    kept.put("a", b"data")
    assert kept.get("a") == b"data" and kept.get("b") is None
    (path,) = kept.folder.iterdir()
    assert kept.folder.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o622)
    assert kept.get("a") is None
    path.chmod(0o600)
    assert kept.get("a") == b"data"
    kept.folder.chmod(0o770)
    assert kept.get("a") is None
    kept.put("c", b"data")
    kept.folder.chmod(0o700)
    assert kept.get("a") == b"data" and kept.get("c") is None
    link = kept.folder / "d.entry"
    link.symlink_to(path)
    assert kept.get("d") is None
    assert caplog.text.count("another user") == 2


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, made: dict[str, int], monkeypatch: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(store.VARIABLE, str(blocked / "kept"))
    for number in (1, 2):
        compiled()(batch())
        assert made["captures"] == number


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    kept = Store(tmp_path / "kept", limit_bytes=1000)
    for index, name in enumerate("abc"):
        kept.put(name, bytes(400 - 60))
        os.utime(kept._path(name), (index, index))
    assert kept.get("a") is None and kept.get("b") is not None  # read last: now
    kept.put("d", bytes(400 - 60))
    assert [name for name in "abcd" if kept.get(name) is not None] == ["b", "d"]
    kept.put("e", bytes(2000))
    assert kept.get("e") is None


def test_where_entries_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for off in ("", "0"):
        monkeypatch.setenv(store.VARIABLE, off)
        assert Store.from_environment() is None
    monkeypatch.delenv(store.VARIABLE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert Store.from_environment() == Store(tmp_path / "zcompile")
