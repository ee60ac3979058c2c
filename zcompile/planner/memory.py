"""What a rank holds during a step, by category, part and moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import sympy

from zcompile.offloading import Offloading
from zcompile.planner import hosted, rates
from zcompile.planner.hardware import Hardware
from zcompile.planner.window import Window

#: the categories, and the parts that each is made of
PARTS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("shards", "uploaded", "model buffers"),
    "gradients": ("gradient shards", "local gradients", "gradient sums"),
    "optimizer states": ("optimizer states",),
    "activations": ("saved for backward", "reloaded", "inputs and outputs", "between regions"),
    "temporary": (
        "gathered weights",
        "gathered, free",
        "reduction buckets",
        "region workspace",
        "exchange",
        "optimizer buffers",
    ),
    "reserve": ("arena gaps", "context and libraries", "fragmentation"),
}
CATEGORIES = tuple(PARTS)
#: gaps of a GPU's allocator as a share of what tensors take: a guess. Measured runs with memory to spare reserved 13 to 34 % more
#: than they allocated, which an allocator under pressure gives back
FRAGMENTATION = 0.05

CATEGORY_OF = {part: category for category, parts in PARTS.items() for part in parts}


@dataclass(frozen=True)
class Moment:
    """Memory around one instruction of a step.

    Attributes:
        phase: ``forward``, ``backward`` or ``optimizer``.
        kind: ``region``, ``collective`` or ``transfer`` (its start), ``wait``, ``release``, ``end`` of a graph, or ``optimizer``.
        name: what runs, such as ``forward_2 (layers.3)`` or ``all_gather of layers.3``.
        during: the most bytes while it runs, by part.
        after: bytes when it has run, by part.
        place: of its micro-batch in a window: ``first``, ``middle`` or ``last``; empty without a window.
    """

    phase: str
    kind: str
    name: str
    during: Mapping[str, int]
    after: Mapping[str, int]
    place: str = ""

    @property
    def num_bytes(self) -> int:
        """The most bytes while it runs, of all parts."""
        return sum(self.during.values())


def by_category(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes by category, each with 0 where there is nothing."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for part, num_bytes in parts.items():
        sums[CATEGORY_OF[part]] += num_bytes
    return sums


@dataclass(frozen=True)
class Setup:
    """What memory depends on beside the graphs.

    Attributes:
        optimizer: one of ``states.OPTIMIZERS``.
        rank: whose memory; ranks differ in rows of optimizer states only.
        fused: whether a compiler fuses regions (``backend="inductor"``).
        on_host: collectives are gloo's, on CPU; else NCCL's.
        copies: large buckets go by the copy engines of one node.
        context_bytes: what the device's context and libraries take.
        fragmentation: gaps of the allocator, as a share of what is allocated: a guess.
        offloading: what is on the host.
        step: where states on the host are updated, as ``hosted.step_of`` finds it.
        window: of micro-batches; None: there is none.
        symbols: what sizes of values mean in formulas, as ``symbols.size_symbols`` finds them.
    """

    optimizer: str = "adamw"
    rank: int = 0
    fused: bool = True
    on_host: bool = True
    copies: bool = False
    context_bytes: int = 0
    fragmentation: float = 0.0
    offloading: Offloading = field(default_factory=Offloading)
    step: str = "device"
    window: Window | None = None
    symbols: Mapping[int, sympy.Expr] = field(default_factory=dict)

    @classmethod
    def on(
        cls,
        hardware: Hardware,
        world_size: int,
        *,
        optimizer: str = "adamw",
        fused: bool = True,
        offloading: Offloading | None = None,
    ) -> Setup:
        """What a step on a machine depends on."""
        on_host = hardware.host.blocks
        return cls(
            optimizer=optimizer,
            fused=fused,
            on_host=on_host,
            copies=rates.by_copies(rates.COPIES_MIN_BYTES, world_size, hardware),
            context_bytes=hardware.reserve_bytes,
            fragmentation=0.0 if on_host else FRAGMENTATION,
            offloading=offloading or Offloading(),
            step=hosted.step_of(offloading or Offloading(), hardware),
        )


@dataclass(frozen=True)
class Memory:
    """The memory of one rank over a step, in its steady state: not the first one, before ``zero_grad`` has run once.

    Attributes:
        moments: in the order of the schedule; of a window, those of its first micro-batch, one in its middle and the last.
        parameter_bytes: stored shards, with padding; what ``model.report()`` calls so.
        gradient_bytes: of gradients after a backward.
        optimizer_bytes: of optimizer states after a step.
        saved_bytes: of what forward leaves for backward, shared storage once, gathered weights apart.
        gathered_peak_bytes: the most that gathered parameters take at once.
        gathered_held_bytes: of the buffers for them, which are used again and never given back.
        exchange_bytes: what the copy engines exchange through, outside of torch's allocator.
        formulas: bytes by what is in this class, in the number of ranks ``W``, for parameters that are divided as they are here;
            ``saved_bytes`` in rows ``B`` and tokens a row ``S``, where sizes in the graph are surely these.
        host: bytes that a rank has in the host's memory, by what they are: no part of any moment.
    """

    moments: tuple[Moment, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    gathered_peak_bytes: int
    gathered_held_bytes: int
    exchange_bytes: int
    formulas: Mapping[str, sympy.Expr] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name, the peak by category, and the formulas as text."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_bytes")}
        peak = self.peak
        return {
            **numbers,
            "host_bytes": self.host_bytes,
            "host": dict(self.host),
            "peak_bytes": self.peak_bytes,
            "peak_at": {"phase": peak.phase, "name": peak.name, "micro_batch": peak.place},
            "peak_by_category": by_category(peak.during),
            "peak_by_part": dict(peak.during),
            "formulas": {name: str(formula) for name, formula in self.formulas.items()},
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank in the host's memory."""
        return sum(self.host.values())

    @cached_property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment, reserve included."""
        return self.peak.num_bytes
