"""How compile time grows with depth: seconds of each stage for several numbers of layers, and ratios to the fewest.

python benchmarks/compile_time.py                          12, 24 and 48 layers, eager and inductor
python benchmarks/compile_time.py --layers 2,4 --backends eager
python benchmarks/compile_time.py --size 1.1B --device cuda --layers 16,48 --backends inductor
python benchmarks/compile_time.py --size gpt2 --device cuda --layers 8 --backends inductor     the model of causal.py
python benchmarks/compile_time.py --layers 24 --warm 3     also three later starts, which find what the first has kept

Each measurement is a process of its own with an empty compile cache; one rank simulates the pipeline of ``--ranks`` ranks,
so nothing is communicated. Lowering must not grow with depth, everything else at most linearly. ``user code`` is the fake run and
Dynamo, which run at every start; ``capture`` is autograd's trace and what follows until there is a graph, ``store`` hashing,
reading and writing what is kept. ``--warm`` shows the median of the later starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PARTS = ("user code", "capture", "passes", "verify", "split", "lower", "store", "total")


#: seconds of the timed calls that the present one has made, innermost last
_inside: list[float] = [0.0]


def timed(seconds: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, with its time added to ``seconds``, without that of timed calls inside."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _inside.append(0.0)
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            elapsed = time.perf_counter() - begin
            seconds[name] += elapsed - _inside.pop()
            _inside[-1] += elapsed

    return wrapper


def measure(layers: int, backend: str, size_name: str, device: str, ranks: int) -> dict[str, Any]:
    """Compile one model in this process; seconds by part. Beside the smallest size, under bf16."""
    import torch

    import zcompile
    from benchmarks import causal
    from benchmarks.llama import SIZES, Llama
    from zcompile import build, passes, scheduled, session
    from zcompile.capture import joint
    from zcompile.config import Config
    from zcompile.ir import pickled

    torch.set_num_threads(1)
    seconds: dict[str, float] = defaultdict(float)
    session.capture = timed(seconds, "capture", session.capture)
    for name in ("_plan_outputs", "_dynamo"):
        setattr(joint, name, timed(seconds, "user code", getattr(joint, name)))
    for owner, name in ((joint, "_key"), (pickled, "find"), (pickled, "keep")):
        setattr(owner, name, timed(seconds, "store", getattr(owner, name)))
    scheduled.split = timed(seconds, "split", scheduled.split)
    build._bodies = timed(seconds, "lower", build._bodies)
    build._runnable = timed(seconds, "lower", build._runnable)
    precision = None if size_name == "tiny" else "bf16"
    config = Config(stage=3, precision=precision)
    pipeline = passes.default_pipeline(config, size=ranks) if ranks > 1 else None
    with torch.device(device):
        if size_name == "gpt2":
            plain, shape = causal.gpt2(layers, 2048, 2048), (4, 2048)
        else:
            size = dataclasses.replace(SIZES[size_name], layers=layers)
            plain, shape = Llama(size), (size.micro_batch, size.seq)
        model = zcompile.compile(plain, backend=backend, precision=precision, pipeline=pipeline)
    verifier = model._session._verifier
    verifier.verify = timed(seconds, "verify", verifier.verify)
    tokens = torch.zeros(shape, dtype=torch.long, device=device)

    class Done(Exception):
        """Compiled; running the program of several ranks on one makes no sense."""

    def stop(*args: Any) -> None:
        raise Done

    model._session.runner.forward = stop
    begin = time.perf_counter()
    try:
        model(tokens, labels=tokens)
    except Done:
        pass
    seconds["total"] = time.perf_counter() - begin
    seconds["passes"] = seconds["total"] - sum(seconds[part] for part in PARTS if part not in ("passes", "total"))
    graphs = next(iter(model._session._built.values())).graphs
    regions = [g for g in (graphs.forward, graphs.backward) if g is not None]
    return {
        "layers": layers,
        "backend": backend,
        "distinct_regions": sum(len(g.regions) for g in regions),
        "regions": sum(str(g).count(" = call ") for g in regions),
        **{part: seconds[part] for part in PARTS},
    }


def start(layers: int, backend: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own, whose caches are in a folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    environment.pop("ZCOMPILE_CACHE_DIR", None)
    command = [sys.executable, __file__, "--one", "--layers", str(layers), "--backends", backend]
    command += ["--size", args.size, "--device", args.device, "--ranks", str(args.ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{layers} layers, {backend}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def show_growth(rows: list[dict[str, Any]]) -> None:
    """A line for each number of layers."""
    print("| layers | " + " | ".join(PARTS) + " | distinct/total regions |")
    print("|" + "---|" * (len(PARTS) + 2))
    for row in rows:
        cells = [f"{row[p]:.2f} ({row[p] / max(rows[0][p], 1e-9):.2f}x)" for p in PARTS]
        regions = f"{row['distinct_regions']}/{row['regions']}"
        print(f"| {row['layers']} | {' | '.join(cells)} | {regions} |", flush=True)


def show_starts(rows: list[dict[str, Any]]) -> None:
    """A line for the first start, and one for the median of the others."""
    cold = rows[0]
    warm = {part: statistics.median(row[part] for row in rows[1:]) for part in PARTS}
    print(f"| {cold['layers']} layers | " + " | ".join(PARTS) + " |")
    print("|" + "---|" * (len(PARTS) + 1))
    for name, row in (("first start", cold), ("later start", warm)):
        print(f"| {name} | " + " | ".join(f"{row[p]:.2f}" for p in PARTS) + " |")
    print(f"\na later start takes {100 * warm['total'] / cold['total']:.0f} % of the first", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--backends", default="eager,inductor")
    parser.add_argument("--size", default="tiny", help="of benchmarks/llama.py, with other numbers of layers, or gpt2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warm", type=int, default=0, help="also so many later starts with the caches of the first")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    args = parser.parse_args()
    layers = [int(n) for n in args.layers.split(",")]
    if args.one:
        print("RESULT " + json.dumps(measure(layers[0], args.backends, args.size, args.device, args.ranks)))
        return
    results = []
    for backend in args.backends.split(","):
        rows = []
        for count in layers:
            with tempfile.TemporaryDirectory() as folder:
                starts = [start(count, backend, folder, args) for _ in range(1 + args.warm)]
            if args.warm:
                print(f"\n{backend}, {args.size}, seconds\n")
                show_starts(starts)
            rows.append(starts[0])
            results += starts
        if not args.warm:
            print(f"\n{backend}, {args.size}, seconds (ratio to {layers[0]} layers)\n")
            show_growth(rows)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
