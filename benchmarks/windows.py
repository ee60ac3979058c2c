"""Windows of micro-batches: what weights that stay gathered save, and what memory they take.

python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/windows.py --sizes 0.19B,1.1B,8B
python -m torch.distributed.run --standalone --nproc_per_node=2 benchmarks/windows.py --device cpu --sizes tiny --backend eager

A window is so many micro-batches and one update. ``hold none`` gathers in every micro-batch, as before there was a hold; ``default``
holds what the policy keeps and the unit that forward needs first; ``first`` also all that backward gathers, until the next forward
has read it; ``all`` keeps everything. ``gathered`` counts parameters in the gathers of one window, ``replayed`` the micro-batches of
one that are CUDA graphs, in the mean. FSDP2 is measured as it comes, and with its weights kept over the window, where only the last
backward reduces.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.llama import SIZES
from benchmarks.measure import GIB, Clock, Here
from benchmarks.systems import SYSTEMS, Options, Trainee, batch
from zcompile.ir.graph import Step
from zcompile.planner.course import simulate_course
from zcompile.planner.hosted import hardware_here

#: windows; as many steps as a step may need until it is found to wait for the host, and a few more
WARMUP = 6
HOLDS = {
    "none": "hold{units=0 first=0},prefetch",
    "default": None,
    "first": "hold{first=999},prefetch",
    "all": "keep{units=999},prefetch",
}
COLUMNS = (
    ("system", 26),
    ("window_ms", 10),
    ("predicted_ms", 13),
    ("micro_batch_ms", 15),
    ("gathered", 9),
    ("replayed", 9),
    ("peak_gib", 9),
    ("predicted_gib", 14),
)


def window(trainee: Trainee, inputs: tuple[Any, Any], micro_batches: int, keeps: bool) -> None:
    """One window and its update; ``keeps``: FSDP2 is told to keep and to reduce at the end."""
    assert trainee.optimizer is not None
    fsdp: Any = trainee.model
    for number in range(micro_batches):
        if keeps:
            last = number == micro_batches - 1
            fsdp.set_requires_gradient_sync(last)
            fsdp.set_reshard_after_backward(last)
        with trainee.context():
            loss = trainee.model(*inputs)
        (loss / micro_batches).backward()
    trainee.optimizer.step()
    trainee.zero()


def counted(trainee: Trainee, run: Callable[[], None]) -> int:
    """How many parameters a window gathers that is issued."""
    collectives: Any = trainee.model._session.runner.executor.collectives
    plain, found = collectives.all_gather, 0

    def all_gather(outputs: Any, *rest: Any) -> Any:
        nonlocal found
        found += len(outputs)
        return plain(outputs, *rest)

    collectives.all_gather = all_gather
    run()
    del collectives.all_gather
    return found


def predicted_us(trainee: Trainee, options: Options) -> float:
    """What planning says about a window of the graphs that run."""
    session: Any = trainee.model._session
    graphs = session.latest.graphs
    step, machine = Step(graphs.forward, graphs.backward), hardware_here(options.device)
    return simulate_course(step, session.setup().window, machine, options.world_size).step_us


def measure(
    name: str, make: Callable[[Options], Trainee], options: Options, micro_batches: int, steps: int
) -> dict[str, Any]:
    on_gpu, clock = options.device.type == "cuda", Clock(options.device)
    trainee = make(options)
    run = partial(window, trainee, batch(options, dist.get_rank()), micro_batches, options.keep)

    gathered = counted(trainee, run) if name.startswith("zc") else None
    for _ in range(WARMUP):
        run()
    clock.finish()
    dist.barrier()
    clock.forget_peaks()
    replays = trainee.facts().get("replays", 0)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        clock.finish()
        times.append(1000 * (time.perf_counter() - start))
    ms = statistics.median(times)
    row: dict[str, Any] = {"system": name, "window_ms": round(ms, 2), "micro_batch_ms": round(ms / micro_batches, 2)}
    if on_gpu:
        facts = trainee.facts()  # what torch does not see: exchange of the copy engines, memory of recordings
        outside = facts.get("peer_gib", 0.0) + facts.get("recorded_gib", 0.0)
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB + outside, 2)
    if name.startswith("zc"):
        row["gathered"] = gathered
        row["replayed"] = round((trainee.facts()["replays"] - replays) / steps, 1)
        predicted = trainee.model.report(trainee.optimizer).predicted  # type: ignore[operator]
        row["predicted_gib"] = round(predicted.peak_bytes / GIB, 2)
        row["predicted_ms"] = round(predicted_us(trainee, options) / 1000, 2)
    if trainee.close is not None:
        trainee.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1.1B")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    here = Here.start(args.device)
    rows = []
    for size in args.sizes.split(","):
        plain = Options(SIZES[size], here.device, here.world_size, backend=args.backend)
        runs = [("FSDP2", SYSTEMS["fsdp2-c"], plain), ("FSDP2, kept", SYSTEMS["fsdp2-c"], replace(plain, keep=True))]
        for stage in args.stages.split(","):
            for hold in ("none", "default") if stage in "12" else HOLDS:
                others = {"gradient_accumulation_steps": args.micro_batches}
                options = replace(plain, policy=HOLDS[hold], others=others)
                runs.append((f"zc{stage}, hold {hold}", SYSTEMS[f"zc{stage}"], options))
        if here.rank == 0:
            print(
                f"{size}, {args.micro_batches} micro-batches\n" + "".join(f"{c:>{width}}" for c, width in COLUMNS),
                flush=True,
            )
        for name, make, options in runs:
            try:
                row = measure(name, make, options, args.micro_batches, args.steps)
            except torch.OutOfMemoryError as error:
                row = {"system": name, "error": str(error).splitlines()[0]}
            rows.append({"size": size, "micro_batches": args.micro_batches, **row})
            if here.rank == 0:
                print(
                    "".join(
                        f"{row.get(c, row.get('error', '')[:60] if c == 'window_ms' else '')!s:>{width}}"
                        for c, width in COLUMNS
                    ),
                    flush=True,
                )
                if args.json is not None:
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
