"""Measures rows one after the other: the program that every rank runs. Rank 0 prints a line, ``RESULT`` and JSON, for each.

torchrun --nproc_per_node=2 benchmarks/measure.py '[{"system": "zc3", "size": "1.1B"}, {"system": "fsdp2-c", "size": "1.1B"}]'

Fields of a row are those of ``benchmarks.rows.Row``. Between rows everything is given back; ``left_over_gib`` says what was not,
and peaks do not contain it. Where it is much, the line ``RESTART`` asks for new processes for the rows that are left. A row that
fails is a row with ``error``, and the next one follows where ranks cannot be out of step.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.llama import SIZES
from benchmarks.rows import Row, read_rows
from benchmarks.systems import SYSTEMS, Options, Trainee, batch

WARMUP = 6  # steps: zcompile decides in the first five whether it replays the rest
#: steps on an idle device that the host's time is measured over, at most
HOST_STEPS = 5
#: what earlier rows may leave on a device; with more the next one is measured by new processes
MAX_LEFT_OVER_GIB = 2.0
#: bytes that ranks say to each other when they meet
MAX_TEXT = 400
#: systems of one rank; the first while the others wait, the second on all at once
OF_EACH = ("single", "single-each")
GIB = 2.0**30


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

    def forget_peaks(self) -> None:
        """Let peaks of memory begin here."""
        if self._on_device:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()


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
    trainee.backward(loss)
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
    """Time steps that follow each other without a wait, then the host's part of steps that start on an idle device.

    Peaks of memory are those of the latter: a step may be recorded for replays while the former are timed.
    """
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
    clock.forget_peaks()
    for _ in range(min(steps, HOST_STEPS)):
        clock.finish()
        begin = time.perf_counter()
        one_step(trainee, tokens, labels, clip, clock)
        times.host.append((time.perf_counter() - begin) * 1e3)
    clock.finish()
    assert loss is not None
    return times, float(loss.detach())


def host_gib() -> float:
    """Memory of this host that is taken, by all ranks together."""
    return psutil.virtual_memory().used / GIB


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


@dataclass(frozen=True)
class Here:
    """This process.

    Attributes:
        meeting: a group on the host, in which ranks meet between rows.
    """

    rank: int
    world_size: int
    device: torch.device
    meeting: Any

    @classmethod
    def start(cls, kind: str) -> Here:
        """Make the process group that torchrun describes."""
        on_gpu = kind == "cuda"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        meeting = dist.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        return cls(dist.get_rank(), dist.get_world_size(), device, meeting)

    def limit(self, gib: float | None) -> None:
        """Let torch's allocator reserve no more than so much; None: as much as there is."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total) if gib else 1.0)

    def copy_bandwidth(self) -> float:
        """Bytes read and written each second by a large copy, with all memory free for it."""
        self.give_back()
        return copy_bandwidth(self.device, 2**32 if self.device.type == "cuda" else 2**24)

    def meet(self, text: str = "") -> list[str]:
        """Wait for all ranks, and have what each says."""
        said = text.encode()[:MAX_TEXT].ljust(MAX_TEXT, b"\0")
        mine = torch.tensor(list(said), dtype=torch.uint8)  # all_gather_object would need numpy
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self.meeting)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in everyone]

    def give_back(self) -> dict[str, float]:
        """Free what nobody has any more; says what is still there, in torch's allocator and on the device beside it."""
        gc.collect()
        torch.compiler.reset()
        gc.collect()
        if self.device.type != "cuda":
            tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
            storages = {s.data_ptr(): s.nbytes() for each in tensors for s in [each.untyped_storage()]}
            return {"left_over_gib": sum(storages.values()) / GIB, "host_gib": host_gib()}
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "left_over_gib": torch.cuda.memory_allocated() / GIB,
            "left_reserved_gib": reserved / GIB,
            "outside_gib": (total - free - reserved) / GIB,
            "host_gib": host_gib(),
        }


def attempt(row: Row, here: Here, before: dict[str, float]) -> dict[str, Any]:
    """Measure a row on this rank. What it raises is a result with ``error``, and ``ends`` if the ranks may be out of step since."""
    trainee = None
    here.limit(row.card_gib)
    try:
        size = SIZES[row.size]
        size = dataclasses.replace(
            size, micro_batch=row.micro_batch or size.micro_batch, layers=row.layers or size.layers
        )
        options = Options(
            size=size,
            device=here.device,
            world_size=1 if row.system in OF_EACH else here.world_size,
            dtype=torch.bfloat16 if row.dtype == "bf16" else torch.float32,
            backend=row.backend,
            policy=row.policy,
            reduce=row.reduce,
            recompute=row.recompute,
            clip=row.clip,
            others=row.options,
        )
        begin = time.perf_counter()
        trainee = SYSTEMS[row.system](options)
        result = result_of(row, trainee, options, here, before, begin)
    except Exception as error:
        traceback.print_exc()
        result = {"error": describe(error), "ends": trainee is None or trainee.close is None, **before}
    if trainee is not None and trainee.close is not None:
        trainee.close()
    return result


