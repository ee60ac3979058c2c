"""A process whose ranks are lost ends, whatever holds it back then; and only that one is ended."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

#: What holds back is native code that Python's objects call when they go, as those of a process group do.
PROGRAM = """
import atexit, ctypes, os, sys, time
import torch.distributed as dist
from zcompile.runtime.ranks import exits
from zcompile.runtime.ranks.agreement import Agreement

exits.EXIT_SECONDS, exits.SIGNS = 2.0, 0.2
SLEEP = getattr(ctypes, sys.argv[2])(None).sleep

class Holds:
    def __del__(self, sleep=SLEEP, write=os.write, seconds=int(sys.argv[3])):
        sleep(seconds)
        write(1, b"let go\\n")

def at_exit():
    time.sleep(4.0)
    print("done at exit", flush=True)

atexit.register(at_exit)
agreement = Agreement(dist.HashStore(), 0, 2)
holds = Holds()
if sys.argv[1] == "lost":
    agreement.fail(ValueError("bad batch"))
"""


def end(*arguments: str) -> tuple[int, str, float]:
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout, time.monotonic() - begin


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["without the GIL", "with the GIL"])
def test_what_holds_back_a_process_that_lost_ranks_is_ended(library: str) -> None:
    code, output, seconds = end("lost", library, "100")
    assert code == 1
    assert output == "done at exit\n", "what is registered for the end has its time"
    assert seconds < 60


@pytest.mark.parametrize(("state", "seconds"), [("lost", "0"), ("well", "5")])
def test_other_ends_are_left_alone(state: str, seconds: str) -> None:
    assert end(state, "CDLL", seconds)[:2] == (0, "done at exit\nlet go\n")
