"""``benchmarks/measure.py`` with systems that fail on one rank: what ``test_rows.py`` has the ranks run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.systems import SYSTEMS, Options, Trainee


def out_of_memory(grad: Tensor) -> None:
    raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")


def refuse() -> None:
    raise ValueError("a bad batch")


def fails(options: Options, *, system: str, how: str) -> Trainee:
    """On rank 1 in the second step, in the way that is asked for."""
    trainee = SYSTEMS[system](options)
    if dist.get_rank() == 0 and system != "single":
        return trainee
    if how == "out of memory":  # in the middle of a backward
        trainee.parameters[0].register_hook(out_of_memory)
        return trainee
    return replace(
        trainee, context={"raises": refuse, "dies": partial(os._exit, 3), "hangs": partial(time.sleep, 1000)}[how]
    )


kept: list[Tensor] = []


def leaks(options: Options) -> Trainee:
    kept.append(torch.empty(3 << 30, dtype=torch.uint8))  # never touched, so it takes no memory
    return SYSTEMS["single"](options)


SYSTEMS["leaks"] = leaks
for name, system, how in (
    ("oom", "zc3", "out of memory"),
    ("raises", "zc3", "raises"),
    ("fsdp2-raises", "fsdp2", "raises"),
    ("dies", "zc3", "dies"),
    ("hangs", "single", "hangs"),
):
    SYSTEMS[name] = partial(fails, system=system, how=how)

if __name__ == "__main__":
    measure.main()
