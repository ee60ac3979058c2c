"""Full parameters and optimizer state: reading, changing, saving, loading at another world size, starting from meta."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import CASES, Net, all_rows, net, rows
from tests.dist.pool import Pools
from tests.dist.training import LR, Trained, adamw, assert_equal_training, this_rank, train, world_size
from zcompile.errors import MeshError, ShardingError, StateError, UnfilledError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

both_ends = pytest.mark.parametrize("stage", [0, 3])


def compiled(stage: int = 3, model: nn.Module | None = None) -> Any:
    return zcompile.compile(model or net(), stage=stage, backend="eager", verify="off")


def assert_same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    for name, value in b.items():
        assert a[name].dtype == value.dtype
        assert torch.equal(a[name], value), name


# Full parameters. -----------------------------------------------------------------------------------------------------


def full_state(stage: int) -> None:
    plain = net()
    model = compiled(stage)
    state = model.full_state_dict()
    assert_same_state(state, plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert model.again.weight is model.first.weight
    other = compiled(3 - stage)
    other.load_state_dict({n: torch.zeros_like(v) for n, v in state.items()})
    assert not any(v.any() for v in other.full_state_dict().values())
    other.load_state_dict(state)
    assert_same_state(other.full_state_dict(), state)
    x = rows(0, this_rank())
    assert torch.equal(other(x)["loss"], model(x)["loss"])
    plain.load_state_dict(state, strict=True)
    for problem in ({**state, "no.such": torch.zeros(1)}, {n: v for n, v in state.items() if n != "norm.bias"}):
        with pytest.raises(StateError, match=r"no\.such|norm\.bias"):
            other.load_state_dict(problem)
    with pytest.raises(StateError, match=r"norm\.bias"):
        other.load_state_dict({**state, "norm.bias": torch.zeros(14)})
    assert_same_state(other.full_state_dict(), state)


@both_ends
def test_full_state_dict_round_trip(ranks: Pools, stage: int) -> None:
    ranks(2, full_state, stage=stage)


class Counting(nn.Linear):
    """A layer that saves something of its own, of any type."""

    seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "rows": torch.arange(self.seen)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def extra_state() -> None:
    model = compiled(model=nn.Sequential(Counting(4, 3), nn.Tanh()))
    model.original[0].seen = 2 + this_rank()
    state = model.full_state_dict()
    assert list(state) == ["0.weight", "0.bias", "0._extra_state"]
    assert state["0._extra_state"]["seen"] == 2, "rank 0's"
    assert torch.equal(state["0._extra_state"]["rows"], torch.arange(2))
    nn.Sequential(Counting(4, 3), nn.Tanh()).load_state_dict(state)
    model.load_state_dict(state)
    assert model.original[0].seen == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_extra_state_is_in_the_full_state(ranks: Pools, world_size: int) -> None:
    ranks(world_size, extra_state)


def unsharded(stage: int) -> None:
    plain, model = net(), compiled(stage)
    x = rows(0, this_rank())
    with model.unsharded() as original:
        assert type(original) is Net
        assert_same_state(original.state_dict(), plain.state_dict())
        assert original.again.weight is original.first.weight
        assert torch.equal(original(x)["out"], plain(x)["out"])
        with torch.no_grad():
            original.first.weight.mul_(2 + this_rank())  # rank 0's change counts
    with torch.no_grad():
        plain.first.weight.mul_(2)
    torch.testing.assert_close(model(x)["out"], plain(x)["out"])
    with model.unsharded(modifier_rank=1) as original, torch.no_grad():
        original.norm.bias.fill_(this_rank() + 3)
    with torch.no_grad():
        plain.norm.bias.fill_(4)
    with model.unsharded(modifier_rank=None) as original, torch.no_grad():
        original.norm.bias.fill_(9)  # to read only
    assert_same_state(model.full_state_dict(), plain.state_dict())
    with pytest.raises(ShardingError, match="structure only after"), model.unsharded() as original:
        original.extra = nn.Linear(2, 2)
    del model.original.extra
    optimizer, reference = adamw(model), adamw(plain)  # training goes on
    model(x)["loss"].backward()
    plain(all_rows(0, world_size()))["loss"].backward()
    optimizer.step()
    reference.step()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-2 * LR)


@both_ends
def test_unsharded(ranks: Pools, stage: int) -> None:
    ranks(2, unsharded, stage=stage)


def unwrap(stage: int) -> None:
    plain, model = net(), compiled(stage)
    x = rows(0, this_rank())
    model(x)["loss"].backward()
    eager = zcompile.unwrap(model)
    assert type(eager) is Net
    assert all(type(p) is nn.Parameter and type(p.data) is Tensor for p in eager.parameters())
    assert [p.requires_grad for p in eager.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert eager.again.weight is eager.first.weight
    assert_same_state(eager.state_dict(), plain.state_dict())
    assert torch.equal(eager(x)["out"], plain(x)["out"])
    copy.deepcopy(eager)
    again = compiled(stage, eager)  # and it can be compiled again
    again(x)["loss"].backward()
    assert_same_state(again.full_state_dict(), plain.state_dict())


@both_ends
def test_unwrap(ranks: Pools, stage: int) -> None:
    ranks(2, unwrap, stage=stage)


def close(stage: int) -> None:
    """A closed model refuses calls, nothing of it stays alive, and its ranks can make another."""
    model, x = compiled(stage), rows(0, this_rank())
    optimizer = adamw(model)
    model(x)["loss"].backward()
    optimizer.step()
    alive = [weakref.ref(each) for each in (model, model.original, *model.parameters())]
    model.close()
    model.close()
    for refused in (lambda m: m(x), lambda m: m.full_state_dict(), lambda m: m.clip_grad_norm_(1.0)):
        with pytest.raises(MeshError, match="ended by close"):
            refused(model)
    del model, optimizer
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    compiled(stage)(x)["loss"].backward()


@both_ends
@pytest.mark.parametrize("world_size", [1, 2])
def test_close(ranks: Pools, stage: int, world_size: int) -> None:
    ranks(world_size, close, stage=stage)


def no_copies() -> None:
    model = compiled()
    with pytest.raises(ShardingError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(ShardingError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    for move in (lambda: model.to(torch.float64), lambda: model.half(), lambda: model.to("cpu")):
        with pytest.raises(ShardingError, match="cannot be moved or cast"):
            move()
    model(rows(0, this_rank()))["loss"].backward()


def test_copies_and_casts_are_refused(ranks: Pools) -> None:
    ranks(2, no_copies)


# Meta. ----------------------------------------------------------------------------------------------------------------


def meta_model(stage: int) -> None:
    state = net().state_dict()
    with torch.device("meta"):
        empty = Net()
    model = compiled(stage, empty)
    x = rows(0, this_rank())
    with pytest.raises(UnfilledError, match=r"parameter 'first\.weight' has no value yet"):
        model(x)
    half = {n: v for n, v in state.items() if not n.startswith("norm")}
    model.load_state_dict(half, strict=False)
    with pytest.raises(UnfilledError, match=r"parameter 'norm\.weight' has no value yet \(2 in all\)"):
        model(x)
    model.load_state_dict(state)
    assert_same_state(model.full_state_dict(), state)
    plain = net()
    torch.testing.assert_close(model(x)["loss"], plain(x)["loss"])
    model(x)["loss"].backward()


@both_ends
def test_meta_model(ranks: Pools, stage: int) -> None:
    ranks(2, meta_model, stage=stage)


def meta_buffers() -> None:
    """Buffers that no state dict holds have to be given by the user."""
    case = CASES["llama"]
    plain = case.build()
    with torch.device("meta"):
        empty = case.make()
    model = compiled(3, empty)
    model.load_state_dict(plain.state_dict())
    with pytest.raises(UnfilledError, match="buffer 'cos' has no value yet"):
        model(**case.data(0, 0))
    model.cos, model.sin = plain.cos, plain.sin
    torch.testing.assert_close(case.loss(model(**case.data(0, 0))), case.loss(plain(**case.data(0, 0))))


def test_meta_buffers(ranks: Pools) -> None:
    ranks(2, meta_buffers)


# Optimizers. ----------------------------------------------------------------------------------------------------------


def built_before(stage: int) -> None:
    plain, user = net(), net()
    optimizer, reference = adamw(user), adamw(plain)
    user(rows(9, 0))["loss"].backward()  # with state already, the same on every rank
    plain(rows(9, 0))["loss"].backward()
    for each in (optimizer, reference):
        each.step()
        each.zero_grad()
    model = compiled(stage, user)
    for step in range(4):
        model(rows(step, this_rank()))["loss"].backward()
        plain(all_rows(step, world_size()))["loss"].backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-2 * LR)


@both_ends
def test_optimizer_built_before_compile(ranks: Pools, stage: int) -> None:
    ranks(2, built_before, stage=stage)


#: global rows of a step in the world-size trip; 2, 3 and 1 ranks divide them evenly
GLOBAL_ROWS = 12


def part_of_trip(start: int, steps: int, stage: int, which: str, saved: bytes | None) -> tuple[list[float], bytes]:
    """Some steps of training, from and to full states."""
    model = compiled(stage)
    kind = zcompile.optim.AdamW if which == "ours" else torch.optim.AdamW
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2 * LR},
    ]
    optimizer = kind(groups, lr=LR)
    if saved is not None:
        state = torch.load(io.BytesIO(saved))
        model.load_state_dict(state["model"])
        model.load_full_optimizer_state_dict(optimizer, state["optimizer"])
    losses = []
    for step in range(start, start + steps):
        chunk = all_rows(step, 1, GLOBAL_ROWS).chunk(world_size())[this_rank()]
        loss = model(chunk)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    out = io.BytesIO()
    torch.save({"model": model.full_state_dict(), "optimizer": model.full_optimizer_state_dict(optimizer)}, out)
    return losses, out.getvalue()


@pytest.mark.parametrize(("save", "load"), [("torch", "torch"), ("ours", "torch"), ("torch", "ours")])
def test_state_travels_over_world_sizes(ranks: Pools, save: str, load: str) -> None:
    losses: list[float] = []
    saved: bytes | None = None
    for start, (world, stage, which) in enumerate([(2, 3, save), (3, 1, load), (1, 3, save), (2, 0, load)]):
        results = ranks(world, part_of_trip, start=3 * start, steps=3, stage=stage, which=which, saved=saved)
        losses += torch.tensor([r[0] for r in results]).double().mean(0).tolist()
        saved = results[0][1]
    plain = net()
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2 * LR},
        ],
        lr=LR,
    )
    expected = []
    for step in range(12):
        loss = plain(all_rows(step, 1, GLOBAL_ROWS))["loss"]
        loss.backward()
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())
    assert saved is not None
    state = torch.load(io.BytesIO(saved))
    assert_equal_training(Trained(losses, state["model"]), Trained(expected, plain.state_dict()))
    entry = state["optimizer"]["state"]["first.weight"]
    mine = reference.state[plain.first.weight]
    assert entry["step"] == mine["step"] == 12
    torch.testing.assert_close(entry["exp_avg"], mine["exp_avg"], rtol=1e-3, atol=1e-6)


def own_adamw(name: str) -> None:
    """``zcompile.optim.AdamW`` trains as torch's does."""
    case = CASES[name]
    a, b = compiled(3, case.build()), compiled(3, case.build())
    losses = train(a, case, steps=5)
    again = train(b, case, optimizer=zcompile.optim.AdamW(b.parameters(), lr=LR), steps=5)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(again), rtol=1e-6, atol=0)


def test_own_adamw(ranks: Pools) -> None:
    ranks(2, own_adamw, name="deep")
