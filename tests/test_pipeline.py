"""Pipelines as values: specs, order, history, and the files that dumps and failures leave."""

import dataclasses
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zcompile.config import Config
from zcompile.errors import ConfigError, PassError, PipelineError
from zcompile.ir import meta
from zcompile.ir.graph import Graph, Input, Step
from zcompile.ir.text import parse_step
from zcompile.passes import KNOWN, PASSES, default_pipeline, parse, read_policy, schedule
from zcompile.passes.cleanup import Cleanup
from zcompile.passes.memory.chunk_loss import ChunkLoss
from zcompile.passes.replay import opt, parse_target
from zcompile.passes.schedule.bucket import Bucket
from zcompile.passes.schedule.keep import Keep
from zcompile.passes.schedule.prefetch import Prefetch
from zcompile.passes.zero.reduce import Reduce
from zcompile.passes.zero.shard import Shard
from zcompile.pipeline import Dump, JointPass, Pass, Pipeline, Stats, StepPass
from zcompile.verify.facts import Fact
from zcompile.verify.verifier import Verifier

GRAPH = """\
graph m.forward
  inputs:
    %w: f32[4, 4] = param 'w' of [4, 4]
    %x: f32[2, 4] = input 0
  body:
    %y: f32[2, 4] = aten.mm(%x, %w)
  return output 0 %y"""

#: values that each option may have in a spec
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "stage": st.integers(0, 3),
    "size": st.integers(1, 64),
    "axis": st.sampled_from(["dp", "replicas"]),
    "ignore": st.sampled_from(["", "*.norm.*", "layers.0.*|head.[wb]*"]),
    "dtype": st.sampled_from([None, "bf16", "f16", "f32"]),
    "local": st.booleans(),
    "mib": st.floats(0, 1e6, allow_nan=False) | st.integers(0, 512),
    "units": st.integers(0, 64),
    "first": st.integers(0, 64),
    "inside": st.booleans(),
    "min_mib": st.floats(0, 1e6, allow_nan=False),
    "columns": st.integers(0, 1 << 20),
    "drop": st.booleans(),
    "always": st.booleans(),
    "alike": st.booleans(),
    "device": st.sampled_from(["", "cuda", "cpu"]),
    "intensity": st.floats(0, 1e6, allow_nan=False) | st.integers(0, 512),
    "lookahead": st.integers(0, 8),
    "mode": st.sampled_from(["full", "selective", "budget"]),
    "limit_mib": st.none() | st.floats(0, 1e6, allow_nan=False),
}


@st.composite
def passes(draw: st.DrawFn) -> Pass[Any]:
    cls = draw(st.sampled_from(PASSES))
    of = {f.name: OPTIONS[f.name] for f in dataclasses.fields(cls)}
    for f in dataclasses.fields(cls):
        if "None" not in str(f.type):
            of[f.name] = of[f.name].filter(lambda value: value is not None)
    return cls(**{name: draw(values) for name, values in of.items()})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go during a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


# Specs. ---------------------------------------------------------------------------------------------------------------


@given(st.lists(passes(), max_size=4).map(tuple))
def test_every_pass_with_every_option_survives_its_spec(chosen: tuple[Pass[Any], ...]) -> None:
    pipeline = Pipeline(chosen)
    assert parse(str(pipeline)) == pipeline
    assert str(parse(str(pipeline))) == str(pipeline)


