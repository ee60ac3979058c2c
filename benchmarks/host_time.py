"""What the host does in a step that is replayed.

python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py             milliseconds by part
python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py --profile   and where they go
python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py --size 0.19B            on GPUs
python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/host_time.py --micro-batches 4       of windows

Without ``--size`` it runs on CPUs, and everything but the replay itself, which does nothing there: the model has the modules and
parameters of a Llama of so many layers, each parameter a few bytes large, so that the update of the optimizer takes next to
nothing either. On GPUs every step starts on an idle device.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zcompile
from benchmarks.llama import SIZES, Llama, Size, fill
from zcompile.runtime.replay.tapes import Tapes
from zcompile.runtime.sharding import gradients
from zcompile.runtime.step import _Step

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


def step(model: Any, optimizer: Any, tokens: Tensor, clip: bool, micro_batches: int = 1) -> list[float]:
    """Seconds of each part; of forward and backward, of all micro-batches."""
    forward = backward = 0.0
    for _ in range(micro_batches):
        begin = time.perf_counter()
        loss = model(tokens, tokens)
        middle = time.perf_counter()
        loss.backward()
        forward, backward = forward + middle - begin, backward + time.perf_counter() - middle
    marks = [time.perf_counter()]
    if clip:
        model.clip_grad_norm_(1.0)
    marks.append(time.perf_counter())
    optimizer.step()
    marks.append(time.perf_counter())
    optimizer.zero_grad()
    marks.append(time.perf_counter())
    return [forward, backward, *(b - a for a, b in itertools.pairwise(marks))]


def replaying(args: argparse.Namespace) -> tuple[Any, Tensor]:
    """A model whose steps are replayed, and what it is called with."""
    options = {"stage": args.stage, "precision": "bf16", "gradient_accumulation_steps": args.micro_batches}
    if args.size is not None:
        size = SIZES[args.size]
        with torch.device("meta"):
            plain = Llama(size)
        model = zcompile.compile(plain, cuda_graphs=True, init=fill, **options)
        tokens = torch.randint(0, size.vocab, (size.micro_batch, size.seq), device="cuda")
        return model, tokens
    gradients.KEEP_BYTES = 0  # gradients of a model that is worth a GPU come and go
    size = Size(vocab=32, hidden=8, layers=args.layers, heads=2, kv_heads=2, ffn=16, seq=8, micro_batch=1)
    model = zcompile.compile(Llama(size), backend="eager", **options)
    runner = model._session.runner
    runner.tapes = Tapes(runner.executor, Nothing, print)
    return model, torch.zeros(1, 8, dtype=torch.int64)


def profiled(run: Callable[[], Any], steps: int) -> list[pstats.Stats]:
    """What functions take, in the calling thread and, on a GPU, in the one that runs backwards."""
    of_caller, of_engine, caller = cProfile.Profile(), cProfile.Profile(), threading.get_ident()
    plain = _Step.backward
    of_caller.enable()  # one after the other: from Python 3.12 on there can be only one
    for _ in range(steps):
        run()
    of_caller.disable()

    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if threading.get_ident() == caller:
            return plain(ctx, *tangents)
        return of_engine.runcall(plain, ctx, *tangents)

    _Step.backward = staticmethod(backward)
    for _ in range(steps):
        run()
    _Step.backward = staticmethod(plain)
    return [pstats.Stats(profile) for profile in (of_caller, of_engine) if profile.getstats()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="run on GPUs")
    parser.add_argument("--layers", type=int, default=12, help="of the model on CPUs")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a window")
    parser.add_argument(
        "--clip", action="store_true", help="clip gradients too, which waits for the other rank on CPUs"
    )
    parser.add_argument(
        "--one-thread", action="store_true", help="backward in the calling thread, not in the engine's for the GPU"
    )
    parser.add_argument("--profile", action="store_true", help="show which functions take the time")
    args = parser.parse_args()
    if args.size is None:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    torch.autograd.set_multithreading_enabled(not args.one_thread)
    finish: Callable[[], Any] = (lambda: None) if args.size is None else torch.cuda.synchronize
    model, tokens = replaying(args)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> list[float]:
        finish()
        return step(model, optimizer, tokens, args.clip, args.micro_batches)

    for _ in range(WARMUP):
        run()
    rows = [run() for _ in range(args.steps)]
    assert model.report().replays >= args.micro_batches * (WARMUP + args.steps - 2)
    if dist.get_rank() == 0:
        found = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
        shown = ", ".join(f"{name} {ms:.2f}" for name, ms in zip(PARTS, found, strict=True))
        print(f"{len(list(model.parameters()))} parameters, ms: {shown}, together {sum(found):.2f}")
    if args.profile:
        for stats in profiled(run, args.steps):
            if dist.get_rank() == 0:
                stats.sort_stats("tottime").print_stats(40)
    dist.barrier()
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
