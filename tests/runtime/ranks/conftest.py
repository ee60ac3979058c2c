"""Another process, as ranks of one host are to each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

#: says who it is, and waits
PROGRAM = "from zcompile.runtime.ranks.process import identity; print(identity(), flush=True); input()"


@dataclass
class Other:
    """A process that waits, and its ``identity``."""

    process: subprocess.Popen[str]
    name: str


@pytest.fixture
def other() -> Iterator[Other]:
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Other(process, process.stdout.readline().strip())
        process.kill()
