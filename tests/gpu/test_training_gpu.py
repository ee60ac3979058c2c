"""Training on one and two GPUs: losses against plain PyTorch, memory, and ranks that fail."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.ranks import NUM_RANKS, SHARES, Results, run

pytestmark = pytest.mark.gpu

#: of everything here; a name other than cuda is for trying the tests themselves without a GPU
DEVICE, BACKEND = "cuda", "inductor"

#: seconds that a rank program waits on purpose
PAUSE = 0.2

#: with one rank all stages are the same program
STAGES = {1: (0, 3), 2: (0, 1, 2, 3)}
PEERS = ["stage:3:fp32:peers", "stage:3:bf16:peers", "stage:1:bf16:peers"]
GRAPHS = {1: ["stage:3:bf16:graphs"], 2: ["stage:3:fp32:graphs", "stage:0:bf16:graphs", "stage:3:bf16:peers+graphs"]}
WINDOWS = {1: ["window:3:graphs", "window:3:graphs+local"]}
WINDOWS[2] = ["window:0:graphs", "window:1:graphs", "window:2:graphs+local", *WINDOWS[1]]
PROFILES = {1: ["profile", "profile:graphs"], 2: ["profile", "profile:peers+graphs"]}


def training_jobs(world_size: int) -> list[str]:
    """What trains on so many ranks."""
    stages = [f"stage:{stage}:{precision}" for precision in ("fp32", "bf16") for stage in STAGES[world_size]]
    return stages + PEERS * (world_size > 1) + GRAPHS[world_size]


def jobs(world_size: int) -> list[str]:
    """Everything that runs on so many ranks, whatever fails in between."""
    others = [f"{kind}:{stage}" for kind in ("memory", "fp16", "window") for stage in STAGES[world_size]]
    return [
        "plain",
        "fsdp2:bf16",
        *training_jobs(world_size),
        *others,
        *WINDOWS[world_size],
        *PROFILES[world_size],
        "asking",
        "closed",
        "long",
    ]


NEEDS = {
    1: [pytest.mark.skipif(NUM_RANKS < 1, reason="needs a CUDA device")],
    2: [pytest.mark.dist, pytest.mark.skipif(NUM_RANKS < 2, reason="needs two CUDA devices")],
}


def worlds(names: str, cases: Callable[[int], Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrize over world sizes and what ``cases`` gives for each."""
    values = [pytest.param(w, case, marks=NEEDS[w]) for w in STAGES for case in cases(w)]
    return pytest.mark.parametrize(("world_size", names), values)


two_devices = pytest.mark.skipif(NUM_RANKS < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("gpu"), DEVICE, BACKEND, jobs)


def distance(losses: list[float], reference: list[float]) -> float:
    """The mean distance of two courses of training."""
    return sum(abs(a - b) for a, b in zip(losses, reference, strict=True)) / len(reference)


@worlds("job", lambda w: [job for job in jobs(w) if "fp32" in job or job.startswith("window")])
def test_fp32_losses_equal_plain_pytorch(results: Results, world_size: int, job: str) -> None:
    reference = results.of(world_size, "plain")["losses"]
    losses = results.of(world_size, job)["losses"]
    assert losses == pytest.approx(reference, rel=5e-5)
    assert reference[-1] < reference[0], "the reference learns"


@worlds("job", lambda w: [job for job in training_jobs(w) if "bf16" in job])
def test_bf16_losses_are_as_near_as_fsdp2(results: Results, world_size: int, job: str) -> None:
    """Near to fp32 training, up to half as far again as FSDP2 in bf16 is on the same run."""
    reference = results.of(world_size, "plain")["losses"]
    theirs = distance(results.of(world_size, "fsdp2:bf16")["losses"], reference)
    mine = distance(results.of(world_size, job)["losses"], reference)
    assert 0 < mine <= 1.5 * theirs + 1e-4, f"mean distance from fp32: {mine:.2e}, FSDP2 {theirs:.2e}"


