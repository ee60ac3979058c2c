"""Profiles in one process: errors in the middle of a step, models that end, and what is left of a profile that is dropped."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import zcompile
from tests.dist.models import CASES
from zcompile.analysis.structure import region_key


def trained(count: int, model: Any, optimizer: Any) -> None:
    for _ in range(count):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def made() -> tuple[Any, Any]:
    model = zcompile.compile(nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(1, model, optimizer)
    return model, optimizer


def test_a_step_that_ends_with_an_error_does_not_count() -> None:
    model, optimizer = made()
    profile = model.profile(steps=2)
    trained(2, model, optimizer)
    bodies = model._session.latest.program.backward.bodies
    name, body = next(iter(bodies.items()))

    def breaks(args: list[Any]) -> Any:
        raise ValueError("broke")

    bodies[name] = breaks
    with pytest.raises(ValueError, match="broke"):
        trained(1, model, optimizer)
    bodies[name] = body
    optimizer.zero_grad()
    trained(3, model, optimizer)
    assert profile.done, profile.state
    assert "1 step left out: it ended with an error" in str(profile)
    assert all(step.micro_batches == 1 for step in profile.steps)


def test_a_forward_without_a_backward_belongs_to_the_step_that_follows() -> None:
    model, optimizer = made()
    with model.profile(steps=1) as profile:
        trained(1, model, optimizer)
        model(torch.ones(2, 7))
        trained(1, model, optimizer)
    (step,) = profile.steps
    forwards = {s.name for s in step.spans if s.phase == "forward" and s.kind == "region"}
    assert sum(s.kind == "region" and s.phase == "forward" for s in step.spans) == 2 * len(forwards)
    assert step.micro_batches == 1


def test_a_loop_without_updates_is_one_step() -> None:
    model, _ = made()
    with model.profile(steps=1) as profile:
        for count in range(3):
            model(torch.ones(2, 7)).sum().backward()
            said = f"; the one that runs has {count + 1} backwards, and no update or zero_grad yet"
            assert (said in profile.state) == (count > 0), profile.state
    assert profile.done and profile.missing == 1, "the only step showed memory"
    model.zero_grad()
    profile = model.profile(steps=1)
    for _ in range(3):
        model(torch.ones(2, 7)).sum().backward()
        model.zero_grad()
    model(torch.ones(2, 7))
    assert profile.done and profile.steps[0].micro_batches == 1, "zero_grad ends a step, too"


def test_other_models_and_optimizers_do_not_count() -> None:
    model, optimizer = made()
    other, its = made()
    profile = model.profile(steps=1)
    for _ in range(3):
        model(torch.ones(2, 7)).sum().backward()
        trained(1, other, its)  # its update is not this model's
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [s.micro_batches for s in profile.steps] == [2]
    assert sum(s.kind == "optimizer" for s in profile.steps[0].spans) == 1


def test_a_model_goes_with_its_profile() -> None:
    def num_hooks() -> int:
        return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)

    gc.collect()
    before = num_hooks()
    model, optimizer = made()
    model.profile()
    trained(2, model, optimizer)
    runner = weakref.ref(model._session.runner)
    model.close()
    del model, optimizer
    gc.collect()
    assert runner() is None and num_hooks() == before


def test_nothing_is_left_in_the_runtime() -> None:
    model, optimizer = made()
    runner = model._session.runner
    own = dict(vars(runner)), dict(vars(runner.executor))
    profile = model.profile(steps=1)
    trained(3, model, optimizer)
    assert profile.done
    assert (dict(vars(runner)), dict(vars(runner.executor))) == own


def test_names_of_plans_and_programs_are_the_same() -> None:
    model, _ = made()
    latest = model._session.latest
    for graph, runnable in (
        (latest.graphs.forward, latest.program.forward),
        (latest.graphs.backward, latest.program.backward),
    ):
        nodes = {node.name: node for node in graph.body}
        for name, ins in zip(runnable.program.nodes, runnable.program.instructions, strict=True):
            assert name in nodes and (type(ins).__name__ == "Call") == ("region_call" in str(nodes[name].target))


@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, {"precision": "bf16", "debug_nonfinite": True}, {"offload": "activations{mib=0}"}],
)
def test_options_of_compile(options: dict[str, Any]) -> None:
    """Whatever is computed again or checked, every instruction is there, and every region has a time of its own."""
    case = CASES["deep"]
    model = zcompile.compile(case.build(), backend="eager", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = model.profile(steps=1)
    for step in range(4):
        case.loss(model(**case.data(step, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    latest = model._session.latest
    spans = [s for s in profile.steps[0].spans if s.phase in ("forward", "backward") and s.kind != "gap"]
    found = [s.name for s in spans if s.stream == "compute"]
    assert found == [*latest.program.forward.program.nodes, *latest.program.backward.program.nodes]
    assert {s.stream for s in spans} - {"compute"} == ({"offloads", "reloads"} if "offload" in options else set())
    distinct = {region_key(r) for g in (latest.graphs.forward, latest.graphs.backward) for r in g.regions.values()}
    assert set(profile.region_times()) == distinct
