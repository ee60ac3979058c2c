"""Weights that stay gathered over a declared window: the same bits as without, fewer gathers, and never a stale value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zcompile
from tests.dist.models import Case, Deep, all_rows, net, own_batch, rows
from tests.dist.pool import Pools
from tests.dist.training import assert_close_gradients, full_gradients, this_rank, world_size
from zcompile.errors import RankError, ShardingError
from zcompile.runtime import holding

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

#: holds nothing, and is the same otherwise
UNHELD = ",hold{units=0 first=0}"


def compiled(
    stage: int, *, holds: bool = True, keep: str = "keep{units=99}", case: Case | None = None, **options: Any
) -> Any:
    """A compiled model whose released buffers are NaN."""
    options = {"gradient_accumulation_steps": 3, **options}
    model = case.build() if case else net()
    policy = f"{keep},prefetch" if holds else f"{keep.partition(',hold')[0]},prefetch{UNHELD}"
    model = zcompile.compile(model, stage=stage, backend="eager", verify="fast", policy=policy, **options)
    model._session.runner.executor.buffers.poison = True
    return model


def mine(step: int) -> Tensor:
    return rows(step, this_rank())


def num_held(model: Any) -> int:
    return len(model._session.runner.holding)


def live_bytes(model: Any) -> int:
    return model.report().gathered_live_bytes


@contextmanager
def gathers(model: Any) -> Iterator[list[str]]:
    """What is gathered inside: the label of its gather for each parameter."""
    collectives, started = model._session.runner.executor.collectives, []
    plain = collectives.all_gather

    def all_gather(outputs: Any, sends: Any, label: str) -> Any:
        started.extend([label] * len(outputs))
        return plain(outputs, sends, label)

    collectives.all_gather = all_gather
    try:
        yield started
    finally:
        del collectives.all_gather


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = found[name] is value if value is None else torch.equal(found[name], value)
        assert same, f"{name} differs"


# The same numbers. ----------------------------------------------------------------------------------------------------


def trained(steps: int, case: Case, **options: Any) -> tuple[dict[str, Any], list[list[str]]]:
    """Weights and gradients after two windows with an update between, and what each micro-batch gathers."""
    model = compiled(case=case, gradient_accumulation_steps=steps, **options)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-2)
    gathered = []
    for step in range(2 * steps):
        with gathers(model) as started:
            case.loss(model(**case.data(step, this_rank()))).backward()
        gathered.append(started)
        if step == steps - 1:
            optimizer.step()
            optimizer.zero_grad()
    assert live_bytes(model) == 0 and num_held(model) == 0
    return model.full_state_dict() | {f"grad {n}": g for n, g in full_gradients(model).items()}, gathered


def same_bits(stage: int, keep: str, precision: str | None, steps: int) -> None:
    """As without holding; of what is kept each window gathers everything once."""
    options = {"stage": stage, "keep": keep, "precision": precision, "case": Case(partial(Deep, 2), own_batch)}
    found, gathered = trained(steps, **options)
    wanted, plain = trained(steps, **options, holds=False)
    assert_same_bits(found, wanted)
    everything = stage < 3 or "keep{units=99}" in keep
    for window in (gathered[:steps], gathered[steps:]):
        assert window[0] and all((not later) == everything for later in window[1:])
    assert len(set(map(len, plain))) == 1
    assert all(len(g) <= len(p) for g, p in zip(gathered, plain, strict=True))
    assert sum(map(len, gathered)) < sum(map(len, plain))
    if (
        "first=99" in keep
    ):  # forward gathers nothing that the backward before it had: 3 weights of each block and the head's
        assert len(gathered[1]) == len(plain[1]) - 7


@pytest.mark.parametrize(
    ("stage", "keep", "precision", "steps"),
    [
        (1, "keep", None, 3),
        pytest.param(1, "keep", "bf16", 2, marks=pytest.mark.wide),
        (2, "keep", "bf16", 3),
        pytest.param(3, "keep", None, 2, marks=pytest.mark.wide),
        (3, "keep", "bf16", 3),
        (3, "keep{units=99}", "bf16", 3),
        (3, "keep{units=0},hold{first=99}", "bf16", 3),
    ],
)
def test_the_same_bits_with_fewer_gathers(
    ranks: Pools, stage: int, keep: str, precision: str | None, steps: int
) -> None:
    ranks(2, same_bits, stage=stage, keep=keep, precision=precision, steps=steps)


def as_plain(stage: int) -> None:
    """Uneven rows, tied, frozen and unused parameters on three ranks."""
    model, plain = compiled(stage), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for start in (0, 3):
        for i in range(3):
            model(mine(start + i))["loss"].backward()
            plain(all_rows(start + i, world_size()))["loss"].backward()
            assert (num_held(model) > 0) == (i < 2)
        assert_close_gradients(full_gradients(model), plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.wide), 3])
def test_windows_equal_plain_pytorch(ranks: Pools, stage: int) -> None:
    ranks(3, as_plain, stage=stage)


# What ends it. --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def double_in_place(model: Any, folder: Path) -> None:
    for parameter in model.parameters():
        parameter.mul_(2.0)


@torch.no_grad()
def double_local(model: Any, folder: Path) -> None:
    for parameter in model.parameters():
        parameter.to_local().mul_(2.0)


@torch.no_grad()
def double_detached(model: Any, folder: Path) -> None:
    for parameter in model.parameters():
        parameter.detach().mul_(2.0)


def double_unsharded(model: Any, folder: Path) -> None:
    with model.unsharded() as whole, torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2.0)


def load_doubled(model: Any, folder: Path) -> None:
    model.load_state_dict({name: 2.0 * value for name, value in model.full_state_dict().items()})


def load_doubled_checkpoint(model: Any, folder: Path) -> None:
    """A checkpoint is refused while gradients wait for the end of the window, so it was written before."""
    zcompile.load_checkpoint(folder, model)


def step_of_torch(model: Any, folder: Path) -> None:
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5))


def step_of_many(model: Any, folder: Path) -> None:
    """One operator for all parameters, which torch does not count as a write."""
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5, foreach=True))


def step_of_ours(model: Any, folder: Path) -> None:
    _step(model, zcompile.optim.AdamW(model.parameters(), lr=0.5))


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    if model._config.stage == 1:  # where gradients are not in .grad yet
        model.sync_gradients()
    optimizer.step()


def drop_gradients(model: Any, folder: Path) -> None:
    model.zero_grad()


def complete_gradients(model: Any, folder: Path) -> None:
    model.sync_gradients()


#: what may happen between two micro-batches, and whether it writes parameters
ENDINGS: dict[str, tuple[Callable[[Any, Path], None], bool]] = {
    f.__name__: (f, writes)
    for f, writes in (
        (double_in_place, True),
        (double_local, True),
        (double_detached, True),
        (double_unsharded, True),
        (load_doubled, True),
        (load_doubled_checkpoint, True),
        (step_of_torch, True),
        (step_of_many, True),
        (step_of_ours, True),
        (drop_gradients, False),
        (complete_gradients, False),
    )
}


def ended(stage: int, folder: str) -> None:
    path = Path(folder) / "doubled"
    doubled = net()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
    zcompile.save_checkpoint(path, zcompile.compile(doubled, stage=stage, backend="eager"))
    held, unheld = compiled(stage), compiled(stage, holds=False)
    for name, (action, writes) in ENDINGS.items():
        assert_same_bits(*[_after_ending(model, action, writes, path, name) for model in (held, unheld)])


def _after_ending(
    model: Any, action: Callable[[Any, Path], None], writes: bool, path: Path, name: str
) -> dict[str, Any]:
    holds = "hold{units=0 first=0" not in str(model.pipeline)
    model.load_state_dict(net().state_dict())
    model.zero_grad()
    model(mine(0))["loss"].backward()
    assert (num_held(model) > 0) == holds
    before = model.full_state_dict()["middle.weight"]
    action(model, path)
    assert torch.equal(model.full_state_dict()["middle.weight"], before) != writes, name
    with gathers(model) as started:
        losses = [model(mine(1))["loss"]]
    assert started, f"{name} left weights that were gathered before it"
    losses[0].backward()
    losses.append(model(mine(2))["loss"])
    losses[1].backward()
    if model._session.runner.executor.accumulation.position:
        model.sync_gradients()
    assert live_bytes(model) == 0 and num_held(model) == 0, name
    return full_gradients(model) | {f"loss {i}": loss.detach() for i, loss in enumerate(losses)}


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_held_over_a_write(ranks: Pools, stage: int, tmp_path: Path) -> None:
    ranks(2, ended, stage=stage, folder=str(tmp_path))


@torch.no_grad()
def double_data(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.data.mul_(2.0)


@torch.no_grad()
def double_data_of_one(parameters: list[Any]) -> None:
    parameters[0].data.mul_(2.0)


@torch.no_grad()
def double_many(parameters: list[Any]) -> None:
    torch._foreach_mul_(parameters, 2.0)


def unseen(stage: int, **options: Any) -> None:
    """What torch does not count is an error at the end of the window, unless a new one has begun; the next window is right."""
    held, unheld = [compiled(stage, holds=holds, **options) for holds in (True, False)]
    few, holding.FEW_WINDOWS = holding.FEW_WINDOWS, 1
    for write in (double_data, double_data_of_one, double_many):
        for model in (held, unheld):
            model.load_state_dict(net().state_dict())
            model.zero_grad()
            model(mine(0))["loss"].backward()
            write(list(model.parameters()))
            model(mine(1))["loss"].backward()
        with pytest.raises(ShardingError, match="written inside an accumulation window"):
            held(mine(2))["loss"].backward()
        assert live_bytes(held) == 0
        for end in (held.sync_gradients, held.zero_grad):
            held.zero_grad()
            held(mine(0))["loss"].backward()
            write(list(held.parameters()))
            held(mine(1))["loss"].backward()
            with pytest.raises(ShardingError, match="written inside an accumulation window"):
                end()
            write(list(unheld.parameters()))
        results = []
        for model in (held, unheld):
            for i in range(4):
                model.zero_grad() if i < 2 else None
                model(mine(i))["loss"].backward()
                write(list(model.parameters())) if i == 0 else None
            results.append(full_gradients(model))
        assert_same_bits(*results)
    holding.FEW_WINDOWS = few


def looks() -> None:
    """At the sums of shards, which takes time: in the first windows, and in few later ones."""
    model = compiled(3)
    found = []
    for step in range(holding.FEW_WINDOWS + 2):
        found.append(model._session.runner.holding.looks)
        for number in range(3):
            model(mine(number))["loss"].backward()
        if step % 2:
            model.zero_grad()
    assert [i for i, looked in enumerate(found) if looked] == [0, 1, 2, holding.FEW_WINDOWS]


def test_few_windows_are_looked_at(ranks: Pools) -> None:
    ranks(2, looks)


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload": "parameters"}])
def test_a_write_that_torch_does_not_count_is_an_error(ranks: Pools, options: dict[str, Any]) -> None:
    ranks(2, unseen, **options)


def unseen_by_one() -> None:
    model = compiled(3, timeout=30.0)
    model(mine(0))["loss"].backward()
    if this_rank() == 0:
        double_data(list(model.parameters()))
    model(mine(1))["loss"].backward()
    with pytest.raises(ShardingError if this_rank() == 0 else RankError, match="written inside an accumulation window"):
        model(mine(2))["loss"].backward()
        model(mine(3))["loss"].backward()


def test_the_other_ranks_end_with_it_where_one_alone_wrote(ranks: Pools) -> None:
    ranks(2, unseen_by_one)


# What else may happen in a window. ------------------------------------------------------------------------------------


def evaluates(model: Any) -> None:
    """In the middle: it gathers by itself, and what is held stays."""
    model(mine(0))["loss"].backward()
    count = num_held(model)
    model.eval()
    with torch.no_grad(), gathers(model) as started:
        model(mine(5))
    model.train()
    assert not count or (started and num_held(model) == count)
    with gathers(model) as started:
        model(mine(1))["loss"].backward()
    assert not started or not count
    model(mine(2))["loss"].backward()


def two_forwards(model: Any) -> None:
    """Two before a backward: each gathers for itself, and one of them leaves it to the third."""
    one, two = model(mine(0))["loss"], model(mine(1))["loss"]
    two.backward()
    count = num_held(model)
    one.backward()
    assert num_held(model) == count
    model(mine(2))["loss"].backward()


def retains(model: Any) -> None:
    loss = model(mine(0))["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    model(mine(1))["loss"].backward()


def asks_for_some(model: Any) -> None:
    """``autograd.grad`` is no part of the window."""
    weight = dict(model.named_parameters())["middle.weight"]
    model(mine(0))["loss"].backward()
    torch.autograd.grad(model(mine(5))["loss"], [weight])
    assert num_held(model) == 0
    model(mine(1))["loss"].backward()
    model(mine(2))["loss"].backward()


def drops_a_forward(model: Any) -> None:
    """The caller's own code raises behind a forward, and goes on with the next micro-batch."""
    model(mine(0))["loss"].backward()
    with pytest.raises(ZeroDivisionError):
        _ = model(mine(5))["loss"] + 1 / 0
    model(mine(1))["loss"].backward()
    model(mine(2))["loss"].backward()


