"""Predicted against measured: steps and peaks of several sizes, stages and micro-batches, and the ranking of schedules.

python benchmarks/plan_accuracy.py --calibrate here.json                     two GPUs: measure all, describe them, compare
python benchmarks/plan_accuracy.py --calibrate here.json --measure-only rows.json         on the GPUs, where time is dear
python benchmarks/plan_accuracy.py --compare rows.json --hardware here.json               anywhere: needs no GPU
python benchmarks/plan_accuracy.py --measured rows.json,table.json ...                    rows that need no new measurement
python benchmarks/plan_accuracy.py --predict-only                                         what would be compared

Rows are, the most valuable first: every stage of each size (``own``; with --peers also the limit, DDP and FSDP2), the same with
micro-batches twice as large (``second``), stage 3 of one size with policies that differ in lookahead, bucket size and kept units
(``schedules``), and last what may not fit (``large``). All are measured in one set of processes, and written after each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import train_step
from benchmarks.llama import SIZES, Llama
from benchmarks.rows import Launch, Row, write_rows
from zcompile.planner.hardware import Hardware, hardware
from zcompile.planner.memory import Setup
from zcompile.planner.simulate import simulate
from zcompile.planner.trace import Traced, trace
from zcompile.planner.walk import predict

GIB = 2**30
#: what the predictions are to keep
MAX_TIME_ERROR, MAX_MEMORY_ERROR, MIN_CORRELATION = 0.15, 0.05, 0.9
#: systems of a size in the order of their worth
SYSTEMS = ("zc3", "single", "fsdp2-c", "zc1", "zc2", "zc0", "ddp-c")
PARTS = ("own", "second", "schedules", "large")
#: policies of which no two should take the same time, the worst ones included; in an order in which the first few say most
SCHEDULES = (
    "none",
    "keep{units=18}",
    "keep{units=1},bucket{mib=1024},prefetch{lookahead=1}",
    "keep{units=1},prefetch{lookahead=1}",
    "keep{units=8}",
    "keep{units=0},bucket{mib=2048},prefetch{lookahead=1}",
    "keep{units=1},bucket{mib=512},prefetch{lookahead=1}",
    "keep{units=0},prefetch{lookahead=1}",
    "keep{units=18},prefetch{lookahead=2}",
    "keep{units=1},prefetch{lookahead=2}",
)
OUT_OF_MEMORY = "out of memory"


def rows_of(options: argparse.Namespace) -> list[Row]:
    """What is measured, in order."""
    parts, stages = options.rows.split(","), [f"zc{stage}" for stage in options.stages.split(",")]
    found: dict[str, list[Row]] = {part: [] for part in PARTS}
    for size in options.sizes.split(","):
        too_large = train_step.TOO_LARGE.get(size, ())
        for part, batch in (("own", None), ("second", 2 * SIZES[size].micro_batch)):
            for system in SYSTEMS:
                if system in stages:
                    found["large" if system in too_large else part].append(Row(system, size, batch))
                elif is_peer(system) and options.peers and part == "own" and system not in too_large:
                    found[part].append(Row(system, size))
    found["schedules"] = [Row("zc3", options.schedules_of, policy=policy) for policy in SCHEDULES]
    same = {"backend": options.backend, "steps": options.steps, "options": options.options}
    return [dataclasses.replace(row, **same) for part in PARTS if part in parts for row in found[part]]


def is_peer(system: str) -> bool:
    return not system.startswith("zc")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two rows the same measurement."""
    batch = row.get("micro_batch") or SIZES[row["size"]].micro_batch
    return row["size"], row["system"], batch, row.get("policy") or "prefetch"


