"""Measures one system at one size: the program that every rank runs. Rank 0 prints one line, ``RESULT`` and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.llama import SIZES
from benchmarks.systems import SYSTEMS, Options, Trainee, batch

WARMUP = 3


class Clock:
    """Marks moments in the order of the device's work; on the CPU, moments of the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) if self._on_device else (second - first) * 1e3

    def finish(self) -> None:
        if self._on_device:
            torch.cuda.synchronize()


@dataclass
class Times:
    """Milliseconds of each step."""

    forward_backward: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)


def one_step(
    trainee: Trainee, tokens: Tensor, labels: Tensor, clip: float | None, clock: Clock
) -> tuple[Any, Any, Tensor]:
    """Forward, backward, clip, update; gives the marks before and after the update, and the loss."""
    with trainee.context():
        loss = trainee.model(tokens, labels)
    loss.backward()
    between = clock.mark()
    if trainee.optimizer is not None:
        if clip is not None:
            trainee.clip(clip)
        trainee.optimizer.step()
    trainee.zero()
    return between, clock.mark(), loss


def measure(
    trainee: Trainee, tokens: Tensor, labels: Tensor, steps: int, clip: float | None, clock: Clock
) -> tuple[Times, float]:
    """Time steps that follow each other without a wait, then the host's part of steps that start on an idle device."""
    times = Times()
    marks, loss = [clock.mark()], None
    for _ in range(steps):
        between, end, loss = one_step(trainee, tokens, labels, clip, clock)
        marks += [between, end]
    clock.finish()
    for begin, between, end in zip(marks[:-2:2], marks[1:-1:2], marks[2::2], strict=True):
        times.forward_backward.append(clock.ms(begin, between))
        times.optimizer.append(clock.ms(between, end))
        times.step.append(clock.ms(begin, end))
    for _ in range(min(steps, 10)):
        clock.finish()
        begin = time.perf_counter()
        one_step(trainee, tokens, labels, clip, clock)
        times.host.append((time.perf_counter() - begin) * 1e3)
    clock.finish()
    assert loss is not None
    return times, float(loss.detach())


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written each second by a large copy on the device."""
    clock = Clock(device)
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    rates = []
    for _ in range(8):
        begin = clock.mark()
        target.copy_(source)
        end = clock.mark()
        clock.finish()
        rates.append(2 * source.nbytes / (clock.ms(begin, end) * 1e-3))
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--policy")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--reduce", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument(
        "--recompute", help="full: blocks are computed again in backward; zcompile also knows selective"
    )
    parser.add_argument("--micro-batch", type=int, help="rows of one rank; default: the size's")
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed = args.system != "single"
    if distributed:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    chosen = SIZES[args.size]
    chosen = dataclasses.replace(chosen, micro_batch=args.micro_batch or chosen.micro_batch)
    options = Options(chosen, device, world_size, dtype, args.backend, args.policy, args.reduce, args.recompute)
    clock = Clock(device)
    begin = time.perf_counter()
    trainee = SYSTEMS[args.system](options)
    tokens, labels = batch(options, rank)
    clock.finish()
    build_s, begin = time.perf_counter() - begin, time.perf_counter()
    one_step(trainee, tokens, labels, args.clip, clock)
    clock.finish()
    first_s = time.perf_counter() - begin
    for _ in range(WARMUP - 1):
        one_step(trainee, tokens, labels, args.clip, clock)
    clock.finish()
    gc.collect()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, loss = measure(trainee, tokens, labels, args.steps, args.clip, clock)
    gib = 2.0**30
    facts = trainee.facts()
    outside = facts.get("peer_gib", 0.0)  # what a system allocates behind the allocator's back counts too
    forward_backward, step = statistics.median(times.forward_backward), statistics.median(times.step)
    size = options.size
    num_params = sum(p.numel() for p in trainee.model.parameters())
    num_tokens = size.micro_batch * size.seq
    flops = 6 * (num_params - size.vocab * size.hidden) * num_tokens + size.attention_flops()
    result = {
        "system": args.system,
        "size": args.size,
        "world_size": world_size,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "num_params": num_params,
        "steps": args.steps,
        "clip": args.clip,
        "dtype": args.dtype,
        "reduce": options.reduce,
        "recompute": options.recompute,
        "micro_batch": chosen.micro_batch,
        "forward_backward_ms": forward_backward,
        "optimizer_ms": statistics.median(times.optimizer),
        "step_ms": step,
        "step_ms_min": min(times.step),
        "host_ms": statistics.median(times.host),
        "tokens_per_s": num_tokens * world_size / step * 1e3,
        "tflops": flops / step / 1e9,
        "allocated_gib": torch.cuda.max_memory_allocated() / gib + outside if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / gib + outside if on_gpu else None,
        "build_s": build_s,
        "first_step_s": first_s,
        "loss": loss,
        **facts,
    }
    if args.system == "single":
        del trainee, tokens, labels
        result["copy_bytes_per_s"] = copy_bandwidth(device, 2**32 if on_gpu else 2**24)
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
