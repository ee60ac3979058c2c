"""What the host does in a step that is replayed, on CPUs: everything but the replay itself, which here does nothing.

python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py             milliseconds by part
python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py --profile   and where they go

The model has the modules and parameters of a Llama of so many layers, each parameter a few bytes large, so that the update of the
optimizer, which runs here, takes next to nothing either. On a GPU the launches of replays and kernels come on top.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zcompile
from benchmarks.llama import Llama, Size
from zcompile.runtime.tape import Tapes

WARMUP = 10
PARTS = ("forward", "backward", "clip", "optimizer", "zero_grad")


class Nothing:
    """A recorder whose recordings do nothing when they are replayed."""

    def record(self, body: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
        return type("Recording", (), {"replay": staticmethod(lambda: None)})(), list(body())

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor

    def hidden_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def step(model: Any, optimizer: Any, tokens: Tensor, clip: bool) -> list[float]:
    """Seconds of each part."""
    marks = [time.perf_counter()]
    loss = model(tokens, tokens)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    if clip:
        model.clip_grad_norm_(1.0)
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--clip", action="store_true", help="clip gradients too, which waits for the other rank here")
    parser.add_argument("--profile", action="store_true", help="show which functions take the time")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = Size(vocab=32, hidden=8, layers=args.layers, heads=2, kv_heads=2, ffn=16, seq=8, micro_batch=1)
    model = zcompile.compile(Llama(size), stage=args.stage, backend="eager", precision="bf16")
    runner = model._session.runner
    runner.tapes = Tapes(runner.executor, Nothing, print)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    run = partial(step, model, optimizer, tokens, args.clip)
    for _ in range(WARMUP):
        run()
    rows = [run() for _ in range(args.steps)]
    assert model.report().replays == WARMUP + args.steps - 2
    if dist.get_rank() == 0:
        found = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in zip(PARTS, found, strict=True))
        print(f"{len(list(model.parameters()))} parameters, ms: {shown}, together {sum(found):.2f}")
    if args.profile:
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                run()
        if dist.get_rank() == 0:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
