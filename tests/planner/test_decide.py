"""A memory budget: the search against planning every combination, what stays as it was given, what is said, what would fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from functools import cache
from typing import Any

import pytest
import torch

import zcompile
from tests.dist.models import Deep
from zcompile.__main__ import main
from zcompile.config import Config
from zcompile.errors import BudgetError, ConfigError
from zcompile.planner.choice import Candidate, Choice
from zcompile.planner.decide import decide
from zcompile.planner.hardware import Hardware, hardware
from zcompile.planner.memory import Setup
from zcompile.planner.plan import Plan
from zcompile.planner.space import KINDS, Space, offloads
from zcompile.planner.trace import Traced, trace
from zcompile.planner.variants import Limits, Variants
from zcompile.scheduled import Splits
from zcompile.verify.verifier import Verifier

WORLD = 2
FREE = ("policy", "recompute", "loss_chunk", "offload")


@cache
def machine() -> Hardware:
    """Processors, where no library takes memory, that issue at once: small models show what their schedules take."""
    known = hardware("cpu-2core")
    host = dataclasses.replace(known.host, kernel_us=0, region_us=0, collective_us=0, copied_tensor_us=0, step_us=0)
    return dataclasses.replace(known, host=host)


def example(micro_batch: int = 16) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Also the factory of the command line's test: activations take more than states."""
    with torch.device("meta"):
        return Deep(2), {n: torch.empty(micro_batch, 6, dtype=torch.int64) for n in ("tokens", "labels")}


@cache
def traced() -> Traced:
    return trace(*example(), world_size=WORLD, verify="off")


@cache
def splits() -> Splits:
    return Splits(traced().captured, Verifier("off"))


def variants(budget: int, **config: Any) -> Variants:
    """Of the example with a budget; captured and split once for all tests."""
    return Variants(
        splits=splits(),
        config=Config(memory_budget=budget, **config),
        specs=traced().specs,
        world_size=WORLD,
        axis="dp",
        hardware=machine(),
        setup=Setup.on(machine(), WORLD, fused=False),
        limits=Limits(budget),
    )


@cache
def everything() -> list[Candidate]:
    """Every combination of the ends, without pruning."""
    many = variants(1)
    policies = [
        *(f"keep{{units={n}}},prefetch" for n in (0, 1, 2, 4)),
        "keep{units=0},bucket{mib=0},prefetch",
        "none",
    ]
    moved = offloads(traced().specs, ("optimizer",))
    return [
        many.candidate(Choice(3, policy, recompute, "none", offload))
        for policy, recompute, offload in itertools.product(policies, (None, "selective", "full"), moved)
    ]


@pytest.mark.parametrize("quantile", [0.0, 0.4, 0.95])
def test_nothing_that_fits_is_faster(quantile: float) -> None:
    """Against a search of everything; with amounts in between it may be faster than all of that."""
    peaks = sorted(candidate.peak_bytes for candidate in everything())
    budget = peaks[int(quantile * (len(peaks) - 1))]
    found = decide(variants(budget, free=FREE), Space.of(Config(free=FREE), offloads(traced().specs, ("optimizer",))))
    best = min(c.step_us for c in everything() if c.peak_bytes <= budget)
    assert found.chosen.peak_bytes <= budget and found.chosen.fits
    assert found.chosen.step_us <= best * 1.001
    assert found.chosen in found.tried and len(found.tried) < len(everything())
    assert found.chosen.step_us == min(c.step_us for c in found.tried if c.fits)


def test_a_window_saves_gathers_and_takes_memory() -> None:
    """What is kept is gathered once in four micro-batches and outlives each; without a hold it is as many steps with one update."""
    keep, nothing = "keep{units=4},prefetch", "keep{units=0},prefetch"
    found = {}
    for steps in (1, 4):
        for policy in (keep, f"hold{{units=0 first=0}},{keep}", nothing):
            many = variants(1, gradient_accumulation_steps=steps)
            found[steps, policy] = many.candidate(Choice(3, policy, None, "none", ""))
    once, held = found[1, keep], found[4, keep]
    unheld, gathered = found[4, f"hold{{units=0 first=0}},{keep}"], found[4, nothing]
    assert held.step_us < unheld.step_us < min(once.step_us, gathered.step_us)
    assert once.peak_bytes <= unheld.peak_bytes <= held.peak_bytes
    left = variants(1, gradient_accumulation_steps=4).candidate(
        Choice(3, f"hold{{first=4}},{nothing}", None, "none", "")
    )
    assert left.step_us < gathered.step_us
    assert found[1, keep] == dataclasses.replace(found[1, f"hold{{units=0 first=0}},{keep}"], choice=once.choice)


