"""Rates against the numbers that were measured on two H200, and against what formulas must keep to."""

import dataclasses

import pytest

from zcompile.analysis.cost import Cost, Kernel
from zcompile.errors import PlanError
from zcompile.planner import rates
from zcompile.planner.hardware import hardware, known_hardware
from zcompile.runtime.communication import peers

MIB = 1 << 20
H200 = hardware("h200")
WITHOUT_COPIES = dataclasses.replace(H200, copies=None)


@pytest.mark.parametrize(("num_bytes", "bus_bytes_per_s"), [(64 * MIB, 210e9), (256 * MIB, 240e9), (1024 * MIB, 268e9)])
def test_all_gathers_of_two_h200_take_what_was_measured(num_bytes: int, bus_bytes_per_s: float) -> None:
    measured_us = num_bytes / 2 / bus_bytes_per_s * 1e6
    assert rates.collective_us("all_gather", num_bytes, 2, WITHOUT_COPIES) == pytest.approx(measured_us, rel=0.15)


def test_small_all_gathers_take_the_measured_floor() -> None:
    assert rates.collective_us("all_gather", MIB // 4, 2, H200) == pytest.approx(50, rel=0.25)


@pytest.mark.parametrize("num_bytes", [116 * MIB, 416 * MIB])
def test_coalesced_gathers_of_layers_take_what_was_measured(num_bytes: int) -> None:
    """259 and 851 us through NCCL."""
    measured_us = {116: 259, 416: 851}[num_bytes // MIB]
    assert rates.collective_us("all_gather", num_bytes, 2, WITHOUT_COPIES) == pytest.approx(measured_us, rel=0.05)


def test_copies_of_a_layer_take_what_was_measured() -> None:
    """221 us with the staging of float32 shards, beside matmuls."""
    staged = rates.memory_us(116 * MIB / 2 * 3, H200)
    assert rates.collective_us("all_gather", 116 * MIB, 2, H200) + staged == pytest.approx(221, rel=0.15)


def test_a_large_matmul_takes_what_was_measured() -> None:
    kernel = Kernel("matmul", "mm", Cost({"bf16": 2.0 * 8192**3}, 2 * 2 * 8192**2, 2 * 8192**2))
    assert kernel.cost.num_flops / rates.kernel_us(kernel, H200) * 1e6 == pytest.approx(799e12, rel=0.01)


def test_the_update_takes_what_was_measured() -> None:
    """0.54 G parameters in 3.54 ms."""
    assert rates.optimizer_us(537_000_000, H200) == pytest.approx(3540, rel=0.03)


def test_the_runtime_switches_to_copies_where_the_planner_says() -> None:
    assert (rates.COPIES_MIN_BYTES, rates.COPIES_MAX_RANKS) == (peers.MIN_BYTES, peers.MAX_RANKS)
    assert rates.by_copies(48 * MIB, 8, H200) and not rates.by_copies(48 * MIB - 1, 8, H200)
    assert not rates.by_copies(48 * MIB, 16, H200) and not rates.by_copies(48 * MIB, 2, WITHOUT_COPIES)


@pytest.mark.parametrize("name", known_hardware())
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce"])
def test_more_bytes_and_slower_links_take_longer(name: str, op: str) -> None:
    machine = dataclasses.replace(hardware(name), copies=None)
    slower = dataclasses.replace(
        machine,
        node=dataclasses.replace(machine.node, bytes_per_s=machine.node.bytes_per_s / 2),
        network=dataclasses.replace(machine.network, bytes_per_s=machine.network.bytes_per_s / 2),
    )
    for size in (2, 8, 12, 64, 4096):
        times = [rates.collective_us(op, mib * MIB, size, machine) for mib in (0, 1, 64, 1024)]
        assert times == sorted(times) and times[0] > 0
        assert rates.collective_us(op, 64 * MIB, size, slower) > times[2]
    assert rates.collective_us(op, MIB, 1, machine) == 0


def test_an_all_reduce_is_a_reduction_and_a_gather_in_one_node() -> None:
    both = sum(rates.collective_us(op, 256 * MIB, 8, WITHOUT_COPIES) for op in ("all_gather", "reduce_scatter"))
    assert rates.collective_us("all_reduce", 256 * MIB, 8, WITHOUT_COPIES) == pytest.approx(both, rel=0.05)


def test_a_tree_beats_a_ring_where_latency_counts() -> None:
    """512 nodes: a ring of 4096 ranks has thousands of hops, a tree of nodes nine levels."""
    ring = 2 * rates.collective_us("all_gather", MIB, 4096, WITHOUT_COPIES)
    assert rates.collective_us("all_reduce", MIB, 4096, WITHOUT_COPIES) < ring / 10


def test_a_ring_through_nodes_is_as_fast_as_its_slowest_part() -> None:
    slow = dataclasses.replace(WITHOUT_COPIES, network=dataclasses.replace(H200.network, bytes_per_s=1e9))
    passed = 1024 * MIB * 15 / 16
    us = rates.collective_us("all_gather", 1024 * MIB, 16, slow) - rates.collective_us("all_gather", 0, 16, slow)
    assert us == pytest.approx(passed / (8 * 1e9) * 1e6)


@pytest.mark.parametrize(
    ("op", "num_bytes", "size"), [("broadcast", 1, 2), ("all_gather", -1, 2), ("all_gather", 1, 0)]
)
def test_meaningless_collectives_are_refused(op: str, num_bytes: int, size: int) -> None:
    with pytest.raises(PlanError, match=r"must be|may be"):
        rates.collective_us(op, num_bytes, size, H200)
