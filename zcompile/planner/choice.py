"""What a memory budget came to: the options that were chosen, and the combinations beside which they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zcompile.config import UNITS, Config
from zcompile.offloading import Offloading
from zcompile.passes.memory.recompute import Recompute

#: most combinations that a table shows
SHOWN = 10


@dataclass(frozen=True)
class Choice:
    """Options that decide what a step takes in memory and time.

    Attributes:
        stage: ZeRO stage.
        policy: schedule passes.
        recompute: ``full`` or ``selective``, or the MiB that blocks save for backward; None: only what is cheap is computed again.
        loss_chunk: as in ``compile``.
        offload: as in ``compile``; empty for nothing.
    """

    stage: int
    policy: str
    recompute: str | float | None
    loss_chunk: str
    offload: str

    @classmethod
    def of(cls, config: Config) -> Choice:
        """The options as they are."""
        return cls(
            config.stage, config.policy, config.recompute_mode, config.loss_chunk or "none", config.offload or ""
        )

    def config(self, config: Config) -> Config:
        """Other options with these. Bytes that blocks save are a pass of their own: ``recompute_pass``."""
        return replace(
            config,
            stage=self.stage,
            policy=self.policy,
            recompute=self.recompute if isinstance(self.recompute, str) else None,
            loss_chunk=self.loss_chunk,
            offload=self.offload or None,
            free=(),
        )

    @property
    def recompute_pass(self) -> Recompute | None:
        """The pass that lets blocks save so many bytes; None where ``config`` says all."""
        return Recompute(mode="budget", mib=self.recompute) if isinstance(self.recompute, float) else None

    @property
    def offloading(self) -> Offloading:
        """What is on the host."""
        return Offloading.parse(self.offload or None)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for choices that differ in their policy, or in how much blocks save or leaves the device, alone."""
        saved = "some" if isinstance(self.recompute, float) else self.recompute
        return (self.stage, saved, self.loss_chunk, str(self.offloading.with_share(1)))

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", f"policy {self.policy}"]
        if isinstance(self.recompute, float):
            parts.append(f"recompute all but {size(self.recompute * 2**20)} of blocks")
        elif self.recompute is not None:
            parts.append(f"recompute {self.recompute}")
        if self.loss_chunk != "none":
            parts.append(f"loss_chunk {self.loss_chunk}")
        if self.offload:
            parts.append(f"offload {self.offload}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Candidate:
    """A combination, planned.

    Attributes:
        choice: its options.
        peak_bytes: what all tensors of a rank take at most, with what is on the device beside the model.
        step_us: the simulated step; in a window of micro-batches, what one takes on average with its share of the update.
        host_bytes: in the host's memory.
        fits: whether the peak is within the budget, and the rest within its limits.
        saved_bytes: what blocks save for backward.
        most_bytes: what they would save at the least time.
        moved_bytes: activations that go to the host.
        state_bytes: optimizer states on the host.
        pieces: losses that are computed in pieces.
    """

    choice: Choice
    peak_bytes: int
    step_us: float
    host_bytes: int
    fits: bool
    saved_bytes: int = 0
    most_bytes: int = 0
    moved_bytes: int = 0
    state_bytes: int = 0
    pieces: int = 0

    def row(self) -> str:
        """A line of a table."""
        fits = "yes" if self.fits else "no"
        return f"{size(self.peak_bytes):>12}{self.step_us / 1000:>10.2f}{fits:>6}  {self.choice}"

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return asdict(self)


def head(micro_batches: int) -> str:
    """What is over the columns of ``Candidate.row``."""
    return f"{'peak':>12}{'step ms' if micro_batches == 1 else 'ms each':>10}{'fits':>6}  with"


@dataclass(frozen=True)
class Decision:
    """What a memory budget came to.

    Attributes:
        budget_bytes: for all tensors of a rank.
        beside_bytes: of it, what is no tensor of the model: libraries, and what was on the device before.
        chosen: the fastest combination that fits.
        tried: every combination that was planned, ``chosen`` among them.
        notes: options that save nothing, and options that could not be chosen.
        micro_batches: in a step; times are those of one on average, with its share of the update.
    """

    budget_bytes: int
    beside_bytes: int
    chosen: Candidate
    tried: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    micro_batches: int = 1

    @property
    def shown(self) -> list[Candidate]:
        """The chosen one and the best of each other kind: those that fit by time, then those that do not by memory."""
        return [self.chosen, *best_of_kinds(c for c in self.tried if c.choice.kind != self.chosen.choice.kind)][:SHOWN]

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {
            "budget_bytes": self.budget_bytes,
            "beside_bytes": self.beside_bytes,
            "chosen": self.chosen.to_dict(),
            "tried": [candidate.to_dict() for candidate in self.tried],
            "notes": list(self.notes),
            "micro_batches": self.micro_batches,
        }

    def __str__(self) -> str:
        beside = f", of which {size(self.beside_bytes)} for what is beside the model" if self.beside_bytes else ""
        return "\n".join(
            [
                f"memory_budget of {size(self.budget_bytes)}{beside}: {self.chosen.choice}",
                head(self.micro_batches),
                *(c.row() + "  <- chosen" * (c is self.chosen) for c in self.shown),
                *(
                    [f"ms each: of one of {self.micro_batches} micro-batches, with its share of the update"]
                    if self.micro_batches > 1
                    else []
                ),
                *(f"note: {note}" for note in self.notes),
            ]
        )


def best_of_kinds(candidates: Any) -> list[Candidate]:
    """The best of each kind: the fastest that fits, else the smallest; in this order over all kinds."""
    best: dict[tuple[Any, ...], Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.choice.kind)
        if known is None or _order(candidate) < _order(known):
            best[candidate.choice.kind] = candidate
    return sorted(best.values(), key=_order)


def _order(candidate: Candidate) -> tuple[bool, float, float]:
    us, peak = candidate.step_us, candidate.peak_bytes
    return (False, us, peak) if candidate.fits else (True, peak, us)


def fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest of those that fit; of equals the one with least memory."""
    fitting = [c for c in candidates if c.fits]
    return min(fitting, key=_order) if fitting else None


def size(num_bytes: float) -> str:
    """Bytes for people: ``12.92 GiB``."""
    unit = next((name for name in ("GiB", "MiB") if num_bytes >= UNITS[name]), "KiB")
    return f"{num_bytes / UNITS[unit]:.2f} {unit}"
