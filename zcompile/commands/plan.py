"""``python -m zcompile plan``: memory and time of a step, before anything runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from zcompile.config import RECOMPUTE, Config, dtype_name
from zcompile.errors import PlanError
from zcompile.planner.hardware import hardware, known_hardware
from zcompile.planner.models import BUILT_IN, load_model
from zcompile.planner.request import Request
from zcompile.planner.states import OPTIMIZERS

#: a budget of less was meant in other units
FEWEST_BYTES = 1 << 20


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="memory and time of a training step on any number of ranks, before it runs",
        description="What a training step takes on each rank, from the graphs that would run: no GPU and no process group needed.",
    )
    add_model(parser)
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument("--stage", type=int, help="ZeRO stage, 0 to 3 (default: 3)")
    parser.add_argument("--policy", metavar="SPEC", help="schedule passes (default: prefetch)")
    parser.add_argument(
        "--offload",
        metavar="WHAT",
        help="activations, optimizer, parameters, or several joined by + (default: nothing)",
    )
    parser.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="choose what is not given of stage, policy, offload, recompute and loss chunk, so that the tensors of a rank keep this at "
        "the least time: 40GiB, or a share of the device such as 0.8",
    )
    parser.add_argument(
        "--recompute",
        metavar=f"{{{','.join((*RECOMPUTE, 'none'))}}}",
        help="what is computed again in backward (default: nothing dear)",
    )
    parser.add_argument(
        "--loss-chunk",
        metavar="SIZE",
        help="auto, none, or the most that a piece of logits takes: 64MiB (default: auto on GPUs)",
    )
    parser.add_argument(
        "--hardware", default="h200", help=f"{', '.join(known_hardware())}, or a JSON file (default: h200)"
    )
    parser.add_argument(
        "--gradient-accumulation-steps",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches to an update: plan the window of them (default: 1)",
    )
    parser.add_argument(
        "--accumulate-dtype",
        metavar="DTYPE",
        help="fp32 adds gradients up in it over a window (default: their own dtype)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--no-advice", action="store_true", help="do not plan changes")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model is trained on what."""
    parser.add_argument(
        "--model", required=True, help=f"{', '.join(BUILT_IN)}, a Hugging Face config.json, or module:factory"
    )
    parser.add_argument("--micro-batch", type=int, default=1, help="rows of a rank (default: 1)")
    parser.add_argument("--seq", type=int, help="tokens in a row (default: 2048, or as many as the model can)")
    parser.add_argument("--precision", help="bf16 or fp16 with fp32 masters (default: the model's own dtypes)")
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="take times of regions from a profile of this model: what profile.to_json(FILE) wrote",
    )


def measured_times(path: Path | None) -> dict[str, float] | None:
    """The times of regions in a profile's JSON.

    Raises:
        PlanError: a file that is not there, or is no profile.
    """
    if path is None:
        return None
    try:
        times = json.loads(path.read_text())["region_times"]
        return {str(key): float(us) for key, us in times.items()}
    except OSError as error:
        raise PlanError(f"profile '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"file '{path}' has no region_times; pass what profile.to_json(path) wrote") from error


def _size(text: str | None) -> str | float | None:
    """A budget as it is typed: a share and a number of bytes are numbers.

    Raises:
        PlanError: so few bytes that a unit was forgotten.
    """
    for kind in (int, float):
        try:
            given = None if text is None else kind(text)
        except ValueError:
            continue
        if isinstance(given, int) and 1 < given < FEWEST_BYTES:
            raise PlanError(f"--memory-budget is {given} bytes; with a unit it is {given}GiB or {given}MiB")
        return given
    return text


def run(options: argparse.Namespace) -> int:
    """Print the plan, and write what was asked for."""
    machine = hardware(options.hardware)
    config = Config.choosing(
        _size(options.memory_budget),
        stage=options.stage,
        policy=options.policy,
        recompute=options.recompute,
        loss_chunk=options.loss_chunk,
        offload=options.offload,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        accumulate_dtype=dtype_name(options.accumulate_dtype),
        precision=dtype_name(options.precision),
        verify="fast",
    )
    times = measured_times(options.measured)
    advises = not options.no_advice and options.memory_budget is None
    # on a terminal alone; a large model takes a minute
    with Console(stderr=True).status(f"planning {options.model}{' and what could make it better' * advises} ..."):
        model = load_model(options.model, options.micro_batch, options.seq)
        request = Request(model.name, model.module, model.inputs, machine, options.optimizer, model.notes, times)
        plan = request.plan(config, options.world_size, advise=not options.no_advice)
    print(plan.to_json() if options.json else plan)
    try:
        if options.html is not None:
            plan.to_html(options.html)
        if options.trace is not None:
            plan.to_trace(options.trace)
    except OSError as error:
        raise PlanError(f"'{error.filename}' cannot be written: {error.strerror}") from error
    return 0
