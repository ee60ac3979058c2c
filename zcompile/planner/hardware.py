"""What a machine can do: peak rates, how much of them is reached, links, host times; read from JSON files."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from zcompile.errors import PlanError

#: a quantity by size, such as the share of the peak that matmuls of so many flops reach; interpolated in the logarithm of the size
Curve = tuple[tuple[float, float], ...]


_LINKS = ("node", "network", "copies", "host_link", "shared_host_link")


@dataclass(frozen=True)
class Link:
    """A way between devices.

    Attributes:
        latency_us: time of one hop.
        bytes_per_s: what one device sends (and receives at the same time).
    """

    latency_us: float
    bytes_per_s: float


@dataclass(frozen=True)
class Host:
    """What the host spends to issue work, in microseconds.

    Attributes:
        kernel_us: each kernel of a region.
        region_us: each region call, beside its kernels.
        collective_us: each coalesced collective.
        copied_tensor_us: each tensor that the copy engines move between two ranks.
        step_us: everything that a step takes once: the call, autograd, the optimizer.
        blocks: the device is the host itself: a region occupies it until it ends.
    """

    kernel_us: float
    region_us: float
    collective_us: float
    copied_tensor_us: float
    step_us: float
    blocks: bool = False


@dataclass(frozen=True)
class Hardware:
    """A device with its node and network.

    Attributes:
        name: how it is called.
        device_memory_bytes: memory of one device.
        reserve_bytes: of it, what neither tensors nor the allocator's gaps can use: the driver's context and NCCL.
        peak_flops: peak flop/s by dtype (``bf16``, ``f16``, ``f32``, ``f64``), as the vendor states it, without sparsity.
        memory_bytes_per_s: peak memory bandwidth, reads and writes together.
        kernel_us: the least that a kernel takes on the device, with the gap to the next one.
        efficiency: the share of the peak that is reached, by size: ``matmul``, ``attention`` and ``convolution`` by flops,
            ``memory`` by bytes.
        host: what issuing costs.
        devices_per_node: devices that ``node`` connects.
        node: link between devices of a node.
        network: link between nodes, for each device.
        collective_us: what a collective takes beside its hops and bytes.
        copies: how copy engines move data within a node; None: they do not.
        slowdown: by how much longer computation takes while a collective is under way, as a share: ``kernels`` for one that
            takes multiprocessors, ``gather_copies`` and ``reduce_copies`` for the copy engines.
        host_link: between a device and page-locked memory of its host, each way at the same time.
        shared_host_link: the same while all ranks of a host use theirs; None: no less.
        host_memory_bytes: memory of the host for each of its devices.
        host_bytes_per_s: what the processors move in that memory for each device, reads and writes together.
        sources: which numbers were measured, which are the vendor's, which are guesses.
    """

    name: str
    device_memory_bytes: int
    reserve_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    kernel_us: float
    efficiency: Mapping[str, Curve]
    host: Host
    devices_per_node: int
    node: Link
    network: Link
    collective_us: float
    copies: Link | None = None
    slowdown: Mapping[str, float] = field(default_factory=dict)
    host_link: Link = Link(10.0, 20e9)
    shared_host_link: Link | None = None
    host_memory_bytes: int = 128 << 30
    host_bytes_per_s: float = 20e9
    sources: str = ""

    def __post_init__(self) -> None:
        for name, value in self._numbers():
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"hardware '{self.name}' has {name} {value}; it must be a number that is not negative")
        for name in (
            "device_memory_bytes",
            "memory_bytes_per_s",
            "devices_per_node",
            "node.bytes_per_s",
            "network.bytes_per_s",
            "host_link.bytes_per_s",
            "shared_host_link.bytes_per_s",
            "host_bytes_per_s",
        ):
            if dict(self._numbers()).get(name) == 0:
                raise PlanError(f"hardware '{self.name}' has {name} 0; it must be positive")
        for kind in ("matmul", "attention", "convolution", "memory"):
            if not self.efficiency.get(kind):
                raise PlanError(
                    f"hardware '{self.name}' has no efficiency of '{kind}'; give pairs of size and share of the peak"
                )
        if "f32" not in self.peak_flops or any(f <= 0 for f in self.peak_flops.values()):
            raise PlanError(
                f"hardware '{self.name}' needs positive peak_flops, of f32 at least; it has {dict(self.peak_flops)}"
            )
        for kind, curve in self.efficiency.items():
            sizes = [size for size, _ in curve]
            if sizes != sorted(set(sizes)) or any(size <= 0 or not 0 < share <= 1 for size, share in curve):
                raise PlanError(
                    f"hardware '{self.name}' has efficiency of '{kind}' {curve}; sizes must grow, shares lie in (0, 1]"
                )

    def efficiency_at(self, kind: str, size: float) -> float:
        """The share of the peak at a size, interpolated in the logarithm of the size, constant outside of the curve."""
        curve = self.efficiency[kind]
        at = bisect.bisect_right(curve, size, key=lambda point: point[0])
        if at in (0, len(curve)):
            return curve[max(at - 1, 0)][1]
        (left, low), (right, high) = curve[at - 1], curve[at]
        return low + (high - low) * math.log(size / left) / math.log(right / left)

    def flops_per_s(self, dtype: str) -> float:
        """The peak for a dtype; that of float32 where it is not stated."""
        return self.peak_flops.get(dtype, self.peak_flops["f32"])

    @property
    def copy_bytes_per_s(self) -> float:
        """What a large copy reaches, reads and writes together."""
        return self.memory_bytes_per_s * self.efficiency["memory"][-1][1]

    @property
    def usable_bytes(self) -> int:
        """Memory of a device without its reserve."""
        return max(self.device_memory_bytes - self.reserve_bytes, 0)

    def shared(self, num_ranks: int) -> Hardware:
        """The machine as each of so many ranks finds it."""
        if num_ranks == 1 or self.shared_host_link is None:
            return self
        return dataclasses.replace(self, host_link=self.shared_host_link)

    def save(self, path: str | Path) -> None:
        """Write a file that ``hardware`` reads."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def _numbers(self) -> list[tuple[str, float]]:
        links = [(name, getattr(self, name)) for name in _LINKS]
        return [
            *(
                (n, getattr(self, n))
                for n in (
                    "device_memory_bytes",
                    "reserve_bytes",
                    "memory_bytes_per_s",
                    "kernel_us",
                    "host_memory_bytes",
                    "host_bytes_per_s",
                )
            ),
            *((n, getattr(self, n)) for n in ("devices_per_node", "collective_us")),
            *((f"{n}.{f}", getattr(link, f)) for n, link in links if link for f in ("latency_us", "bytes_per_s")),
            *((f"host.{f.name}", getattr(self.host, f.name)) for f in dataclasses.fields(Host) if f.name != "blocks"),
            *((f"slowdown.{n}", value) for n, value in self.slowdown.items()),
        ]


