"""Training on one and two GPUs: losses against plain PyTorch, memory, and ranks that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.ranks import Ended, run

pytestmark = pytest.mark.gpu

#: of everything here; a name other than cuda is for trying the tests themselves without a GPU
DEVICE, BACKEND = "cuda", "inductor"
NUM_DEVICES = torch.cuda.device_count()

STAGES = [f"stage:{stage}:{precision}" for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
MEMORY = [f"memory:{stage}" for stage in (0, 1, 2, 3)]
JOBS = ["plain", "fsdp2:bf16", *STAGES, *MEMORY]
JOB_LIMIT = 60.0  # seconds for each job, compilation included, and the same again to start

worlds = pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.skipif(NUM_DEVICES < 1, reason="needs a CUDA device")),
        pytest.param(2, marks=[pytest.mark.dist, pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")]),
    ],
)
two_devices = pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two CUDA devices")


class Results:
    """All jobs of a world size, run in as few sets of processes as failures allow, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[int, dict[str, Any]] = {}

    def of(self, world_size: int, job: str) -> dict[str, Any]:
        if world_size not in self._results:
            self._results[world_size] = self._run(world_size)
        result = self._results[world_size][job]
        if isinstance(result, str):
            pytest.fail(f"{job} on {world_size} ranks did not finish:\n{result}")
        return result

    def _run(self, world_size: int) -> dict[str, Any]:
        results: dict[str, Any] = {}
        waiting, number = list(JOBS), 0
        while waiting:
            number += 1
            ends = run(
                world_size,
                self._folder / f"{world_size}_{number}",
                DEVICE,
                BACKEND,
                *waiting,
                limit=JOB_LIMIT * (1 + len(waiting)) / 2,
            )
            results |= parse(ends[0])
            if all(end.code == 0 for end in ends):
                break
            waiting = waiting[len([job for job in waiting if job in results]) :]
            if waiting:  # the first one left is the one that failed; the others start anew without it
                results[waiting.pop(0)] = "\n".join(
                    f"--- rank {r}: exit code {e.code}\n{e.output[-3000:]}" for r, e in enumerate(ends)
                )
        return results


def parse(end: Ended) -> dict[str, Any]:
    lines = [json.loads(line.removeprefix("RESULT ")) for line in end.output.splitlines() if line.startswith("RESULT ")]
    return {line.pop("job"): line for line in lines}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("gpu"))


def distance(losses: list[float], reference: list[float]) -> float:
    """The mean distance of two courses of training."""
    return sum(abs(a - b) for a, b in zip(losses, reference, strict=True)) / len(reference)


@worlds
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_losses_equal_plain_pytorch(results: Results, world_size: int, stage: int) -> None:
    reference = results.of(world_size, "plain")["losses"]
    losses = results.of(world_size, f"stage:{stage}:fp32")["losses"]
    assert losses == pytest.approx(reference, rel=5e-5)
    assert reference[-1] < reference[0], "the reference learns"


@worlds
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_losses_are_as_near_as_fsdp2(results: Results, world_size: int, stage: int) -> None:
    """Near to fp32 training, up to half as far again as FSDP2 in bf16 is on the same run."""
    reference = results.of(world_size, "plain")["losses"]
    theirs = distance(results.of(world_size, "fsdp2:bf16")["losses"], reference)
    mine = distance(results.of(world_size, f"stage:{stage}:bf16")["losses"], reference)
    assert 0 < mine <= 1.5 * theirs + 1e-4, f"mean distance from fp32: {mine:.2e}, FSDP2 {theirs:.2e}"


@worlds
@pytest.mark.parametrize("job", [*STAGES, *MEMORY])
def test_nothing_stays_gathered_after_a_step(results: Results, world_size: int, job: str) -> None:
    assert results.of(world_size, job)["gathered_live_bytes"] == 0


@worlds
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_model_states(results: Results, world_size: int, stage: int) -> None:
    """Each rank holds its part, and a step leaves nothing behind."""
    report = results.of(world_size, f"memory:{stage}")
    parts = 1 if stage == 0 else world_size
    assert report["parameter_bytes"] <= report["parameter_bytes_total"] / parts * 1.02
    assert report["optimizer_bytes"] <= report["optimizer_bytes_total"] / parts * 1.02
    assert report["allocated_after"] <= report["allocated_before"] + 2**20


@worlds
def test_peak_memory_falls_with_the_stage(results: Results, world_size: int) -> None:
    if world_size == 1 or DEVICE != "cuda":
        pytest.skip("one rank holds everything in every stage")
    peaks = [results.of(world_size, f"memory:{stage}")["allocated_peak"] for stage in range(4)]
    shown = [round(peak / 2**20) for peak in peaks]
    assert peaks[3] < 0.75 * peaks[0], f"MiB: {shown}"
    assert peaks[3] < peaks[2] <= 1.02 * peaks[1] and peaks[1] < peaks[0], f"MiB: {shown}"


@two_devices
@pytest.mark.dist
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_failing_rank_ends_the_other(tmp_path: Path, how: str) -> None:
    ends = run(2, tmp_path, DEVICE, BACKEND, how, limit=150.0)
    assert "failing" in ends[1].output, ends[1].output[-3000:]
    assert ends[0].code not in (0, -9), f"exit code {ends[0].code}\n{ends[0].output[-3000:]}"
    assert ends[0].seconds - ends[1].seconds < 30.0
    assert "RankError" in ends[0].output, ends[0].output[-3000:]
    if how == "raises":
        assert "bad batch" in ends[0].output, ends[0].output[-3000:]
