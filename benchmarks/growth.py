"""How a step grows: its time and memory over the rows of a micro-batch, and over the layers of the model.

python benchmarks/growth.py                                             1.1B, stage 3, two GPUs
python benchmarks/growth.py --nproc 1
python benchmarks/growth.py --device cpu --size tiny --backend eager --nproc 1 --steps 2 --rows 1,2 --layers 1,2

Beside what was measured stands the straight line that comes nearest to it, and by how much the measured differs.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import Launch, Row, write_rows


def off_the_line(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """By which share each value is above the straight line with the least squares."""
    slope, intercept = statistics.linear_regression(x, y)
    return [value / (intercept + slope * at) - 1 for at, value in zip(x, y, strict=True)]


def table(what: str, counts: Sequence[int], results: Sequence[dict[str, Any]]) -> str:
    """The results over one count, in Markdown."""
    measured = [(count, row) for count, row in zip(counts, results, strict=True) if "error" not in row]
    lines = [f"| {what} | step ms | off the line | alloc GiB | off the line |", "| --- | --- | --- | --- | --- |"]
    columns: list[list[float]] = []
    for key in ("step_ms", "allocated_gib"):
        values = [row.get(key) or 0.0 for _, row in measured]
        columns += [values, off_the_line([c for c, _ in measured], values) if len(values) > 1 and all(values) else []]
    for index, (count, _) in enumerate(measured):
        ms, ms_off, gib, gib_off = (column[index] if column else 0.0 for column in columns)
        lines.append(f"| {count} | {ms:.1f} | {ms_off:+.1%} | {gib:.2f} | {gib_off:+.1%} |")
    lines += [
        f"| {c} | {r['error'].replace('|', '/')} | | | |" for c, r in zip(counts, results, strict=True) if "error" in r
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.1B")
    parser.add_argument("--system", default="zc3")
    parser.add_argument("--rows", default="1,2,4,8", help="of a micro-batch")
    parser.add_argument("--layers", default="8,16,24,32")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one row")
    parser.add_argument("--json", help="write all results here, after every row")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended too
    base = Row(args.system, args.size, backend=args.backend, steps=args.steps)
    counts = {name: [int(n) for n in getattr(args, name).split(",")] for name in ("rows", "layers")}
    rows = [replace(base, micro_batch=n) for n in counts["rows"]] + [replace(base, layers=n) for n in counts["layers"]]
    everything: list[dict[str, Any]] = []
    for result in Launch(args.nproc, args.device, args.timeout).measure(rows):
        everything.append(result)
        if args.json:
            write_rows(args.json, everything)
    split = len(counts["rows"])
    print(f"{args.size}, {args.system}, {args.nproc} ranks\n\n{table('rows', counts['rows'], everything[:split])}")
    print(f"\n{table('layers', counts['layers'], everything[split:])}")
    return int(any("error" in row for row in everything))


if __name__ == "__main__":
    sys.exit(main())
