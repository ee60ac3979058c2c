"""What the engine prints on rank 0: steps, losses, learning rates, throughput and times of phases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Progress:
    """Collects the losses and times of a step and prints a line every few steps.

    Args:
        every: steps between two lines; None: no lines.
        timed: whether times of phases are taken and printed; then the device finishes each phase before the next one.
        device: where the model is.
        shows: whether this rank prints.
    """

    def __init__(self, every: int | None, *, timed: bool, device: torch.device, shows: bool) -> None:
        self.every = every
        self.takes_time = timed
        self.device = device
        self.shows = shows
        self._losses: list[Tensor] = []
        self._times: dict[str, float] = {}
        self._samples, self._begin = 0, time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add to the time of a phase, if times are taken."""
        if not self.takes_time:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - begin

    def add_loss(self, share: Tensor) -> None:
        """A part of this step's loss, detached; read when a line is printed."""
        if self.shows and self.every is not None:
            self._losses.append(share)

    def end_step(self, step: int, samples: int, lr: Sequence[float], scale: str) -> None:
        """Print what is due after step number ``step``.

        Args:
            step: steps so far.
            samples: rows so far, on all ranks.
            lr: of each parameter group.
            scale: about loss scaling; may be empty.
        """
        losses, self._losses = self._losses, []
        times, self._times = self._times, {}
        if not self.shows:
            return
        if self.every is not None and step % self.every == 0:
            now = time.perf_counter()
            rate = (samples - self._samples) / (now - self._begin)
            self._samples, self._begin = samples, now
            loss = sum(share.item() for share in losses)
            rates = ", ".join(f"{value:g}" for value in lr)
            print(f"step {step}: loss {loss:.6g}, lr {rates}{scale}, {rate:.4g} samples/s", flush=True)
        if times and step % (self.every or 1) == 0:
            print("time (ms): " + ", ".join(f"{name} {1e3 * t:.2f}" for name, t in times.items()), flush=True)
