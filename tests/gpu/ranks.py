"""Starts one process a rank with a time limit, as torchrun would, and leaves none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "gpu" / "rank_program.py"


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
