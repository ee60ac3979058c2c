"""Plans: what they say, as text, JSON, page and trace; advice that is what another plan says; bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import zcompile
from tests.dist.models import CASES, VOCAB, Deep
from zcompile.__main__ import main
from zcompile.config import Config
from zcompile.errors import ConfigError, PlanError, VerifyError, ZCompileError
from zcompile.planner.hardware import Link, hardware
from zcompile.planner.memory import CATEGORIES, Setup, by_category
from zcompile.planner.plan import Plan
from zcompile.planner.states import evaluate
from zcompile.planner.symbols import ROWS as ROWS_SYMBOL
from zcompile.planner.symbols import TOKENS
from zcompile.planner.trace import trace_with
from zcompile.planner.walk import predict
from zcompile.planner.window import Window

ROWS = 4


def model_and_inputs(rows: int = ROWS) -> tuple[Deep, dict[str, torch.Tensor]]:
    """Also the factory of the command line's tests."""
    with torch.device("meta"):
        return Deep(3), {
            "tokens": torch.empty(rows, 6, dtype=torch.int64),
            "labels": torch.empty(rows, 6, dtype=torch.int64),
        }


def make(**options: object) -> Plan:
    arguments = {"world_size": 3, "advise": False, **options}
    model, inputs = model_and_inputs()
    return zcompile.plan(model, inputs, **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(advise=True)


def test_a_plan_holds_graphs_memory_and_times(plan: Plan) -> None:
    assert plan.fits and plan.batch == ROWS and plan.tokens == 6 * ROWS
    assert "zc.all_gather" in str(plan.step.forward) and "zc.reduce_scatter" in str(plan.step.backward)
    assert plan.num_params == sum(p.numel() for p in Deep(3).parameters())
    phases = [m.phase for m in plan.memory.moments]
    assert phases == sorted(phases, key=("forward", "backward", "optimizer").index) and set(phases) == {
        "forward",
        "backward",
        "optimizer",
    }
    assert plan.memory.peak_bytes == max(m.num_bytes for m in plan.memory.moments) > 0
    assert all(part >= 0 for m in plan.memory.moments for part in (*m.during.values(), *m.after.values()))
    assert plan.timeline.step_us > 0


def test_formulas_hold_for_other_numbers_of_ranks(plan: Plan) -> None:
    for world in (2, 3):
        memory = plan.memory if world == 3 else make(world_size=world).memory
        for name, formula in plan.memory.formulas.items():
            sizes = {ROWS_SYMBOL: ROWS, TOKENS: 6}
            assert evaluate(formula.subs(sizes), world) == getattr(memory, name), (name, world)


def test_activations_as_a_formula_in_rows(plan: Plan) -> None:
    """Another micro-batch, traced by itself, saves what the formula says."""
    formula = plan.memory.formulas["saved_bytes"]
    assert formula.free_symbols == {ROWS_SYMBOL, TOKENS}
    model, inputs = model_and_inputs(7)
    other = zcompile.plan(model, inputs, world_size=3, advise=False)
    assert int(formula.subs({ROWS_SYMBOL: 7, TOKENS: 6})) == other.memory.saved_bytes


def test_text_names_what_matters(plan: Plan) -> None:
    text = str(plan)
    for category in CATEGORIES:
        assert category in text
    assert re.search(r"together +[\d.]+  of 131\.3: fits", text) and "limited by" in text
    assert "do not divide by 3 ranks" in text, "padding is said"


def test_communication_is_all_of_it_and_its_idle_part_is_a_part(plan: Plan) -> None:
    """Also where the host is slow to issue what makes a collective wait, and where copies to the host are most of it."""
    for options in ({}, {"policy": "hold{first=99}"}, {"policy": "none"}):
        text = str(plan if not options else make(advise=False, **options))
        found = re.search(r"communication ([\d.]+) ms of which ([\d.]+) ms with computation idle", text)
        assert found is not None and 0 < float(found[2]) <= float(found[1]), text
    slow = dataclasses.replace(plan.hardware, host_link=Link(10.0, 1e6))
    for offload, limit in (
        ("optimizer{chunk_mib=0.001}", "copies to the host and from it"),
        ("optimizer", "waits of computation and copies for each other"),  # one chunk comes, and goes when it is updated
    ):
        with torch.device("meta"):
            model = Deep(16)
        moved = zcompile.plan(
            model, model_and_inputs()[1], world_size=1, hardware=slow, offload=offload, verify="off", advise=False
        )
        assert f"limited by {limit}: " in str(moved), str(moved)
        assert "communication and copies to the host " in str(moved) and moved.timeline.bounds.communication_us == 0


def test_out_of_memory_is_predicted() -> None:
    tiny = dataclasses.replace(hardware("h200"), name="tiny", device_memory_bytes=60_000, reserve_bytes=0)
    model, inputs = model_and_inputs()
    over = zcompile.plan(model, inputs, world_size=2, stage=0, hardware=tiny)
    peak = over.memory.peak_bytes
    assert not over.fits and peak > 60_000
    assert "does not fit" in str(over) and "most of it: " in str(over) and "to make it fit" in str(over)
    assert over.advice and {a.change for a in over.tried} >= {"stage 3", "micro-batch 2"}
    largest = max(by_category(over.memory.peak.during), key=by_category(over.memory.peak.during).__getitem__)
    assert largest in str(over).split("most of it: ")[1].splitlines()[0]


def test_what_does_not_fit_is_told_at_least_what_saves_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """However little time there is for changes."""
    monkeypatch.setattr("zcompile.planner.advice.BUDGET_S", 0.0)
    roomy = make()
    tight = dataclasses.replace(roomy.hardware, device_memory_bytes=roomy.memory.peak_bytes - 1)
    over = make(advise=True, hardware=tight)
    assert not over.fits and [a.change for a in over.tried] == ["recompute='full'"]
    assert not make(advise=True).tried


def test_advice_is_what_another_plan_says(plan: Plan) -> None:
    assert plan.tried and set(map(id, plan.advice)) <= set(map(id, plan.tried))
    changed = {a.change: a for a in plan.tried}
    for change in ("stage 2", f"micro-batch {2 * ROWS}"):
        advice = changed[change]
        options = dict(advice.options)
        model, inputs = model_and_inputs(options.pop("micro_batch", ROWS))
        again = zcompile.plan(model, inputs, world_size=3, advise=False, **options)
        assert (again.memory.peak_bytes, again.timeline.step_us) == (advice.peak_bytes, advice.step_us)


def test_recomputation_takes_less_memory_and_more_time(plan: Plan) -> None:
    full, selective = (make(recompute=mode, advise=False) for mode in ("full", "selective"))
    saved = [max(m.after.get("saved for backward", 0) for m in p.memory.moments) for p in (plan, selective, full)]
    assert saved[0] > saved[2] and saved[1] > saved[2]
    assert full.timeline.backward_us > plan.timeline.backward_us


def test_json_comes_back(plan: Plan, tmp_path: Path) -> None:
    text = plan.to_json(tmp_path / "plan.json")
    read = json.loads(text)
    assert read == json.loads((tmp_path / "plan.json").read_text()) == plan.to_dict()
    assert (
        read["memory"]["peak_bytes"]
        == plan.memory.peak_bytes
        == max(sum(point[c] for c in CATEGORIES) for point in read["memory_over_time"])
    )
    times = [point["us"] for point in read["memory_over_time"]]
    assert times == sorted(times) and times[-1] <= plan.timeline.step_us + 1


def test_a_trace_has_streams_and_memory(plan: Plan, tmp_path: Path) -> None:
    plan.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert sum(e["ph"] == "X" for e in events) == len(plan.timeline.events)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


def test_the_page_stands_alone(plan: Plan, tmp_path: Path) -> None:
    plan.to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert not re.search(r"(src|href)=|@import|url\(|<script|<link|<img", text), "nothing comes from outside"
    pictures = {m.attrib["id"]: m for m in map(ET.fromstring, re.findall(r"<svg.*?</svg>", text, re.S))}
    assert set(pictures) == {"memory", "streams"}
    svg = "{http://www.w3.org/2000/svg}"
    areas = pictures["memory"].findall(f"{svg}polygon")
    assert {a.findtext(f"{svg}title") for a in areas} >= {"parameters", "gradients", "activations", "temporary"}
    assert len(pictures["streams"].findall(f"{svg}rect")) == len(plan.timeline.events)
    for picture in pictures.values():
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        for shape in picture.iter():
            for point in shape.attrib.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height


def test_a_browser_shows_the_page_without_complaint(plan: Plan, tmp_path: Path) -> None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(names)})")
    plan.to_html(tmp_path / "plan.html")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    shown = subprocess.run(
        [*command, f"file://{tmp_path}/plan.html"], capture_output=True, text=True, timeout=60, check=True
    )
    assert 'id="memory"' in shown.stdout and 'id="streams"' in shown.stdout
    assert "CONSOLE" not in shown.stderr


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hardware": "h300"}, PlanError, "hardware 'h300' is not known; the known ones are .*h200"),
        ({"optimizer": "adagrad"}, PlanError, "optimizer 'adagrad' is not known"),
        ({"world_size": -2}, PlanError, "world size is -2; it must be at least 1"),
        ({"stage": 4}, ConfigError, "stage is 4"),
        ({"policy": "prefetcher"}, ZCompileError, "unknown pass 'prefetcher'; the known ones are .*prefetch"),
        ({"recompute": "most"}, ConfigError, "recompute is 'most'; it must be one of full, selective"),
        ({"recompute": "1GiB"}, ConfigError, "recompute is '1GiB', a budget, which compile takes"),
        ({"gradient_accumulation_steps": 0}, ConfigError, "gradient_accumulation_steps is 0; it must be at least 1"),
        ({"accumulate_dtype": "fp32"}, ConfigError, "accumulate_dtype is for a declared window"),
        ({"accumulate_dtype": torch.bfloat16}, ConfigError, "accumulate_dtype is 'bf16'; it must be fp32, or None"),
    ],
)
def test_bad_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**options)


