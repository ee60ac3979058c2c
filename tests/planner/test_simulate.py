"""Simulated steps: what the graph says about order, waits and streams is what the timeline shows."""

import dataclasses
from functools import cache

import pytest
import torch
from torch._decomp import get_decompositions

from benchmarks.llama import SIZES, Llama
from tests.planner.networks import traced
from tests.verify import steps
from zcompile import compat, passes
from zcompile.errors import PlanError
from zcompile.planner.hardware import Hardware, hardware
from zcompile.planner.issue import Costs, step_jobs
from zcompile.planner.simulate import REPLAY_SHARE, Timeline, simulate
from zcompile.planner.trace import trace
from zcompile.planner.window import FIRST, MicroBatch, Window

H200 = hardware("h200")


def events(line: Timeline, kind: str, phase: str = "") -> list[tuple[float, float]]:
    return [(e.start_us, e.end_us) for e in line.events if e.kind == kind and phase in ("", e.phase)]


@pytest.mark.parametrize("name", ["outlined", "kept"])
def test_every_call_and_collective_of_the_graph_is_one_event(name: str) -> None:
    step = steps.step(name)
    line = simulate(step, H200, 2)
    text = str(step)
    assert len(events(line, "region")) == text.count(" = call ")
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert len(events(line, op)) == text.count(f"zc.{op}(")
    assert len(events(line, "optimizer")) == 1
    assert line.step_us == pytest.approx(line.forward_us + line.backward_us + line.optimizer_us)


def test_gathers_run_beside_the_region_that_they_are_started_before() -> None:
    """In ``outlined`` the second gather starts before the first region is called, and the third after it."""
    jobs = step_jobs(steps.step("outlined"), Costs(H200), 2)
    index = {job.name: i for i, job in enumerate(jobs) if job.phase == "forward"}
    assert index["gather_b"] < index["forward_0"] < index["gather_c"]
    assert jobs[index["gather_b"]].after == (index["gather_a"],)
    assert jobs[index["forward_0"]].after == (index["gather_a"],)
    assert index["forward_0"] in jobs[index["gather_c"]].after
    assert index["gather_b"] in jobs[index["forward_1"]].after


def test_more_bandwidth_never_makes_a_step_slower() -> None:
    step = traced().at(world_size=64, policy="prefetch").step
    times = []
    for factor in (0.1, 0.5, 1, 2, 10, 100):
        link = dataclasses.replace(H200.node, bytes_per_s=H200.node.bytes_per_s * factor)
        outer = dataclasses.replace(H200.network, bytes_per_s=H200.network.bytes_per_s * factor)
        times.append(simulate(step, dataclasses.replace(H200, node=link, network=outer), 64).step_us)
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]


def test_prefetch_hides_what_comes_as_it_is_needed_exposes() -> None:
    base = traced().unscheduled(8)
    exposed = {p: simulate(base.schedule(passes.schedule(p)), H200, 8).exposed_us for p in ("none", "prefetch")}
    assert exposed["prefetch"] < 0.7 * exposed["none"]


def test_measured_region_times_take_the_place_of_computed_ones() -> None:
    step = steps.step("outlined")
    line = simulate(step, H200, 2, region_us={"forward_0": 1e6})
    assert (1e6, 1e6 + 1) > events(line, "region")[0] and events(line, "region")[0][1] >= 1e6
    assert line.bounds.compute_us == pytest.approx(
        simulate(step, H200, 2).bounds.compute_us
        + 1e6
        - Costs(H200).region(step.forward.regions["forward_0"]).device_us
    )


def test_without_an_update_the_step_ends_with_backward() -> None:
    step = steps.step("outlined")
    line = simulate(step, H200, 2, micro_batch=MicroBatch(FIRST, 1, step, Window(steps=2)))
    assert not events(line, "optimizer") and line.optimizer_us == 0


def test_one_rank_communicates_nothing() -> None:
    line = simulate(traced().at(world_size=1).step, H200, 1)
    assert line.bounds.communication_us == line.exposed_us == 0


