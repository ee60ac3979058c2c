"""Real processes that disagree, die or leave: each must end in time, with the reason."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LIMIT = 30.0  # seconds from the start of a scenario within which every rank has its error
PATIENCE = 150.0  # seconds for the whole run: imports and exits are slow on a busy machine


class Run:
    """What the ranks of a scenario printed, how they ended and how long they took."""

    def __init__(
        self, scenario: str, tmp_path: Path, *, store: str, world_size: int, timeout: float, stopped: int = -1
    ) -> None:
        if store == "tcp":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        else:
            init_method = f"file://{tmp_path}/store"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        program = str(ROOT / "tests" / "dist" / "rank_programs.py")
        self.processes = [
            subprocess.Popen(
                [sys.executable, program, scenario, str(rank), str(world_size), init_method, str(timeout)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(world_size)
        ]
        begin = time.monotonic()
        self.outputs: list[str] = []
        try:
            for rank, process in enumerate(self.processes):
                if rank == stopped:
                    self.outputs.append("")
                    continue
                left = PATIENCE - (time.monotonic() - begin)
                self.outputs.append(process.communicate(timeout=max(1.0, left))[0])
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
        self.codes = [process.returncode for process in self.processes]

    def seconds(self, rank: int) -> float:
        """How long the scenario itself took on a rank."""
        line = next(line for line in self.outputs[rank].splitlines() if line.startswith("scenario took "))
        return float(line.split()[2])

    def text(self, rank: int) -> str:
        """The last line of a rank's traceback, or all that it printed."""
        lines = [line for line in self.outputs[rank].splitlines() if "zcompile.errors." in line]
        return lines[-1] if lines else self.outputs[rank]


def check_fails(run: Run, ranks: list[int], *texts: str, kind: str = "RankError") -> None:
    for rank in ranks:
        line = run.text(rank)
        assert f"zcompile.errors.{kind}: [rank {rank} of {len(run.codes)}] " in line, (
            f"rank {rank}:\n{run.outputs[rank]}"
        )
        assert any(text in line for text in texts), line
        assert run.seconds(rank) < LIMIT, f"rank {rank} took {run.seconds(rank)} s"
        assert run.codes[rank] == 1, f"rank {rank} ended with {run.codes[rank]}:\n{run.outputs[rank]}"


@pytest.mark.parametrize(
    ("scenario", "world_size", "store"),
    [
        ("fine", 2, "tcp"),
        ("fine", 3, "file"),
        ("numbers", 2, "file"),
        ("numbers", 3, "tcp"),
        ("same_bits", 3, "file"),
        ("two_models", 2, "tcp"),
    ],
)
def test_ends_well(scenario: str, world_size: int, store: str, tmp_path: Path) -> None:
    run = Run(scenario, tmp_path, store=store, world_size=world_size, timeout=20.0)
    assert run.codes == [0] * world_size, "\n".join(run.outputs)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_another_text(store: str, tmp_path: Path) -> None:
    run = Run("parameters", tmp_path, store=store, world_size=2, timeout=60.0)
    check_fails(run, [0, 1], "rank 1 has 'b [4]' where rank 0 has 'b [3]' (line 2)", kind="RankMismatchError")


def test_absent(tmp_path: Path) -> None:
    run = Run("absent", tmp_path, store="tcp", world_size=2, timeout=3.0)
    check_fails(run, [0, 1], ": arrived: rank 0; missing: rank 1", kind="RankTimeoutError")


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 3)])
def test_deviates(store: str, world_size: int, tmp_path: Path) -> None:
    run = Run("deviates", tmp_path, store=store, world_size=world_size, timeout=60.0)
    text = "rank 1 waits to confirm call 5 as forward (eval)"
    check_fails(run, list(range(world_size)), text, kind="RankMismatchError")
    assert "waits in call 5, forward (train), for all_gather of layers.0" in run.text(0)


def test_a_collective_that_others_do_not_make(tmp_path: Path) -> None:
    run = Run("mixed", tmp_path, store="tcp", world_size=2, timeout=60.0)
    check_fails(run, [0, 1], "ranks disagree about call 8", kind="RankMismatchError")
    assert "clip_grad_norm_" in run.text(0) and "forward (train)" in run.text(1)


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 3)])
def test_raises(store: str, world_size: int, tmp_path: Path) -> None:
    run = Run("raises", tmp_path, store=store, world_size=world_size, timeout=60.0)
    others = [rank for rank in range(world_size) if rank != 1]
    check_fails(run, others, "rank 1 failed in call 4, forward (train), with ValueError: bad batch")
    assert "ValueError: bad batch" in run.outputs[1]


def test_caught(tmp_path: Path) -> None:
    run = Run("caught", tmp_path, store="tcp", world_size=2, timeout=60.0)
    check_fails(run, [0, 1], "rank 1 raised ValueError: bad batch in its user's code and makes no further call")


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 2), ("tcp", 3)])
def test_killed(store: str, world_size: int, tmp_path: Path) -> None:
    run = Run("killed", tmp_path, store=store, world_size=world_size, timeout=60.0)
    last = world_size - 1
    check_fails(run, list(range(last)), f"rank {last} is gone: no sign of life")


@pytest.mark.parametrize("world_size", [2, 3])
def test_host_killed(world_size: int, tmp_path: Path) -> None:
    run = Run("host_killed", tmp_path, store="tcp", world_size=world_size, timeout=60.0)
    check_fails(run, list(range(1, world_size)), "rank 0, which hosts the store, is gone")


def test_killed_before_vote(tmp_path: Path) -> None:
    run = Run("killed_before_vote", tmp_path, store="file", world_size=3, timeout=60.0)
    check_fails(run, [0, 2], "rank 1 is gone: no sign of life")


def test_stopped(tmp_path: Path) -> None:
    run = Run("stopped", tmp_path, store="tcp", world_size=2, timeout=60.0, stopped=1)
    check_fails(run, [0], "rank 1 is gone: no sign of life")


def test_leaves(tmp_path: Path) -> None:
    run = Run("leaves", tmp_path, store="tcp", world_size=2, timeout=60.0)
    check_fails(run, [0], "rank 1 has ended: rank 0 ")
    assert run.codes[1] == 0


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_host_leaves(store: str, tmp_path: Path) -> None:
    run = Run("host_leaves", tmp_path, store=store, world_size=2, timeout=60.0)
    check_fails(run, [1], "rank 0, which hosts the store, is gone", "rank 0 has ended: rank 1 ")
