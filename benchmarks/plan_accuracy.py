"""Predicted against measured: step times and peaks of several sizes, stages and micro-batches, and the ranking of schedules.

python benchmarks/plan_accuracy.py                                two GPUs, described by hardware h200
python benchmarks/plan_accuracy.py --hardware here.json           described by python -m zcompile doctor --calibrate here.json
python benchmarks/plan_accuracy.py --sizes 1.1B --stages 3 --schedules
python benchmarks/plan_accuracy.py --predict-only                 no GPU: what would be compared

Each row is measured as benchmarks/train_step.py measures it, in processes of its own. ``--schedules`` runs one size with policies
that differ in lookahead, bucket size and kept units, and prints Spearman's rank correlation of predicted and measured steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import train_step
from benchmarks.llama import SIZES, Llama
from zcompile.planner.hardware import Hardware, hardware
from zcompile.planner.memory import Setup
from zcompile.planner.simulate import simulate
from zcompile.planner.trace import Traced, trace
from zcompile.planner.walk import predict

GIB = 2**30
STAGES = (0, 1, 2, 3)
#: schedules that differ in what a policy can choose, the worst ones included
SCHEDULES = (
    "none",
    "keep{units=1}",
    "keep{units=0},prefetch{lookahead=1}",
    "keep{units=1},prefetch{lookahead=1}",
    "keep{units=2},prefetch{lookahead=1}",
    "keep{units=8},prefetch{lookahead=1}",
    "keep{units=1},prefetch{lookahead=2}",
    "keep{units=1},bucket{mib=256},prefetch{lookahead=1}",
    "keep{units=1},bucket{mib=1024},prefetch{lookahead=1}",
    "keep{units=18},prefetch{lookahead=2}",
)


def traced(size: str, micro_batch: int | None, world_size: int) -> Traced:
    """The step of one size, with its own micro-batch when none is given."""
    chosen = SIZES[size] if micro_batch is None else dataclasses.replace(SIZES[size], micro_batch=micro_batch)
    with torch.device("meta"):
        model = Llama(chosen)
        tokens = torch.empty(chosen.micro_batch, chosen.seq, dtype=torch.int64)
    return trace(model, (tokens, tokens), world_size=world_size, precision="bf16", verify="off")


def predicted(step: Traced, machine: Hardware, world_size: int, stage: int, policy: str) -> dict[str, Any]:
    """Milliseconds and GiB of one schedule."""
    found = step.at(stage=stage, policy=policy)
    line = simulate(found.step, machine, world_size)
    setup = dataclasses.replace(Setup.on(machine, world_size), context_bytes=0, fragmentation=0.0)  # as allocated
    return {
        "predicted_ms": line.step_us / 1000,
        "predicted_gib": predict(found.step, found.specs, setup).peak_bytes / GIB,
        "gap": line.gap,
    }


def measured(
    options: argparse.Namespace, size: str, stage: int, policy: str, micro_batch: int | None
) -> dict[str, Any]:
    """Milliseconds and GiB of a run, or its error."""
    call = argparse.Namespace(
        nproc=options.nproc,
        device=options.device,
        steps=options.steps,
        backend=options.backend,
        dtype="bf16",
        reduce="fp32",
        policy=policy,
        clip=None,
        timeout=options.timeout,
        logs=None,
        micro_batch=micro_batch,
    )
    row = train_step.run(call, size, f"zc{stage}")
    if "error" in row:
        return {"error": row["error"]}
    return {"measured_ms": row["step_ms"], "measured_gib": row["allocated_gib"]}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, ties given their mean rank."""
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    cells = [
        row["size"],
        str(row["stage"]),
        str(row["micro_batch"] or "-"),
        row["policy"],
        f"{row['predicted_ms']:.2f}",
    ]
    cells += [f"{row['measured_ms']:.2f}" if "measured_ms" in row else row.get("error", "-")]
    cells += [f"{row['predicted_ms'] / row['measured_ms'] - 1:+.1%}" if "measured_ms" in row else "-"]
    cells += [f"{row['predicted_gib']:.2f}", f"{row['measured_gib']:.2f}" if row.get("measured_gib") else "-"]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| size | stage | micro-batch | policy | predicted ms | measured ms | off | predicted GiB | measured GiB |\n|"
    + "---|" * 9
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--sizes", default="0.19B,1.1B,8B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--micro-batches", default="", help="separated by commas; default: each size's own")
    parser.add_argument("--policy", default="prefetch")
    parser.add_argument("--schedules", action="store_true", help="compare schedules of one size at stage 3 instead")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = hardware(options.hardware)
    sizes = options.sizes.split(",")
    unknown = [size for size in sizes if size not in SIZES]
    if unknown:
        raise SystemExit(f"unknown sizes {', '.join(unknown)}; there are {', '.join(SIZES)}")
    batches = [int(b) for b in options.micro_batches.split(",") if b] or [None]
    stages = (3,) if options.schedules else tuple(int(s) for s in options.stages.split(","))
    policies = SCHEDULES if options.schedules else (options.policy,)
    rows: list[dict[str, Any]] = []
    print(HEAD)
    for size in sizes:
        for batch in batches:
            step = traced(size, batch, options.nproc)
            for stage in stages:
                if f"zc{stage}" in train_step.TOO_LARGE.get(size, ()):
                    continue
                for policy in policies:
                    row = {"size": size, "stage": stage, "micro_batch": batch, "policy": policy}
                    row |= predicted(step, machine, options.nproc, stage, policy)
                    if not options.predict_only:
                        row |= measured(options, size, stage, policy, batch)
                    rows.append(row)
                    print(line(row), flush=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps(rows, indent=1))
    both = [row for row in rows if "measured_ms" in row]
    if both:
        off = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in both]
        print(f"\nsteps: off by {statistics.mean(off):.1%} on average, {max(off):.1%} at most, over {len(off)} rows")
    if len(both) > 2:
        print(f"Spearman of steps: {spearman([r['predicted_ms'] for r in both], [r['measured_ms'] for r in both]):.3f}")
    return int(not options.predict_only and not both)


if __name__ == "__main__":
    sys.exit(main())
