"""The policy bench: policies by name, spec and file; what breaks a graph is refused before it is simulated."""

import json
from pathlib import Path

import pytest

from tests.planner.networks import traced
from zcompile.__main__ import main
from zcompile.errors import PlanError, VerifyError
from zcompile.planner.hardware import hardware
from zcompile.planner.policies import compare, find_policy

H100 = hardware("h100")

GOOD = '''
from dataclasses import dataclass
from typing import ClassVar
from zcompile.analysis.schedule import collectives, is_reduction
from zcompile.pipeline import StepPass

@dataclass(frozen=True)
class LateWaits(StepPass):
    """Wait for reductions at the end."""

    name: ClassVar[str] = "late-waits"
    count: int = 0

    def run(self, target, stats):
        for graph in target.graphs:
            for reduction in collectives(graph, is_reduction):
                for node in (reduction.wait, *reduction.results):
                    graph.output.prepend(node)
'''
BAD = '''
from dataclasses import dataclass
from typing import ClassVar
from zcompile import ops
from zcompile.pipeline import StepPass

@dataclass(frozen=True)
class Forgets(StepPass):
    """Release what is still read."""

    name: ClassVar[str] = "forgets"

    def run(self, target, stats):
        for graph in target.graphs:
            calls = [n for n in graph.body if n.target is ops.region_call]
            for release in [n for n in graph.body if n.target is ops.release]:
                calls[0].prepend(release) if release.all_input_nodes[0] in calls[0].all_input_nodes else None
'''


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.py").write_text(GOOD)
    return f"{tmp_path}/good.py:LateWaits"


def test_policies_are_compared_on_every_number_of_ranks(good: str) -> None:
    policies = [find_policy(p) for p in ("none", "prefetch", "keep{units=2}+prefetch{lookahead=2}", good, "auto")]
    results = list(compare([traced().unscheduled(n) for n in (2, 64)], policies, H100, optimal=True))
    assert [(r.world_size, r.policy) for r in results] == [(n, p.name) for n in (2, 64) for p in policies]
    for r in results:
        assert r.fits and 0 < r.peak_bytes < H100.device_memory_bytes
        assert r.step_us >= r.bound_us and r.gap == pytest.approx(r.step_us / r.bound_us - 1)
        assert r.optimal_us is not None and r.step_us >= r.optimal_us * (1 - 1e-9)
    by = {(r.world_size, r.policy): r for r in results}
    for n in (2, 64):
        none, late, auto = by[n, "none"], by[n, good], by[n, "auto"]
        assert late.exposed_us < none.exposed_us and late.step_us <= none.step_us  # equal where the host sets the pace
        assert auto.step_us <= min(by[n, p.name].step_us for p in policies[:3])
        assert late.spec == "late-waits{count=0}"
        again = find_policy(auto.spec)  # what auto finds can be asked for by name, and is what compile takes
        assert again.passes is not None and ",".join(map(str, again.passes)) == auto.spec


def test_a_policy_that_breaks_the_graph_gives_the_error_of_the_verifier(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    policy = find_policy(f"{tmp_path}/bad.py:Forgets")
    with pytest.raises(VerifyError, match="release") as caught:
        list(compare([traced().unscheduled(2)], [policy], H100))
    notes = " ".join(caught.value.__notes__)
    assert "in pass 'forgets'" in notes and "bad.py:Forgets' on 2 ranks" in notes


def test_options_of_a_policy_in_a_file(good: str) -> None:
    (found,) = find_policy(f"{good}{{count=3}}").passes or ()
    assert str(found) == "late-waits{count=3}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "policy 'fastest' is not known .*; the known ones are none, prefetch, keep, auto"),
        ("shard", "policy 'shard' is not known"),
        ("prefetch{speed=2}", "pass 'prefetch' has no option 'speed'"),
        ("./nowhere.py:Policy", "policy file 'nowhere.py' cannot be read: there is no such file"),
    ],
)
def test_unknown_policies_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_policy(text)


def test_files_without_the_policy_are_refused(good: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no class 'Other' that is a StepPass with a name; it has LateWaits"):
        find_policy(good.replace("LateWaits", "Other"))
    (tmp_path / "broken.py").write_text("import nothing_like_it")
    with pytest.raises(PlanError, match="cannot be imported: ModuleNotFoundError"):
        find_policy(f"{tmp_path}/broken.py:Policy")


# The command. ---------------------------------------------------------------------------------------------------------

MODEL = ["policies", "--model", "tests.planner.networks:small", "--layers", "2", "--precision", "bf16"]


def test_the_command_prints_a_table_and_json(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--world-size", "2,64", "--hardware", "h100", "--policies", f"none,keep{{units=1}}+prefetch,{good},auto"]
    assert main([*MODEL, *options, "--optimal"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tests.planner.networks:small on h100, stage 3, 1 rows a rank"
    assert lines[1].split() == "ranks policy step ms exposed ms peak GiB fits over bound over optimum".split()
    assert [line.split()[:2] for line in lines[2:10:4]] == [["2", "none"], ["64", "none"]]
    assert len(lines) == 2 + 8 + 2 + 1 and lines[-2].startswith("auto on 64 ranks: keep{") and "to trace" in lines[-1]
    assert main([*MODEL, "--world-size", "2", "--policies", "none", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["policy"] == "none" and row["world_size"] == 2 and row["step_us"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "two"], "world size is 'two'; pass numbers separated by commas"),
        (["--world-size", "8,-1"], "world size is -1; it must be at least 1"),
        (["--hardware", "h900"], "hardware 'h900' is not known"),
        (["--policies", "fastest"], "policy 'fastest' is not known"),
        (["--model", "gpt9"], "model 'gpt9' is not known; the known ones are"),
        (["--layers", "0"], "number of layers is 0; it must be at least 1"),
        (["--micro-batch", "-2"], "micro-batch is -2; it must be at least 1"),
        (["--model", "tests.planner.networks:tower_without"], "cannot be imported"),
    ],
)
def test_bad_arguments_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err
