"""torchrun on two nodes, which are two launchers on this host: they train, and the end of one ends the other."""

from __future__ import annotations

import ast
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.dist.models import rows

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
#: seconds until both train, and from the end of one node to that of the other
START, END = 150.0, 60.0


@contextlib.contextmanager
def nodes(kind: str, steps: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two launchers with one process each; nothing of them is left afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    launchers = []
    try:
        for node in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
            if kind == "static":
                command += [f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
            else:
                command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
                command += ["--local-addr=127.0.0.1"]
            command += [str(ROOT / "tests" / "dist" / "torchrun_program.py"), str(steps), str(folder)]
            with (folder / f"node{node}.log").open("w") as log:
                launchers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        yield launchers
    finally:
        for launcher in launchers:
            lose(launcher)


def lose(launcher: subprocess.Popen[bytes]) -> None:
    """As if the node had lost its power."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(launcher.pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                one.kill()
    launcher.wait()


def plain(steps: int) -> tuple[list[float], list[float]]:
    """The losses on each rank's rows of one plain model that learns from both."""
    torch.manual_seed(0)
    model = nn.Linear(7, 7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        optimizer.zero_grad()
        for rank, own in enumerate(losses):
            x = rows(step, rank)
            loss = (model(x) - x).square().mean()
            (loss / 2).backward()
            own.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize(("kind", "lost"), [("static", 1), pytest.param("c10d", 0, marks=pytest.mark.wide)])
def test_two_nodes(kind: str, lost: int, tmp_path: Path) -> None:
    """They train as plain PyTorch does; then one is lost (of the first, the launcher hosts the store)."""
    with nodes(kind, 100_000, tmp_path) as launchers:
        logs = [tmp_path / f"node{node}.log" for node in range(2)]
        files = [tmp_path / f"trains{rank}" for rank in range(2)]
        deadline = time.monotonic() + START
        while not all(f.exists() and f.stat().st_size for f in files):
            alive = [launcher.poll() is None for launcher in launchers]
            assert all(alive) and time.monotonic() < deadline, "\n".join(log.read_text() for log in logs)
            time.sleep(0.1)
        mine = [ast.literal_eval(f.read_text()) for f in files]
        assert sorted(mine) == [pytest.approx(losses, rel=1e-5) for losses in sorted(plain(4))]
        lose(launchers[lost])
        other = launchers[1 - lost]
        try:
            code = other.wait(END)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the other node lives {END} s later:\n{logs[1 - lost].read_text()}")
    text = logs[1 - lost].read_text()
    assert code == 1, text
    assert "zcompile.errors.RankError: [rank " in text and ("is gone" in text or "has ended" in text), text