def test_a_budget_in_a_window() -> None:
    """With room everything stays; with less, what is at least as fast as the default and fits."""
    free = ("policy",)
    options = {"free": free, "gradient_accumulation_steps": 4}
    space = Space.of(Config(free=free), ("",))
    much = decide(variants(1 << 40, **options), space).chosen
    assert "keep{units=4}" in much.choice.policy and "hold{first=4}" in much.choice.policy
    usual = variants(1, **options).candidate(Choice(3, "prefetch", None, "none", ""))
    less = decide(variants(max(usual.peak_bytes, much.peak_bytes - 1), **options), space).chosen
    assert less.fits and much.step_us <= less.step_us <= usual.step_us
    in_stage_2 = Space.of(Config(stage=2, free=free), ("",))  # which keeps everything; after a backward it need not
    unheld = variants(1, **options).candidate(Choice(2, "hold{units=0},prefetch", None, "none", ""))
    assert decide(variants(1 << 40, **options), in_stage_2).chosen.choice.policy == "prefetch"
    assert decide(variants(unheld.peak_bytes, **options), in_stage_2).chosen.fits


def test_amounts_are_between_the_ends() -> None:
    """Where saving everything is a little too much and saving nothing much too little."""
    free = ("recompute",)
    by_mode = {
        c.choice.recompute: c
        for c in everything()
        if c.choice.policy == "keep{units=1},prefetch" and not c.choice.offload
    }
    budget = int(0.97 * by_mode[None].peak_bytes)
    assert by_mode["selective"].peak_bytes < budget
    found = decide(variants(budget, free=free, policy="keep{units=1},prefetch"), Space.of(Config(free=free), ("",)))
    assert isinstance(found.chosen.choice.recompute, float)
    assert by_mode["selective"].saved_bytes < found.chosen.saved_bytes < found.chosen.most_bytes
    assert by_mode[None].step_us <= found.chosen.step_us <= by_mode["selective"].step_us
    assert 0.9 * budget < found.chosen.peak_bytes <= budget


def test_as_many_states_stay_on_the_device_as_have_room() -> None:
    """Which is faster than to have all on the host."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6))), torch.empty(8, 2048)

    def chosen(budget: Any, offload: str | None) -> Candidate:
        given = {"policy": "none", "recompute": "none", "loss_chunk": "none", "stage": 3, "hardware": "h200"}
        plan = zcompile.plan(
            model, (x,), memory_budget=budget, offload=offload, world_size=WORLD, backend="eager", advise=False, **given
        )
        return plan.decision.chosen

    none, whole = chosen(1.0, "none"), chosen(1.0, "optimizer{chunk_mib=1}")
    assert whole.peak_bytes < none.peak_bytes and none.step_us < whole.step_us
    part = chosen((none.peak_bytes + whole.peak_bytes) // 2, None)
    moments = part.choice.offloading.optimizer
    assert moments is not None and 0.4 < moments.share < 0.7
    assert none.step_us < part.step_us < whole.step_us and whole.peak_bytes < part.peak_bytes < none.peak_bytes
    assert 0.4 * whole.host_bytes < part.host_bytes == part.state_bytes < 0.7 * whole.host_bytes
    assert chosen(part.peak_bytes, str(part.choice.offloading)).peak_bytes == part.peak_bytes, "what is given stays"


def make(budget: Any, rows: int = 16, **options: Any) -> Plan:
    arguments = {"world_size": WORLD, "backend": "eager", "hardware": machine(), **options}
    return zcompile.plan(*example(rows), memory_budget=budget, **arguments)


def peak_without(**options: Any) -> int:
    """What the tensors of a plan without a budget take."""
    return make(
        1.0, policy="prefetch", recompute="none", loss_chunk="none", offload="none", stage=3, **options
    ).decision.chosen.peak_bytes


def test_a_plan_takes_what_was_chosen_and_shows_it() -> None:
    whole = peak_without()
    plan = make(int(0.85 * whole))
    assert plan.decision is not None and plan.traced.config.memory_budget == int(0.85 * whole)
    counted, limit = plan.decision.chosen.peak_bytes / 2**30, plan.decision.budget_bytes / 2**30
    assert f"{counted:>14.2f}  of {limit:.1f}; beside it the reserve" in str(plan)
    chosen = plan.decision.chosen
    assert plan.timeline.step_us == pytest.approx(chosen.step_us)
    assert plan.memory.peak_bytes - plan.memory.peak.during["context and libraries"] <= chosen.peak_bytes * 1.06
    text = str(plan)
    assert str(chosen.choice) in text and "<- chosen" in text
    assert {c.choice.kind for c in plan.decision.shown} >= {chosen.choice.kind, (3, None, "none", "")}
    read = json.loads(plan.to_json())["decision"]
    assert read["chosen"]["peak_bytes"] == chosen.peak_bytes <= read["budget_bytes"]
    assert len(read["tried"]) == len(plan.decision.tried)
    assert any(
        "loss_chunk='auto' saves nothing: losses computed whole: fewer than" in note for note in plan.decision.notes
    )


def test_the_stage_is_chosen_where_it_is_left_out() -> None:
    roomy = make(1.0)
    assert roomy.decision is not None
    assert {c.choice.stage for c in roomy.decision.tried} == {0, 3}
    least = min(c.step_us for c in roomy.decision.tried)
    assert roomy.decision.chosen.step_us == least and roomy.traced.config.stage == roomy.decision.chosen.choice.stage
    given = make(1.0, stage=0)
    assert given.decision is not None and {c.choice.stage for c in given.decision.tried} == {0}


def test_what_is_given_stays() -> None:
    given = {"stage": 2, "policy": "none", "recompute": "full", "loss_chunk": "auto", "offload": "activations"}
    plan = make(1.0, **given)
    assert plan.decision is not None and len(plan.decision.tried) == 1
    assert {name: getattr(plan.traced.config, name) for name in given} == given
    nothing = {note.split(",")[0] for note in plan.decision.notes}
    assert nothing == {"loss_chunk='auto'", "offload='activations'"}, (
        "of small tensors none moves, and few classes are no matter"
    )


def test_a_refusal_says_what_would_fit_and_that_is_so() -> None:
    options: dict[str, Any] = {"stage": 3, "offload": "none", "policy": "prefetch"}
    with pytest.raises(BudgetError) as refused:
        make("160KiB", **options)
    error = refused.value
    text = str(error)
    assert text.startswith("memory_budget is 160.00 KiB and the least of ") and isinstance(error, ConfigError)
    ranks = re.search(r"(\d+) ranks instead of 2: peak ([\d.]+ KiB)", text)
    rows = re.search(r"micro-batch (\d+) instead of 16: peak ([\d.]+ KiB)", text)
    budget = re.search(r"memory_budget=(\d+) ", text)
    assert rows is not None and budget is not None
    make("160KiB", rows=int(rows[1]), **options)
    if ranks is not None:
        make("160KiB", **options | {"world_size": int(ranks[1])})
    assert int(budget[1]) == error.least_bytes
    assert make(error.least_bytes, **options).decision.chosen.peak_bytes <= error.least_bytes
    with pytest.raises(BudgetError):
        make(error.least_bytes - 1, **options)


def test_a_model_without_anything_to_save() -> None:
    """One layer: what was considered and saves nothing is said."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(torch.nn.Linear(64, 64)), torch.empty(8, 64)
    options: dict[str, Any] = {"world_size": 1, "backend": "eager", "hardware": machine(), "optimizer": "sgd"}
    with pytest.raises(BudgetError) as refused:
        zcompile.plan(model, x, memory_budget="1KiB", **options)
    said = str(refused.value)
    for option in ("offload='activations'", "offload='optimizer'", "recompute='full'", "loss_chunk='auto'"):
        assert f"{option} saves nothing" in said, said