def known_hardware() -> list[str]:
    """The names of the descriptions that come with zcompile."""
    files = resources.files("zcompile.planner").joinpath("data").iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def hardware(name_or_path: str | Path | Hardware) -> Hardware:
    """A description by name, or from a file that ``python -m zcompile doctor --calibrate FILE`` wrote.

    Raises:
        PlanError: a name that is not known, or a file that cannot be read or is no description.
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    given = str(name_or_path)
    if given in known_hardware():
        text = resources.files("zcompile.planner").joinpath("data", f"{given}.json").read_text()
    elif given.endswith(".json") or isinstance(name_or_path, Path):
        try:
            text = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlanError(f"hardware file '{given}' cannot be read: {reason}") from error
    else:
        raise PlanError(
            f"hardware '{given}' is not known; the known ones are {', '.join(known_hardware())}, or pass the path of a .json "
            "file that python -m zcompile doctor --calibrate wrote"
        )
    return _parse(text, given)


def _parse(text: str, where: str) -> Hardware:
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError("it holds no object")
        fields["host"] = Host(**fields["host"])
        for link in _LINKS:
            if fields.get(link) is not None:
                fields[link] = Link(**fields[link])
        fields["efficiency"] = {kind: _curve(points) for kind, points in fields["efficiency"].items()}
        return Hardware(**fields)
    except KeyError as error:
        raise PlanError(f"hardware file '{where}' is no description of hardware: it has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"hardware file '{where}' is no description of hardware: {error}") from error


def _curve(points: Any) -> Curve:
    return tuple((float(size), float(share)) for size, share in points)
