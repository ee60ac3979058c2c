"""``python -m zcompile doctor``: what is here, and whether zcompile can run on it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zcompile import __version__, compat
from zcompile.errors import PlanError
from zcompile.planner.calibrate import calibrate

#: seconds that ranks of a calibration wait for each other
CALIBRATION_TIMEOUT = timedelta(seconds=120)


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="check that zcompile can run here; exit code 1 if it cannot")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine and write FILE, which --hardware and zcompile.plan take; under torchrun, collectives as well",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is here and what is wrong with it; 1 when zcompile cannot run."""
    if options.calibrate is not None:
        return _calibrate(options.calibrate)
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


def _calibrate(path: Path) -> int:
    """Measure this machine, on every rank that was started, and write its description on rank 0."""
    on_gpu = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise PlanError(f"file '{path}' cannot be written: it is a folder, or its folder is not there")
    if on_gpu:
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=CALIBRATION_TIMEOUT)
    try:
        found = calibrate(device, path.stem)
    finally:
        if several:
            dist.destroy_process_group()
    if rank == 0:
        try:
            found.save(path)
        except OSError as error:
            raise PlanError(f"file '{path}' cannot be written: {error.strerror}") from error
        rate, bandwidth = max(found.peak_flops.values()) / 1e12, found.memory_bytes_per_s / 1e9
        print(f"{path}: {rate:.2f} TFLOP/s, memory {bandwidth:.1f} GB/s, links {found.node.bytes_per_s / 1e9:.1f} GB/s")
        print(found.sources)
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
