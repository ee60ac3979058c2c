"""What computing a loss in pieces costs and saves: the head of a language model alone, then a whole training step, on one device.

python benchmarks/loss.py                                              heads of 0.19B, 1.1B and 8B models, bf16, forward and backward
python benchmarks/loss.py --train 1.1B --micro-batch 8 --recompute full    a step of that model, with and without pieces
python benchmarks/loss.py --heads tiny --device cpu --backend eager    to try the script

Peaks are what a step allocates beyond what is alive before it. Errors are those of gradients beside float32, relative to their norm.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GIB = 2.0**30
WARMUP, STEPS = 4, 20
#: tokens of a micro-batch, hidden size, vocabulary
HEADS = {
    "tiny": (96, 16, 300),
    "0.19B": (8192, 768, 50304),
    "1.1B": (16384, 2048, 32000),
    "8B": (4096, 4096, 128256),
}


class Head(nn.Module):
    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), labels)


def timed(step: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Median milliseconds of a step, and the most MiB that it takes."""
    for _ in range(WARMUP):
        step()
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3, float("nan")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)), peak


def error(have: Tensor, want: Tensor) -> float:
    return float((have.float() - want).norm() / want.norm())


def head_step(model: Any, hidden: Tensor, labels: Tensor) -> None:
    hidden.grad = None
    for p in model.parameters():
        p.grad = None
    model(hidden, labels).backward()


def built(state: dict[str, Tensor], width: int, vocab: int, device: torch.device) -> Head:
    with device:
        model = Head(width, vocab).bfloat16()
    model.load_state_dict(state)
    return model


def systems(sizes: list[str], backend: str) -> dict[str, Callable[[nn.Module], Any]]:
    import zcompile

    found: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model}
    if backend == "inductor":
        found["torch.compile"] = torch.compile
    for size in sizes:
        found[f"zcompile, {size}"] = partial(zcompile.compile, loss_chunk=size, backend=backend)
    return found


def heads(names: list[str], sizes: list[str], device: torch.device, backend: str) -> None:
    print("| head | system | ms | peak MiB | error of weight's gradient | of hidden's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        rows, width, vocab = HEADS[name]
        torch.manual_seed(0)
        with device:
            exact = Head(width, vocab).bfloat16()
            hidden = torch.randn(rows, width, dtype=torch.bfloat16)
            labels = torch.randint(vocab, (rows,))
        state = {key: value.clone() for key, value in exact.state_dict().items()}
        exact, wide = exact.float(), hidden.float().requires_grad_()
        hidden.requires_grad_()
        head_step(exact, wide, labels)
        wanted = (exact.head.weight.grad, wide.grad)
        del exact, wide
        for system, compiled in systems(sizes, backend).items():
            model = compiled(built(state, width, vocab, device))
            ms, peak = timed(partial(head_step, model, hidden, labels), device)
            have = (next(iter(model.parameters())).grad, hidden.grad)
            errors = " | ".join(f"{error(a, b):.1e}" for a, b in zip(have, wanted, strict=True))
            print(f"| {name} | {system} | {ms:.2f} | {peak:.0f} | {errors} |", flush=True)
            del model, have
            gc.collect()


def train_step(model: Any, optimizer: Any, tokens: Tensor) -> None:
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(args: argparse.Namespace, sizes: list[str], device: torch.device) -> None:
    import zcompile
    from benchmarks.llama import SIZES, Llama

    size = SIZES[args.train]
    size = dataclasses.replace(size, micro_batch=args.micro_batch or size.micro_batch)
    print("| model | loss_chunk | step ms | peak GiB | predicted GiB | loss | pass |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for option in sizes:
        torch.manual_seed(0)
        with device:
            plain = Llama(size)
            tokens = torch.randint(size.vocab, (size.micro_batch, size.seq + 1))
        options = {"precision": "bf16", "recompute": args.recompute, "backend": args.backend}
        model = zcompile.compile(plain, loss_chunk=option, **options)
        optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-4)
        ms, _ = timed(partial(train_step, model, optimizer, tokens), device)
        report = model.report(optimizer)
        peak = float("nan") if report.device is None else report.device.peak_allocated / GIB
        memory = report.predicted
        predicted = float("nan") if memory is None else memory.peak_bytes / GIB
        loss = float(model(tokens[:, :-1], tokens[:, 1:]).detach())
        stats = [f"{what}: {n}" for e in model.history if e.name == "chunk-loss" for what, n in e.stats.items() if n]
        print(
            f"| {args.train} | {option} | {ms:.1f} | {peak:.2f} | {predicted:.2f} | {loss:.4f} | {', '.join(stats)} |"
        )
        del plain, model, optimizer, report, memory
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="0.19B,1.1B,8B", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--sizes", default="none,auto", help="values of loss_chunk")
    parser.add_argument("--train", metavar="SIZE", help="a whole step of this size instead")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--recompute")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device, sizes = torch.device(args.device), args.sizes.split(",")
    if args.train:
        train(args, sizes, device)
    else:
        heads(args.heads.split(","), sizes, device, args.backend)


if __name__ == "__main__":
    main()
