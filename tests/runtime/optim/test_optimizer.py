"""AdamW over flat memory against torch's."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.runtime.conftest import Launch
from tests.runtime.models import Odd, cut_into_chunks, full_gradients, reduced, set_gradients, shard
from zcompile.errors import OptimizerError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.shards import ParameterShards

Make = Callable[..., Any]


class Pair:
    """A sharded model with our AdamW beside a plain one with torch's."""

    def __init__(self, mesh: Mesh, *, dtype: torch.dtype = torch.float32, groups: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.plain = Odd(dtype), Odd(dtype)
        self.plain.load_state_dict(self.model.state_dict())
        self.shards = shard(self.model, mesh)
        self.ours = AdamW(self.grouped(self.model, groups), lr=0.1, **options)
        self.theirs = torch.optim.AdamW(self.grouped(self.plain, groups), lr=0.1, foreach=False, **options)

    @staticmethod
    def grouped(model: nn.Module, groups: bool) -> list[Any]:
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not groups:
            return trainable
        decay, rest = [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]
        return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]

    def step(self, seed: int, skip: tuple[str, ...] = ()) -> None:
        gradients = full_gradients(self.plain, seed, skip=skip)
        set_gradients(self.plain, gradients)
        self.shards.drop_gradients()  # as a forward does
        self.shards.accumulate_many(*reduced(self.shards, gradients))
        self.theirs.step()
        self.ours.step()
        self.ours.zero_grad()

    def check(self, rtol: float = 1e-6, atol: float = 1e-7) -> None:
        """Parameters and state equal torch's; nothing outside them was written."""
        for name, plain in self.plain.named_parameters():
            spec = self.shards.specs[name]
            mine = self.model.get_parameter(name)
            self.same(spec.name, self.shards.local(name), plain.detach(), rtol, atol)
            theirs = self.theirs.state.get(plain, {})
            assert self.ours.state.get(mine, {}).keys() == theirs.keys()
            for key, value in theirs.items():
                found = self.ours.state[mine][key]
                if key == "step":
                    assert found.item() == value.item()
                    continue
                local = found.to_local() if isinstance(found, DTensor) else found
                assert local.storage_offset() == 0
                assert local.untyped_storage().nbytes() == local.nbytes
                self.same(name, full_tensors.pad(spec, local, self.shards.mesh.rank), value, rtol, atol)

    def same(self, name: str, padded: Tensor, full: Tensor, rtol: float, atol: float) -> None:
        spec = self.shards.specs[name]
        expected = torch.zeros_like(padded)
        full_tensors.write_shard(spec, expected, full, self.shards.mesh.rank)
        torch.testing.assert_close(padded, expected, rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}")


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "groups": {"groups": True},
    "no decay": {"weight_decay": 0.0, "betas": (0.5, 0.7)},
    "no eps": {"eps": 0.0},
    "tensor lr": {"foreach": None},
}


@pytest.mark.usefixtures("both_sizes")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equal_to_torch(options: dict[str, Any]) -> None:
    pair = Pair(Mesh.create(device="cpu"), **{k: v for k, v in options.items() if k != "foreach"})
    for seed in range(4):
        pair.step(seed)
        pair.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_parameters_own_dtype(dtype: torch.dtype) -> None:
    pair = Pair(Mesh.create(device="cpu"), dtype=dtype)
    for seed in range(3):
        pair.step(seed)
    pair.check(rtol=0, atol=0)
    assert pair.ours.state[pair.model.up.weight]["exp_avg"].dtype is dtype


@pytest.mark.usefixtures("both_sizes")
def test_parameters_without_a_gradient_are_skipped() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    pair.step(0, skip=("up.weight", "nothing"))
    assert pair.model.up.weight not in pair.ours.state
    pair.step(1, skip=("up.bias",))
    pair.step(2)
    pair.step(3, skip=("embed.weight",))
    pair.check()
    assert {v["step"].item() for v in pair.ours.state.values()} == {3.0, 4.0}


