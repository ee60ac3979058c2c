"""What the ranks of the GPU tests run: ``rank_program.py DEVICE BACKEND JOB...``. Rank 0 prints a line of JSON for each job.

Jobs: ``plain``; ``fsdp2:PRECISION``; ``stage:STAGE:PRECISION``; ``fp16:STAGE``, with loss scaling; ``window:STAGE``; ``memory:STAGE``;
``offload:STAGE:WHAT`` and ``memory:STAGE:WHAT``, with that on the host; ``raises``; ``killed``; ``asking``, a model that cannot be
replayed; ``closed``, models that were; ``long``, many steps issued and replayed; ``profile``; ``budget``, three memory budgets.
``stage``, ``raises``, ``killed`` and ``profile`` take ``:peers``, for buckets of every size by the copy engines, ``:graphs``, for
steps that are replayed, or ``:peers+graphs``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.gpu import memory_jobs, profile_jobs, replay_jobs, training_jobs
from tests.gpu.ranks import SHARES
from tests.gpu.trainees import RANK
from zcompile.runtime.communication import peers

JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": training_jobs.plain,
    "fsdp2": training_jobs.fsdp2,
    "stage": training_jobs.stage,
    "fp16": training_jobs.fp16,
    "window": training_jobs.window,
    "offload": training_jobs.offload,
    "raises": partial(training_jobs.fails, how="raises"),
    "killed": partial(training_jobs.fails, how="killed"),
    "memory": memory_jobs.memory,
    "closed": memory_jobs.closed,
    "budget": memory_jobs.budgets,
    "asking": replay_jobs.asks,
    "long": replay_jobs.long,
    "profile": profile_jobs.profiles,
}


def main() -> None:
    kind, backend, *jobs = sys.argv[1:]
    device = torch.device("cuda", RANK % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
    if SHARES:
        peers._reaches = lambda *_: True  # a GPU that ranks share is none that they are told apart by
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    for job in jobs:
        name, *options = job.split(":")
        result = JOBS[name](device, backend, *options)
        assert all(math.isfinite(loss) for loss in result.get("losses", ())), f"{job}: {result}"
        if RANK == 0:
            print("RESULT " + json.dumps({"job": job, **result}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
