"""What a rank holds, measured: states are the total divided by the world size, gathered parameters live for a moment."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.dist.models import CASES
from tests.dist.pool import Pools
from tests.dist.training import adamw, this_rank, train, world_size

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True


def expected(shape: torch.Size, world: int, stage: int) -> tuple[int, int]:
    """Elements that every rank stores of a parameter, and those that this rank's DTensor shows.

    Rows are divided as torch.chunk does and padded to equal counts; where dimension 0 leaves a rank empty, another
    dimension that all ranks divide evenly is taken, else the parameter is replicated.
    """
    total = shape.numel()
    if stage == 0 or world == 1:
        return total, total
    rows = shape[0]
    chunk = -(-rows // world)
    if (world - 1) * chunk < rows:
        mine = min(rows, (this_rank() + 1) * chunk) - min(rows, this_rank() * chunk)
        return chunk * total // rows, mine * total // rows
    if any(size % world == 0 for size in shape):
        return total // world, total // world
    return total, total


def states_are_divided(name: str, stage: int, kept: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Check every kind of memory.

    Args:
        name: which model.
        stage: ZeRO stage.
        kept: patterns of the parameters that stage 3 keeps gathered between forward and backward.
        options: of compile.
    """
    case, world = CASES[name], world_size()
    plain = case.build()
    shapes = [p.shape for p in plain.parameters()]
    model = zcompile.compile(case.build(), stage=stage, backend="eager", verify="fast", **options)
    optimizer = adamw(model)
    buffers = model._session.runner.executor.buffers
    gathered = sum(shape.numel() for shape in shapes) * 4

    train(model, case, optimizer=optimizer, steps=2)
    loss = case.loss(model(**case.data(2, this_rank())))
    between = buffers.live_bytes
    loss.backward()
    report = model.report(optimizer)

    stored = sum(expected(shape, world, stage)[0] for shape in shapes)
    seen = sum(expected(shape, world, stage)[1] for shape in shapes)
    total = sum(shape.numel() for shape in shapes)
    steps = 4 * len(shapes)  # AdamW counts steps in one number a parameter
    assert (report.parameter_bytes, report.parameter_bytes_total) == (4 * stored, 4 * total)
    assert (report.gradient_bytes, report.gradient_bytes_total) == (4 * stored, 4 * total)
    assert (report.optimizer_bytes, report.optimizer_bytes_total) == (8 * seen + steps, 8 * total + steps)
    assert report.captures == 1

    # The report is what there is: the memory behind the tensors themselves.
    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    assert sum(t.numel() for t in locals_) == seen
    assert sum(t.untyped_storage().nbytes() for t in locals_) == 4 * seen
    assert all(type(p) is nn.Parameter or p.grad.placements == p.placements for p in model.parameters())

    assert buffers.live_bytes == 0
    if stage == 3 and world > 1:
        wanted = [p.shape for n, p in case.build().named_parameters() if any(fnmatch(n, k) for k in kept)]
        assert between == sum(4 * world * expected(shape, world, stage)[0] for shape in wanted)
        assert 0 < buffers.peak_bytes < gathered, (buffers.peak_bytes, gathered)
    if stage in (1, 2) and world > 1:
        assert between > 0, "stages 1 and 2 keep gathered parameters for the backward"
    return {"peak": buffers.peak_bytes, "gathered": gathered}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_states_of_stage_3_are_divided(ranks: Pools, world: int) -> None:
    """The default policy keeps the head from forward to backward: backward needs its weight, not its bias."""
    policy = "bucket{mib=0},prefetch{lookahead=1}"
    ranks(world, states_are_divided, name="deep", stage=3, policy=policy, kept=["head.weight"])


def test_what_a_policy_keeps(ranks: Pools) -> None:
    """Keeping two units costs nothing at the peak: with a lookahead of one two are gathered at a time; keeping all does."""
    peaks = []
    for units, kept in (
        (0, []),
        (1, ["head.weight"]),
        (2, ["head.weight", "blocks.3.?.weight"]),
        (1000, ["head.weight", "blocks.*.weight"]),
    ):
        policy = f"keep{{units={units}}},bucket{{mib=0}},prefetch{{lookahead=1}}"
        peaks.append(ranks(2, states_are_divided, name="deep", stage=3, policy=policy, kept=kept)[0]["peak"])
    assert peaks[0] == peaks[1] == peaks[2] < peaks[3]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_states_of_other_stages(ranks: Pools, stage: int) -> None:
    ranks(2, states_are_divided, name="deep", stage=stage)


