"""Training loops whose last rank fails, dies, leaves or does something else: every other rank ends in time, with the reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.test_ranks import LIMIT, ROOT, Run

pytestmark = pytest.mark.dist

#: short, for what only the timeout ends
SHORT = 4.0

GONE = "zcompile.errors.RankError: [rank 0 of 2] rank 1 is gone: its process has ended while rank 0 "
FAILED = "zcompile.errors.RankError: [rank 0 of 2] rank 1 failed in "

#: whoever is first: the rank that looks after the other, or torch, whose collective has lost its connection
IN_TORCH_CLIP = re.compile(
    r"\[rank 0 of 2\] rank 1 is gone: its process has ended while rank 0 "
    r"(lost a connection in|runs its own code after) call 6, backward"
)

#: for each program: the timeout, what each rank must say, and the exit code of each
EXPECTED: dict[str, tuple[float, tuple[str | re.Pattern[str], str], tuple[int, int]]] = {
    "dies_in_new_group": (
        SHORT,
        ("RankError: [rank 0 of 2] rank 1 ended or cannot be reached: ranks could not be connected: ", ""),
        (1, -9),
    ),
    "host_dies_before_compile": (
        60.0,
        ("", "RankError: [rank 1 of 2] rank 0, which hosts the store, is gone while rank 1 waits for all ranks to call compile: "),
        (-9, 1),
    ),
    "other_device": (60.0, ("has its model on cpu, as 1 of 2 ranks do", "on mps, as 1 of 2 ranks do"), (1, 1)),
    "another_pipeline": (60.0, ("rank 1 has \"pipeline = 'plan-units", "rank 1 has \"pipeline = 'plan-units"), (1, 1)),
    "initialises_alone": (60.0, ("rank 1 has \"init = 'given'\"", "where rank 0 has 'init = None'"), (1, 1)),
    "dies_in_compile": (60.0, (GONE, ""), (1, -9)),
    "raises_in_compile": (60.0, ("rank 1 failed with MemoryError: no room", "MemoryError: no room"), (1, 1)),
    "dies_in_capture": (60.0, (GONE, ""), (1, -9)),
    "dies_in_full_state": (60.0, (GONE, ""), (1, -9)),
    "dies_in_unsharded": (60.0, (GONE, ""), (1, -9)),
    "dies_in_clip": (60.0, (GONE, ""), (1, -9)),
    "dies_in_torch_clip": (60.0, (IN_TORCH_CLIP, ""), (1, -9)),
    "dies_unnoticed": (60.0, (GONE + "runs its own code after call ", ""), (1, -9)),
    "dies_in_optimizer": (60.0, (GONE, ""), (1, -9)),
    "dies_in_no_sync": (60.0, (GONE, ""), (1, -9)),
    "raises_before_backward": (60.0, (FAILED + "call 5, forward (train), with ValueError: a bad label", "a bad label"), (1, 1)),
    "raises_in_a_hook": (60.0, (FAILED + "call 6, backward (train), with ValueError: a bad gradient", "a bad gradient"), (1, 1)),
    "raises_in_torch_clip": (
        60.0,
        ("[rank 0 of 2] rank 1 failed in call 6, backward (train), with ValueError: a bad norm", "a bad norm"),
        (1, 1),
    ),
    "interrupted": (60.0, (FAILED + "call 5, forward (train), with KeyboardInterrupt", "KeyboardInterrupt"), (1, -2)),
    "exits": (60.0, ("rank 1 has ended: rank 0 ", ""), (1, 3)),
    "exits_in_forward": (60.0, ("rank 1 has ended: rank 0 ", ""), (1, 3)),
    "stopped_for_a_while": (
        SHORT,
        ("arrived: rank 0; missing: rank 1 (rank 1 does not answer)", "RankTimeoutError: [rank 1 of 2] rank 0 waits in call 5"),
        (1, 1),
    ),
    "data_ends_early": (60.0, ("ranks disagree about call 7: ", "rank 1 has 'full_state_dict' where rank 0 has "), (1, 1)),
    "data_ends_early_and_leaves": (60.0, ("rank 1 has ended: rank 0 ", "done"), (1, 0)),
    "data_ends_early_at_a_barrier": (
        SHORT,
        (
            "missing: rank 1 (rank 1 runs its own code after call 4, backward (train))",
            "[rank 1 of 2] rank 0 waits in call 5, forward (train), for all_gather of first",
        ),
        (1, 1),
    ),
}  # fmt: skip

#: each of the others goes a way that one of these, or a test of tests/dist/test_ranks.py, goes too
COMMON = (
    "dies_in_new_group",
    "host_dies_before_compile",
    "other_device",
    "another_pipeline",
    "initialises_alone",
    "dies_in_torch_clip",
    "dies_unnoticed",
    "interrupted",
    "stopped_for_a_while",
    "data_ends_early_at_a_barrier",
)


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """The process that forks ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(ROOT / "tests" / "dist" / "training_programs.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.communicate()


@pytest.mark.parametrize("name", [n if n in COMMON else pytest.param(n, marks=pytest.mark.wide) for n in EXPECTED])
def test_every_other_rank_ends_with_the_reason(name: str, server: subprocess.Popen[str], tmp_path: Path) -> None:
    timeout, texts, codes = EXPECTED[name]
    run = Run(server, tmp_path, name, store="tcp", world_size=2, timeout=timeout)
    for rank, (text, code) in enumerate(zip(texts, codes, strict=True)):
        pattern = re.escape(text) if isinstance(text, str) else text
        assert re.search(pattern, run.outputs[rank]), f"rank {rank}:\n{run.outputs[rank]}"
        assert run.codes[rank] == code, f"rank {rank} ended with {run.codes[rank]}:\n{run.outputs[rank]}"
        if code == 1:
            assert run.seconds(rank) < LIMIT + timeout * (timeout == SHORT)
