"""Starts one process a rank with a time limit, as torchrun would, and leaves none behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "gpu" / "rank_program.py"

JOB_LIMIT = 60.0  # seconds for each job, compilation included, and the same again to start

#: ``SHARE_GPU=1``: ranks for which there are no GPUs share one. NCCL believes them to be on different hosts then, and the copy engines
#: copy within one memory; time is sliced between the processes, so a step takes long.
SHARES = os.environ.get("SHARE_GPU") == "1" and torch.cuda.device_count() > 0

#: ranks that can run here
NUM_RANKS = max(torch.cuda.device_count(), 2 * SHARES)


@dataclass(frozen=True)
class Ended:
    """How one rank ended: what it printed, its exit code, and seconds since the start."""

    output: str
    code: int
    seconds: float


def run(world_size: int, folder: Path, *arguments: str, limit: float, grace: float = 45.0) -> list[Ended]:
    """Run ``rank_program.py`` on every rank.

    A rank that is not done ``limit`` seconds later, or ``grace`` after the first that ended, is killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        if SHARES:
            environment |= {
                "NCCL_HOSTID": f"host {rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            }
        with log.open("w") as stream:
            command = [sys.executable, "-u", str(PROGRAM), *arguments]
            processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment))
    begin = time.monotonic()
    ends: dict[int, float] = {}
    try:
        while len(ends) < world_size and time.monotonic() - begin < (min(ends.values()) + grace if ends else limit):
            for rank, process in enumerate(processes):
                if rank not in ends and process.poll() is not None:
                    ends[rank] = time.monotonic() - begin
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    return [
        Ended(log.read_text(), process.returncode, ends.get(rank, seconds))
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True))
    ]


class Results:
    """All jobs of a world size, run in as few sets of processes as failures allow, when first asked for.

    Args:
        folder: of logs.
        device: kind of device.
        backend: that lowers.
        jobs: of ``rank_program.py``, on so many ranks.
    """

    def __init__(self, folder: Path, device: str, backend: str, jobs: Callable[[int], Sequence[str]]) -> None:
        self._folder, self._device, self._backend, self._jobs = folder, device, backend, jobs
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
        waiting, number = list(self._jobs(world_size)), 0
        while waiting:
            number += 1
            ends = run(
                world_size,
                self._folder / f"{world_size}_{number}",
                self._device,
                self._backend,
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
