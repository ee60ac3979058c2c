"""``python -m zcompile memory``: model states of each ZeRO stage, from the number of parameters alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zcompile.planner.states import OPTIMIZERS, ByteCosts, table

#: bytes for each parameter by name: of the copy that is computed with, the gradient, and what only the optimizer reads
PRESETS = {
    "paper": ByteCosts(2, 2, 12),  # ZeRO (Rajbhandari et al., 2020), figure 1: fp16 with fp32 masters and Adam
    "fp32-gradients": ByteCosts(2, 4, 12),  # Megatron's distributed optimizer is 6 + 12/d of this at stage 1
    "fp32": ByteCosts(4, 4, 8),
    "no-masters": ByteCosts(2, 2, 4),  # bf16 parameters and states, updated in place
}


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "memory",
        help="bytes of model states on a rank at each ZeRO stage",
        description="Bytes of parameters, gradients and optimizer states on one rank at ZeRO stages 0 to 3: as the ZeRO paper "
        "counts them, and as zcompile stores them. For activations, buffers and time use the plan command.",
    )
    parser.add_argument("--params", type=float, required=True, help="number of parameters, such as 7.5e9")
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument(
        "--bytes", choices=PRESETS, default="paper", help="bytes for each parameter (default: paper, 2 + 2 + 12)"
    )
    for name in ("parameter", "gradient", "optimizer"):
        parser.add_argument(f"--{name}-bytes", type=float, metavar="BYTES", help=f"other bytes for the {name}")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="zcompile's compute dtype"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="zcompile's optimizer states")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    preset = PRESETS[options.bytes]
    costs = ByteCosts(
        *(
            getattr(preset, name) if (given := getattr(options, f"{name}_bytes")) is None else given
            for name in ("parameter", "gradient", "optimizer")
        )
    )
    precision = None if options.precision == "fp32" else options.precision
    rows = table(options.params, options.world_size, costs, precision=precision, optimizer=options.optimizer)
    if options.json:
        print(json.dumps({"params": options.params, "world_size": options.world_size, "stages": rows}, indent=1))
        return 0
    print(
        f"model states on each of {options.world_size} ranks, {options.params:g} parameters, in GB of 10^9 bytes\n"
        f"ZeRO paper: {costs.parameter:g} + {costs.gradient:g} + {costs.optimizer:g} bytes a parameter; "
        f"zcompile: {options.precision} compute, fp32 masters, {options.optimizer}\n"
    )
    print(f"{'stage':6}{'ZeRO paper':>12}  {'formula':28}{'zcompile':>12}  formula")
    for row in rows:
        paper, own = row["bytes"] / 1e9, row["zcompile_bytes"] / 1e9
        print(f"{row['stage']:<6}{paper:>12.1f}  {row['formula']:28}{own:>12.1f}  {row['zcompile_formula']}")
    return 0
