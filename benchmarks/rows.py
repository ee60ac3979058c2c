"""The rows of the tables, and the processes that measure many of them one after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: seconds that ranks have to start, beside the first row's own
START_LIMIT = 120.0
#: seconds that processes which have measured everything have to end by themselves
FAREWELL = 5.0
#: seconds that a row takes in processes that run already, by size; of peers about half: from the first steps and steps in BENCHMARKS.md
SECONDS = {"tiny": 2.0, "0.19B": 12.0, "1.1B": 14.0, "8B": 35.0}


@dataclass(frozen=True)
class Row:
    """A system at a size, and how it trains.

    Attributes:
        system: one of ``benchmarks.systems.SYSTEMS``.
        size: one of ``benchmarks.llama.SIZES``.
        micro_batch: rows of one rank; None: the size's own.
        layers: None: the size's own.
        policy: zcompile's; None: its own.
        recompute: ``full`` computes blocks again in backward; zcompile also knows ``selective``.
        clip: clips gradients to this norm.
        dtype: of compute, ``bf16`` or ``fp32``; masters are fp32.
        reduce: dtype of zcompile's and FSDP2's gradient reduction, ``fp32`` or ``bf16``.
        backend: of compiled systems; ``eager`` leaves compilation out.
        steps: how many are timed.
        card_gib: what torch's allocator may reserve on a GPU, as if the GPU had no more; None: all of it.
        options: further ones of ``zcompile.compile``, by name. Of these the others know ``offload``: ``optimizer`` and
            ``parameters``, as far as they can.
    """

    system: str
    size: str
    micro_batch: int | None = None
    layers: int | None = None
    policy: str | None = None
    recompute: str | None = None
    clip: float | None = None
    dtype: str = "bf16"
    reduce: str = "fp32"
    backend: str = "inductor"
    steps: int = 20
    card_gib: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Size, system and what differs in the model or its schedule."""
        chosen: list[tuple[str, Any]] = [
            ("layers", self.layers),
            ("micro-batch", self.micro_batch),
            ("policy", self.policy),
            ("recompute", self.recompute),
        ]
        chosen += self.options.items()
        return " ".join([self.size, self.system, *(f"{name}={value}" for name, value in chosen if value is not None)])

    @property
    def seconds(self) -> float:
        """About what it takes on a GPU, in processes that run already."""
        return SECONDS[self.size] * (1.0 if self.system.startswith("zc") else 0.5)


def read_rows(text: str) -> list[Row]:
    """Rows from a JSON list of objects with the fields of ``Row``, or from a file that holds one."""
    given = json.loads(text if text.lstrip().startswith("[") else Path(text).read_text())
    return [Row(**fields) for fields in given]


def write_rows(path: str, results: Sequence[dict[str, Any]]) -> None:
    """Replace a file by one with these results; whoever is ended meanwhile leaves the old one."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(path)


@dataclass(frozen=True)
class Launch:
    """Where and how rows are measured.

    Attributes:
        nproc: ranks.
        device: ``cuda`` or ``cpu``.
        timeout: seconds for one row.
        logs: a folder for what each row printed.
        fresh: new processes and an empty compile cache for every row: only then is a first step a cold one.
        calibrate: a file for a description of this machine, made before the first row.
        program: what the ranks run.
    """

    nproc: int = 2
    device: str = "cuda"
    timeout: float = 240.0
    logs: str | None = None
    fresh: bool = False
    calibrate: str | None = None
    program: str = "benchmarks/measure.py"

    def measure(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """The result of each row in order, as soon as it is there; a failure is a result with ``error``.

        A row that its processes do not survive, or that takes too long, ends them; the rest goes on in new ones.
        """
        calibrate, waiting = self.calibrate, list(rows)
        while waiting or calibrate:
            group = waiting[:1] if self.fresh else list(waiting)
            with tempfile.TemporaryDirectory() as cache:
                for result in self._run(group, calibrate, cache):
                    del waiting[0]
                    yield result
            calibrate = None

    def _run(self, rows: Sequence[Row], calibrate: str | None, cache: str) -> Iterator[dict[str, Any]]:
        """Results of the first rows, of one at least: as many as one set of processes measures."""
        begin = time.monotonic()
        process = self._start(rows, calibrate, cache)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        limit, log, done, started = self.timeout + START_LIMIT, "", 0, False
        try:
            while True:
                line, ended = _next(lines, process, begin + limit), f"not done in {limit:.0f} s"
                if line == "RESTART\n":
                    return
                if line is not None and not line.startswith("RESULT "):
                    log += line
                    if line == "READY\n":
                        print(f"{self.nproc} ranks: {time.monotonic() - begin:.0f} s to start", file=sys.stderr)
                        started, begin, limit = True, time.monotonic(), self.timeout
                    continue
                if done == len(rows):
                    if not rows:
                        print(log, file=sys.stderr)
                    return
                if line is not None:
                    result = json.loads(line.removeprefix("RESULT "))
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        ended = f"exit code {process.wait(1.0)}"
                    result = {"error": f"{reason(log)} ({ended})", "ends": True, "log": log[-4000:]}
                ends = result.pop("ends", False)
                for row in rows[done : done + 1] if started else rows:
                    self._write_log(row, log)
                    done += 1
                    seconds = time.monotonic() - begin
                    yield {**dataclasses.asdict(row), **result, "warm": not self.fresh, "seconds": seconds}
                if ends:
                    return
                begin, log = time.monotonic(), ""
                limit = self.timeout if done < len(rows) else FAREWELL
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()

    def _start(self, rows: Sequence[Row], calibrate: str | None, cache: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.nproc}"]
        program += [str(ROOT / self.program), json.dumps([dataclasses.asdict(row) for row in rows])]
        program += ["--device", self.device, *(["--calibrate", calibrate] if calibrate else [])]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8" if self.device == "cuda" else "1"),
        }
        if self.fresh:
            environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)

    def _write_log(self, row: Row, log: str) -> None:
        if self.logs is not None:
            Path(self.logs).mkdir(parents=True, exist_ok=True)
            (Path(self.logs) / f"{re.sub('[^A-Za-z0-9.=-]+', '_', str(row))}.log").write_text(log)


def _read(stream: Any, lines: queue.SimpleQueue[str | None]) -> None:
    """Lines as they come, then None."""
    for line in stream:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.SimpleQueue[str | None], process: subprocess.Popen[str], deadline: float) -> str | None:
    """The next line; None at the deadline, and when the process has ended, even if a child of it keeps the stream open."""
    while True:
        left = deadline - time.monotonic()
        try:
            return lines.get(timeout=max(0.0, min(left, 1.0)))
        except queue.Empty:
            if left <= 0 or process.poll() is not None:
                return None


def kill_tree(pid: int) -> None:
    """End a launcher and its ranks, which have sessions of their own."""
    pids = [pid]
    for parent in pids:  # grows while it is read
        try:
            pids += [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        except OSError:
            continue
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def reason(output: str) -> str:
    """The line of a log that says most."""
    if "OutOfMemoryError" in output:
        return "out of memory"
    lines = [
        line.strip() for line in output.splitlines() if "Error" in line and "torch.distributed.elastic" not in line
    ]
    lines = [line.split("]:", 1)[-1].strip() for line in lines if "ChildFailedError" not in line]
    return (lines[-1] if lines else "no result")[:160]
