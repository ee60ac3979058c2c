"""A compiled model under a memory budget, on one rank: what a step really takes, the numbers of plain PyTorch, later captures."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import zcompile
from tests.dist.models import Batch, Deep, own_batch
from zcompile import compat
from zcompile.errors import BudgetError

ROWS = 16


def data(rows: int = ROWS, step: int = 0) -> Batch:
    batch = own_batch(torch.Generator().manual_seed(step))
    return {name: value.repeat(rows // len(value), 1) for name, value in batch.items()}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Deep(2)


def compiled(budget: Any, **options: Any) -> tuple[Any, Any]:
    model = zcompile.compile(build(), backend="eager", verify="fast", memory_budget=budget, **options)
    return model, zcompile.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3, rows: int = ROWS) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(**data(rows, step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def allocated(run: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had given at once while something ran, beside what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def between_steps(model: Any, optimizer: Any) -> int:
    """What tensors take between two steps, without what is on the host."""
    report, update = model.report(optimizer), model._session.runner.shards.hosting.update
    states = report.optimizer_bytes if update is None else update.device_bytes
    gradients = model._session.runner.shards.gradients.arenas.values()
    return report.parameter_bytes + states + sum(arena.nbytes for arena in gradients) + report.gathered_held_bytes


def measured_peak(model: Any, optimizer: Any) -> int:
    """What the tensors of a warm step take: what there is between steps, and what comes in one."""
    return between_steps(model, optimizer) + allocated(lambda: train(model, optimizer, steps=1))


@pytest.fixture(scope="module")
def plain() -> list[float]:
    model = build()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@functools.cache
def peaks() -> dict[str, int]:
    """The predicted peaks of the kinds of steps that a roomy and a hopeless budget lead to."""
    model, _ = compiled("1GiB")
    model(**data())
    roomy = model.report().decision.chosen.peak_bytes
    model, _optimizer = compiled(1)
    with pytest.raises(BudgetError) as refused:
        model(**data())
    return {"roomy": roomy, "least": refused.value.least_bytes}


def test_a_budget_is_kept(plain: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Three budgets, three choices, plain PyTorch's losses, and what is allocated is less than was predicted."""
    ends = peaks()
    assert ends["least"] < 0.85 * ends["roomy"]
    choices, measured = [], []
    for part in (1.0, 0.6, 0.0):
        budget = int(ends["least"] + part * (ends["roomy"] - ends["least"]))
        model, optimizer = compiled(budget)
        with caplog.at_level(logging.INFO, "zcompile"):
            losses = train(model, optimizer)
        assert losses == pytest.approx(plain, rel=1e-5)
        decision = model.report(optimizer).decision
        assert decision.chosen.peak_bytes <= budget == decision.budget_bytes
        assert f"deep: {decision}" in caplog.text
        choices.append(decision.chosen.choice)
        measured.append(measured_peak(model, optimizer))
        assert measured[-1] <= budget, str(decision)
        assert measured[-1] > 0.85 * decision.chosen.peak_bytes
    assert len(set(choices)) == 3 and choices[0].recompute is None and not choices[0].offload
    assert measured[0] > measured[1] > measured[2]
    assert choices[2].recompute is not None and "optimizer" in choices[2].offload
    numbers = model.report(optimizer).to_dict()
    assert numbers["budget_bytes"] >= numbers["budgeted_bytes"] and str(choices[2]) in str(model.report(optimizer))


def test_states_that_there_are_move_to_the_host(plain: list[float]) -> None:
    """A resumed run: states are loaded before the first call, and leave the device when the budget says so."""
    before, optimizer = compiled("1GiB")
    train(before, optimizer, steps=1)
    model, resumed = compiled(peaks()["least"])
    model.load_state_dict(before.full_state_dict())
    model.load_full_optimizer_state_dict(resumed, before.full_optimizer_state_dict(optimizer))
    expected, found = (one(**data(ROWS, 1))["loss"] for one in (before, model))
    for loss, own in ((expected, optimizer), (found, resumed)):
        loss.backward()
        own.step()
    assert "optimizer" in model.report().decision.chosen.choice.offload
    assert model._session.runner.shards.hosting.memory.held_bytes > 0
    assert torch.equal(found, expected)
    for mine, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_another_optimizer_stays_on_the_device() -> None:
    model = zcompile.compile(build(), backend="eager", memory_budget=1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError, match=r"offload='optimizer' is not offered: it needs zcompile\.optim\.AdamW"):
        model(**data())
    assert not optimizer.state


def test_later_captures_keep_it_or_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """A smaller step recomputes nothing, a larger one does, and one that cannot fit is named with its numbers."""
    ends = peaks()
    budget = int(ends["least"] + 0.7 * (ends["roomy"] - ends["least"]))
    model, optimizer = compiled(budget, offload="none")
    kinds, losses = {}, {}
    for rows in (ROWS, 2, 18, 160):
        caplog.clear()
        losses[rows] = train(model, optimizer, steps=1, rows=rows)
        kinds[rows] = model.report().decision.chosen
        assert ("takes" in caplog.text) == (rows == 160), caplog.text
    assert kinds[2].choice.recompute is None and kinds[2].fits
    assert kinds[ROWS].choice.recompute is not None and kinds[18].choice.recompute is not None
    assert max(kinds[ROWS].peak_bytes, kinds[18].peak_bytes) <= budget
    assert f"memory_budget is {budget / 1024:.2f} KiB and a new capture of deep takes" in caplog.text
    with torch.no_grad():
        caplog.clear()
        model(**data(400))
    assert "a call of deep without gradients takes" in caplog.text


class Big(nn.Module):
    """A head with many classes, whose logits nobody gets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 32768, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), labels)


def test_losses_in_pieces_are_chosen() -> None:
    """Planned alone: logits of 2200 rows are 275 MiB, and more is computed from them."""
    with torch.device("meta"):
        model, inputs = Big(), (torch.empty(2200, 4), torch.empty(2200, dtype=torch.int64))
    options: dict[str, Any] = {"world_size": 1, "hardware": "cpu-2core", "offload": "none"}
    whole = zcompile.plan(model, inputs, memory_budget="8GiB", **options).decision
    assert whole is not None and whole.chosen.choice.loss_chunk == "none"
    plan = zcompile.plan(model, inputs, memory_budget=whole.chosen.peak_bytes - 1, **options)
    assert plan.decision is not None and plan.decision.chosen.choice.loss_chunk == "auto"
    assert plan.decision.chosen.pieces == 1


@pytest.mark.parametrize(
    ("told", "then"),
    [
        ("", "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:true", None),
        ("expandable_segments:False", None),
    ],
)
def test_the_allocator_of_a_gpu_is_made_ready(monkeypatch: pytest.MonkeyPatch, told: str, then: str | None) -> None:
    """What the user has told it stays."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", told)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    said: list[str] = []

    def tell(settings: str) -> None:
        said.append(settings)
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", tell)
    assert compat.expand_segments() == (told != "expandable_segments:False")
    assert said == ([] if then is None else [then])
