"""The command line: ``python -m zcompile``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zcompile import __version__
from zcompile.commands import doctor, memory, opt, plan, policies
from zcompile.errors import ZCompileError

COMMANDS = (plan, memory, policies, opt, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        arguments: those of the command line; None: of this process.
    """
    parser = argparse.ArgumentParser("python -m zcompile", description="A compiler for ZeRO data-parallel training.")
    parser.add_argument("--version", action="version", version=f"zcompile {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except ZCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