def test_a_spec_may_be_written_freely() -> None:
    pipeline = parse(" shard{stage=2, size=4 ignore=*.norm.*} ,cleanup,reduce{dtype=none local=true}")
    assert pipeline.passes == (Shard(stage=2, size=4, ignore="*.norm.*"), Cleanup(), Reduce(dtype=None, local=True))
    assert parse("prefetch { lookahead = 2 }, bucket{mib =0.5}") == Pipeline((Prefetch(lookahead=2), Bucket(mib=0.5)))
    assert parse("shard{axis=3 ignore=none}").passes == (Shard(axis="3", ignore="none"),), "words may look like numbers"
    assert str(Prefetch(lookahead=2)) == "prefetch{lookahead=2 limit_mib=none}" and str(Cleanup()) == "cleanup"
    assert parse("") == Pipeline(())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("teleport", f"unknown pass 'teleport'; the known ones are {', '.join(sorted(KNOWN))}"),
        ("prefetch{distance=2}", "pass 'prefetch' has no option 'distance'; its options are lookahead, limit_mib"),
        ("cleanup{hard=true}", r"pass 'cleanup' has no option 'hard'; its options are \(none\)"),
        ("prefetch{2}", "pass 'prefetch' has no option '2'; its options are lookahead, limit_mib"),
        ("Prefetch", r"'Prefetch' is not a pass spec; write name or name\{option=value other=value\}"),
        ("prefetch{lookahead=1", r"'prefetch\{lookahead=1' is not a pass spec"),
        ("shard,,cleanup", "'' is not a pass spec"),
        ("prefetch{lookahead=far}", "pass 'prefetch' has lookahead=far; lookahead is a whole number$"),
        ("prefetch{lookahead=1e99}", "pass 'prefetch' has lookahead=1e99; lookahead is a whole number$"),
        ("prefetch{lookahead=true}", "pass 'prefetch' has lookahead=true; lookahead is a whole number$"),
        ("prefetch{lookahead=}", "pass 'prefetch' has lookahead=; lookahead is a whole number$"),
        ("prefetch{limit_mib=much}", "pass 'prefetch' has limit_mib=much; limit_mib is a number or none$"),
        ("bucket{mib=nan}", "pass 'bucket' has mib=nan; mib is a number$"),
        ("hold{inside=1}", "pass 'hold' has inside=1; inside is true or false$"),
    ],
)
def test_what_is_no_spec_is_refused(spec: str, message: str) -> None:
    with pytest.raises(PipelineError, match=f"^{message}"):
        parse(spec)


def test_policies_are_schedule_passes() -> None:
    assert schedule("none") == ()
    assert schedule("prefetch{lookahead=2}") == (Keep(), Bucket(), Prefetch(lookahead=2))
    assert schedule("prefetch,bucket{mib=1}") == (Keep(), Prefetch(), Bucket(mib=1))
    assert schedule("prefetch,keep{units=0}") == (Keep(units=0), Bucket(), Prefetch())
    assert schedule("bucket,keep{mib=64}") == (Keep(mib=64), Bucket())
    with pytest.raises(PipelineError, match="policy 'cleanup' names 'cleanup', which is no schedule pass; those are"):
        schedule("cleanup")


@dataclass(frozen=True)
class Mine(StepPass):
    """A policy of a user's."""

    name: ClassVar[str] = "mine"
    regions: int = 1

    def run(self, target: Step, stats: Stats) -> None:
        stats["runs"] += 1


def test_a_policy_is_a_spec_or_passes() -> None:
    assert read_policy(None) == (None, ())
    assert read_policy("prefetch{lookahead=2}") == ("prefetch{lookahead=2}", ())
    assert read_policy(Prefetch(lookahead=2)) == ("prefetch{lookahead=2 limit_mib=none}", ())
    assert read_policy([Keep(units=2), Prefetch()])[1] == ()
    assert read_policy(Mine(2)) == ("mine{regions=2}", (Mine(2),))
    assert read_policy((Bucket(), Mine())) == (f"{Bucket()},mine{{regions=1}}", (Bucket(), Mine()))


def test_a_policy_of_ones_own_is_all_that_schedules() -> None:
    config = Config(policy="mine{regions=2}", own_policy=(Mine(2),), gradient_accumulation_steps=2)
    usual = default_pipeline(Config(policy="none"), size=2).passes
    at = len(usual) - 1
    assert default_pipeline(config, size=2).passes == (*usual[:at], Mine(2), usual[at])


@pytest.mark.parametrize("policy", [5, [], ["prefetch"], Mine, (Prefetch(), "keep"), ChunkLoss()])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match=r"^policy is .*; pass a spec such as .*, a StepPass, or a list of them$"):
        read_policy(policy)


def test_auto_is_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"^policy is 'auto'; pass memory_budget="):
        read_policy("auto")


# Order. ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_default_pipeline_is_in_order_and_a_spec(stage: int, precision: str | None) -> None:
    pipeline = default_pipeline(Config(stage=stage, precision=precision, ignore=("*.norm.*", "head")), size=4)
    pipeline.check()
    assert parse(str(pipeline)) == pipeline
    assert pipeline.joint + pipeline.step == pipeline.passes


