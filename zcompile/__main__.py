"""The command line: ``python -m zcompile doctor`` and ``python -m zcompile opt``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from zcompile import __version__, compat
from zcompile.errors import ZCompileError
from zcompile.passes.replay import opt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        arguments: those of the command line; None: of this process.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _doctor() if options.command == "doctor" else _opt(options.file, options.run, options.given)
    except (OSError, UnicodeDecodeError) as error:
        print(f"error: cannot read '{options.file}': {getattr(error, 'strerror', error)}", file=sys.stderr)
        return 1
    except ZCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m zcompile", description="A compiler for ZeRO data-parallel training.")
    parser.add_argument("--version", action="version", version=f"zcompile {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    commands.add_parser("doctor", help="check that zcompile can run here; exit code 1 if it cannot")
    replay = commands.add_parser(
        "opt",
        help="run passes on the text of a graph and print the result",
        description="Run passes on the text of a graph, such as a file that ZCOMPILE_DUMP wrote, and print the result.",
    )
    replay.add_argument("file", type=Path, help="graph text; - reads standard input")
    replay.add_argument("--run", required=True, metavar="SPEC", help="passes, such as 'bucket{mib=32},prefetch'")
    replay.add_argument(
        "--given",
        default="",
        metavar="FACTS",
        help="what holds already and is verified, such as 'params-gathered{stage=3}, grads-reduced{stage=3}'; "
        "without it, what the passes require is taken to hold",
    )
    return parser


# opt ------------------------------------------------------------------------------------------------------------------


def _opt(file: Path, spec: str, given: str) -> int:
    text = sys.stdin.read() if str(file) == "-" else file.read_text()
    print(opt(text, spec, given))
    return 0


# doctor ---------------------------------------------------------------------------------------------------------------


def _doctor() -> int:
    """Print what is here and what is wrong with it; 1 when zcompile cannot run."""
    print(f"zcompile  {__version__}")
    print(f"python    {platform.python_version()}")
    print(f"torch     {torch.__version__}")
    print(f"triton    {version('triton') if importlib.util.find_spec('triton') else 'none'}")
    print(f"devices   {', '.join(_devices())}")
    print(f"compiler  {_cpp_compiler() or 'none'}")
    for warning in _warnings():
        print(f"warning: {warning}")
    failures = compat.self_test()
    for name, problem in failures.items():
        print(f"failed: {name}: {problem}")
    count = len(compat.SELF_TESTS)
    if failures:
        print(
            f"{len(failures)} of {count} checks of torch's internals failed; use a torch version that zcompile is tested "
            f"with: {', '.join(compat.TESTED)}"
        )
        return 1
    print(f"all {count} checks of torch's internals passed")
    return 0


def _warnings() -> list[str]:
    """What does not keep zcompile from running, and yet may be a problem."""
    found = []
    if not is_tested(torch.__version__):
        found.append(f"torch {torch.__version__} is not among the tested versions: {', '.join(compat.TESTED)}")
    if _cpp_compiler() is None:
        found.append("no C++ compiler is found, which backend='inductor' needs; install g++, or pass backend='eager'")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        found.append("triton is not installed, which backend='inductor' needs on GPUs; install it")
    return found


def is_tested(torch_version: str) -> bool:
    """Whether a torch version such as ``2.13.0+cpu`` is among those that zcompile is tested with."""
    return ".".join(torch_version.split(".")[:2]) in compat.TESTED


def _devices() -> list[str]:
    """The CPU and each GPU, by name."""
    cpu = f"cpu ({torch.get_num_threads()} threads)"
    return [cpu, *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))]


def _cpp_compiler() -> str | None:
    """The path of the C++ compiler that Inductor would find."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++"]:
        if path := shutil.which(name):
            return path
    return None


if __name__ == "__main__":
    sys.exit(main())
