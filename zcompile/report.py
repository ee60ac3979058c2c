"""What a compiled model holds in memory on this rank, beside what it would hold unsharded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zcompile.runtime.placed import local_of
from zcompile.runtime.shards import ParameterShards


@dataclass(frozen=True)
class Report:
    """Measured bytes of model states on this rank, with padding; ``*_total`` is the plain, unsharded model.

    ``gradient_bytes`` is what is alive: memory may outlive the ``.grad`` that used it, up to the next forward or, in a small
    model, for good. ``gathered_peak_bytes`` is the most that gathered parameters took at once.
    """

    world_size: int
    stage: int
    parameter_bytes: int
    parameter_bytes_total: int
    gradient_bytes: int
    gradient_bytes_total: int
    optimizer_bytes: int
    optimizer_bytes_total: int
    gathered_live_bytes: int
    gathered_peak_bytes: int
    peer_bytes: int
    captures: int

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [f"{'MiB':14}{'this rank':>12}{'unsharded':>12}"]
        for kind in ("parameter", "gradient", "optimizer"):
            mine, total = getattr(self, f"{kind}_bytes"), getattr(self, f"{kind}_bytes_total")
            rows.append(f"{kind + 's':14}{mine / 2**20:>12.2f}{total / 2**20:>12.2f}")
        rows.append(f"{'gathered peak':14}{self.gathered_peak_bytes / 2**20:>12.2f}{'':>12}")
        return "\n".join(rows)


def state_bytes(shards: ParameterShards) -> tuple[int, int, int, int]:
    """Bytes of (parameters, all parameters unsharded, gradients, all gradients unsharded) that exist now."""
    return (
        sum(shards.local(name).nbytes for name in shards.specs),
        sum(s.num_bytes for s in shards.specs.values()),
        shards.gradients.live_bytes(),
        sum(s.num_bytes for n, s in shards.specs.items() if shards.parameter(n).grad is not None),
    )


def optimizer_bytes(shards: ParameterShards, optimizer: Optimizer | None) -> tuple[int, int]:
    """Bytes of the optimizer's state on this rank, and of the same state unsharded."""
    mine = total = 0
    for parameter, entry in ({} if optimizer is None else optimizer.state).items():
        name = shards.name_of(parameter)
        for value in entry.values():
            if isinstance(value, Tensor):
                local = local_of(value)
                mine += local.numel() * local.element_size()
                full = shards.specs[name].numel if name is not None and value.dim() else local.numel()
                total += full * local.element_size()
    return mine, total
