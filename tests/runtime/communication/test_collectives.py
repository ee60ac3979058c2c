"""Collectives of one rank: copies, without a process group. More ranks: tests/dist/test_ranks.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zcompile.runtime.communication.collectives import Collectives
from zcompile.runtime.ranks.agreement import Agreement


@pytest.fixture
def collectives() -> Collectives:
    mesh = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"), group=None)
    return Collectives(mesh, Agreement(None, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_one_rank_gathers_a_copy(collectives: Collectives, dtype: torch.dtype) -> None:
    shards = [torch.ones(3, 2).to(dtype), torch.ones(0, 4).to(dtype)]
    fulls = [torch.zeros_like(t) for t in shards]
    collectives.all_gather(fulls, shards).wait("all_gather of a")
    assert all(torch.equal(a, b) for a, b in zip(fulls, shards, strict=True))


def test_one_rank_reduces_to_the_same(collectives: Collectives) -> None:
    grads = [torch.arange(6.0).view(3, 2)]
    parts = [torch.zeros(3, 2)]
    collectives.reduce_scatter(parts, grads).wait()
    collectives.all_reduce(grads, "sum").wait()
    collectives.broadcast(grads).wait()
    assert torch.equal(parts[0], torch.arange(6.0).view(3, 2)) and torch.equal(grads[0], parts[0])


def test_sizes_and_reductions_are_checked(collectives: Collectives) -> None:
    with pytest.raises(AssertionError, match=r"\(5,\) is not 1 times \(4,\)"):
        collectives.all_gather([torch.zeros(5)], [torch.zeros(4)])
    with pytest.raises(AssertionError, match="integers have no average"):
        collectives.all_reduce([torch.zeros(4, dtype=torch.int64)])
    with pytest.raises(AssertionError, match="unknown reduction"):
        collectives.all_reduce([torch.zeros(4)], "median")


def test_close_is_harmless(collectives: Collectives) -> None:
    collectives.close()
    collectives.close()


# Copies that wait for a rank which is gone. ---------------------------------------------------------------------------

PROGRAM = """
import sys, threading, time
from types import SimpleNamespace
import torch
from zcompile import compat
from zcompile.errors import RankError
from zcompile.runtime.communication import collectives as module
from zcompile.runtime.ranks.agreement import Agreement

left = int(sys.argv[1])
log = []

class Peers:
    num_bytes = 0

    def unblock(self):
        global left
        if left < 0:
            time.sleep(60)  # a call into the driver that does not come back
        left -= 1
        return left >= 0

module.HEAD_START, module.DRAIN_SECONDS = 0.5, 1.5
let_go = threading.Event()
# as NCCL's: it does not end before the recordings that use it
compat.abort_group = lambda group: (let_go.wait(20) or log.append("hangs"), log.append(("aborted", left)))
compat.set_group_timeout = lambda group, seconds: None
agreement = Agreement(None, 0, 2)
mesh = SimpleNamespace(size=2, rank=0, device=torch.device("cuda", 0), group=object())
collectives = module.Collectives(mesh, agreement)
collectives.peers = Peers()
collectives.let_go = let_go.set
agreement._break(RankError, "rank 1 failed with ValueError: bad batch")
assert len(log) == 1, log
print("aborted", "after" if log[0][1] < 0 else "before", "the device ran out", flush=True)
time.sleep(4)
print("alive", flush=True)
"""


def broken(barriers: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(barriers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_barriers_are_let_go_before_the_group_is_aborted() -> None:
    end = broken(3)
    assert end.stdout.splitlines() == ["aborted after the device ran out", "alive"], end.stdout + end.stderr
    assert end.returncode == 0


@pytest.mark.parametrize("barriers", [10**9, -1], ids=["never done", "held back"])
def test_a_device_that_never_runs_out_ends_the_process_with_the_reason(barriers: int) -> None:
    """Whoever waits for the device cannot be reached by an exception."""
    end = broken(barriers)
    assert len(end.stdout.splitlines()) == 1, end.stdout + end.stderr
    assert end.returncode == 1
    assert "RankError: [rank 0 of 2]" in end.stderr and "ValueError: bad batch" in end.stderr
    assert "does not answer any more" in end.stderr