def ragged(model: Any) -> None:
    """Other rows on one rank, and another branch: a step takes what is held only if it is what it reads."""
    model(mine(0))["loss"].backward()
    with gathers(model) as started:
        model(rows(1, this_rank(), count=2 + this_rank()))["loss"].backward()
    assert not started or not num_held(model)
    model(mine(2), extra=True)["loss"].backward()


def local_only(model: Any) -> None:
    for i in range(2):
        with model.no_sync():
            model(mine(i))["loss"].backward()
    model(mine(2))["loss"].backward()


def past_the_end(model: Any) -> None:
    """``no_sync`` around the last call of the window, whose sum another one reduces."""
    for i in range(3):
        with model.no_sync():
            model(mine(i))["loss"].backward()
    assert num_held(model) == 0
    model(mine(3))["loss"].backward()


def hooked(model: Any) -> None:
    hook = dict(model.named_parameters())["first.weight"].register_hook(lambda grad: grad * 2)
    for i in range(3):
        model(mine(i))["loss"].backward()
    hook.remove()


def ends(model: Any) -> None:
    for i in range(2):
        model(mine(i))["loss"].backward()
    model.sync_gradients()


SITUATIONS: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (evaluates, two_forwards, retains, asks_for_some, drops_a_forward, ragged, local_only, past_the_end, hooked, ends)
}  # fmt: skip


