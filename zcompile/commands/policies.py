"""``python -m zcompile policies``: what scheduling policies are worth on any number of ranks, without running them."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from zcompile.commands.plan import add_model, measured_times
from zcompile.config import Config, dtype_name
from zcompile.errors import PlanError
from zcompile.planner.hardware import hardware, known_hardware
from zcompile.planner.models import load_model
from zcompile.planner.policies import NAMED, Result, compare, find_policy
from zcompile.planner.trace import check_world_size, trace_with

_COLUMNS = ("ranks", "policy", "step ms", "exposed ms", "peak GiB", "fits", "over bound")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "policies",
        help="compare scheduling policies on any numbers of ranks, without running them",
        description="Schedule one captured step with several policies on several numbers of ranks, verify each graph, simulate it, "
        "and print what it takes. No GPU and no process group needed.",
    )
    add_model(parser)
    parser.add_argument("--world-size", default="8", metavar="N,N,...", help="numbers of ranks (default: 8)")
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage, 0 to 3 (default: 3)")
    parser.add_argument(
        "--hardware", default="h200", help=f"{', '.join(known_hardware())}, or a JSON file (default: h200)"
    )
    parser.add_argument(
        "--policies",
        default=",".join(NAMED),
        metavar="P,P,...",
        help=f"of {', '.join(NAMED)}, specs joined by + (keep{{units=2}}+prefetch{{lookahead=2}}), ./file.py:Class (default: all names)",
    )
    parser.add_argument("--layers", type=int, help="so many layers of the model instead of all")
    parser.add_argument(
        "--optimal",
        action="store_true",
        help="search for the best schedule as well; for few layers, such as --layers 2",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line for each policy on each number of ranks."""
    machine = hardware(options.hardware)
    world_sizes = _world_sizes(options.world_size)
    policies = [find_policy(text) for text in _split(options.policies)]
    config = Config(stage=options.stage, precision=dtype_name(options.precision), policy="none")
    model = load_model(options.model, options.micro_batch, options.seq, options.layers)
    begin = time.process_time()
    traced = trace_with(model.module, model.inputs, config, world_sizes[0], for_gpu=not machine.host.blocks)
    trace_s = time.process_time() - begin
    results: list[Result] = []
    width = max(24, *(len(_short(policy.name)) for policy in policies))
    if not options.json:
        print(
            f"{options.model} on {machine.name}, stage {options.stage}, {options.micro_batch} rows a rank", flush=True
        )
        print(_row([*_COLUMNS, *(["over optimum"] if options.optimal else [])], width), flush=True)
    steps = (traced.unscheduled(n) for n in world_sizes)
    times = measured_times(options.measured)
    for result in compare(steps, policies, machine, optimal=options.optimal, measured=times):
        results.append(result)
        if not options.json:
            print(_row(_cells(result), width), flush=True)
    if options.json:
        print(json.dumps([result.as_dict() for result in results], indent=1))
        return 0
    found = {(r.world_size, r.spec): None for r in results if r.policy == "auto"}
    for ranks, spec in found:
        print(f"auto on {ranks} ranks: {spec}")
    compare_s = time.process_time() - begin - trace_s
    print(f"seconds of one core: {trace_s:.0f} to trace the step, {compare_s:.0f} to schedule, verify and simulate it")
    return 0


def _world_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise PlanError(f"world size is '{text}'; pass numbers separated by commas, such as 8,64,512") from None
    for size in sizes:
        check_world_size(size)
    return sizes


def _split(text: str) -> list[str]:
    """Policies at commas outside of braces."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _cells(r: Result) -> list[str]:
    cells = [
        str(r.world_size),
        _short(r.policy),
        f"{r.step_us / 1000:.2f}",
        f"{r.exposed_us / 1000:.2f}",
        f"{r.peak_bytes / 2**30:.1f}",
        "yes" if r.fits else "no",
        f"{r.gap:.1%}",
    ]
    return cells if r.optimal_us is None else [*cells, f"{r.step_us / r.optimal_us - 1:.1%}"]


def _short(policy: str) -> str:
    """A policy without the folder of its file."""
    return policy.rpartition("/")[2]


def _row(cells: list[str], width: int) -> str:
    return f"{cells[0]:>6}  {cells[1]:{width}}" + "".join(f"{cell:>13}" for cell in cells[2:])