def test_a_policy_that_breaks_the_graph_is_the_verifiers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from zcompile.passes.schedule.prefetch import Prefetch
    from zcompile.pipeline import Stats

    def run(self: Prefetch, target: object, stats: Stats) -> None:
        release = next(n for n in target.forward.body if "release" in n.name)  # type: ignore[attr-defined]
        release.graph.erase_node(release)

    monkeypatch.setattr(Prefetch, "run", run)
    with pytest.raises(VerifyError, match="release"):
        make()


def test_a_compiled_model_is_refused() -> None:
    case = CASES["deep"]
    compiled = zcompile.compile(case.build(), backend="eager")
    with pytest.raises(ConfigError, match="is compiled already"):
        zcompile.plan(compiled, case.data(0, 0), world_size=2)


def test_plan_is_a_function_in_every_import_order() -> None:
    import zcompile.planner.plan

    assert callable(zcompile.plan) and zcompile.Plan is Plan and VOCAB


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    arguments = ["plan", "--model", "tests.planner.test_plan:model_and_inputs", "--world-size", "3", "--no-advice"]
    assert main([*arguments, "--html", str(page), "--trace", str(trace), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["memory"]["parameter_bytes"] == make().memory.parameter_bytes
    assert page.stat().st_size > 1000 and json.loads(trace.read_text())["traceEvents"]
    assert main([*arguments, "--html", str(tmp_path / "no" / "p.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_refuses_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama4", "--world-size", "8"]) == 1
    assert "error: model 'llama4' is not known; the known ones are gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "there"), [(0, False), (1, False), (2, True), (3, True)])
@pytest.mark.parametrize("hold", ["hold,", "hold{units=0 first=0},"])
def test_gradients_over_a_window(stage: int, there: bool, hold: str) -> None:
    """Stages 0 and 1 have full ones until the last backward makes shards of them; the others add to shards. More than a model keeps.

    While they are added up, a backward has its own beside them.
    """
    with torch.device("meta"):
        model, x = (
            torch.nn.Sequential(*(torch.nn.Linear(8192, 8192, bias=False) for _ in range(3))),
            torch.empty(8, 8192),
        )
    policy = "prefetch" if stage == 0 else f"{hold}prefetch"
    config = Config(stage=stage, policy=policy, gradient_accumulation_steps=3)
    traced = trace_with(model, (x,), config, 2, for_gpu=True)
    window = Window.of(config, traced.pipeline, 2)
    setup = dataclasses.replace(Setup.on(hardware("h200"), 2), window=window)
    memory = predict(traced.step, traced.specs, setup)
    full = 3 * 8192 * 8192 * 4
    shards = full if stage == 0 else full // 2
    of = {place: [m for m in memory.moments if m.place == place] for place in ("first", "middle", "last")}
    assert memory.moments == (*of["first"], *of["middle"], *of["last"])
    names = ("gradient shards", "local gradients")
    found = {
        (place, m.phase, *(m.after.get(name, 0) for name in names))
        for place in of
        for m in of[place]
        if m.phase == "forward" or m.name == "end of backward" or m.phase == "optimizer"
    }
    sums = (shards, 0) if there else (0, full)
    assert found == {
        ("first", "forward", 0, 0),
        ("first", "backward", *sums),
        ("middle", "forward", *sums),
        ("middle", "backward", *sums),
        ("last", "forward", *sums),
        ("last", "backward", shards, 0),
        ("last", "optimizer", shards, 0),
    }
    assert memory.gradient_bytes == shards
    at_end = {place: [m for m in of[place] if "gradients" in m.name and m.kind == "end"] for place in of}
    if there:
        assert [m.name for found in at_end.values() for m in found] == 3 * ["accumulate gradients"]
        buckets = [found[0].after.get("reduction buckets", 0) for found in at_end.values()]
        assert buckets == [0, shards, shards], "the first reduces right into .grad"
    else:
        added = [m for m in memory.moments if m.name == "add local gradients"]
        assert [m.place for m in added] == ["first", "middle"]
        own = [
            m.after["reduction buckets"] + m.after["between regions"] for m in added
        ]  # one is handed from region to region
        assert own == [m.after["local gradients"] for m in added] == [full, full]
        assert not any(
            m.kind in ("collective", "wait") for m in memory.moments if m.place == "middle" and m.phase == "backward"
        )
    takes = [m.after.get("local gradients", 0) for m in of["last"] if m.phase == "backward"]
    assert takes == sorted(takes, reverse=True), "they go as they are reduced"