def test_the_host_is_a_limit_too() -> None:
    little = dataclasses.replace(machine(), host_memory_bytes=1)
    specs = traced().specs
    assert offloads(specs, KINDS)[0] == "" and len(offloads(specs, KINDS)) == 5
    given: dict[str, Any] = {"hardware": little, "stage": 3, "policy": "prefetch", "recompute": "none", "rows": 1}
    with pytest.raises(BudgetError, match=r"KiB of host memory, of which there are 0\.00 KiB"):
        make(1.0, offload="optimizer", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": "24"}, "memory_budget is '24'; it must be a budget such as '24GiB' or a number of bytes"),
        ({"memory_budget": 1.5}, "memory_budget is 1.5; it must be"),
        ({"memory_budget": 0}, "memory_budget is 0; it must be"),
        ({"memory_budget": True}, "memory_budget is True; it must be"),
        ({"memory_budget": 0.5}, "memory_budget is 0.5, a share of a GPU's memory, and the model is on cpu"),
        ({"memory_budget": "1GiB", "recompute": "2GiB"}, "recompute is '2GiB' and memory_budget '1GiB', two budgets"),
        ({"memory_budget": "1GiB", "pipeline": "plan-units"}, "pipeline and memory_budget='1GiB' are both given"),
    ],
)
def test_budgets_without_a_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zcompile.compile(torch.nn.Linear(2, 2), **options)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests.planner.test_decide:example", "--world-size", "2", "--hardware", "cpu-2core"]
    assert main([*arguments, "--memory-budget", "350KiB"]) == 0
    assert "memory_budget of 350.00 KiB" in capsys.readouterr().out
    given = ["--stage", "3", "--policy", "none", "--recompute", "none", "--offload", "parameters", "--micro-batch", "1"]
    assert main([*arguments, *given, "--memory-budget", "1KiB"]) == 1
    assert "error: memory_budget is 1.00 KiB and the least of" in capsys.readouterr().err
    assert main([*arguments, "--memory-budget", "40"]) == 1
    assert "error: --memory-budget is 40 bytes; with a unit it is 40GiB" in capsys.readouterr().err
    assert main([*arguments, "--recompute", "24GiB"]) == 1
    assert "error: recompute is '24GiB', a budget, which compile takes" in capsys.readouterr().err