def test_neighbours_are_updated_in_one_piece() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    pair.step(0)
    (arena,) = {cell.arena for cell in pair.ours._cells.values()}
    segments = arena.segments(tuple(range(len(arena.cells))), False)
    assert len(segments.table) == 1
    pair = Pair(Mesh.create(device="cpu"), groups=True)
    pair.step(0)
    assert len({cell.arena for cell in pair.ours._cells.values()}) == 2


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"groups": True}], ids=["default", "amsgrad", "groups"])
def test_chunks_change_no_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for cut in (False, True):
        if cut:
            cut_into_chunks(monkeypatch)
        pair = Pair(Mesh.create(device="cpu"), **options)
        for seed in range(4):
            pair.step(seed, skip=("up.bias",) if seed == 1 else ())
        assert (len({place.key for place in pair.shards.layout.places if place}) > 3) == cut  # frozen ones are one more
        results.append([shards.clone() for shards in map(pair.shards.local, pair.shards.names)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_large_pieces_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.optim.adamw_update.CHUNK_ELEMENTS", 100)
    pair = Pair(Mesh.create(device="cpu"), amsgrad=True)
    for seed in range(2):
        pair.step(seed)
    pair.check()


@pytest.mark.usefixtures("both_sizes")
def test_options_may_change_between_steps() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    for seed in range(4):
        for optimizer in (pair.ours, pair.theirs):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.05) if seed == 1 else 0.1 / (seed + 1)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * seed
            optimizer.param_groups[0]["amsgrad"] = seed == 3
        if seed == 3:  # torch wants the maxima to exist
            for state in pair.theirs.state.values():
                state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        pair.step(seed)
    pair.check()


@pytest.mark.usefixtures("both_sizes")
def test_a_gradient_of_the_users() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    pair.step(0)
    gradients = full_gradients(pair.plain, 1)
    set_gradients(pair.plain, gradients)
    pair.shards.accumulate_many(*reduced(pair.shards, gradients))
    pair.model.up.weight.grad = gradients["up.weight"].clone()
    pair.ours.step()
    pair.theirs.step()
    pair.ours.zero_grad()
    pair.step(2)
    pair.check()


#: what a user may do to an optimizer between two steps
CHANGES: dict[str, Callable[[torch.optim.Optimizer, nn.Parameter], Any]] = {
    "a moment": lambda o, p: o.state[p].update(exp_avg=torch.full_like(p.detach(), 0.5)),
    "a moment in place": lambda o, p: o.state[p]["exp_avg_sq"].mul_(2),
    "a count": lambda o, p: o.state[p].update(step=torch.tensor(7.0)),
    "a count in place": lambda o, p: o.state[p]["step"].fill_(9.0),
    "an entry": lambda o, p: o.state.__setitem__(p, {key: 0.5 * value for key, value in o.state[p].items()}),
    "no entry": lambda o, p: o.state.pop(p),
    "its contents": lambda o, p: o.state[p].clear(),
    "the order": lambda o, p: o.param_groups[0]["params"].reverse(),
    "one less": lambda o, p: o.param_groups[0]["params"].pop(),
    "another in its place": lambda o, p: o.param_groups[0]["params"].__setitem__(-1, nn.Parameter(torch.zeros(2))),
    "a gradient": lambda o, p: setattr(p, "grad", torch.full_like(p.detach(), 0.25)),
    "no gradient": lambda o, p: setattr(p, "grad", None),
}


@pytest.mark.usefixtures("both_sizes")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_users_change_is_seen(change: Callable[[torch.optim.Optimizer, nn.Parameter], Any]) -> None:
    """A plan that was made before holds no more; the steps are torch's."""
    pair = Pair(Mesh.create(device="cpu"))
    skip = ("nothing",)  # a parameter that is updated on its own lets no plan hold
    for seed in range(3):
        pair.step(seed, skip)
    assert pair.ours._plans
    gradients = full_gradients(pair.plain, 3, skip=skip)
    set_gradients(pair.plain, gradients)
    pair.shards.accumulate_many(*reduced(pair.shards, gradients))
    change(pair.ours, pair.model.up.weight)
    change(pair.theirs, pair.plain.up.weight)
    pair.ours.step()
    pair.theirs.step()
    for p in pair.model.parameters():
        p.grad = None
    for seed in (4, 5):
        pair.step(seed, skip)
    pair.check()


@pytest.mark.usefixtures("both_sizes")
@pytest.mark.parametrize("distributed", [False, True])
def test_state_goes_to_torch_and_comes_back(distributed: bool, request: pytest.FixtureRequest) -> None:
    if distributed:
        request.getfixturevalue("one_rank")
    pair = Pair(Mesh.create(device="cpu"), groups=True)
    for seed in range(2):
        pair.step(seed)
    file = io.BytesIO()
    torch.save(pair.ours.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert len(file.getvalue()) < 40_000

    again = Pair(pair.shards.mesh, groups=True)
    again.model.load_state_dict(copy.deepcopy(pair.model.state_dict()))
    again.plain.load_state_dict(pair.plain.state_dict())
    again.step(7)  # state that loading must overwrite
    again.model.load_state_dict(copy.deepcopy(pair.model.state_dict()))
    again.plain.load_state_dict(pair.plain.state_dict())
    cells = list(again.ours._cells.values())
    again.ours.load_state_dict(saved)
    again.theirs.load_state_dict(pair.theirs.state_dict())
    assert again.ours.param_groups[0]["weight_decay"] == 0.3
    again.step(5)
    again.check()
    assert list(again.ours._cells.values()) == cells, "loading copies into the memory that is there"

    theirs = torch.optim.AdamW(Pair.grouped(pair.model, True), lr=0.1)  # torch's optimizer takes our state
    theirs.load_state_dict(pair.ours.state_dict())
    gradients = full_gradients(pair.plain, 5)
    pair.shards.accumulate_many(*reduced(pair.shards, gradients))
    theirs.step()
    for ours, expected in zip(pair.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_copies_start_from_the_same_state() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    pair.step(0)
    copied = copy.deepcopy(pair.ours)
    assert copied._cells == {} and len(copied.state) == len(pair.ours.state)
    before = [p.detach().clone() for p in pair.model.parameters()]
    for p in copied.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    copied.step()
    assert all(torch.equal(a, b) for a, b in zip(before, pair.model.parameters(), strict=True))
    pair.ours.state.clear()  # a fresh start
    pair.theirs.state.clear()
    pair.step(1)
    pair.check()


@pytest.mark.usefixtures("both_sizes")
def test_a_group_added_later() -> None:
    pair = Pair(Mesh.create(device="cpu"))
    for optimizer, model in ((pair.ours, pair.model), (pair.theirs, pair.plain)):
        group = optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not model.nothing]
        model.frozen.requires_grad_()
    pair.step(0, skip=("frozen", "nothing"))
    for optimizer, model in ((pair.ours, pair.model), (pair.theirs, pair.plain)):
        optimizer.add_param_group({"params": [model.frozen, model.nothing], "lr": 0.3})
    pair.step(1)
    pair.step(2)
    pair.check()


def test_any_other_parameter() -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 4), torch.randn(2, dtype=torch.complex64), torch.randn(()), torch.randn(5, 6).t()]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in range(2))
    mine, reference = AdamW(ours, lr=0.1, amsgrad=True), torch.optim.AdamW(theirs, lr=0.1, amsgrad=True)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert mine.step(lambda: 3.5) == 3.5