def situation(stage: int) -> None:
    models = [compiled(stage, holds=holds) for holds in (True, False)]
    for name, act in SITUATIONS.items():
        results = []
        for model in models:
            model.zero_grad()
            act(model)
            assert live_bytes(model) == 0 and num_held(model) == 0, name
            results.append(full_gradients(model))
        try:
            assert_same_bits(*results)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.wide), 3])
def test_a_window_in_which_other_things_happen(ranks: Pools, stage: int) -> None:
    ranks(2, situation, stage=stage)


def other_options() -> None:
    """Offloading, checks of what regions compute, and recomputation."""
    case = Case(partial(Deep, 2), own_batch)
    for options in (
        {"offload": "parameters"},
        {"offload": "activations{mib=0}"},
        {"debug_nonfinite": True, "recompute": "full"},
    ):
        given = {"steps": 2, "stage": 3, "case": case, "precision": "bf16", **options}
        found, gathered = trained(**given, keep="keep{units=99}")
        wanted, _ = trained(**given, keep="keep{units=99}", holds=False)
        assert_same_bits(found, wanted)
        assert not gathered[1] and not gathered[3]


def test_windows_with_other_options(ranks: Pools) -> None:
    ranks(2, other_options)


def deepspeed() -> None:
    """The engine declares its window."""
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 3,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }
    model = net()
    engine, *_ = zcompile.initialize(model=model, model_parameters=model.parameters(), config=settings, backend="eager")
    for step in range(6):
        with gathers(engine.module) as started:
            engine.backward(engine(mine(step))["loss"])
            engine.step()
        assert bool(started) == (step % 3 == 0)
    assert engine.global_steps == 2 and live_bytes(engine.module) == 0


def test_the_engine_gathers_once_a_window(ranks: Pools) -> None:
    ranks(2, deepspeed)


def closed() -> None:
    """What is held goes with the model."""
    for end in (lambda model: model.close(), zcompile.unwrap):
        model = compiled(2)
        model(mine(0))["loss"].backward()
        runner = model._session.runner
        assert num_held(model) > 0
        end(model)
        assert len(runner.holding) == 0 and runner.executor.buffers.live_bytes == 0


def test_the_end_of_a_model_lets_go(ranks: Pools) -> None:
    ranks(2, closed)


def unheld() -> None:
    """Without a window, at stage 0, with no policy, and where a pipeline without ``hold`` is given: as ever."""
    for stage, options in ((3, {"gradient_accumulation_steps": 1}), (0, {}), (3, {"policy": "none"})):
        options = {"policy": "keep{units=99},prefetch", "gradient_accumulation_steps": 3, **options}
        model = zcompile.compile(net(), stage=stage, backend="eager", **options)
        for i in range(2):
            model(mine(i))["loss"].backward()
            assert num_held(model) == 0 and live_bytes(model) == 0


def test_nothing_is_held_elsewhere(ranks: Pools) -> None:
    ranks(2, unheld)