def test_order_is_checked() -> None:
    with pytest.raises(PipelineError, match=r"^pass 0 'prefetch' requires grads-reduced, which no earlier pass establ"):
        parse("prefetch").check()
    parse("prefetch").check([Fact.GRADS_REDUCED, Fact.PARAMS_GATHERED])
    with pytest.raises(PipelineError, match=r"^pass 2 'shard' requires units-planned"):
        parse("plan-units,outline,shard").check()
    with pytest.raises(
        PipelineError,
        match=r"^pass 1 'recompute-params' works on the joint graph but comes after 'plan-units', which works on the "
        r"split step; move it to the front$",
    ):
        parse("plan-units,recompute-params").check()


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_passes_are_frozen_and_say_what_they_are(cls: type[Pass[Any]]) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert issubclass(cls, (JointPass, StepPass)) and cls.__doc__ and "Exact" in cls.__doc__
    assert not cls.establishes & cls.breaks
    described = cls.__doc__.partition("Attributes:")[2]
    assert all(f"        {f.name}: " in described for f in dataclasses.fields(cls))


def test_exactness_follows_the_options() -> None:
    assert Reduce().exact and not Reduce(dtype="bf16").exact


# Running. -------------------------------------------------------------------------------------------------------------


def run(spec: str, dump: Dump | None = None) -> Any:
    return parse(spec).run_step(parse_step(GRAPH), Verifier("full"), dump)


def test_history_holds_graphs_and_counts() -> None:
    history = run("plan-units,shard{size=2},cleanup")
    assert [e.name for e in history] == ["plan-units", "shard", "cleanup"] and len(history) == 3
    assert history[0].before == GRAPH and history["shard"].before == history[0].after
    assert history["shard"].spec == "shard{stage=3 size=2 axis=dp ignore=}"
    assert str(history[0].stats) == "forward regions: 1\nunits: 1"
    assert history[0].diff().splitlines() == [
        "--- m.forward before plan-units",
        "+++ m.forward after",
        "@@ -1,7 +1,7 @@",
        " graph m.forward",
        "   inputs:",
        "-    %w: f32[4, 4] = param 'w' of [4, 4]",
        "+    %w: f32[4, 4] = param 'w' of [4, 4] unit 'w'",
        "     %x: f32[2, 4] = input 0",
        "   body:",
        "-    %y: f32[2, 4] = aten.mm(%x, %w)",
        "+    %y: f32[2, 4] = aten.mm(%x, %w) @0",
        "   return output 0 %y",
    ]
    assert history["cleanup"].diff() == ""
    with pytest.raises(KeyError, match="no pass 'bucket' ran; these did: plan-units, shard, cleanup"):
        history["bucket"]


SCALED = """\
graph m.forward
  inputs:
    %w: f32[4, 4] = param 'w' of [4, 4]
    %x: f32[2, 4] = input 0
  region scale(%a: f32[2, 4]):
    %b: f32[2, 4] = aten.mul.Scalar(%a, 2)
    return %b
  body:
    %y: f32[2, 4] = aten.mm(%x, %w)
    %z: f32[2, 4] = call scale(%y)
    %v: f32[2, 4] = aten.add.Tensor(%z, %y)
  return output 0 %v"""


def node_of(graph: Graph, name: str) -> Any:
    return next(n for g in (graph.fx, graph.regions["scale"].fx) for n in g.nodes if n.name == name)


