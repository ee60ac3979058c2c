"""Training what does not fit: offloading and budgets of zcompile beside FSDP2's CPUOffloadPolicy and DeepSpeed's offload_optimizer.

python benchmarks/offload.py                         two GPUs: 8B, sequence 4096, 40 GiB a rank
python benchmarks/offload.py --nproc 1 --layers 14   one GPU with as much of a model as a rank of two has of 8B
python benchmarks/offload.py --nproc 1 --largest zc3:56,fsdp2-c:26,ds3:26 --host 100
python benchmarks/offload.py --device cpu --size tiny --budget 64MiB --backend eager --steps 2 --only zc3,fsdp2

Blocks are computed again in backward in all systems. ``--largest`` trains each system with so many layers, and then with a few more
until it fails or its host memory is over ``--host`` GiB: peers with everything on the host, zcompile with what a budget chooses.
DeepSpeed is an optional install.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.llama import SIZES
from benchmarks.rows import Launch, Row, write_rows
from benchmarks.systems import TITLES

#: further layers of a system that fitted
STEP_LAYERS = 4
#: of the device, with ``--largest``
MOST = 0.9
COLUMNS = (
    ("B parameters", "num_params", 1e-9, "{:.1f}"),
    ("step ms", "step_ms", 1.0, "{:,.0f}"),
    ("tokens/s", "tokens_per_s", 1.0, "{:,.0f}"),
    ("alloc GiB", "allocated_gib", 1.0, "{:.1f}"),
    ("reserved GiB", "reserved_gib", 1.0, "{:.1f}"),
    ("host GiB", "host_gib", 1.0, "{:.1f}"),
    ("first loss", "first_loss", 1.0, "{:.3f}"),
    ("last loss", "loss", 1.0, "{:.3f}"),
)


def rows_of(args: argparse.Namespace) -> list[Row]:
    """The systems with what they can put on the host."""
    budget = args.budget or "40GiB"
    everything = {
        "fsdp2-c": [{"offload": "optimizer+parameters"}],
        "fsdp2": [{"offload": "optimizer+parameters"}],
        "ds3": [{"offload": "optimizer"}, {"offload": "optimizer+parameters"}],
        "zc3": [{"memory_budget": budget}, {"offload": "optimizer"}, {"offload": "optimizer{step=cpu}"}],
    }
    same: dict[str, Any] = {"size": args.size, "layers": args.layers, "backend": args.backend, "steps": args.steps}
    return [
        Row(
            system,
            options=options,
            recompute=None if "memory_budget" in options else "full",
            card_gib=args.card if "memory_budget" in options else None,
            **same,
        )
        for system in args.only.split(",")
        for options in everything[system]
    ]


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    options = row["options"].get("memory_budget") or row["options"].get("offload") or "–"
    cells = [TITLES[row["system"]], str(options), str(row["layers"] or SIZES[row["size"]].layers)]
    if "error" in row:
        return f"| {' | '.join(cells)} | {row['error'].replace('|', '/')} {'| ' * len(COLUMNS)}"
    cells += ["–" if row.get(k) is None else form.format(row[k] * unit) for _, k, unit, form in COLUMNS]
    return f"| {' | '.join(cells)} |"


def larger(args: argparse.Namespace, launch: Launch) -> Iterator[dict[str, Any]]:
    """Results of ever larger models, of each system until it fails."""
    for given in args.largest.split(","):
        system, _, layers = given.partition(":")
        count = int(layers)
        while True:
            same: dict[str, Any] = {"layers": count, "backend": args.backend, "steps": args.steps}
            if system.startswith("zc"):
                row = Row(system, args.size, options={"memory_budget": args.budget or MOST}, **same)
            else:
                row = Row(system, args.size, recompute="full", options={"offload": "optimizer+parameters"}, **same)
            (result,) = launch.measure([row])
            yield result
            if "error" in result or result["host_gib"] > args.host:
                break
            count += STEP_LAYERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="8B", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--layers", type=int, help="of the model; default: the size's own")
    parser.add_argument(
        "--budget", help=f"zcompile's memory_budget; default: 40GiB, {MOST} of the device with --largest"
    )
    parser.add_argument(
        "--card", type=float, help="GiB that a row with a budget may reserve, as a GPU that has no more"
    )
    parser.add_argument("--only", default="zc3,fsdp2-c,ds3", help="systems")
    parser.add_argument("--largest", help="systems and layers to begin with, such as zc3:56,fsdp2-c:26")
    parser.add_argument("--host", type=float, default=100.0, help="GiB of the host that --largest may take")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--timeout", type=float, default=200.0, help="seconds for one row")
    parser.add_argument("--json", help="write all results here, after every row")
    parser.add_argument("--logs", help="write the output of every row into this folder")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended too
    if args.largest:
        os.environ["ZCOMPILE_HOST_BYTES"] = str(int(args.host * 2**30 / args.nproc))
    launch = Launch(args.nproc, args.device, args.timeout, args.logs)
    print(
        f"| system | option | layers | {' | '.join(title for title, *_ in COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}"
    )
    everything: list[dict[str, Any]] = []
    for row in larger(args, launch) if args.largest else launch.measure(rows_of(args)):
        everything.append(row)
        print(line(row), flush=True)
        if args.json:
            write_rows(args.json, everything)
    for row in everything:
        if row.get("decision"):
            print(f"\n{row['decision']}")
    return int(all("error" in row for row in everything))


if __name__ == "__main__":
    sys.exit(main())
