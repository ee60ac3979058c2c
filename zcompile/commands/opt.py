"""``python -m zcompile opt``: passes on the text of a graph."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from zcompile.errors import TextError
from zcompile.passes.replay import opt


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "opt",
        help="run passes on the text of a graph and print the result",
        description="Run passes on the text of a graph, such as a file that ZCOMPILE_DUMP wrote, and print the result.",
    )
    parser.add_argument("file", type=Path, help="graph text; - reads standard input")
    parser.add_argument(
        "--run", required=True, dest="passes", metavar="SPEC", help="passes, such as 'bucket{mib=32},prefetch'"
    )
    parser.add_argument(
        "--given",
        default="",
        metavar="FACTS",
        help="what holds already and is verified, such as 'params-gathered{stage=3}, grads-reduced{stage=3}'; "
        "without it, what the passes require is taken to hold",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the graph after the passes."""
    file: Path = options.file
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"cannot read '{file}': {getattr(error, 'strerror', None) or error}") from error
    print(opt(text, options.passes, options.given))
    return 0