def result_of(
    row: Row, trainee: Trainee, options: Options, here: Here, before: dict[str, float], begin: float
) -> dict[str, Any]:
    """Warm up, measure, and put everything together."""
    on_gpu, clock, size = here.device.type == "cuda", Clock(here.device), options.size
    tokens, labels = batch(options, here.rank)
    clock.finish()
    build_s, begin = time.perf_counter() - begin, time.perf_counter()
    first_loss = float(one_step(trainee, tokens, labels, row.clip, clock)[-1].detach())
    clock.finish()
    first_s = time.perf_counter() - begin
    for _ in range(WARMUP - 1):
        one_step(trainee, tokens, labels, row.clip, clock)
    clock.finish()
    gc.collect()
    times, loss = measure(trainee, tokens, labels, row.steps, row.clip, clock)
    peaks = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else None
    facts = trainee.facts()  # which may run further steps
    outside = facts.get("peer_gib", 0.0)  # what a system allocates behind the allocator's back counts too
    recorded = facts.get("recorded_gib", 0.0)  # of steps that are replayed: reserved, and used in each
    step = statistics.median(times.step)
    lower, _, upper = statistics.quantiles(times.step, n=4, method="inclusive") if row.steps > 1 else (step,) * 3
    num_tokens = size.micro_batch * size.seq
    flops = 6 * (size.num_params - size.vocab * size.hidden) * num_tokens + size.attention_flops()
    allocated = reserved = None
    if peaks is not None:
        allocated = peaks[0] / GIB - before["left_over_gib"] + outside + recorded
        reserved = peaks[1] / GIB - before["left_reserved_gib"] + outside
    return {
        "world_size": options.world_size,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "num_params": size.num_params,
        "micro_batch": size.micro_batch,
        "reduce": options.reduce,
        "forward_backward_ms": statistics.median(times.forward_backward),
        "optimizer_ms": statistics.median(times.optimizer),
        "step_ms": step,
        "step_ms_min": min(times.step),
        "step_ms_iqr": upper - lower,
        "host_ms": statistics.median(times.host),
        "tokens_per_s": num_tokens * options.world_size / step * 1e3,
        "tflops": flops / step / 1e9,
        "allocated_gib": allocated,
        "reserved_gib": reserved,
        "build_s": build_s,
        "first_step_s": first_s,
        "first_loss": first_loss,
        "loss": loss,
        **(before | {"host_gib": host_gib() - before["host_gib"]}),
        **facts,
    }


def describe(error: Exception) -> str:
    """An error in a table."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):  # NCCL's is an error of its own
        return "out of memory"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def worst(errors: list[str]) -> str:
    """The error that the others follow from."""
    own = [error for error in errors if not error.startswith("Rank")]
    return "out of memory" if "out of memory" in errors else (own or errors)[0]


def say(line: str) -> None:
    """A line of its own, whatever other ranks have begun to print."""
    print(f"\n{line}", flush=True)


def run(row: Row, here: Here, before: dict[str, float]) -> None:
    """Measure a row on all ranks, or the limit on one while the others wait, or on each by itself: then the slowest counts."""
    result = attempt(row, here, before) if row.system != "single" or here.rank == 0 else {}
    if result.get("ends"):  # the others may wait on the device for what never comes
        say("RESULT " + json.dumps(result))
        sys.stderr.flush()
        os._exit(1)
    if row.system == "single" and "error" not in result and here.rank == 0:
        result["copy_bytes_per_s"] = here.copy_bandwidth()
    errors = [error for error in here.meet(result.get("error", "")) if error]
    if row.system == "single-each" and not errors:
        times = [float(ms) for ms in here.meet(str(result["forward_backward_ms"]))]
        result |= {"forward_backward_ms": max(times), "step_ms": max(times), "of_each_ms": times}
    if here.rank == 0:
        say("RESULT " + json.dumps(result | ({"error": worst(errors)} if errors else {})))


def describe_machine(path: str, here: Here) -> None:
    """What ``python -m zcompile doctor --calibrate`` does, on the ranks that are here."""
    from zcompile.planner.calibrate import calibrate

    found = calibrate(here.device, os.path.splitext(os.path.basename(path))[0])
    if here.rank == 0:
        found.save(path)
        print(f"{path}: {found.sources}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=read_rows, help="a JSON list, or a file with one")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calibrate", metavar="FILE", help="first describe this machine, as zcompile's doctor does")
    args = parser.parse_args()
    here = Here.start(args.device)
    here.meet()
    if here.rank == 0:
        say("READY")
    if args.calibrate:
        describe_machine(args.calibrate, here)
    torch.set_float32_matmul_precision("high")
    first = None
    for row in args.rows:
        before = here.give_back()
        held = before["left_over_gib"] + before.get("outside_gib", 0.0)
        first = held if first is None else first
        if max(map(float, here.meet(str(held - first)))) > MAX_LEFT_OVER_GIB:
            if here.rank == 0:
                say("RESTART")
            break
        run(row, here, before)
    dist.destroy_process_group()  # after an error it could wait for what never comes


if __name__ == "__main__":
    main()
