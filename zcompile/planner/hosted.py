"""What offloading puts into the host's memory, and the buffers that it needs for that on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from zcompile.offloading import Moments, Offloading
from zcompile.placement import ParamSpec
from zcompile.planner.hardware import Hardware, hardware
from zcompile.runtime.offload.host import pages
from zcompile.runtime.offload.hosted_update import NUM_SLOTS, chunk_numel
from zcompile.runtime.sharding.arenas import ArenaKey, ArenaLayout

#: chunks of states are at most this part of them: the six buffers of a chunk each take a tenth of what they save
BUFFERS_SHARE = 30


def parameter_bytes(layout: ArenaLayout) -> int:
    """Host memory of the shards."""
    return sum(pages(size * key.dtype.itemsize) for key, size in layout.sizes.items())


def state_bytes(layout: ArenaLayout, indices: Iterable[int], count: int, share: float = 1) -> tuple[int, int]:
    """Memory of ``count`` states of these parameters, which lie in an arena for each of theirs: on the host, and on the device."""
    sizes: tuple[Counter[ArenaKey], Counter[ArenaKey]] = (Counter(), Counter())
    hosted = layout.leading(share)
    for index in indices:
        place = layout.places[index]
        if place is not None:
            sizes[index not in hosted][place.key] += place.extent
    there, here = ([size * key.dtype.itemsize for key, size in part.items()] for part in sizes)
    return count * sum(map(pages, there)), count * sum(here)


def buffer_bytes(layout: ArenaLayout, moments: Moments) -> int:
    """Memory of the buffers that states, or parameters and gradients, pass through."""
    largest: dict[torch.dtype, int] = {}
    for key, size in layout.sizes.items():
        if key.trainable:
            largest[key.dtype] = max(size, largest.get(key.dtype, 0))
    chunk_bytes = int(moments.chunk_mib * 2**20)
    return sum(2 * NUM_SLOTS * chunk_numel(chunk_bytes, d, size) * d.itemsize for d, size in largest.items())


def step_of(offloading: Offloading, machine: Hardware, bytes_per_parameter: int = 4) -> str:
    """Where states on the host are updated: as it was asked for, or where it is faster on a machine.

    On the device the states go both ways at once. On the processors gradients and parameters come and parameters go back,
    beside what the processors read and write: 28 bytes a float32 parameter.
    """
    if offloading.parameters is not None:
        return "in place"
    moments = offloading.optimizer
    if moments is None or moments.step != "auto":
        return "device" if moments is None else moments.step
    link = machine.host_link.bytes_per_s
    device = 2 * bytes_per_parameter / link
    processors = max(2 * bytes_per_parameter / link, 7 * bytes_per_parameter / machine.host_bytes_per_s)
    return "cpu" if processors < device else "device"


def step_here(offloading: Offloading, device: torch.device) -> str:
    """``step_of`` on a device of this machine."""
    return step_of(offloading, hardware_here(device))


def hardware_here(device: torch.device) -> Hardware:
    """The known hardware that a device's name says; an H100 for a GPU that is not known."""
    if device.type != "cuda":
        return hardware("cpu-2core")
    name = torch.cuda.get_device_name(device).lower()
    known = next(
        (h for h in ("h200", "h100", "a100-80", "mi300x", "rtx4090") if h.partition("-")[0].lstrip("rtx") in name),
        "h100",
    )
    return hardware(known)


def fitting_moments(specs: Sequence[ParamSpec]) -> Moments:
    """Offloading of optimizer states with chunks so small that the buffers take a small part of what leaves the device."""
    state = sum(size * key.dtype.itemsize for key, size in ArenaLayout(specs).sizes.items() if key.trainable)
    return Moments(chunk_mib=max(min(Moments().chunk_mib, round(state / BUFFERS_SHARE / 2**20, 3)), 1 / 1024))


def chunks(num_params: int, moments: Moments | None) -> list[int]:
    """Parameters of each chunk of an update of so many with states on the host, in float32."""
    size = chunk_numel(int((moments or Moments()).chunk_mib * 2**20), torch.float32, num_params)
    return [min(size, num_params - start) for start in range(0, num_params, size)]
