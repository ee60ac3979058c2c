"""Real processes that disagree, die or leave: each must end in time, with the reason."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
LIMIT = 30.0  # seconds from the start of a scenario within which every rank has its error
PATIENCE = 150.0  # seconds for the whole run: exits are slow on a busy machine


class Run:
    """What the ranks of a scenario printed, how they ended and how long they took.

    Args:
        server: the process that forks the ranks.
        stopped: a rank that does not end.
    """

    def __init__(
        self,
        server: subprocess.Popen[str],
        folder: Path,
        scenario: str,
        *,
        store: str,
        world_size: int,
        timeout: float,
        stopped: int = -1,
    ) -> None:
        if store == "tcp":
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                init_method = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        else:
            init_method = f"file://{folder}/store"
        request: dict[str, Any] = {"scenario": scenario, "world_size": world_size, "init_method": init_method}
        request |= {"timeout": timeout, "stopped": stopped, "patience": PATIENCE, "folder": str(folder)}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.codes: list[int | None] = json.loads(server.stdout.readline())
        logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self.outputs = [log.read_text() if log.exists() else "" for log in logs]
        late = [rank for rank, code in enumerate(self.codes) if code is None and rank != stopped]
        assert not late, f"ranks {late} did not end:\n" + "\n".join(self.outputs)

    def seconds(self, rank: int) -> float:
        """How long the scenario itself took on a rank."""
        line = next(line for line in self.outputs[rank].splitlines() if line.startswith("scenario took "))
        return float(line.split()[2])

    def text(self, rank: int) -> str:
        """The last line of a rank's traceback, or all that it printed."""
        lines = [line for line in self.outputs[rank].splitlines() if "zcompile.errors." in line]
        return lines[-1] if lines else self.outputs[rank]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that forks ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(ROOT / "tests" / "dist" / "rank_programs.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.communicate()


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Callable[..., Run]:
    """``run(scenario, store=..., world_size=..., timeout=...)``."""
    return lambda scenario, **options: Run(server, tmp_path, scenario, **options)


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
def test_ends_well(scenario: str, world_size: int, store: str, run: Callable[..., Run]) -> None:
    done = run(scenario, store=store, world_size=world_size, timeout=20.0)
    assert done.codes == [0] * world_size, "\n".join(done.outputs)


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_another_text(store: str, run: Callable[..., Run]) -> None:
    done = run("parameters", store=store, world_size=2, timeout=60.0)
    check_fails(done, [0, 1], "rank 1 has 'b [4]' where rank 0 has 'b [3]' (line 2)", kind="RankMismatchError")


def test_absent(run: Callable[..., Run]) -> None:
    done = run("absent", store="tcp", world_size=2, timeout=3.0)
    check_fails(done, [0, 1], ": arrived: rank 0; missing: rank 1", kind="RankTimeoutError")


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 3)])
def test_deviates(store: str, world_size: int, run: Callable[..., Run]) -> None:
    done = run("deviates", store=store, world_size=world_size, timeout=60.0)
    text = "rank 1 waits to confirm call 5 as forward (eval)"
    check_fails(done, list(range(world_size)), text, kind="RankMismatchError")
    assert "waits in call 5, forward (train), for all_gather of layers.0" in done.text(0)


def test_a_collective_that_others_do_not_make(run: Callable[..., Run]) -> None:
    done = run("mixed", store="tcp", world_size=2, timeout=60.0)
    check_fails(done, [0, 1], "ranks disagree about call 8", kind="RankMismatchError")
    assert "clip_grad_norm_" in done.text(0) and "forward (train)" in done.text(1)


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 3)])
def test_raises(store: str, world_size: int, run: Callable[..., Run]) -> None:
    done = run("raises", store=store, world_size=world_size, timeout=60.0)
    others = [rank for rank in range(world_size) if rank != 1]
    check_fails(done, others, "rank 1 failed in call 4, forward (train), with ValueError: bad batch")
    assert "ValueError: bad batch" in done.outputs[1]


def test_caught(run: Callable[..., Run]) -> None:
    done = run("caught", store="tcp", world_size=2, timeout=60.0)
    check_fails(done, [0, 1], "rank 1 raised ValueError: bad batch in its user's code and makes no further call")


@pytest.mark.parametrize(("store", "world_size"), [("tcp", 2), ("file", 2), ("tcp", 3)])
def test_killed(store: str, world_size: int, run: Callable[..., Run]) -> None:
    done = run("killed", store=store, world_size=world_size, timeout=60.0)
    last = world_size - 1
    check_fails(done, list(range(last)), f"rank {last} is gone: its process has ended")


@pytest.mark.parametrize("world_size", [2, 3])
def test_host_killed(world_size: int, run: Callable[..., Run]) -> None:
    done = run("host_killed", store="tcp", world_size=world_size, timeout=60.0)
    check_fails(done, list(range(1, world_size)), "rank 0, which hosts the store, is gone")


def test_killed_before_vote(run: Callable[..., Run]) -> None:
    done = run("killed_before_vote", store="file", world_size=3, timeout=60.0)
    check_fails(done, [0, 2], "rank 1 is gone: its process has ended")


def test_stopped(run: Callable[..., Run]) -> None:
    done = run("stopped", store="tcp", world_size=2, timeout=60.0, stopped=1)
    check_fails(done, [0], "rank 1 is gone: no sign of life")


def test_leaves(run: Callable[..., Run]) -> None:
    done = run("leaves", store="tcp", world_size=2, timeout=60.0)
    check_fails(done, [0], "rank 1 has ended: rank 0 ")
    assert done.codes[1] == 0


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_host_leaves(store: str, run: Callable[..., Run]) -> None:
    done = run("host_leaves", store=store, world_size=2, timeout=60.0)
    check_fails(done, [1], "rank 0, which hosts the store, is gone", "rank 0 has ended: rank 1 ")
