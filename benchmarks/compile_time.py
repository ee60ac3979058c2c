"""How compile time grows with depth: seconds of each stage for several numbers of layers, and ratios to the fewest.

python benchmarks/compile_time.py                          12, 24 and 48 layers, eager and inductor
python benchmarks/compile_time.py --layers 2,4 --backends eager
python benchmarks/compile_time.py --size 1.1B --device cuda --layers 16,48 --backends inductor
python benchmarks/compile_time.py --size gpt2 --device cuda --layers 8 --backends inductor     the model of causal.py

Each measurement is a process of its own with an empty compile cache; one rank simulates the pipeline of ``--ranks`` ranks,
so nothing is communicated. Lowering must not grow with depth, everything else at most linearly.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
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

PARTS = ("capture", "passes", "verify", "split", "lower", "total")


def timed(seconds: dict[str, float], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, with its time added to ``seconds``."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - begin

    return wrapper


def measure(layers: int, backend: str, size_name: str, device: str, ranks: int) -> dict[str, Any]:
    """Compile one model in this process; seconds by part. Beside the smallest size, under bf16."""
    import torch

    import zcompile
    from benchmarks import causal
    from benchmarks.llama import SIZES, Llama
    from zcompile import build, passes, scheduled, session
    from zcompile.config import Config

    torch.set_num_threads(1)
    seconds: dict[str, float] = defaultdict(float)
    session.capture = timed(seconds, "capture", session.capture)
    scheduled.split = timed(seconds, "split", scheduled.split)
    build._lower = timed(seconds, "lower", build._lower)
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
    seconds["passes"] = seconds["total"] - sum(seconds[part] for part in ("capture", "split", "verify", "lower"))
    graphs = next(iter(model._session._built.values())).graphs
    regions = [g for g in (graphs.forward, graphs.backward) if g is not None]
    return {
        "layers": layers,
        "backend": backend,
        "distinct_regions": sum(len(g.regions) for g in regions),
        "regions": sum(str(g).count(" = call ") for g in regions),
        **{part: seconds[part] for part in PARTS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--backends", default="eager,inductor")
    parser.add_argument("--size", default="tiny", help="of benchmarks/llama.py, with other numbers of layers, or gpt2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
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
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, __file__, "--one", "--layers", str(count), "--backends", backend]
                command += ["--size", args.size, "--device", args.device, "--ranks", str(args.ranks)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise SystemExit(f"{count} layers, {backend}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            rows.append(json.loads(lines[-1].removeprefix("RESULT ")))
        results += rows
        print(f"\n{backend}, {args.size}, seconds (ratio to {layers[0]} layers)\n")
        print("| layers | " + " | ".join(PARTS) + " | distinct/total regions |")
        print("|" + "---|" * (len(PARTS) + 2))
        for row in rows:
            cells = [f"{row[p]:.2f} ({row[p] / max(rows[0][p], 1e-9):.2f}x)" for p in PARTS]
            print(
                f"| {row['layers']} | " + " | ".join(cells) + f" | {row['distinct_regions']}/{row['regions']} |",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