@worlds("stage", STAGES.__getitem__)
def test_fp16_with_loss_scaling(results: Results, world_size: int, stage: int) -> None:
    """Near to fp32 training, and one rank's overflow is everybody's: no rank steps, all lower their scale."""
    reference = results.of(world_size, "plain")["losses"]
    theirs = distance(results.of(world_size, "fsdp2:bf16")["losses"], reference)
    result = results.of(world_size, f"fp16:{stage}")
    mine = distance(result["losses"], reference)
    assert 0 < mine <= theirs + 1e-4, f"mean distance from fp32: {mine:.2e}, FSDP2 in bf16 {theirs:.2e}"
    scales = result["scales"]
    assert result["same_scales"] and scales[3] == scales[2] / 2, scales
    assert max(b / a for a, b in itertools.pairwise(scales)) == 2, f"it grows again: {scales}"
    assert result["changed_by_skipped_steps"] == 0


@worlds("job", lambda w: [job for job in jobs(w)[2:] if not job.startswith(("fp16", "asking", "closed", "long"))])
def test_nothing_stays_gathered_after_a_step(results: Results, world_size: int, job: str) -> None:
    assert results.of(world_size, job)["gathered_live_bytes"] == 0


@two_devices
@pytest.mark.dist
@pytest.mark.parametrize("job", PEERS)
def test_copy_engines_move_what_they_should(results: Results, job: str) -> None:
    """The copies are used where they are asked for, and give what NCCL gives."""
    copied, through_nccl = results.of(2, job), results.of(2, job.removesuffix(":peers"))
    if SHARES or torch.cuda.can_device_access_peer(0, 1):
        assert copied["peer_bytes"] > 0
    assert through_nccl["peer_bytes"] == 0, "its buckets are small"
    tolerance = 1e-6 if "fp32" in job else 1e-4  # attention's backward adds up in another order in each run
    assert copied["losses"] == pytest.approx(through_nccl["losses"], rel=tolerance)


@worlds("job", GRAPHS.__getitem__)
def test_replayed_steps_train_as_issued_ones(results: Results, world_size: int, job: str) -> None:
    """All steps but the first two are CUDA graphs, and give what is issued."""
    replayed, issued = (
        results.of(world_size, name) for name in (job, job.replace("+graphs", "").replace(":graphs", ""))
    )
    assert (replayed["replays"], issued["replays"]) == (len(replayed["losses"]) - 2, 0)
    tolerance = 1e-6 if "fp32" in job else 1e-4  # attention's backward adds up in another order in each run
    assert replayed["losses"] == pytest.approx(issued["losses"], rel=tolerance)


@worlds("job", WINDOWS.__getitem__)
def test_windows_are_replayed(results: Results, world_size: int, job: str) -> None:
    """Every kind of micro-batch in its third window, and as issued ones."""
    replayed, issued = (results.of(world_size, name) for name in (job, job[: len("window:3")]))
    total = 4 * len(replayed["losses"])
    assert total - 8 <= replayed["replays"] <= total - 2 and issued["replays"] == 0
    assert replayed["losses"] == pytest.approx(issued["losses"], rel=1e-6 if "local" not in job else 5e-5)


@worlds("job", lambda w: ["asking"])
def test_what_cannot_be_replayed_trains(results: Results, world_size: int, job: str) -> None:
    result = results.of(world_size, job)
    assert result["replays"] == 0
    assert result["losses"] == pytest.approx(result["plain"], rel=1e-5)


@worlds("job", lambda w: ["closed"])
def test_models_that_were_replayed_leave_no_memory(results: Results, world_size: int, job: str) -> None:
    result = results.of(world_size, job)
    assert result["replays"] == 3 * 3
    first, *others = result["left"]
    assert max(others) <= first + 2**20, result["left"]


@worlds("job", lambda w: ["long"])
def test_many_replayed_steps_are_those_that_are_issued(results: Results, world_size: int, job: str) -> None:
    """Bit for bit; where two courses of issued steps differ, about as much as they do."""
    result = results.of(world_size, job)
    first, second, replayed = result["courses"]
    assert len(replayed) == 500 and result["replays"] == [0, 0, 498]
    between = distance(second, first)
    assert distance(replayed, first) <= 3 * between, f"mean distance; of two courses of issued steps {between:.2e}"


