"""The host's memory beside a device: what is page-locked there, how much there may be, and copies each way beside computation."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcompile import compat
from zcompile.errors import HostMemoryError
from zcompile.program import Transfer
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.communication.peers import Copied

#: page-locked memory comes in whole pages, of which no two tensors share one
PAGE_BYTES = 4096

#: the share of the free host memory that the ranks of a host may take together: the rest is for data loading and the page cache
SHARE = 0.9

#: bytes that one rank may have on its host, instead of its share of what is free
LIMIT_VARIABLE = "ZCOMPILE_HOST_BYTES"

#: the attribute of a value on the host that is its memory
BLOCK = "_zcompile_block"

#: what a stream has had at some moment, as torch gives it
Event = Any

#: where the kernel says how much memory a container may use, and uses
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes() -> int:
    """Memory of this host that processes can still get, within the limits of the container."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in _CGROUPS:
        if (most := _read(limit).strip()).isdigit() and (now := _read(used).strip()).isdigit():
            free = min(free, max(int(most) - int(now), 0))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def ranks_here(size: int) -> int:
    """How many of ``size`` ranks share this host: what torchrun says, else all of them."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(given), size) if given.isdigit() and int(given) > 0 else size


class HostMemory:
    """Memory on the host for one rank of one model: page-locked where the device is a GPU, so that copies go beside computation.

    Attributes:
        limit_bytes: the most that there may be.
        held_bytes: what there is now, with padding to whole pages.
        peak_bytes: the most that there ever was.
        values_bytes: of it, what values that forward offloaded take, in use or free.
    """

    def __init__(self, device: torch.device, *, ranks_on_host: int = 1) -> None:
        self.device = device
        given = os.environ.get(LIMIT_VARIABLE, "")
        if given and not given.isdigit():
            raise HostMemoryError(f"{LIMIT_VARIABLE} is {given!r}; it must be a number of bytes")
        self.limit_bytes = int(given) if given else int(free_bytes() * SHARE) // max(ranks_on_host, 1)
        self.held_bytes = 0
        self.peak_bytes = 0
        self.values_bytes = 0
        self._free: dict[int, list[Tensor]] = {}
        self._promised: dict[str, int] = {}

    def promise(self, num_bytes: int, what: str) -> None:
        """Keep room for what will be allocated under the same name; the last promise counts.

        Raises:
            HostMemoryError: there is no room for it.
        """
        self._promised.pop(what, None)
        self.require(num_bytes, what)
        self._promised[what] = num_bytes

    def require(self, num_bytes: int, what: str) -> None:
        """Check that so many more bytes fit.

        Raises:
            HostMemoryError: they do not.
        """
        taken = self.held_bytes + sum(self._promised.values())
        if taken + num_bytes > self.limit_bytes:
            raise HostMemoryError(
                f"offloading of {what} takes {num_bytes:,} bytes of host memory and this rank may have {self.limit_bytes:,}, of "
                f"which {taken:,} are taken; offload less, use more hosts, or set {LIMIT_VARIABLE} if there is more"
            )

    def zeros(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """A flat tensor of zeros that starts at a page. Its memory is page-locked until nobody holds this very tensor.

        Raises:
            HostMemoryError: there is no room for it.
        """
        num_bytes = pages(numel * dtype.itemsize)
        if what in self._promised:
            self._promised[what] = max(self._promised[what] - num_bytes, 0)
        self.require(num_bytes, what)
        memory = torch.zeros(num_bytes + PAGE_BYTES, dtype=torch.uint8)
        skip = -memory.data_ptr() % PAGE_BYTES
        flat = memory[skip : skip + num_bytes]
        locked = self.device.type == "cuda"
        if locked and num_bytes and (code := compat.lock_pages(flat)):
            raise HostMemoryError(
                f"offloading of {what} takes {num_bytes:,} bytes of host memory, which CUDA does not lock (error {code}); offload "
                "less, or raise the limit of locked memory (ulimit -l)"
            )
        result = flat.view(dtype)[:numel]
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        # the storage must outlive the lock, and the copies that still read or write it
        storage = flat if locked and num_bytes else None
        weakref.finalize(result, _give_back, weakref.ref(self), storage, num_bytes, self.device).atexit = False
        return result

    # Values that forward offloads. ------------------------------------------------------------------------------------

    def take(self, num_bytes: int) -> Tensor:
        """So many bytes, for a value."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        self.values_bytes += pages(num_bytes)
        return self.zeros(num_bytes, torch.uint8, "activations")

    def give(self, values: Sequence[Tensor]) -> None:
        """Take the memory of values back, which several may share. Copies to it or from it must have been waited for."""
        for block in {id(block): block for value in values if (block := block_of(value)) is not None}.values():
            self._free.setdefault(block.nbytes, []).append(block)


