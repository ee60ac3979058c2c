"""Training steps of zcompile and of its peers, side by side: a table and JSON.

python benchmarks/train_step.py                         all sizes and systems, two GPUs
python benchmarks/train_step.py --quick                 two sizes, the systems that matter most
python benchmarks/train_step.py --sizes 8B --only single,fsdp2-c,zc3 --json out.json
python benchmarks/train_step.py --device cpu --sizes tiny --backend eager --steps 3

All rows are measured by the same processes, one after the other; with --fresh each has processes and an empty compile cache of
its own, and only then does the table say how long the first step took. Times are medians over steps that follow each other
without a wait; ``host`` is how long the host takes to issue a step when the device is idle. The limit's whole step adds the
optimizer's bytes at the copy bandwidth of the same call; ``single-each`` says whether another device is slower, which no step of all
can beat. Peaks leave out what an earlier row left over, which is shown.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import Launch, Row, write_rows

SYSTEMS = ("single", "single-each", "ddp-c", "fsdp2", "fsdp2-c", "fsdp2-best", "zc0", "zc1", "zc2", "zc3")
#: ways to compile for one device alone, to be compared with --nproc 1
OF_ONE = ("single-whole", "single-zc")
QUICK_SYSTEMS = ("single", "fsdp2-c", "ddp-c", "zc3")
QUICK_SIZES = ("1.1B", "0.19B")
GPU_SIZES = ("0.19B", "1.1B", "8B")

#: bytes that an update of one float32 parameter moves, at least: four read, three written
OPTIMIZER_BYTES = 28

#: systems that hold the whole float32 training state on every rank do not fit at this size
TOO_LARGE = {"8B": ("ddp-c", "zc0")}

COLUMNS = (
    ("system", "", "{}"),
    ("fwd+bwd ms", "forward_backward_ms", "{:.1f}"),
    ("step ms", "step_ms", "{:.1f}"),
    ("vs limit", "vs_limit", "{:.2f}x"),
    ("host ms", "host_ms", "{:.1f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("TFLOP/s", "tflops", "{:.0f}"),
    ("alloc GiB", "allocated_gib", "{:.1f}"),
    ("reserved GiB", "reserved_gib", "{:.1f}"),
    ("first step s", "cold_step_s", "{:.1f}"),
    ("left over GiB", "left_over_gib", "{:.2f}"),
    ("regions", "region_text", "{}"),
    ("replayed", "replays", "{}"),
    ("loss", "loss", "{:.3f}"),
)


def compare(rows: list[dict[str, Any]], nproc: int) -> None:
    """Complete the rows of one size: the limit's whole step, and every step in units of it."""
    limit = next((r for r in rows if r["system"] == "single" and "error" not in r), None)
    if limit is not None:
        local_params = limit["num_params"] / nproc
        floor_ms = local_params * OPTIMIZER_BYTES / limit["copy_bytes_per_s"] * 1e3
        limit["optimizer_floor_ms"] = floor_ms
        limit["step_ms"] = limit["forward_backward_ms"] + floor_ms
    for row in rows:
        if "error" not in row:
            row["region_text"] = f"{row['distinct_regions']}/{row['regions']}" if "regions" in row else None
            row["cold_step_s"] = None if row.get("warm") else row["first_step_s"]
            row["vs_limit"] = row["step_ms"] / limit["step_ms"] if limit is not None else None


def said(row: dict[str, Any]) -> str:
    """What a row came to, in a few words; on a GPU with what the device held before it, beside torch's allocator."""
    text = row["error"] if "error" in row else f"{row['step_ms']:.1f} ms"
    outside = f", {row['outside_gib']:.1f} GiB outside of torch before" if "outside_gib" in row else ""
    return f"{text} ({row['seconds']:.0f} s{outside})"


def table(rows: list[dict[str, Any]]) -> str:
    """One size's rows as a Markdown table."""
    cells = [[title for title, _, _ in COLUMNS]]
    for row in rows:
        if "error" in row:
            cells.append([row["system"], row["error"].replace("|", "/"), *[""] * (len(COLUMNS) - 2)])
            continue
        values = [(row.get(key) if key else row["system"], form) for _, key, form in COLUMNS]
        cells.append(["–" if value is None else form.format(value) for value, form in values])
    widths = [max(len(line[i]) for line in cells if i != 1 or len(line[1]) < 20) for i in range(len(COLUMNS))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"of tiny, {', '.join(GPU_SIZES)}; separated by commas")
    parser.add_argument("--only", help=f"systems, of {', '.join(SYSTEMS)}, and with --nproc 1 {', '.join(OF_ONE)}")
    parser.add_argument("--stages", help="zcompile's stages, such as 0,3; the peers stay")
    parser.add_argument(
        "--quick", action="store_true", help=f"sizes {', '.join(QUICK_SIZES)}, systems {', '.join(QUICK_SYSTEMS)}"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"), help="of compute; masters are fp32")
    parser.add_argument(
        "--reduce", default="fp32", choices=("fp32", "bf16"), help="of gradients, FSDP2's and zcompile's"
    )
    parser.add_argument("--clip", type=float, help="clip gradients to this norm in every step; default: no clipping")
    parser.add_argument("--policy", help="zcompile's policy; default: its own")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="zcompile's others, in JSON: '{\"max_captures\": 2}'"
    )
    parser.add_argument("--micro-batch", type=int, help="rows of a rank; default: the size's own")
    parser.add_argument("--backend", default="inductor", help="of every compiled system; eager leaves compilation out")
    parser.add_argument("--fresh", action="store_true", help="new processes and an empty compile cache for every row")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one system at one size")
    parser.add_argument("--json", help="write all results here, after every system")
    parser.add_argument("--logs", help="write the output of every system into this folder")
    return parser.parse_args()


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended too
    sizes = args.sizes.split(",") if args.sizes else list(QUICK_SIZES if args.quick else GPU_SIZES)
    systems = args.only.split(",") if args.only else list(QUICK_SYSTEMS if args.quick else SYSTEMS)
    if args.stages is not None:
        stages = [f"zc{stage}" for stage in args.stages.split(",")]
        systems = [s for s in systems if not s.startswith("zc")] + stages
    known = SYSTEMS + OF_ONE * (args.nproc == 1)
    unknown = [s for s in systems if s not in known]
    if unknown:
        raise SystemExit(f"unknown systems {', '.join(unknown)}; there are {', '.join(known)}")
    names = ("micro_batch", "policy", "clip", "dtype", "reduce", "backend", "steps", "options")
    options = {n: getattr(args, n) for n in names}
    chosen = not args.only and args.stages is None
    wanted = [
        Row(system, size, **options)
        for size in sizes
        for system in systems
        if not (chosen and system in TOO_LARGE.get(size, ()))
    ]
    launch = Launch(args.nproc, args.device, args.timeout, args.logs, args.fresh)
    everything: list[dict[str, Any]] = []
    for index, row in enumerate(launch.measure(wanted)):
        everything.append(row)
        size = row["size"]
        rows = [r for r in everything if r["size"] == size]
        compare(rows, args.nproc)
        print(f"{wanted[index]}: {said(row)}", file=sys.stderr, flush=True)
        if args.json:
            write_rows(args.json, everything)
        if index + 1 == len(wanted) or wanted[index + 1].size != size:
            print(f"\n{size}, {args.nproc} ranks, {args.dtype}\n\n{table(rows)}\n", flush=True)
    return int(all("error" in row for row in everything))


if __name__ == "__main__":
    sys.exit(main())
