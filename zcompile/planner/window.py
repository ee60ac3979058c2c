"""A declared window of micro-batches, as plans see it: which graphs its micro-batches run, and what becomes of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from zcompile.config import Config
from zcompile.ir import meta
from zcompile.ir.graph import Kept, Step
from zcompile.passes.schedule.hold import Hold, inside_window
from zcompile.pipeline import Pipeline, Stats
from zcompile.placement import ParamSpec

#: the micro-batches of a window, by their place
FIRST, MIDDLE, LAST = "first", "middle", "last"


@dataclass(frozen=True)
class Window:
    """So many backward calls before an update.

    Attributes:
        steps: backward calls; at least two.
        defers: all but the last keep full gradients on their rank.
        summed: the dtype in which reductions read gradients; None: their parameters'.
        wide: the dtype in which gradients are added up where their own is narrower; None: their own.
        hold: makes the graphs for the middle of the window; None: full parameters go after each backward.
    """

    steps: int
    defers: bool = False
    summed: torch.dtype | None = None
    wide: torch.dtype | None = None
    hold: Hold | None = None

    @classmethod
    def of(cls, config: Config, pipeline: Pipeline, world_size: int) -> Window | None:
        """What is declared; None: every backward call is complete."""
        if config.gradient_accumulation_steps == 1:
            return None
        return cls(
            steps=config.gradient_accumulation_steps,
            defers=config.defers_reduction and world_size > 1,
            summed=config.summed_dtype,
            wide=config.wide_dtype,
            hold=inside_window(pipeline),
        )

    def middle(self, step: Step) -> Step | None:
        """The graphs for the middle of the window; None: they are those of the step."""
        if self.hold is None or step.backward is None:
            return None
        middle = step.copy()
        self.hold.run(middle, Stats())
        return middle if any(isinstance(meta.origin(node), Kept) for node in middle.forward.inputs) else None

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What gradients of a dtype are added up in."""
        return dtype if self.wide is None else torch.promote_types(dtype, self.wide)

    def widens(self, params: Iterable[ParamSpec]) -> bool:
        """Whether some gradients are added up in another dtype than they come in."""
        own = [
            (param.dtype if not self.defers else self.summed or param.dtype) for param in params if param.requires_grad
        ]
        return any(self.sum_dtype(dtype) != dtype for dtype in own)

    def local_dtype(self, param: ParamSpec) -> torch.dtype:
        """What full gradients of a parameter are added up in on their rank."""
        return self.sum_dtype(self.summed or param.dtype)

    def local_bytes(self, param: ParamSpec) -> int:
        """Bytes of the sum of a parameter's full gradients on their rank."""
        return math.prod(param.padded_full_shape) * self.local_dtype(param).itemsize

    def wide_bytes(self, param: ParamSpec) -> int:
        """Bytes of the sum of a parameter's reduced gradients beside ``.grad``; 0 where they are added up there."""
        dtype = self.sum_dtype(param.dtype)
        return 0 if self.defers or dtype == param.dtype else param.padded_local_numel * dtype.itemsize


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a window, or all that there is in a step.

    Attributes:
        place: in its window: ``first``, ``middle`` or ``last``; empty without a window.
        count: how many of a window run alike.
        step: its graphs: the first gathers what the others find, the last gives it back.
        window: that it belongs to; None: it is complete in itself.
    """

    place: str
    count: int
    step: Step
    window: Window | None = None

    @classmethod
    def alone(cls, step: Step) -> MicroBatch:
        """All that there is in a step."""
        return cls("", 1, step)

    @property
    def updates(self) -> bool:
        """Whether the update follows."""
        return self.place in ("", LAST)

    @property
    def reduces(self) -> bool:
        """Whether its gradients are reduced; else they stay on their rank, full."""
        return self.window is None or not self.window.defers or self.updates

    @property
    def adds(self) -> bool:
        """Whether there are gradients of earlier micro-batches, to which it adds."""
        return self.place in (MIDDLE, LAST)

    @property
    def takes_local(self) -> bool:
        """Whether its reductions take along the full gradients that earlier micro-batches have left."""
        return self.adds and self.reduces and self.window is not None and self.window.defers

    def adds_shards(self, param: ParamSpec) -> bool:
        """Whether the ``.grad`` of a parameter is there already, to which it adds."""
        window = self.window
        return self.adds and window is not None and not window.defers and not window.wide_bytes(param)


def micro_batches(step: Step, window: Window | None) -> list[MicroBatch]:
    """What runs from one update to the next, those that run alike once.

    Args:
        step: as it is scheduled.
        window: that is declared; None, and for a step without a backward: there is one micro-batch.
    """
    if window is None or step.backward is None:
        return [MicroBatch.alone(step)]
    middle = window.middle(step) or step
    return [
        MicroBatch(FIRST, 1, Step(step.forward, middle.backward), window),
        *([MicroBatch(MIDDLE, window.steps - 2, middle, window)] if window.steps > 2 else []),
        MicroBatch(LAST, 1, Step(middle.forward, step.backward), window),
    ]