def block_of(value: Tensor) -> Tensor | None:
    """The bytes on the host that hold a value, and keep its pages locked."""
    return getattr(value, BLOCK, None)


def pages(num_bytes: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _give_back(owner: weakref.ref[HostMemory], locked: Tensor | None, num_bytes: int, device: torch.device) -> None:
    if locked is not None:
        torch.cuda.synchronize(device)
        compat.unlock_pages(locked)
    memory = owner()
    if memory is not None:
        memory.held_bytes -= num_bytes


class Copies:
    """Copies that were started in a stream of their own, called ``lane``; their ``works`` end with them, as collectives' do."""

    __slots__ = ("_event", "_kept", "_poison", "device", "lane")

    def __init__(
        self, device: torch.device, event: Event | None, kept: object, poison: Sequence[Tensor], lane: str
    ) -> None:
        self.device = device
        self.lane = lane
        self._event = event
        self._kept = kept
        self._poison = poison

    @property
    def works(self) -> tuple[Copied, ...]:
        """What the end of the copies can be seen by; nothing on CPU, where they have ended."""
        return () if self._event is None else (Copied(self._event),)

    def wait(self) -> None:
        """Let what is issued to the current stream from now on come after the copies."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        for tensor in self._poison:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        self._event, self._kept, self._poison = None, None, ()

    def __del__(self) -> None:
        if self._event is not None:  # an error came between: the memory must not be used again before the copies end
            torch.cuda.current_stream(self.device).wait_event(self._event)


class Lanes:
    """Copies to the host and from it, each way in a stream of its own; on CPU they are made at once, and there are no events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    def start(self, way: str, targets: Sequence[Tensor], sources: Sequence[Tensor], *, poison: bool = False) -> Copies:
        """Start copies between the device and the host behind all work that the current stream has.

        Tensors on the device belong to the current stream and are kept until the wait: then the current stream comes after the
        copies, and the allocator may use their memory again.

        Args:
            way: ``out`` to the host, ``in`` from it.
            targets: flat memory, each of its source's size and dtype.
            sources: flat memory.
            poison: fill the sources with NaN at the wait, which shows who still reads them.
        """
        event = self.copy(way, targets, sources, after=(self.now(),))
        return Copies(self.device, event, (targets, sources), sources if poison else (), way)

    def copy(
        self,
        way: str,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        *,
        after: Sequence[Event | None],
    ) -> Event | None:
        """Copy behind what the way has already and some events; the event of its end. Who calls keeps the tensors."""
        if self.device.type == "cpu":
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        stream = self.stream(way)
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return stream.record_event()

    def now(self) -> Event | None:
        """The end of what the current stream has."""
        return None if self.device.type == "cpu" else torch.cuda.current_stream(self.device).record_event()

    def join(self, event: Event | None) -> None:
        """Let the current stream come after an event."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self, way: str) -> None:
        """Let the host wait for what a way has."""
        if way in self._streams:
            self._streams[way].synchronize()

    def stream(self, way: str) -> torch.cuda.Stream:
        """The stream of one way."""
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(self.device)
        return self._streams[way]


class Mover:
    """Runs a program's transfers. Values that share their memory are copied once, and share it again.

    Attributes:
        memory: on the host.
        lanes: the ways to it.
    """

    def __init__(self, memory: HostMemory, lanes: Lanes, buffers: Buffers) -> None:
        self.memory = memory
        self.lanes = lanes
        self._buffers = buffers

    def start(self, ins: Transfer, slots: list[Tensor]) -> Copies:
        """Start the copies of an instruction; their tensors are in its output slots at once."""
        leaves = ins.op == "offload"
        made: dict[tuple[int, int, torch.dtype], Tensor] = {}
        sources: list[Tensor] = []
        for read, written in zip(ins.inputs, ins.outputs, strict=True):
            value = slots[read]
            key = (value.data_ptr(), value.nbytes, value.dtype)
            if key not in made:
                sources.append(value.as_strided((value.numel(),), (1,)))
                made[key] = (
                    self.memory.take(value.nbytes)
                    if leaves
                    else torch.empty(value.nbytes, dtype=torch.uint8, device=self.lanes.device)
                )
            slots[written] = made[key].view(value.dtype).as_strided(value.shape, value.stride())
            if leaves:
                setattr(slots[written], BLOCK, made[key])
        targets = [block.view(dtype) for (_, _, dtype), block in made.items()]
        return self.lanes.start("out" if leaves else "in", targets, sources, poison=leaves and self._buffers.poison)