def test_lookahead_costs_memory(ranks: Pools) -> None:
    peaks = [
        ranks(
            2,
            states_are_divided,
            name="deep",
            stage=3,
            policy=f"keep{{units=0}},bucket{{mib=0}},prefetch{{lookahead={lookahead}}}",
        )[0]["peak"]
        for lookahead in (0, 1, 2)
    ]
    assert peaks[0] < peaks[1] < peaks[2]


def nothing_saved_is_a_parameter(units: int) -> None:
    """Counted on the values that the forward leaves: no gathered weight, no cast or view of one, but what the policy keeps."""
    case = CASES["llama"]
    policy = f"keep{{units={units}}},bucket{{mib=0}}"
    model = zcompile.compile(case.build(), stage=3, backend="eager", verify="off", policy=policy)
    taken: list[tuple[int, int]] = []
    buffers = model._session.runner.executor.buffers
    take = buffers.take

    def recording(types: Any) -> list[torch.Tensor]:
        result = take(types)
        taken.extend((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in result)
        return result

    buffers.take = recording
    saved = []
    original = model._session.runner.run_forward

    def forward(*args: Any) -> Any:
        outputs, values = original(*args)
        saved.append(values)
        return outputs, values

    model._session.runner.run_forward = forward
    loss = case.loss(model(**case.data(0, this_rank())))
    assert taken and saved and saved[0].values
    assert list(saved[0].kept) == ["head.weight:float32", "norm.weight:float32"][: 2 * units]
    pointers = {pointer for pointer, _ in taken}
    for name, value in saved[0].values.items():
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().data_ptr() not in pointers, f"saved value {name} lies in a gathered buffer"
    sizes = {tuple(p.shape) for p in case.build().parameters() if p.dim() > 1}
    sizes |= {shape[::-1] for shape in sizes}
    for name, value in saved[0].values.items():
        assert not (isinstance(value, torch.Tensor) and tuple(value.shape) in sizes), (
            f"saved value {name} has a weight's shape"
        )
    loss.backward()
    assert buffers.live_bytes == 0


@pytest.mark.parametrize("units", [0, 1])
def test_nothing_saved_is_a_parameter(ranks: Pools, units: int) -> None:
    ranks(2, nothing_saved_is_a_parameter, units=units)


def forward_without_backward(stage: int) -> None:
    """A forward whose result is dropped gives its kept buffers back; one that has no backward keeps nothing."""
    case = CASES["deep"]
    model = zcompile.compile(case.build(), stage=stage, backend="eager", verify="off")
    buffers = model._session.runner.executor.buffers
    loss = case.loss(model(**case.data(0, this_rank())))
    assert buffers.live_bytes > 0
    del loss
    assert buffers.live_bytes == 0
    with torch.no_grad():
        loss = case.loss(model(**case.data(0, this_rank())))
    assert buffers.live_bytes == 0
    del loss
    case.loss(model(**case.data(0, this_rank()))).backward()
    assert buffers.live_bytes == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_forward_without_backward(ranks: Pools, stage: int) -> None:
    ranks(2, forward_without_backward, stage=stage)


def nothing_stays(stage: int) -> None:
    case = CASES["mlp"]
    model = zcompile.compile(case.build(), stage=stage, backend="eager")
    train(model, case, optimizer=zcompile.optim.AdamW(model.parameters()), steps=2)
    alive = [weakref.ref(x) for x in (model, model.original, model._session.runner.shards)]
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def threads_go(stage: int) -> None:
    """A model that is dropped gives its process group and its threads back when the next one is compiled."""
    case, counts = CASES["mlp"], []
    for _ in range(4):
        model = zcompile.compile(case.build(), stage=stage, backend="eager")
        train(model, case, optimizer=adamw(model), steps=1)
        del model
        gc.collect()
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    assert max(counts[1:]) <= counts[0] + 1, counts


def test_models_that_come_and_go_leave_no_threads(ranks: Pools) -> None:
    ranks(2, threads_go, stage=3)


@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_keeps_a_model_that_nobody_has(ranks: Pools, stage: int) -> None:
    ranks(2, nothing_stays, stage=stage)