CHANGES: dict[str, Callable[[Graph], Any]] = {
    "a name": lambda g: setattr(node_of(g, "y"), "name", "u"),
    "a literal that is equal": lambda g: setattr(node_of(g, "b"), "args", (node_of(g, "a"), 2.0)),
    "an argument": lambda g: setattr(node_of(g, "v"), "args", (node_of(g, "y"), node_of(g, "z"))),
    "a keyword argument": lambda g: setattr(node_of(g, "v"), "kwargs", {"alpha": 2}),
    "an operator": lambda g: setattr(node_of(g, "v"), "target", torch.ops.aten.sub.Tensor),
    "the order": lambda g: node_of(g, "w").append(node_of(g, "x")) or node_of(g, "x").append(node_of(g, "w")),
    "metadata": lambda g: meta.set_region(node_of(g, "y"), 1),
    "an origin": lambda g: meta.set_origin(node_of(g, "x"), Input(1)),
    "what is returned": lambda g: g.set_outputs([(node_of(g, "z"), role) for _, role in g.outputs]),
    "a region's operator": lambda g: setattr(node_of(g, "b"), "target", torch.ops.aten.div.Scalar),
    "a node less": lambda g: g.fx.erase_node(g.fx.call_function(torch.ops.aten.neg.default, (node_of(g, "y"),))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_snapshot_shows_every_change(change: str) -> None:
    """It shares what did not change with the one before, and nothing with the graph, which may change later."""
    graph = parse_step(SCALED).forward
    first = graph.copy()
    text = str(first)
    same = graph.snapshot(first)
    assert same.fx is first.fx and same.regions["scale"].fx is first.regions["scale"].fx
    CHANGES[change](graph)
    second = graph.snapshot(same)
    assert str(second) == str(graph) and str(first) == str(same) == text
    assert str(second) != text or change == "a node less"
    kept = [second.fx is first.fx, second.regions["scale"].fx is first.regions["scale"].fx]
    assert kept == {
        "a node less": [True, True],
        "a literal that is equal": [True, False],
        "a region's operator": [True, False],
    }.get(change, [False, True])
    again = parse_step(SCALED).forward  # not its copy: nothing is shared
    assert again.snapshot(first).fx is not first.fx


def test_stats_hide_what_did_not_happen() -> None:
    stats = Stats({"b": 2, "a": 1, "c": 0})
    assert str(stats) == "a: 1\nb: 2"


def test_a_dump_is_numbered_and_parses(tmp_path: Path) -> None:
    dump = Dump(tmp_path / "capture")
    history = run("plan-units,shard{size=2}", dump)
    assert sorted(p.name for p in dump.folder.iterdir()) == ["00_plan-units.txt", "01_shard.txt"]
    text = (dump.folder / "01_shard.txt").read_text()
    assert text == history["shard"].after + "\n" and str(parse_target(text)) + "\n" == text


def test_the_dump_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZCOMPILE_DUMP", raising=False)
    assert Dump.from_environment("m") is None
    monkeypatch.setenv("ZCOMPILE_DUMP", str(tmp_path))
    assert Dump.from_environment("m") == Dump(tmp_path / "m")


def test_a_failed_pass_leaves_its_graph_and_a_command_that_replays_it(folder: Path) -> None:
    with pytest.raises(PassError, match=r"^bucket size is -1 MiB; it must not be negative\n") as caught:
        opt(GRAPH, "plan-units,shard{size=2},unshard,reduce,bucket{mib=-1}")
    (note,) = caught.value.__notes__
    (path,) = folder.glob("zcompile-*/failed_bucket_before.txt")
    assert path.read_text() == opt(GRAPH, "plan-units,shard{size=2},unshard,reduce") + "\n"
    start, _, command = note.partition("replay: ")
    assert start == f"in pass 'bucket{{mib=-1}}'; the graph before it is in {path}; "
    python, *arguments = shlex.split(command)
    assert python == "python"
    again = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={"TMPDIR": str(folder)}
    )
    assert again.returncode == 1
    assert again.stderr.splitlines()[0] == "error: bucket size is -1 MiB; it must not be negative"


def test_a_failure_with_a_dump_is_written_there(folder: Path) -> None:
    dump = Dump(folder / "dump")
    with pytest.raises(PassError):
        run("plan-units,shard{stage=4}", dump)
    assert sorted(p.name for p in dump.folder.iterdir()) == ["00_plan-units.txt", "failed_shard_before.txt"]
    assert not list(folder.glob("zcompile-*"))


@dataclasses.dataclass(frozen=True)
class DropOutput(StepPass):
    """A pass that is wrong."""

    name = "drop-output"

    def run(self, target: Step, stats: Stats) -> None:
        target.forward.set_outputs([])


def test_a_pass_that_breaks_a_graph_is_named(folder: Path) -> None:
    step = parse_step(GRAPH)
    with pytest.raises(Exception, match="output 0") as caught:
        Pipeline((DropOutput(),)).run_step(step, Verifier("full"))
    assert caught.value.__notes__[0].startswith("in pass 'drop-output'; the graph before it is in ")
    (path,) = folder.glob("zcompile-*/failed_drop-output_before.txt")
    assert path.read_text() == GRAPH + "\n"


def test_facts_are_kept_with_the_options_that_established_them() -> None:
    facts: dict[Fact, Any] = {}
    target = parse_target(GRAPH)
    assert not isinstance(target, Graph)
    parse("plan-units,shard{stage=1 size=2},unshard{stage=1},outline").run_step(target, Verifier("full"), None, facts)
    assert set(facts) == {Fact.PARAMS_SHARDED, Fact.PARAMS_GATHERED, Fact.OUTLINED}
    assert facts[Fact.PARAMS_GATHERED] == {"stage": 1}
