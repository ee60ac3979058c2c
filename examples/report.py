"""What a training run shows: a progress bar and the bytes that a rank holds."""

import resource
import sys
import time
from types import TracebackType
from typing import Any, Self

import rich.progress
import torch
from rich.console import Console
from rich.table import Table

MIB = 2**20
KINDS = ("parameter", "gradient", "optimizer")


def peak_memory_mib(device: torch.device) -> float:
    """Peak of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


class Progress:
    """A bar with loss, tokens/s and memory; where there is no terminal, a line every ``every`` steps."""

    def __init__(self, steps: int, tokens_per_step: int, device: torch.device, *, every: int, show: bool) -> None:
        self.steps, self.tokens_per_step, self.device, self.every = steps, tokens_per_step, device, every
        self.console = Console(quiet=not show)
        columns = ("{task.completed}/{task.total}", rich.progress.BarColumn(), "{task.description}")
        self.bar = rich.progress.Progress(*columns, rich.progress.TimeElapsedColumn(), console=self.console)
        self.task = self.bar.add_task("first step: capture and compile", total=steps)
        self.tokens_per_s = 0.0  # without the first step, which compiles
        self.started = time.perf_counter()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def show(self, step: int, loss: float) -> None:
        """Tell that ``step`` (from 0) is done."""
        if step == 0:
            self.started = time.perf_counter()
        else:
            self.tokens_per_s = self.tokens_per_step * step / (time.perf_counter() - self.started)
        shown = f"loss {loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  {peak_memory_mib(self.device):,.0f} MiB peak"
        self.bar.update(self.task, completed=step + 1, description=shown)
        if not self.console.is_terminal and (step % self.every == 0 or step + 1 == self.steps):
            self.console.print(f"step {step + 1:>5}/{self.steps}  {shown}", highlight=False)


def held_bytes(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes (this rank, unsharded) of each kind of training state, from ``model.report(optimizer).to_dict()``."""
    return {kind: (report[f"{kind}_bytes"], report[f"{kind}_bytes_total"]) for kind in KINDS}


def total_bytes(held: dict[str, tuple[int, int]]) -> dict[str, int]:
    """The sums over all kinds, as the final JSON line has them."""
    bytes_per_rank, bytes_unsharded = (sum(sizes) for sizes in zip(*held.values(), strict=True))
    return {"bytes_per_rank": bytes_per_rank, "bytes_unsharded": bytes_unsharded}


def print_summary(console: Console, pipeline: str, held: dict[str, tuple[int, int]], text: str) -> None:
    """The pipeline that ran, what one rank holds against the unsharded total, and the generated text."""
    console.print(f"pipeline: {pipeline}", markup=False, highlight=False)
    table = Table("bytes of", "a rank", "unsharded", "ratio", title="training state")
    for kind, (local, whole) in held.items():
        table.add_row(kind, f"{local:,}", f"{whole:,}", f"{local / max(whole, 1):.3f}")
    console.print(table)
    console.rule("generated")
    console.print(text, markup=False, highlight=False)
    console.rule()