def test_mistakes_are_errors() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}, {"lr": math.nan}):
        with pytest.raises(OptimizerError, match=rf"{next(iter(options))} is .*; pass a value in its range"):
            AdamW(parameters, **options)  # type: ignore[arg-type]
    for name in ("capturable", "differentiable"):
        with pytest.raises(OptimizerError, match=rf"{name}=True is not supported"):
            AdamW(parameters, **{name: True})  # type: ignore[arg-type]
    parameters[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(OptimizerError, match=r"shape \[2\] has a torch.sparse_coo gradient"):
        AdamW(parameters).step()


@pytest.mark.usefixtures("one_rank")
def test_a_wrongly_placed_gradient_is_an_error() -> None:
    model = nn.Linear(3, 4)
    mesh = Mesh.create(device="cpu")
    shard(model, mesh)
    optimizer = AdamW(model.parameters())
    model.weight.grad = torch.ones(4, 3)
    with pytest.raises(OptimizerError, match=r"is a DTensor and its .grad is a plain tensor"):
        optimizer.step()
    model.weight.grad = DTensor.from_local(torch.ones(4, 3), mesh.device_mesh, [Shard(1)])
    with pytest.raises(OptimizerError, match="redistribute the gradient"):
        optimizer.step()


def on_ranks(rank: int, world_size: int, options: dict[str, Any], cut: bool) -> float:
    if cut:
        cut_into_chunks(pytest.MonkeyPatch())
    mesh = Mesh.create(device="cpu", timeout=20)
    pair = Pair(mesh, **options)
    for seed in range(3):
        pair.step(seed, skip=("up.bias",) if seed == 1 else ())
        pair.check()
    return sum(p.full_tensor().double().sum().item() for p in pair.model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("options", [{"groups": True}, {"amsgrad": True, "eps": 0.0}], ids=["groups", "no eps"])
def test_equal_to_torch_on_ranks(launch: Launch, options: dict[str, Any]) -> None:
    assert len(set(launch(3, on_ranks, options, False) + launch(3, on_ranks, options, True))) == 1


@pytest.mark.usefixtures("both_sizes")
def test_nothing_is_held_when_a_model_goes_away() -> None:
    import gc
    import weakref

    pair = Pair(Mesh.create(device="cpu"))
    pair.step(0)
    gone: weakref.ref[ParameterShards] = weakref.ref(pair.shards)
    del pair
    gc.collect()
    assert gone() is None
