"""What a budget may choose from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from zcompile.config import Config
from zcompile.offloading import Offloading
from zcompile.placement import ParamSpec
from zcompile.planner.hosted import fitting_moments

#: what may go to the host
KINDS = ("activations", "optimizer", "parameters")


@dataclass(frozen=True)
class Space:
    """What may be chosen, each from the most memory and the least time to the contrary.

    Attributes:
        stages: ZeRO stages, in any order.
        recomputes: of blocks.
        loss_chunks: of the cross-entropy.
        offloads: what is on the host.
        schedules: whether policies are chosen.
        amounts: whether blocks may save any amount between the ends of ``recomputes``.
        shares: whether any part of the optimizer's states may be on the host, where they may be.
        notes: why something is not there that might be.
    """

    stages: tuple[int, ...]
    recomputes: tuple[str | None, ...]
    loss_chunks: tuple[str, ...]
    offloads: tuple[str, ...]
    schedules: bool
    amounts: bool
    shares: bool
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        offloads: tuple[str, ...],
        *,
        stages: tuple[int, ...] = (),
        amounts: bool = True,
        shares: bool = True,
        notes: tuple[str, ...] = (),
    ) -> Space:
        """What the options leave free.

        Args:
            config: ``free`` names what may be chosen.
            offloads: what may go to the host, if that is free.
            stages: to choose from; empty: the one that there is.
            amounts: whether blocks may save any amount, if that is free.
            shares: whether any part of the optimizer's states may be on the host, if that is free.
            notes: why something is not offered.
        """
        free = config.free
        return cls(
            stages=stages or (config.stage,),
            recomputes=(None, "selective", "full") if "recompute" in free else (config.recompute_mode,),
            loss_chunks=("none", "auto") if "loss_chunk" in free else (config.loss_chunk or "none",),
            offloads=offloads if "offload" in free else (config.offload or "",),
            schedules="policy" in free,
            amounts=amounts and "recompute" in free,
            shares=shares and "offload" in free,
            notes=notes,
        )


def offloads(specs: Sequence[ParamSpec], kinds: Collection[str] = KINDS) -> tuple[str, ...]:
    """What may go to the host, that which costs least first: parameters never without the rest."""
    moments = Offloading(optimizer=fitting_moments(specs))
    found = ["", *(["activations"] if "activations" in kinds else [])]
    if "optimizer" in kinds:
        found += ["+".join(filter(None, (other, str(moments)))) for other in found]
    if "parameters" in kinds:
        found.append("activations+optimizer+parameters")
    return tuple(found)
