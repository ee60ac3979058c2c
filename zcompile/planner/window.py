"""A declared window of micro-batches, as plans see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zcompile.config import Config
from zcompile.ir import meta
from zcompile.ir.graph import Kept, Step
from zcompile.passes.schedule.hold import Hold, inside_window
from zcompile.pipeline import Pipeline, Stats
from zcompile.placement import ParamSpec


@dataclass(frozen=True)
class Window:
    """So many backward calls before an update.

    Attributes:
        steps: backward calls; at least two.
        defers: all but the last keep full gradients on their rank.
        dtype: of their sums; None: their parameters'.
        hold: makes the graphs for the middle of the window; None: full parameters go after each backward.
    """

    steps: int
    defers: bool = False
    dtype: torch.dtype | None = None
    hold: Hold | None = None

    @classmethod
    def of(cls, config: Config, pipeline: Pipeline, world_size: int) -> Window | None:
        """What is declared; None: every backward call is complete."""
        if config.gradient_accumulation_steps == 1:
            return None
        return cls(
            steps=config.gradient_accumulation_steps,
            defers=config.defers_reduction and world_size > 1,
            dtype=config.wide_dtype or config.summed_dtype,
            hold=inside_window(pipeline),
        )

    def middle(self, step: Step) -> Step | None:
        """The graphs for the middle of the window; None: they are those of the step."""
        if self.hold is None or step.backward is None:
            return None
        middle = step.copy()
        self.hold.run(middle, Stats())
        return middle if any(isinstance(meta.origin(node), Kept) for node in middle.forward.inputs) else None

    def local_bytes(self, trained: Iterable[ParamSpec]) -> int:
        """Bytes of the full gradients that a backward leaves on its rank."""
        if not self.defers:
            return 0
        return sum(s.padded_full_bytes // s.dtype.itemsize * (self.dtype or s.dtype).itemsize for s in trained)