def test_casts_of_small_buckets_are_computed_and_those_of_large_ones_copied() -> None:
    """32 MiB of weights a block: NCCL's gathers are cast before, those of the copy engines by the copies."""

    def kinds(machine: Hardware, mib: int) -> set[str]:
        step = traced().at(world_size=2, policy=f"bucket{{mib={mib}}}").step
        return {f"{e.kind} {e.stream}" for e in simulate(step, machine, 2).events if e.kind in ("cast", "all_gather")}

    assert kinds(H200, 0) == {"cast compute", "all_gather group"}
    assert kinds(H200, 512) == {"all_gather gathers"}
    assert kinds(dataclasses.replace(H200, copies=None), 512) == {"cast compute", "all_gather group"}


def test_a_step_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="was scheduled for 2 ranks on axis 'dp' and 8 are to be simulated"):
        simulate(steps.step("outlined"), H200, 8)
    with pytest.raises(PlanError, match="world size is 0"):
        simulate(steps.step("outlined"), H200, 0)


def test_a_step_that_is_not_outlined_is_refused() -> None:
    with pytest.raises(PlanError, match=r"node '.*' computes outside of every region; run 'outline'"):
        simulate(steps.step("stage3"), H200, 2)


# Replayed steps. ------------------------------------------------------------------------------------------------------


def test_a_step_that_the_host_holds_up_is_replayed() -> None:
    step = traced().at(world_size=2).step
    fast, slow = (
        dataclasses.replace(H200, host=dataclasses.replace(H200.host, kernel_us=us, region_us=us, collective_us=us))
        for us in (0.0, 200.0)
    )
    issued, replayed = (simulate(step, slow, 2, cuda_graphs=graphs) for graphs in (False, None))
    assert (issued.replayed, replayed.replayed) == (False, True)
    assert issued.step_us == issued.bounds.host_us
    update = slow.host.step_us
    assert replayed.bounds.host_us - update == pytest.approx(REPLAY_SHARE * (issued.bounds.host_us - update))
    assert replayed.bounds.compute_us == issued.bounds.compute_us <= replayed.step_us < issued.step_us
    assert not simulate(step, fast, 2).replayed and simulate(step, fast, 2, cuda_graphs=True).replayed
    blocking = dataclasses.replace(slow, host=dataclasses.replace(slow.host, blocks=True))
    assert not simulate(step, blocking, 2).replayed, "the device is the host"


# Measured steps. ------------------------------------------------------------------------------------------------------

#: forward and backward, and the whole step, in ms on two H200 (BENCHMARKS.md, "Speed", zcompile stage 3), when losses were
#: computed whole and the backward of ``nll_loss`` scattered into zeros as large as the logits
MEASURED = {
    ("0.19B", False): (33.8, 34.4),
    ("0.19B", None): (19.1, 19.7),  # replayed
    ("1.1B", None): (55.0, 58.7),
    ("8B", None): (375.4, 402.1),
}


@cache
def predicted_ms(name: str, layers: int, cuda_graphs: bool | None) -> tuple[float, float]:
    size = dataclasses.replace(SIZES[name], layers=layers)
    with torch.device("meta"):
        model = Llama(size)
        tokens = torch.empty(size.micro_batch, size.seq, dtype=torch.int64)
    options = {"precision": "bf16", "verify": "off", "loss_chunk": "none"}
    line = simulate(trace(model, (tokens, tokens), world_size=2, **options).step, H200, 2, cuda_graphs=cuda_graphs)
    assert line.replayed == (name == "0.19B" and cuda_graphs is None)
    return (line.forward_us + line.backward_us) / 1000, line.step_us / 1000


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cuda_graphs"), MEASURED)
def test_measured_steps_are_predicted_within_15_percent(
    name: str, cuda_graphs: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are alike, so that two and four of them tell what all of them take."""
    op, table = torch.ops.aten.nll_loss_backward.default, compat.decompositions()
    with_scatter = table | {op: get_decompositions([op])[op]}
    monkeypatch.setattr(compat, "decompositions", lambda: with_scatter)
    few, more = (predicted_ms(name, layers, cuda_graphs) for layers in (2, 4))
    rest = (SIZES[name].layers - 4) / 2
    for a, b, measured in zip(few, more, MEASURED[name, cuda_graphs], strict=True):
        assert b + (b - a) * rest == pytest.approx(measured, rel=0.15)
