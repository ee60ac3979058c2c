"""What a compiled model holds in memory on this rank: measured, beside what was predicted and what it would hold unsharded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.optim import Optimizer

from zcompile.planner.choice import Decision
from zcompile.planner.memory import Memory, by_category
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards, Slot


@dataclass(frozen=True)
class DeviceMemory:
    """What torch's allocator and the driver say about this rank's GPU, in bytes.

    Attributes:
        peak_allocated: the most that tensors took at once.
        peak_reserved: the most that the allocator held; the difference is fragmentation.
        outside: taken on the device and not by the allocator: context, libraries, exchange between GPUs, other processes.
    """

    peak_allocated: int
    peak_reserved: int
    outside: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceMemory | None:
        """Of a device; None for the CPU."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        outside = total - free - torch.cuda.memory_reserved(device)
        return cls(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), outside)


@dataclass(frozen=True)
class Report:
    """Measured bytes of model states on this rank, with padding; ``*_total`` is the plain, unsharded model.

    ``gradient_bytes`` is what is alive: memory may outlive the ``.grad`` that used it, up to the next forward or, in a small
    model, for good. ``gathered_peak_bytes`` is the most that gathered parameters took at once, ``gathered_held_bytes`` what
    the buffers for them take. ``saved_bytes`` is what the latest kind of forward leaves for its backward (0 before the first call).
    With ``cuda_graphs``, ``recorded_bytes`` is the memory of recorded steps that the allocator counts as free, and ``replays`` the
    steps that were replayed.
    ``host_bytes`` is what this rank has in the host's memory (page-locked where the device is a GPU), of which ``offloaded_bytes``
    are for activations; it is at most ``host_limit_bytes``.
    ``predicted`` holds the same numbers, and every moment of a step, as planning finds them in the graphs that run; None before
    the first call. ``decision`` says what ``memory_budget`` came to in the latest training capture, beside what, and why.
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
    gathered_held_bytes: int
    saved_bytes: int
    peer_bytes: int
    recorded_bytes: int
    replays: int
    captures: int
    host_bytes: int = 0
    host_peak_bytes: int = 0
    host_limit_bytes: int = 0
    offloaded_bytes: int = 0
    device: DeviceMemory | None = None
    predicted: Memory | None = None
    decision: Decision | None = None

    def to_dict(self) -> dict[str, int]:
        """The numbers by name, flat, as loggers of scalars take them: ``device_*`` on a GPU, ``predicted_*`` after the first call."""
        numbers = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("device", "predicted", "decision")
        }
        if self.device is not None:
            numbers |= {f"device_{name}": value for name, value in vars(self.device).items()}
        if self.predicted is not None:
            known = self.predicted.to_dict()
            numbers |= {f"predicted_{name}": value for name, value in known.items() if isinstance(value, int)}
        if self.decision is not None:
            numbers |= {"budget_bytes": self.decision.budget_bytes, "budgeted_bytes": self.decision.chosen.peak_bytes}
        return numbers

    def __str__(self) -> str:
        rows = [f"{'MiB':14}{'this rank':>12}{'predicted':>12}{'unsharded':>12}"]
        for kind in ("parameter", "gradient", "optimizer"):
            rows.append(self._row(f"{kind}s", f"{kind}_bytes", getattr(self, f"{kind}_bytes_total")))
        for label, name in (
            ("saved", "saved_bytes"),
            ("gathered peak", "gathered_peak_bytes"),
            ("gathered held", "gathered_held_bytes"),
        ):
            rows.append(self._row(label, name))
        if self.host_bytes or (self.predicted is not None and self.predicted.host):
            rows.append(self._row("of it on host", "host_bytes"))
        if self.device is not None:
            peak = None if self.predicted is None else self._predicted_allocation()
            rows.append(_row("allocated peak", self.device.peak_allocated, peak))
            rows.append(_row("reserved peak", self.device.peak_reserved))
            rows.append(_row("outside", self.device.outside))
        if self.decision is not None:
            rows.append(str(self.decision))
        return "\n".join(rows)

    def _predicted_allocation(self) -> int:
        assert self.predicted is not None
        reserve = by_category(self.predicted.peak.during)["reserve"]
        return self.predicted.peak_bytes - self.predicted.exchange_bytes - reserve

    def _row(self, label: str, name: str, total: int | None = None) -> str:
        predicted = None if self.predicted is None else getattr(self.predicted, name)
        return _row(label, getattr(self, name), predicted, total)


def _row(label: str, *values: int | None) -> str:
    return f"{label:14}" + "".join("            " if v is None else f"{v / 2**20:>12.2f}" for v in values).rstrip()


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


def device_state_bytes(shards: ParameterShards, optimizers: Iterable[Optimizer]) -> int:
    """Bytes that optimizer states take on the device: of those on the host only the buffers that they pass through."""
    update = shards.hosting.update
    found = 0 if update is None else update.device_bytes
    for optimizer in optimizers:
        for parameter, entry in optimizer.state.items():
            slot = Slot.of(parameter)
            if shards.hosting.parameters or (slot is not None and slot[0].hosting.hosts_states(slot[1])):
                continue
            found += sum(local_of(value).nbytes for value in entry.values() if isinstance(value, Tensor))
    return found


def optimizer_kind(optimizer: Optimizer | None) -> str:
    """How planning calls the kind of an optimizer; that of AdamW for one that it does not know."""
    name = "adamw" if optimizer is None else type(optimizer).__name__.lower()
    if name == "sgd" and optimizer is not None and any(group.get("momentum") for group in optimizer.param_groups):
        return "momentum"
    return name if name in ("adam", "adamw", "lion", "sgd") else "adamw"
