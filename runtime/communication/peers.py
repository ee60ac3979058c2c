"""Collectives by the copy engines of GPUs that reach each other's memory.

A collective's kernel takes multiprocessors away from the computation that it runs beside, and is slowed down by it. Measured
on two H200 (116 MiB of bf16, nine tensors, beside matmuls): NCCL's all-gather takes 436 us and costs the matmuls 103 us, this
one 221 and 21; NCCL's float32 reduce-scatter of the same gradients takes 751 and costs 149, the copies of this one 208 and 64.
What each rank does on its own device, casting and averaging, is what remains (`benchmarks/exchange.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile import compat
from zcompile.errors import RankError
from zcompile.runtime.buffers import parts
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.sharding.arenas import ALIGNMENT_BYTES

log = logging.getLogger("zcompile")

#: smaller collectives cost the host more than they save the device
MIN_BYTES = 48 << 20

#: seconds by which a barrier's own end with an error comes after ours, which says more
DEVICE_GRACE = 60.0

#: seconds for ranks that have all come to exchange the addresses of what they share
RENDEZVOUS_SECONDS = 30.0

#: most ranks: every rank copies from and to every other
MAX_RANKS = 8


class SharedMemory(Protocol):
    """Memory of each rank that all ranks can read and write.

    Attributes:
        slabs: by rank, flat uint8; this rank's own is local memory.
    """

    slabs: list[Tensor]

    def barrier(self) -> None:
        """Let the current stream go on when the streams of all ranks are here."""
        ...

    def unblock(self) -> None:
        """Let a barrier go on that waits for a rank which is gone."""
        ...


class Copied:
    """What was started: ready when its last copy is."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    @classmethod
    def here(cls) -> Copied:
        """Ready when everything is that the current stream has been given."""
        event = torch.cuda.Event()
        event.record()
        return cls(event)

    def wait(self) -> None:
        """Let the current stream wait."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return self._event is None or self._event.query()


#: views of the tensors of one bucket, by rank
Views = list[list[Tensor]]


class _Lane:
    """One kind of collective: a stream of its own, and shared memory that grows to what its buckets need."""

    def __init__(self, device: torch.device, share: Callable[[int], SharedMemory]) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.memory: SharedMemory | None = None
        self.views: dict[Any, tuple[Views, Views]] = {}
        self.fixed = False
        self._share = share

    @property
    def capacity(self) -> int:
        return 0 if self.memory is None else self.memory.slabs[0].numel()

    def reserve(self, num_bytes: int) -> SharedMemory:
        """Shared memory of at least this size. Collective when it has to grow, which every rank finds alike.

        Everything that was issued has ended then, and the old memory is given up.
        """
        if self.memory is None or self.capacity < num_bytes:
            if self.fixed:
                raise RuntimeError(
                    f"a recording needs {num_bytes} bytes of shared memory and there are {self.capacity}"
                )
            if self.stream is not None:
                torch.cuda.synchronize(self.stream.device)  # nobody's copies touch the old memory any more
            self.memory = self._share(num_bytes)
            self.views.clear()
        return self.memory

    def fork(self) -> AbstractContextManager[Any]:
        """Work inside goes to the lane's stream, behind everything that was issued so far."""
        if self.stream is None:
            return contextlib.nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def mark(self) -> torch.cuda.Event | None:
        """A point in the lane's stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


class PeerCopies:
    """All-gathers and reduce-scatters that are copies between the ranks' memories.

    All-gather: every rank puts its shards (cast on the way, if need be) into shared memory and where they belong in its own outputs,
    in one pass, and fetches those of the others. Reduce-scatter: every rank puts its parts of the others' gradients into their memory,
    and averages what it has got with its own part, in the order of ranks and in float32 or wider: what travels may be narrower than the
    result. Every rank issues the same collectives of the same sizes in the same order. Results have the same bits in repeated runs.

    Args:
        rank: this rank's place on the axis.
        device: where the tensors are.
        share: makes shared memory of a number of bytes; collective.

    Attributes:
        replayed: the latest replay of recorded collectives.
    """

    def __init__(self, rank: int, size: int, device: torch.device, share: Callable[[int], SharedMemory]) -> None:
        self._rank, self._size = rank, size
        self._gathers = _Lane(device, share)
        self._reductions = _Lane(device, share)
        self._recorded: list[SharedMemory] = []
        self.replayed = Copied(None)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory on this rank."""
        return self._gathers.capacity + self._reductions.capacity

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> Copied:
        """Gather along dim 0: ``outputs[i]`` is all ranks' ``shards[i]`` in the dtype of the output."""
        lane = self._gathers
        types = tuple((shard.shape, out.dtype) for out, shard in zip(outputs, shards, strict=True))
        memory = lane.reserve(sum(_extent(*kind) for kind in types))
        if types not in lane.views:
            lane.views[types] = (_views(memory.slabs, 0, types), [])
        staged, _ = lane.views[types]
        into = [parts(out, self._size) for out in outputs]
        with lane.fork():
            # everybody has fetched what was staged before
            stage(shards, staged[self._rank], [target[self._rank] for target in into])
            memory.barrier()
            for rank in self._others():
                for target, source in zip(into, staged[rank], strict=True):
                    target[rank].copy_(source.view(-1), non_blocking=True)
            memory.barrier()
            return Copied(lane.mark())

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Copied:
        """Average ``inputs[i]`` over ranks: ``outputs[i]`` is this rank's part of it along dim 0, in its own dtype."""
        lane = self._reductions
        types = tuple((torch.Size((t.numel() // self._size,)), t.dtype) for t in inputs)
        num_bytes = sum(_extent(*kind) for kind in types)
        memory = lane.reserve((self._size - 1) * num_bytes)
        if types not in lane.views:
            of_slot = [_views(memory.slabs, slot * num_bytes, types) for slot in range(self._size - 1)]
            put = [
                of_slot[self._rank - (self._rank > rank)][rank] if rank != self._rank else []
                for rank in range(self._size)
            ]
            lane.views[types] = (put, [views[self._rank] for views in of_slot])
        put, got = lane.views[types]
        with lane.fork():
            memory.barrier()  # everybody has averaged what lay there before
            pieces = [t.view(self._size, -1).unbind() for t in inputs]
            for rank in self._others():
                for target, piece in zip(put[rank], pieces, strict=True):
                    target.copy_(piece[rank], non_blocking=True)
            memory.barrier()
            average(outputs, [piece[self._rank] for piece in pieces], got, self._rank)
            return Copied(lane.mark())

    def unblock(self) -> bool:
        """Let the streams run out after a rank is gone: what is computed from then on is garbage. False when they have."""
        waiting = [lane.memory for lane in self._lanes() if lane.stream and not lane.stream.query()]
        if not self.replayed.is_completed():
            waiting += self._recorded
        for memory in waiting:
            if memory is not None:
                memory.unblock()
        return bool(waiting)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, copies are recorded. They will use the memory that is there now, which stays, and may not ask for more."""
        for lane in self._lanes():
            lane.fixed = True
        try:
            yield
        finally:
            for lane in self._lanes():
                lane.fixed = False
        known = self._recorded
        known += [m for lane in self._lanes() if (m := lane.memory) is not None and all(m is not k for k in known)]

    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._gathers, self._reductions

    def _others(self) -> list[int]:
        """The other ranks in the order in which they are served: not all at the same one at the same time."""
        return [(self._rank + 1 + i) % self._size for i in range(self._size - 1)]


def shared_memory(mesh: Mesh, agreement: Agreement) -> Callable[[int], SharedMemory]:
    """A function that makes memory of so many bytes on every rank, which all can read and write; collective.

    Ranks that exchange the addresses block on the store, and block their whole process with it: nobody could find out that one
    is gone. So all of them first say that they have come, which is watched; a rank that is lost after that ends the exchange
    within ``RENDEZVOUS_SECONDS``.
    """

    def share(num_bytes: int) -> SharedMemory:
        agreement.compare("memory shared between GPUs", f"{num_bytes} bytes")
        seconds = min(mesh.timeout, RENDEZVOUS_SECONDS)
        try:
            with compat.group_store_timeout(mesh.group, seconds):
                return compat.SymmetricMemory(num_bytes, mesh.device, mesh.group, mesh.timeout + DEVICE_GRACE)
        except dist.DistError as error:
            raise agreement.explain(error, f"sharing {num_bytes} bytes of memory between GPUs") from error

    return share


def connect(mesh: Mesh, agreement: Agreement) -> PeerCopies | None:
    """The way of the copy engines between the ranks of a mesh; None where there is none, on every rank alike. Collective.

    It takes GPUs of one host that reach each other's memory, each with a rank of its own that sees the others'.
    ``ZCOMPILE_PEER_COPIES=0``, on any rank, switches it off.
    """
    if mesh.group is None or mesh.device.type != "cuda" or not 1 < mesh.size <= MAX_RANKS:
        return None
    share = shared_memory(mesh, agreement)
    able = os.environ.get("ZCOMPILE_PEER_COPIES") != "0"
    here = torch.tensor(_identity(mesh.device), dtype=torch.int64, device=mesh.device)
    everybody = torch.empty(mesh.size * here.numel(), dtype=torch.int64, device=mesh.device)
    mesh.collectives.all_gather([everybody], [here]).wait()
    rows = everybody.view(mesh.size, -1).tolist()
    if not _all_agree(mesh, able and _reaches(mesh.device, rows)):
        return None
    try:
        memory = share(ALIGNMENT_BYTES)
        memory.slabs[(mesh.rank + 1) % mesh.size].sum().item()
        worked = True
    except RankError:
        raise
    except RuntimeError as error:
        log.info("GPUs cannot share memory, collectives go through NCCL: %s", error)
        worked = False
    if not _all_agree(mesh, worked):
        return None
    return PeerCopies(mesh.rank, mesh.size, mesh.device, share)


def _identity(device: torch.device) -> list[int]:
    """Numbers that name this host and this GPU."""
    names = (platform.node() + _boot_id(), str(torch.cuda.get_device_properties(device).uuid))
    return [int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") for name in names]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _reaches(device: torch.device, rows: Sequence[Sequence[int]]) -> bool:
    """Whether every rank has a GPU of its own on this host, which this one can copy from and to."""
    host, mine = _identity(device)
    seen = {_identity(torch.device("cuda", i))[1]: i for i in range(torch.cuda.device_count())}
    others = [gpu for _, gpu in rows if gpu != mine]
    return (
        all(row[0] == host for row in rows)
        and len(set(others)) == len(rows) - 1
        and all(gpu in seen and torch.cuda.can_device_access_peer(device, seen[gpu]) for gpu in others)
    )


def _all_agree(mesh: Mesh, mine: bool) -> bool:
    flag = torch.tensor([mine], dtype=torch.int32, device=mesh.device)
    mesh.collectives.all_reduce([flag], "min").wait()
    return bool(flag.item())


#: what the kernels compute with
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _by_kernels(*rows: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """The places, in all rows, of tensors that kernels can take, and of others."""
    by_kernels: list[int] = []
    by_torch: list[int] = []
    for place, tensors in enumerate(zip(*rows, strict=True)):
        able = all(tensor.is_cuda and tensor.dtype in _KERNEL_DTYPES for tensor in tensors)
        (by_kernels if able else by_torch).append(place)
    return by_kernels, by_torch


def stage(shards: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Copy ``shards[i]``, contiguous, to ``first[i]`` and ``second[i]``, which have another dtype and other shapes."""
    by_kernels, by_torch = _by_kernels(shards, first)
    if by_kernels:
        from zcompile.runtime.kernels.stage import stage_  # Triton is imported where it is used

        stage_(*([row[i] for i in by_kernels] for row in (shards, first, second)))
    for i in by_torch:
        first[i].copy_(shards[i].view(first[i].shape))
        second[i].copy_(first[i].view(second[i].shape))


def average(outputs: Sequence[Tensor], own: Sequence[Tensor], received: Sequence[Sequence[Tensor]], rank: int) -> None:
    """``outputs[i]`` is the mean of ``own[i]`` and the other ranks' ``received[r][i]``, added up in rank order in float32 or wider."""
    by_kernels, by_torch = _by_kernels(outputs, own)
    if by_kernels:
        from zcompile.runtime.kernels.average import average_  # Triton is imported where it is used

        ours, theirs = ([row[i] for i in by_kernels] for row in (outputs, own))
        average_(ours, theirs, [[source[i] for i in by_kernels] for source in received], rank)
    for i in by_torch:
        out, others = outputs[i], [source[i] for source in received]
        total = torch.zeros(out.numel(), dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        for source in (*others[:rank], own[i], *others[rank:]):
            total += source.view(-1).to(total.dtype)
        out.view(-1).copy_(total.div_(1 + len(others)))


def _extent(shape: torch.Size, dtype: torch.dtype) -> int:
    """Bytes from the start of a tensor to that of the next."""
    return -(-shape.numel() * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _views(slabs: Sequence[Tensor], start: int, types: Sequence[tuple[torch.Size, torch.dtype]]) -> Views:
    """Tensors of these types one after the other in each slab, from byte ``start``."""
    views: Views = []
    for slab in slabs:
        offset, row = start, []
        for shape, dtype in types:
            row.append(slab[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape))
            offset += _extent(shape, dtype)
        views.append(row)
    return views
