"""How long work takes on a machine: kernels and regions by the roofline, collectives by latency and bandwidth, the update by its bytes."""

from __future__ import annotations

from zcompile.analysis.cost import Kernel, region_kernels
from zcompile.errors import PlanError
from zcompile.ir.graph import Region
from zcompile.planner.hardware import Hardware

#: smaller buckets go through NCCL, larger ones within a node through the copy engines, up to so many ranks (as the runtime does)
COPIES_MIN_BYTES = 48 << 20
COPIES_MAX_RANKS = 8

#: bytes that the update of one local parameter moves: parameter, two moments and gradient in, parameter and two moments out
ADAMW_BYTES = 28


def kernel_us(kernel: Kernel, hardware: Hardware) -> float:
    """Time of one kernel: the longer of its flops and its bytes at the rates that its size reaches (Williams et al., Roofline,
    2009), and no less than any kernel takes."""
    cost = kernel.cost
    seconds = cost.num_bytes / (hardware.memory_bytes_per_s * hardware.efficiency_at("memory", max(cost.num_bytes, 1)))
    for dtype, flops in cost.flops.items():
        rate = hardware.flops_per_s(dtype) * hardware.efficiency_at(kernel.kind, flops)
        seconds = max(seconds, flops / rate)
    return max(seconds * 1e6, hardware.kernel_us)


def region_us(region: Region, hardware: Hardware) -> float:
    """Device time of one call of a region."""
    return sum(kernel_us(kernel, hardware) for kernel in region_kernels(region))


def memory_us(num_bytes: float, hardware: Hardware) -> float:
    """Time to move bytes, reads and writes together, in one kernel."""
    if num_bytes <= 0:
        return 0.0
    rate = hardware.memory_bytes_per_s * hardware.efficiency_at("memory", num_bytes)
    return max(num_bytes / rate * 1e6, hardware.kernel_us)


def by_copies(num_bytes: int, size: int, hardware: Hardware) -> bool:
    """Whether a bucket of so many full bytes is moved by the copy engines."""
    within = size <= min(hardware.devices_per_node, COPIES_MAX_RANKS)
    return hardware.copies is not None and within and num_bytes >= COPIES_MIN_BYTES


def collective_us(op: str, num_bytes: int, size: int, hardware: Hardware) -> float:
    """Time of a collective alone on the machine.

    A ring sends the full bytes ``S`` of ``W`` ranks in ``W - 1`` steps: ``base + hops + S (W - 1) / W / bandwidth``; an all-reduce
    is two of them, or a tree of nodes where that is shorter. Hops within nodes and between them have latencies of their own, and a
    ring through nodes is as fast as its slowest part: a device's link, or the node's share of the network, which all rings of a
    node use together. These are the formulas of NCCL's own choice of algorithm (nccl, src/graph/tuning.cc).

    Args:
        op: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        num_bytes: bytes of the full side.
        size: ranks; fills whole nodes one after the other.
        hardware: where.
    """
    if op not in ("all_gather", "reduce_scatter", "all_reduce"):
        raise PlanError(f"collective is '{op}'; it must be all_gather, reduce_scatter or all_reduce")
    if num_bytes < 0 or size < 1:
        raise PlanError(
            f"collective of {num_bytes} bytes on {size} ranks has no meaning; neither may be negative or no rank"
        )
    if size == 1:
        return 0.0
    passed = num_bytes * (size - 1) / size
    if op != "all_reduce" and by_copies(num_bytes, size, hardware):
        assert hardware.copies is not None
        return hardware.copies.latency_us * (size - 1) + passed / hardware.copies.bytes_per_s * 1e6
    per_node = hardware.devices_per_node
    nodes = -(-size // per_node)
    bandwidth = hardware.node.bytes_per_s
    if nodes > 1:
        outward = hardware.network.bytes_per_s * per_node
        bandwidth = min(bandwidth, outward) if per_node > 1 else outward
    hops = (size - nodes) * hardware.node.latency_us + (nodes - 1) * hardware.network.latency_us
    ring = hops + passed / bandwidth * 1e6
    if op != "all_reduce":
        return hardware.collective_us + ring
    depth = min(per_node, size) - 1, (nodes - 1).bit_length()
    up = depth[0] * hardware.node.latency_us + depth[1] * hardware.network.latency_us
    return hardware.collective_us + 2 * min(ring, up + num_bytes / bandwidth * 1e6)


def host_copy_us(num_bytes: int, hardware: Hardware) -> float:
    """Time of a copy between the device and page-locked memory of the host, one way."""
    return hardware.host_link.latency_us + num_bytes / hardware.host_link.bytes_per_s * 1e6


def optimizer_us(local_params: int, hardware: Hardware) -> float:
    """Time of AdamW on float32 masters in one kernel, which moves ``ADAMW_BYTES`` a parameter."""
    return memory_us(ADAMW_BYTES * local_params, hardware)
