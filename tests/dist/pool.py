"""Pools of worker processes for tests: one alive at a time, each job with a time limit, nothing left behind.

A nursery process imports torch and zcompile once and forks the workers, so that a pool costs a fraction of a second and
one that a test has broken is simply replaced.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from tests.dist.worker import SHOWS_STACKS

ROOT = Path(__file__).parents[2]

#: seconds until a nursery or a pool must be ready
START_LIMIT = 120.0
#: seconds that the other ranks get after the first one failed
GRACE = 20.0
#: seconds for a worker that hangs to print where it is
STACKS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank.

    Attributes:
        kind: ``returned``, ``raised``, ``died`` or ``late``.
        value: what it returned.
        error: the exception's class name, if it raised.
        text: the exception's message; of a dead or late rank, what it printed last.
        trace: the formatted traceback.
        seconds: from the start of the job to its end on this rank.
    """

    kind: str
    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} after {self.seconds:.1f} s\n{self.trace or self.text}"


class Pool:
    """The workers of one world size; made by ``Pools``."""

    def __init__(self, world_size: int, pids: list[int], connections: list[Connection], folder: Path) -> None:
        self.world_size = world_size
        self.pids = pids
        self.connections = connections
        self.folder = folder

    def run(self, module: str, name: str, arguments: dict[str, Any], limit: float, grace: float) -> list[Outcome]:
        """One job on every rank. A rank that is not done ``limit`` seconds later, or ``grace`` after another failed, is late."""
        begin = time.monotonic()
        outcomes: list[Outcome | None] = [None] * len(self.connections)
        for rank, connection in enumerate(self.connections):
            try:
                connection.send((module, name, arguments))
            except OSError:
                outcomes[rank] = self._lost(rank, "died", 0.0)
        deadline = begin + limit
        while waiting := [c for c, o in zip(self.connections, outcomes, strict=True) if o is None]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            seconds = time.monotonic() - begin
            if not ready:
                self._show_stacks([self.pids[self.connections.index(c)] for c in waiting])
            for connection in ready or waiting:
                rank = self.connections.index(connection)
                outcomes[rank] = self._receive(rank, seconds) if ready else self._lost(rank, "late", seconds)
                if outcomes[rank].kind != "returned":
                    deadline = min(deadline, time.monotonic() + grace)
        return [o for o in outcomes if o is not None]

    def _receive(self, rank: int, seconds: float) -> Outcome:
        try:
            kind, value = self.connections[rank].recv()
        except (EOFError, OSError):
            return self._lost(rank, "died", seconds)
        if kind == "raised":
            error, text, trace = value
            return Outcome("raised", None, error, text, trace, seconds)
        return Outcome("returned", value, seconds=seconds)

    def _lost(self, rank: int, kind: str, seconds: float) -> Outcome:
        log = self.folder / f"rank{rank}.log"
        text = log.read_text() if log.exists() else ""
        fatal = text.find("Fatal Python error")  # the thread that ended the process comes first, and others may be many
        shown = text[-9000 if kind == "late" else -3000 :] if fatal < 0 else text[fatal:][:9000]
        return Outcome(kind, text=shown, seconds=seconds)

    def _show_stacks(self, pids: list[int]) -> None:
        """Have workers that hang print where they are."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SHOWS_STACKS)
        time.sleep(STACKS)

    def kill(self) -> None:
        """End the workers; they hold nothing that needs an orderly end."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for connection in self.connections:
            connection.close()


class Pools:
    """Runs jobs on ranks. A job is a function at the top of a test module; its arguments and result are pickled."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool", ignore_cleanup_errors=True)
        self._key = secrets.token_bytes(16)
        self._listener: Listener | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._nursery: Connection | None = None
        self._pool: Pool | None = None
        self._count = 0

    def __call__(
        self, world_size: int, job: Callable[..., Any], *, limit: float = 180.0, **arguments: Any
    ) -> list[Any]:
        """What the job returned on each rank; fails with every rank's traceback if one did not return."""
        outcomes = self.outcomes(world_size, job, limit=limit, **arguments)
        if any(o.kind != "returned" for o in outcomes):
            raise AssertionError("\n".join(f"-- rank {rank} of {world_size} {o}" for rank, o in enumerate(outcomes)))
        return [o.value for o in outcomes]

    def outcomes(
        self, world_size: int, job: Callable[..., Any], *, limit: float = 180.0, grace: float = GRACE, **arguments: Any
    ) -> list[Outcome]:
        """How the job ended on each rank. World size 0: one process without a process group.

        A pool whose ranks did not all return is replaced before the next job.
        """
        if self._pool is None or self._pool.world_size != world_size:
            self.drop()
            self._pool = self._fork(world_size)
        outcomes = self._pool.run(job.__module__, job.__qualname__, arguments, limit, grace)
        if any(o.kind != "returned" for o in outcomes):
            self.drop()
        return outcomes

    def drop(self) -> None:
        """Kill the present pool, if there is one."""
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def close(self) -> None:
        """End every process."""
        self.drop()
        if self._nursery is not None:
            self._nursery.close()
        if self._process is not None:
            try:
                self._process.wait(10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._listener is not None:
            self._listener.close()
        self._folder.cleanup()

    def _fork(self, world_size: int) -> Pool:
        nursery = self._nursery or self._start_nursery()
        self._count += 1
        folder = Path(self._folder.name) / f"pool{self._count}"
        folder.mkdir()
        nursery.send((world_size, str(folder)))
        if not nursery.poll(START_LIMIT):
            raise RuntimeError(f"no pool of {world_size} ranks after {START_LIMIT} s")
        pids = nursery.recv()
        connections: dict[int, Connection] = {}
        for _ in pids:
            connection = self._accept()
            connections[connection.recv()] = connection
        return Pool(world_size, pids, [connections[rank] for rank in range(len(pids))], folder)

    def _start_nursery(self) -> Connection:
        self._listener = Listener(str(Path(self._folder.name) / "socket"), backlog=16, authkey=self._key)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "tests.dist.worker", str(self._listener.address), self._key.hex()]
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        self._nursery = self._accept()
        return self._nursery

    def _accept(self) -> Connection:
        """The next process that connects; a process that died on its way must not block the tests for ever."""
        assert self._listener is not None
        self._listener._listener._socket.settimeout(START_LIMIT)  # type: ignore[attr-defined]
        return self._listener.accept()
