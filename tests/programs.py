"""Python programs as tests run them: in processes forked from one that has everything imported, with ranks or without.

That saves seconds a process. What only a real start shows (torchrun, the command line) has tests that start real ones.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

#: imported once
HEAVY = (
    "torch._dynamo.functional_export",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "zcompile",
)


class Programs:
    """``programs(script, *arguments, ranks=2)`` runs a script to its end; returns what it printed, its first rank alone."""

    def __init__(self) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.programs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def __call__(
        self,
        script: Path,
        *arguments: str,
        ranks: int = 0,
        timeout: float = 240.0,
        variables: dict[str, str] | None = None,
    ) -> str:
        """Run a script.

        Args:
            script: the program.
            arguments: its arguments.
            ranks: how many processes, which find each other as under torchrun; 0: one alone.
            timeout: seconds until processes that have not ended are killed.
            variables: of the environment.
        """
        with tempfile.TemporaryDirectory() as folder:
            request = {"command": [str(script), *arguments], "ranks": ranks, "timeout": timeout, "folder": folder}
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.write(json.dumps(request | {"variables": variables or {}}) + "\n")
            self._server.stdin.flush()
            codes: list[int] = json.loads(self._server.stdout.readline())
            texts = {path.name: path.read_text() for path in sorted(Path(folder).iterdir())}
        assert not any(codes), f"{script.name} ended with {codes}\n" + "\n".join(texts.values())
        return texts["0.out"]

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def serve() -> tuple[list[str], dict[str, str]] | None:
    """Fork the processes of every request. Returns in each of them (its command, its environment), and None in the end."""
    for name in HEAVY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        pids: list[int] = []
        every = request["variables"] | (addresses(request["ranks"]) if request["ranks"] else {})
        for rank in range(max(1, request["ranks"])):
            pid = os.fork()
            if not pid:
                redirect(f"{request['folder']}/{rank}")
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if request["ranks"] else {}
                return request["command"], every | own
            pids.append(pid)
        print(json.dumps(codes_of(pids, request["timeout"])), flush=True)
    return None


def addresses(ranks: int) -> dict[str, str]:
    """Where the ranks meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def redirect(path: str) -> None:
    """Give this process, in a session of its own, an input without a line and files to print to."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT), number)


def codes_of(pids: Sequence[int], timeout: float) -> list[int]:
    """The exit code of each process, and -9 of those that had to be killed with all that they started."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout
    while len(codes) < len(pids):
        time.sleep(0.01)
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def main() -> None:
    process = serve()
    if process is not None:
        command, variables = process
        os.environ.update(variables)
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