@worlds("job", PROFILES.__getitem__)
def test_a_profile_finds_pauses_of_the_host_and_of_ranks(results: Results, world_size: int, job: str) -> None:
    """Beside plain PyTorch's losses: every instruction once, every moment in one share, and each delay where it was made."""
    result = results.of(world_size, job)
    assert result["losses"] == pytest.approx(results.of(world_size, "plain")["losses"], rel=5e-5)
    assert result["in_order"]
    for step_us, shares in zip(result["step_us"], result["shares"], strict=True):
        assert sum(shares.values()) == pytest.approx(step_us) and min(shares.values()) >= 0
        assert shares["computation"] > 0 and shares["optimizer"] > 0
    first, paused, delayed = result["shares"]
    delay_us = 0.9 * 1e6 * PAUSE
    assert paused["waits for the host"] >= delay_us
    elsewhere = ["other work", "waits for the host"]  # a device that works between programs; on the CPU nobody can tell
    if world_size == 1:
        assert sum(delayed[name] for name in elsewhere[: 1 if DEVICE == "cuda" else 2]) >= delay_us
    else:
        assert delayed["waits for collectives"] >= first["waits for collectives"] + 0.6 * delay_us
        of_last = sum(result["ranks"][-1][name] for name in elsewhere[: 1 if DEVICE == "cuda" else 2])
        assert 3 * of_last >= delay_us, "the mean of three steps"
        assert all(start < end and num_bytes > 0 for start, end, num_bytes in result["collectives"])
        streams = ["gathers", "reductions"] if "peers" in job and DEVICE == "cuda" else ["group"]
        assert set(streams) <= set(result["streams"])
    assert min(result["alive_bytes"]) > 0 and result["num_times"] > 4 and "together" in result["text"]
    replays = result["replays"]
    assert len(set(replays[4:9])) == 1, f"no step is replayed meanwhile: {replays}"
    assert "graphs" not in job or DEVICE != "cuda" or replays[-1] > replays[8] > 0, replays


@worlds("stage", STAGES.__getitem__)
def test_memory_of_model_states(results: Results, world_size: int, stage: int) -> None:
    """Each rank holds its part, and a step leaves nothing behind."""
    report = results.of(world_size, f"memory:{stage}")
    parts = 1 if stage == 0 else world_size
    assert report["parameter_bytes"] <= report["parameter_bytes_total"] / parts * 1.02
    assert report["optimizer_bytes"] <= report["optimizer_bytes_total"] / parts * 1.02
    assert report["allocated_after"] <= report["allocated_before"] + 2**20


@two_devices
@pytest.mark.dist
def test_peak_memory_falls_with_the_stage(results: Results) -> None:
    reports = [results.of(2, f"memory:{stage}") for stage in range(4)]
    peaks = [report["allocated_peak"] + report["peer_bytes"] for report in reports]
    shown = [round(peak / 2**20) for peak in peaks]
    assert peaks[3] < 0.75 * peaks[0], f"MiB: {shown}"
    assert peaks[3] < peaks[2] <= 1.02 * peaks[1] and peaks[1] < peaks[0], f"MiB: {shown}"


@two_devices
@pytest.mark.dist
@pytest.mark.parametrize(
    "how", ["raises", "killed", "raises:peers", "killed:peers", "raises:graphs", "killed:peers+graphs"]
)
def test_a_failing_rank_ends_the_other(tmp_path: Path, how: str) -> None:
    if SHARES and how == "killed":
        pytest.skip("between hosts torch itself may end the process: it throws NCCL's error in a destructor")
    ends = run(2, tmp_path, DEVICE, BACKEND, how, limit=150.0)
    assert "failing" in ends[1].output, ends[1].output[-3000:]
    assert ends[0].code not in (0, -9), f"exit code {ends[0].code}\n{ends[0].output[-3000:]}"
    assert ends[0].seconds - ends[1].seconds < 30.0
    assert "RankError" in ends[0].output, ends[0].output[-3000:]
    if how.startswith("raises"):
        assert "bad batch" in ends[0].output, ends[0].output[-3000:]
