"""How long planning takes and how much memory: ``python benchmarks/plan_time.py [llama3-8b llama3-70b] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

#: name, tokens in a row, ranks
CASES = {"gpt2": (1024, 8), "llama3-8b": (4096, 8), "llama3-70b": (4096, 64)}


def measure(name: str) -> dict[str, object]:
    """Plan one model in this process, without advice; seconds and the process's largest memory."""
    from zcompile.config import Config
    from zcompile.planner.hardware import hardware
    from zcompile.planner.models import load_model
    from zcompile.planner.request import Request

    seq, world = CASES[name]
    wall, cpu = time.monotonic(), time.process_time()
    model = load_model(name, 1, seq)
    request = Request(name, model.module, model.inputs, hardware("h200"))
    plan = request.plan(Config(precision="bf16", verify="fast"), world, advise=False)
    return {
        "model": name,
        "ranks": world,
        "seconds": round(time.monotonic() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "load": round(os.getloadavg()[0], 1),
        "largest_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "peak_gib": round(plan.memory.peak_bytes / 2**30, 2),
        "step_ms": round(plan.step_us / 1000, 1),
        "fits": plan.fits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["llama3-8b", "llama3-70b"], help=", ".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in CASES]:
        parser.error(f"model '{unknown[0]}' is not among {', '.join(CASES)}")
    if options.here:
        print(json.dumps(measure(options.models[0])))
        return
    rows = []
    for name in options.models:  # a process each: memory is that of one plan
        command = [sys.executable, __file__, name, "--here"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(shown.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
