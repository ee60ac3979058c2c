"""Measured times of regions in plans and searches: by structure, wherever it occurs, and what was not measured is scaled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planner.networks import traced
from zcompile import ops, passes
from zcompile.__main__ import main
from zcompile.analysis.structure import region_key
from zcompile.errors import PlanError
from zcompile.ir import calls
from zcompile.ir.graph import Step
from zcompile.ir.text import parse_step
from zcompile.planner.hardware import hardware
from zcompile.planner.issue import Costs, step_jobs
from zcompile.planner.policies import compare, find_policy

H200 = hardware("h200")


def scheduled(world_size: int = 2, policy: str = "prefetch") -> Step:
    return traced().unscheduled(world_size).schedule(passes.schedule(policy))


def keys(step: Step) -> dict[str, str]:
    return {name: region_key(r) for g in step.graphs for name, r in g.regions.items()}


def regions_us(step: Step, costs: Costs) -> float:
    return sum(j.duration_us for j in step_jobs(step, costs, 2) if j.kind == "region")


def test_a_key_is_of_the_structure() -> None:
    """Not of the policy, the number of ranks, the depth or the device; but of shapes and dtypes."""
    found = keys(scheduled())
    assert len(set(found.values())) == len(found) > 3, "regions of a step are distinct"
    assert keys(scheduled(8, "none")) == found
    shallow = set(keys(traced(layers=2).unscheduled(2).step).values())
    assert len(shallow & set(found.values())) == len(shallow) - 1, (
        "the last block keeps other values in a deeper network"
    )
    text = str(scheduled())
    on_gpu = text.replace("device=cpu", "device=cuda").replace("  axis dp=2", "  axis dp=2  device cuda")
    assert on_gpu.count("device=cuda") > 3 and keys(parse_step(on_gpu)) == keys(parse_step(text)) == found
    wider = keys(parse_step(text.replace("bf16[4096, 4096]", "bf16[4096, 4104]")))
    assert wider != found


def test_what_was_measured_takes_the_place_of_what_is_computed() -> None:
    step = scheduled()
    times = {key: 1000.0 + 10 * i for i, key in enumerate(keys(step).values())}
    costs = Costs.measured_in(step, H200, times)
    names = [calls.region(n)[0] for g in step.graphs for n in g.body if n.target is ops.region_call]
    assert len(names) > len(times), "some regions are called several times"
    expected = sum(times[keys(step)[name]] for name in names)
    assert regions_us(step, costs) == pytest.approx(expected)
    assert regions_us(step, Costs(H200)) != pytest.approx(expected)


def test_what_was_not_measured_is_scaled() -> None:
    step = scheduled()
    computed = {name: Costs(H200).region(r).device_us for g in step.graphs for name, r in g.regions.items()}
    times = {key: 3 * computed[name] for name, key in keys(step).items() if name.startswith("forward")}
    assert 0 < len(times) < len(computed)
    assert regions_us(step, Costs.measured_in(step, H200, times)) == pytest.approx(3 * regions_us(step, Costs(H200)))
    with pytest.raises(PlanError, match="measured has 1 regions and none of them is in the step"):
        Costs.measured_in(step, H200, {"0" * 16: 5.0})


def test_policies_decide_by_measured_times() -> None:
    """With computation that takes very long, waiting as late as possible costs nothing; the search sees it."""
    base = traced().unscheduled(2)
    times = dict.fromkeys(keys(base.step).values(), 50000.0)
    policies = [find_policy("none"), find_policy("auto")]
    computed, measured = ({r.policy: r for r in compare([base], policies, H200, measured=m)} for m in (None, times))
    for name in ("none", "auto"):
        assert measured[name].step_us > 5 * computed[name].step_us
    assert measured["none"].exposed_us == pytest.approx(computed["none"].exposed_us, rel=0.2)
    assert (
        measured["none"].exposed_us / measured["none"].step_us
        < 0.1 * computed["none"].exposed_us / computed["none"].step_us
    )


def test_the_commands_take_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> Any:
        model = [
            "--model",
            "tests.planner.networks:small",
            "--precision",
            "bf16",
            "--world-size",
            "2",
            "--micro-batch",
            "4",
        ]
        assert main([*options[:1], *model, *options[1:], "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plain = run("plan", "--no-advice")
    step = traced(layers=2).unscheduled(2).step
    times = dict.fromkeys(keys(step).values(), 7000.0)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"region_times": times}))
    measured = run("plan", "--no-advice", "--measured", str(path))
    assert measured["time"]["bounds"]["compute_us"] > 7000 * len(times) > plain["time"]["bounds"]["compute_us"]
    (row,) = run("policies", "--policies", "none", "--measured", str(path))
    assert row["step_us"] > 7000 * len(times)
    for text, message in (("{}", "has no region_times"), (None, "cannot be read")):
        other = tmp_path / f"{message[:3]}.json"
        if text is not None:
            other.write_text(text)
        assert (
            main(["plan", "--model", "tests.planner.networks:small", "--world-size", "2", "--measured", str(other)])
            != 0
        )
        assert message in capsys.readouterr().err
