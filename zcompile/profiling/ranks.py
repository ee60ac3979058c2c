"""The profiles of all ranks beside each other: who makes the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from zcompile.errors import ProfileError
from zcompile.profiling.measured import EXPOSED, SHARES
from zcompile.runtime.communication.mesh import Mesh


@dataclass(frozen=True)
class Ranks:
    """Where the time of a step goes on each rank.

    Attributes:
        shares: of each rank, mean microseconds of a step by the names of ``SHARES``.
    """

    shares: tuple[Mapping[str, float], ...]

    @property
    def own_us(self) -> tuple[float, ...]:
        """Of each rank, the part of a step in which it does not wait for others."""
        return tuple(sum(us for name, us in shares.items() if name != EXPOSED) for shares in self.shares)

    @property
    def slowest(self) -> int:
        """The rank that the others wait for: the one that itself waits least."""
        return max(range(len(self.shares)), key=lambda rank: self.own_us[rank])

    @property
    def spread(self) -> float:
        """By which share of its own time the slowest rank is slower than the fastest."""
        most = max(self.own_us)
        return (most - min(self.own_us)) / most if most else 0.0

    def __str__(self) -> str:
        width = max(map(len, SHARES)) + 2
        head = f"{'ms of a step':{width}}" + "".join(f"{f'rank {rank}':>10}" for rank in range(len(self.shares)))
        rows = [
            f"{name:{width}}" + "".join(f"{shares[name] / 1000:>10.2f}" for shares in self.shares) for name in SHARES
        ]
        own = f"{'without waits':{width}}" + "".join(f"{us / 1000:>10.2f}" for us in self.own_us)
        slowest = (
            f"slowest: rank {self.slowest}; the fastest takes {self.spread:.0%} less without waits for collectives"
        )
        return "\n".join([head, *rows, own, slowest])


def gather(mesh: Mesh, mine: Mapping[str, float] | None) -> Ranks:
    """All ranks' shares. Collective.

    Args:
        mesh: the ranks.
        mine: this rank's; None: it has none, which is an error on every rank.
    """
    numbers = [0.0 if mine is None else 1.0, *(0.0 if mine is None else mine[name] for name in SHARES)]
    sent = torch.tensor(numbers, dtype=torch.float64, device=mesh.device)
    everyone = torch.empty(mesh.size * len(numbers), dtype=torch.float64, device=mesh.device)
    if mesh.is_distributed:
        mesh.announce("profile.gather")
        mesh.collectives.all_gather([everyone], [sent], "all_gather of profiles").wait()
    else:
        everyone.copy_(sent)
    values = mesh.to_host(everyone, "the profiles of all ranks")
    rows = [values[i : i + len(numbers)] for i in range(0, len(values), len(numbers))]
    empty = [rank for rank, row in enumerate(rows) if not row[0]]
    if empty:
        raise ProfileError(
            f"profile of rank {empty[0]} is not done or has no steps ({len(empty)} of {mesh.size} ranks); gather when done is true "
            "on every rank"
        )
    return Ranks(tuple(dict(zip(SHARES, row[1:], strict=True)) for row in rows))
