"""What computing a loss in pieces costs and saves: the head of a language model alone, then a whole training step, on one device.

python benchmarks/loss.py                                              heads of 0.19B, 1.1B and 8B models, bf16, forward and backward:
                                                                       eager, torch.compile, zcompile with the loss whole, with what
                                                                       "auto" does, and with logits that are computed again
python benchmarks/loss.py --sums                                       errors of gradients by the number of pieces
python benchmarks/loss.py --train 1.1B --micro-batch 8 --recompute full    a step of that model, with and without pieces
python benchmarks/loss.py --heads tiny --device cpu --backend eager    to try the script

Peaks are what a step allocates beyond what is alive before it. Errors are those of gradients beside float32, relative to their norm.
A head with 50257 classes (odd: rows of pieces are padded inside of the operator) and one with twice the rows of 8B are there as well.
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
    "8Bx2": (8192, 4096, 128256),
    "gpt2": (8192, 768, 50257),
}
#: pieces whose gradients are added up, for --sums
PIECES = (1, 2, 3, 4, 8, 16, 32)


class Head(nn.Module):
    """The head of a language model with its loss.

    Args:
        again: weigh the losses with ones that seem to depend on them, so that zcompile cannot make gradients in forward.
    """

    def __init__(self, hidden: int, vocab: int, again: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.again = again

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden).float()
        if not self.again:
            return F.cross_entropy(logits, labels)
        losses = F.cross_entropy(logits, labels, reduction="none")
        return (losses * (losses.detach().clamp(max=0) + 1)).mean()


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


def built(state: dict[str, Tensor], width: int, vocab: int, again: bool, device: torch.device) -> Head:
    with device:
        model = Head(width, vocab, again).bfloat16()
    model.load_state_dict(state)
    return model


def systems(sizes: list[str], backend: str) -> dict[str, tuple[bool, Callable[[nn.Module], Any]]]:
    """How the head is made, and what runs it, by name."""
    import zcompile

    found: dict[str, tuple[bool, Callable[[nn.Module], Any]]] = {"eager": (False, lambda model: model)}
    if backend == "inductor":
        found["torch.compile"] = (False, torch.compile)
    for size in sizes:
        again = size == "again"
        option = "256MiB" if again else size
        name = "zcompile, logits again" if again else f"zcompile, {size}"
        found[name] = (again, partial(zcompile.compile, loss_chunk=option, backend=backend))
    return found


def what_was_done(model: Any) -> str:
    """What the pass says of the loss, and what the plan says of its memory."""
    history = [entry.stats for entry in getattr(model, "history", ()) if entry.name == "chunk-loss"]
    said = [f"{what}: {n}" for stats in history for what, n in stats.items() if n and not what.startswith("bytes")]
    return ", ".join(said)


def heads(names: list[str], sizes: list[str], device: torch.device, backend: str) -> None:
    print("| head | system | ms | peak MiB | error of weight's gradient | of hidden's | pass |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
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
        for system, (again, compiled) in systems(sizes, backend).items():
            model = compiled(built(state, width, vocab, again, device))
            ms, peak = timed(partial(head_step, model, hidden, labels), device)
            have = (next(iter(model.parameters())).grad, hidden.grad)
            errors = " | ".join(f"{error(a, b):.1e}" for a, b in zip(have, wanted, strict=True))
            print(f"| {name} | {system} | {ms:.2f} | {peak:.0f} | {errors} | {what_was_done(model)} |", flush=True)
            del model, have
            gc.collect()


def sums(device: torch.device) -> None:
    """Errors of the gradients, as parts of eager's, where that of the weight is added up in either dtype."""
    from zcompile import ops

    print("| rows, hidden, classes | pieces | weight, added up in float32 | in bfloat16 | hidden |")
    print("| --- | --- | --- | --- | --- |")
    for rows, width, vocab in ((2048, 64, 256), (4096, 64, 4096), (4096, 128, 8192)):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, width, generator=generator).to(device, torch.bfloat16)
        weight = (0.1 * torch.randn(vocab, width, generator=generator)).to(device, torch.bfloat16)
        labels = torch.randint(vocab, (rows,), generator=generator).to(device)

        def gradients(dtype: torch.dtype, inputs: Any = (hidden, weight), labels: Tensor = labels) -> list[Tensor]:
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
            F.cross_entropy(
                (leaves[0] @ leaves[1].t()).to(torch.promote_types(dtype, torch.float32)), labels
            ).backward()
            return [leaf.grad.double() for leaf in leaves]

        exact = gradients(torch.float64)
        eager = [error(a, b) for a, b in zip(gradients(torch.bfloat16), exact, strict=True)]
        weights = torch.full((rows,), 1 / rows, device=device)
        for pieces in PIECES:
            found = {}
            for total in (torch.float32, torch.bfloat16):
                options = {
                    "dtype": torch.float32,
                    "rows": -(-rows // pieces),
                    "total": total,
                    "wanted": [True, True, False],
                }
                _, *grads = ops.linear_cross_entropy_with_grads(hidden, weight, None, labels, weights, **options)
                found[total] = [error(g, w) / e for g, w, e in zip(grads, exact, eager, strict=True)]
            wide, narrow = found[torch.float32], found[torch.bfloat16]
            print(
                f"| {rows}, {width}, {vocab} | {pieces} | {wide[1]:.2f} | {narrow[1]:.2f} | {wide[0]:.2f} |", flush=True
            )


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
        done = what_was_done(model)
        print(
            f"| {args.train} | {option} | {ms:.1f} | {peak:.2f} | {predicted:.2f} | {loss:.4f} | {done} |", flush=True
        )
        del plain, model, optimizer, report, memory
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="0.19B,1.1B,8B,8Bx2,gpt2", help=f"of {', '.join(HEADS)}")
    parser.add_argument("--sizes", help="values of loss_chunk, and 'again'; default: none,auto, and again for heads")
    parser.add_argument("--sums", action="store_true", help="errors by the number of pieces instead")
    parser.add_argument("--train", metavar="SIZE", help="a whole step of this size instead")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--recompute")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device, sizes = (
        torch.device(args.device),
        (args.sizes or ("none,auto" if args.train else "none,auto,again")).split(","),
    )
    if args.sums:
        sums(device)
    elif args.train:
        train(args, sizes, device)
    else:
        heads(args.heads.split(","), sizes, device, args.backend)


if __name__ == "__main__":
    main()