def measured_before(paths: Iterable[str], nproc: int, options: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of files that this program or ``train_step.py`` wrote: those that were run as they are predicted here."""
    found = {}
    for path in paths:
        for row in json.loads(Path(path).read_text()):
            as_here = not any(row.get(n) for n in ("clip", "recompute")) and row.get("dtype", "bf16") == "bf16"
            of_all = row.get("world_size", nproc) == nproc or row["system"] == "single"
            as_here &= is_peer(row["system"]) or row.get("options", {}) == options
            reduced = row.get("reduce", "fp32") == "fp32" or is_peer(row["system"])
            if as_here and of_all and reduced and row.get("error", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY):
                found[key(row)] = row
    return found


@cache
def traced(size: str, micro_batch: int, world_size: int) -> Traced:
    """The step of one size."""
    chosen = dataclasses.replace(SIZES[size], micro_batch=micro_batch)
    with torch.device("meta"):
        model = Llama(chosen)
        tokens = torch.empty(chosen.micro_batch, chosen.seq, dtype=torch.int64)
    return trace(model, (tokens, tokens), world_size=world_size, precision="bf16", verify="off")


def predicted(row: dict[str, Any], machine: Hardware, world_size: int) -> dict[str, Any]:
    """Milliseconds, GiB as torch's allocator counts them, and whether it fits with everything else on the device."""
    size, system, batch, policy = key(row)
    found = traced(size, batch, world_size).at(stage=int(system.removeprefix("zc")), policy=policy)
    line = simulate(found.step, machine, world_size)
    setup = Setup.on(machine, world_size)
    # what the allocator leaves unused is in no peak of its count, except inside of recordings
    bare = dataclasses.replace(setup, context_bytes=0, fragmentation=setup.fragmentation if row.get("replays") else 0.0)
    return {
        "predicted_ms": line.step_us / 1000,
        "predicted_gib": predict(found.step, found.specs, bare).peak_bytes / GIB,
        "predicted_fits": predict(found.step, found.specs, setup).peak_bytes <= machine.device_memory_bytes,
        "gap": line.gap,
    }


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """A predicted row with its errors, as shares of what was measured."""
    if "step_ms" not in row or not row["predicted_fits"]:
        return row
    found = {"time_error": row["predicted_ms"] / row["step_ms"] - 1}
    if row["allocated_gib"] is not None:
        found["memory_error"] = row["predicted_gib"] / row["allocated_gib"] - 1
    return row | found


def rank_correlation(predicted: Sequence[float], measured: Sequence[float], noise: Sequence[float]) -> float:
    """Spearman's rank correlation; pairs whose measured values differ by no more than the noise of either are ties in both.

    A rank is how many values are below minus how many are above: that is Spearman's where every pair counts. NaN where none does.
    """
    everyone = range(len(measured))
    counts = [[abs(measured[i] - measured[j]) > max(noise[i], noise[j]) for j in everyone] for i in everyone]
    a, b = (
        [sum(((v[i] > v[j]) - (v[i] < v[j])) * counts[i][j] for j in everyone) for i in everyone]
        for v in (predicted, measured)
    )
    scale = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else math.nan


HEAD = ("size", "stage", "micro-batch", "policy", "predicted ms", "ms", "error", "predicted GiB", "GiB", "error")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Predicted, measured and the error, of time and memory; in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for row in rows:
        size, system, batch, policy = key(row)
        cells = [size, system.removeprefix("zc"), str(batch), policy]
        cells += [f"{row['predicted_ms']:.1f}" if row["predicted_fits"] else f"predicted {OUT_OF_MEMORY}"]
        cells += [
            row.get("error", "-") if "step_ms" not in row else f"{row['step_ms']:.1f}",
            _percent(row, "time_error"),
        ]
        cells += [f"{row['predicted_gib']:.2f}"]
        cells += [f"{row['allocated_gib']:.2f}" if row.get("allocated_gib") else "-", _percent(row, "memory_error")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _percent(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:+.1%}" if name in row else "-"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The worst errors, which rows fit, and how well schedules are ranked."""
    lines = []
    for what, name, limit in (("steps", "time_error", MAX_TIME_ERROR), ("peaks", "memory_error", MAX_MEMORY_ERROR)):
        both = [row for row in rows if name in row]
        if both:
            worst, within = max(both, key=lambda r: abs(r[name])), sum(abs(r[name]) <= limit for r in both)
            mean, where = statistics.mean(abs(row[name]) for row in both), " ".join(map(str, key(worst)))
            text = f"{what}: {within} of {len(both)} within {limit:.0%}, {mean:.1%} off on average"
            lines.append(f"{text}; worst {worst[name]:+.1%} ({where})")
    run = [row for row in rows if "step_ms" in row or row.get("error", "").startswith(OUT_OF_MEMORY)]
    wrong = [row for row in run if ("step_ms" in row) != row["predicted_fits"]]
    if run:
        names = "".join(f"; wrong: {' '.join(map(str, key(row)))}" for row in wrong)
        lines.append(f"whether it fits: {len(run) - len(wrong)} of {len(run)} as predicted{names}")
    for size in SIZES:
        kinds = [r for r in rows if key(r)[:3] == (size, "zc3", SIZES[size].micro_batch) and "time_error" in r]
        if len(kinds) > 2:
            values = [[r[name] for r in kinds] for name in ("predicted_ms", "step_ms")]
            rho = rank_correlation(*values, [r.get("step_ms_iqr", 0.0) for r in kinds])
            everything = rank_correlation(*values, [0.0] * len(kinds))
            lines.append(
                f"{len(kinds)} schedules of {size}: Spearman {rho:.3f} over pairs that differ by more than the noise (to be "
                f"{MIN_CORRELATION} over 8 at least), {everything:.3f} over all"
            )
    return "\n".join(lines)


def measure(options: argparse.Namespace, wanted: Sequence[Row], known: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Measure the rows that are not known, and add them."""
    waiting = [row for row in wanted if key(vars(row)) not in known]
    left = sum(row.seconds for row in waiting)
    print(f"{len(waiting)} rows to measure, about {left:.0f} s", file=sys.stderr, flush=True)
    launch = Launch(options.nproc, options.device, options.timeout, options.logs, calibrate=options.calibrate)
    for row, result in zip(waiting, launch.measure(waiting), strict=True):
        left -= row.seconds
        known[key(result)] = result
        print(f"{row}: {train_step.said(result)}; about {left:.0f} s left", file=sys.stderr, flush=True)
        write(options, known)


def write(options: argparse.Namespace, known: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Everything that is known by now; what was compared has its predictions as well."""
    if (path := options.measure_only or options.json) is not None:
        write_rows(path, list(known.values()))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="the machine of the predictions; default: what --calibrate wrote, else h200")
    parser.add_argument("--calibrate", metavar="FILE", help="describe the machine that measures, before the first row")
    parser.add_argument("--measure-only", metavar="FILE", help="write what was measured here, and predict nothing")
    parser.add_argument("--compare", metavar="FILES", help="measure nothing: what was is in these files")
    parser.add_argument("--measured", metavar="FILES", help="do not measure again what is in these files")
    parser.add_argument("--predict-only", action="store_true", help="measure nothing")
    parser.add_argument("--rows", default=",".join(PARTS), help="parts of the list, of %(default)s")
    parser.add_argument("--sizes", default="1.1B,0.19B,8B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--schedules-of", default="1.1B", metavar="SIZE", help="whose schedules are ranked")
    parser.add_argument("--peers", action="store_true", help=f"measure {', '.join(filter(is_peer, SYSTEMS))} as well")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; the median of ten is stable")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="zcompile's others, in JSON: '{\"max_captures\": 2}'"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one row")
    parser.add_argument("--logs", help="write the output of every row into this folder")
    parser.add_argument(
        "--json", metavar="FILE", help="write what was measured here after every row, and what it was compared with"
    )
    options = parser.parse_args(arguments)
    for name, given, there in (("sizes", options.sizes, SIZES), ("rows", options.rows, PARTS)):
        if unknown := [each for each in given.split(",") if each not in there]:
            parser.error(f"--{name} has {', '.join(unknown)}; there are {', '.join(there)}")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended too
    wanted = rows_of(options)
    files = ",".join(filter(None, [options.measured, options.compare]))
    known = measured_before(files.split(",") if files else [], options.nproc, options.options)
    if not (options.compare or options.predict_only):
        measure(options, wanted, known)
    if options.measure_only:
        return 0
    machine = hardware(options.hardware or options.calibrate or "h200")
    rows = []
    for row in wanted:
        if not is_peer(row.system):
            mine = vars(row) | known.get(key(vars(row)), {})
            rows.append(compared(mine | predicted(mine, machine, options.nproc)))
    known |= {key(row): row for row in rows}
    write(options, known)
    print(f"{table(rows)}\n\n{summary(rows)}")
    for size in options.sizes.split(","):
        own = [r for r in known.values() if key(r) == (size, r["system"], SIZES[size].micro_batch, "prefetch")]
        own = [r for r in own if "step_ms" in r or "error" in r]
        if any(is_peer(r["system"]) for r in own):
            train_step.compare(own, options.nproc)
            print(f"\n{size}, measured\n\n{train_step.table(own)}")
    return int(not options.predict_only and not any("time_error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
