"""Measures the machine that it runs on and describes it, for ``hardware(path)``."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile import compat
from zcompile.planner.hardware import Curve, Hardware, Host, Link, hardware
from zcompile.runtime.communication import peers
from zcompile.runtime.offload.host import free_bytes, ranks_here

#: sides of the square matmuls that are timed
_SIDES = {"cpu": (32, 128, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
#: bytes of the copies that are timed, read and written together
_COPIES = {"cpu": (1 << 16, 1 << 20, 1 << 26), "cuda": (1 << 17, 1 << 20, 1 << 24, 1 << 27, 1 << 30)}
#: full bytes of the gathers that are timed
_GATHERS = {"cpu": (1 << 10, 1 << 22), "cuda": (1 << 16, 1 << 28)}
#: bytes of the copies between device and host, and between devices, whose bandwidth is taken
_LARGE = {"cpu": 1 << 22, "cuda": 1 << 28}
#: and of those whose latency is
_SMALL = 1 << 10
#: bytes of the operands that matmuls take turns with: a step's do not lie in a cache either
_COLD = {"cpu": 1 << 25, "cuda": 1 << 29}
#: pairs of them, at most
_MOST_OPERANDS = 64
#: seconds that repetitions of one measurement take, at least
_SECONDS = 0.1
#: the same for matmuls, so that the device comes to the clock that its power allows in a long run
_SUSTAINED = {"cpu": 0.1, "cuda": 0.5}
#: in how many parts
_RUNS = 10


@dataclass(frozen=True)
class Clock:
    """Times work on a device."""

    device: torch.device

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def us(self, work: Callable[[], object], seconds: float | None = None) -> float:
        """Microseconds of one call among many that follow each other.

        On the CPU of the fastest run, since other programs only slow it down. On a GPU, which is ours, of the median run: the
        fastest is one that began on a cool device.
        """
        seconds = _SECONDS if seconds is None else seconds
        work()
        self.finish()
        begin = time.perf_counter()
        work()
        self.finish()
        count = max(1, int(seconds / _RUNS / max(time.perf_counter() - begin, 1e-7)))
        runs = []
        for _ in range(_RUNS):
            begin = time.perf_counter()
            for _ in range(count):
                work()
            self.finish()
            runs.append((time.perf_counter() - begin) / count * 1e6)
        return statistics.median(runs) if self.device.type == "cuda" else min(runs)


def calibrate(device: torch.device, name: str) -> Hardware:
    """Measure a device and its host; takes a few seconds. With a process group of two ranks or more, collectives as well, on every
    rank.

    What is not measured (attention, convolutions, what a region call costs the host, slowdown by collectives) is taken from the
    description that comes with zcompile and is nearest, and ``sources`` says so.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    near = hardware("h200" if kind == "cuda" else "cpu-2core")
    clock = Clock(device)
    rates = {dtype: _matmuls(clock, dtype, _SIDES[kind]) for dtype in (torch.float32, torch.bfloat16)}
    peaks = {name: max(rate for _, rate in rates[dtype]) for name, dtype in _NAMES.items()}
    best = rates[torch.bfloat16]
    copies = _copies(clock, _COPIES[kind])
    bandwidth = max(rate for _, rate in copies)
    launch_us = _launch(clock)
    measured = replace(
        near,
        name=name,
        device_memory_bytes=_memory_bytes(device),
        peak_flops={**peaks, "f16": peaks["bf16"], "f64": peaks["f32"] / 2},
        memory_bytes_per_s=bandwidth,
        kernel_us=launch_us if kind == "cpu" else near.kernel_us,
        efficiency={**near.efficiency, "matmul": _shares(best, peaks["bf16"]), "memory": _shares(copies, bandwidth)},
        host=near.host if kind == "cpu" else _scaled_host(near.host, launch_us),
        host_link=near.host_link,
        shared_host_link=None,
        host_memory_bytes=free_bytes() // _ranks_here(),
        host_bytes_per_s=_host_bytes_per_s(_LARGE[kind]),
        sources=f"Measured by doctor --calibrate on {_describe(device)}, torch {torch.__version__}: sustained matmul rates by size, memory "
        f"bandwidth by size, cost of a launch ({launch_us:.1f} us), the host's link and memory. The highest rate is the peak.",
    )
    measured = _with_host_links(measured, clock, _LARGE[kind])
    rest = "attention, convolutions, host times of calls and collectives, reserve, slowdown beside collectives, network"
    if dist.is_initialized() and dist.get_world_size() > 1:
        measured = _with_links(measured, clock, _GATHERS[kind])
        measured = replace(measured, copies=_peer_copies(clock, _LARGE[kind], near.copies))
    else:
        rest += ", links"
    return replace(measured, sources=f"{measured.sources} Taken over from {near.name}: {rest}.")


_NAMES = {"f32": torch.float32, "bf16": torch.bfloat16}


