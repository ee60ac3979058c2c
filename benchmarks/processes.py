"""Starts one process a rank, as ``torchrun`` would, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def ranks(world_size: int, folder: Path, program: str, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that run ``program`` on the CPU, one a rank, each the leader of a process group; killed with all their children.

    Args:
        world_size: how many.
        folder: where what rank 3 prints goes: ``rank3.log``.
        program: a file below the project's root.
        arguments: of the program.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONWARNINGS": "ignore",
            }
            command = [sys.executable, "-u", str(ROOT / program), *arguments]
            with (folder / f"rank{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def logs(folder: Path, world_size: int) -> str:
    """What all ranks printed."""
    return "\n".join(f"-- rank {r}\n{(folder / f'rank{r}.log').read_text()}" for r in range(world_size))