def _matmuls(clock: Clock, dtype: torch.dtype, sides: Sequence[int]) -> list[tuple[float, float]]:
    """Flops of square matmuls with the flop/s that they reach in a long run, with operands from memory."""
    found, kind = [], clock.device.type
    for side in sides:
        count = min(max(_COLD[kind] // (2 * side * side * dtype.itemsize), 1), _MOST_OPERANDS)
        made = [torch.randn(2, side, side, device=clock.device).to(dtype).unbind() for _ in range(count)]
        turns = itertools.cycle(made)
        us = clock.us(lambda turns=turns: torch.mm(*next(turns)), _SUSTAINED[kind])
        found.append((2.0 * side**3, 2.0 * side**3 / us * 1e6))
    return found


def _copies(clock: Clock, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """Bytes of copies, read and written together, with the bytes a second that they reach."""
    found = []
    for size in sizes:
        source = torch.zeros(size // 8, device=clock.device)
        target = torch.empty_like(source)
        found.append((float(size), size / clock.us(lambda s=source, t=target: t.copy_(s)) * 1e6))
    return found


def _launch(clock: Clock) -> float:
    """Microseconds from one tiny operator to the next."""
    x = torch.zeros(1, device=clock.device)
    return clock.us(lambda: x.add_(1))


def _shares(rates: list[tuple[float, float]], peak: float) -> Curve:
    return tuple((size, min(rate / peak, 1.0)) for size, rate in rates)


def _scaled_host(host: Host, launch_us: float) -> Host:
    """A host's costs in proportion to what one launch takes; the H200's host took about 6 us."""
    share = launch_us / 6.0
    scaled = {
        n: getattr(host, n) * share for n in ("kernel_us", "region_us", "collective_us", "copied_tensor_us", "step_us")
    }
    return replace(host, **scaled)


def _with_links(measured: Hardware, clock: Clock, sizes: Sequence[int]) -> Hardware:
    """Latency and bandwidth of gathers over all ranks, which are taken to be in one node."""
    world_size = dist.get_world_size()
    times = []
    for size in sizes:
        part = torch.zeros(size // world_size, dtype=torch.uint8, device=clock.device)
        full = torch.empty(part.numel() * world_size, dtype=torch.uint8, device=clock.device)
        times.append(
            _together(clock, lambda f=full, p=part: compat.start_all_gather(dist.group.WORLD, [f], [p]).wait())
        )
    passed = [size * (world_size - 1) / world_size for size in sizes]
    slope = (times[-1] - times[0]) / (passed[-1] - passed[0])  # us a byte
    slope = max(slope, times[-1] / passed[-1] / 2)  # a large gather spends at least half of its time on its bytes
    latency = max(times[0] - passed[0] * slope, 0.0)
    return replace(
        measured,
        devices_per_node=max(world_size, measured.devices_per_node),
        node=Link(latency / 2 / (world_size - 1), 1e6 / slope),
        collective_us=latency / 2,
        sources=f"{measured.sources} All-gathers over {world_size} ranks ({dist.get_backend()}), half of the latency put on hops; "
        "copies between devices, if they reach each other.",
    )


def _peer_copies(clock: Clock, num_bytes: int, near: Link | None) -> Link | None:
    """What one device fetches from another one's memory while all do so; the latency of what is near, which is mostly barriers.

    None where the runtime does not copy: a rank of another host, or GPUs that do not reach each other.
    """
    size, device = dist.get_world_size(), clock.device
    able = near is not None and device.type == "cuda" and size <= peers.MAX_RANKS and _ranks_here() == size
    able = able and torch.cuda.device_count() >= size
    other = torch.device("cuda", (dist.get_rank() + 1) % size)
    able = able and other != device and torch.cuda.can_device_access_peer(device, other)
    everybody = torch.tensor([able], dtype=torch.int32, device=device)
    dist.all_reduce(everybody, op=dist.ReduceOp.MIN)
    if near is None or not everybody.item():
        return None
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=other)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    us = _together(clock, lambda: target.copy_(source, non_blocking=True))
    return Link(near.latency_us, num_bytes / us * 1e6)


def _with_host_links(here: Hardware, clock: Clock, num_bytes: int) -> Hardware:
    """With copies between a device and page-locked memory: of the first rank alone, and of all ranks at the same time."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return replace(here, host_link=_host_link(clock, num_bytes, clock.us))
    if dist.get_rank() == 0:
        here = replace(here, host_link=_host_link(clock, num_bytes, clock.us))
    dist.barrier()
    return replace(here, shared_host_link=_host_link(clock, num_bytes, partial(_together, clock)))


def _host_link(clock: Clock, num_bytes: int, time_us: Callable[[Callable[[], object]], float]) -> Link:
    """Copies between a device and page-locked memory, both ways at the same time where there are streams for it."""
    on_gpu = clock.device.type == "cuda"
    streams = [torch.cuda.Stream(clock.device) for _ in range(2)] if on_gpu else []
    ways = []
    for size in (_SMALL, num_bytes):
        host = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        here = [torch.zeros(size, dtype=torch.uint8, device=clock.device) for _ in range(2)]
        clock.finish()

        def both(host: list[Tensor] = host, here: list[Tensor] = here) -> None:
            for stream, source, target in zip(streams, (host[0], here[1]), (here[0], host[1]), strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)

        ways.append(time_us(both if on_gpu else partial(here[0].copy_, host[0])))
    latency, whole = ways
    return Link(latency, num_bytes / max(whole - latency, whole / 2) * 1e6)


def _host_bytes_per_s(num_bytes: int) -> float:
    """What this rank's processors move in the host's memory, reads and writes together."""
    source = torch.zeros(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * num_bytes / Clock(torch.device("cpu")).us(lambda: target.copy_(source)) * 1e6


def _ranks_here() -> int:
    """How many ranks of this job share this host."""
    return ranks_here(dist.get_world_size()) if dist.is_initialized() else 1


def _together(clock: Clock, work: Callable[[], object]) -> float:
    """Microseconds of a collective: of the fastest call, that of its slowest rank."""
    for _ in range(2):
        work()
    clock.finish()
    runs = []
    for _ in range(_RUNS):
        dist.barrier()
        begin = time.perf_counter()
        work()
        clock.finish()
        runs.append((time.perf_counter() - begin) * 1e6)
    us = torch.tensor(runs, device=clock.device)
    dist.all_reduce(us, op=dist.ReduceOp.MAX)
    return float(us.min().item())


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_memory_bytes()


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"a CPU with {torch.get_num_threads()} threads"
