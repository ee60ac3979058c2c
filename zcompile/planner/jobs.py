"""Device work of a step as jobs, in the order in which the host issues them: what each takes, where it runs, what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zcompile.planner import rates
from zcompile.planner.hardware import Hardware
from zcompile.runtime.offload.hosted_update import NUM_SLOTS

#: the streams of the runtime: computation, NCCL's collectives, and the two lanes of the copy engines
COMPUTE, GROUP, GATHERS, REDUCTIONS = "compute", "group", "gathers", "reductions"
#: the ways to the host and from it, and the host's own work on what it holds
OUT, IN, CPU = "offloads", "reloads", "cpu"
STREAMS: tuple[str, ...] = (COMPUTE, GROUP, GATHERS, REDUCTIONS, OUT, IN, CPU)


@dataclass(frozen=True)
class Job:
    """One piece of device work. Jobs are in a list, in the order in which they are issued, and name others by their index.

    Attributes:
        name: of its node.
        kind: ``region``, ``cast``, ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``offload``, ``reload``, ``accumulate`` (a window's
            gradients) or ``optimizer``.
        phase: ``forward``, ``backward`` or ``optimizer``.
        stream: one of ``STREAMS``; jobs of a stream run in the order of the list.
        duration_us: time of the device when nothing runs beside it.
        host_us: time of the host to issue it.
        after: earlier jobs that end before it starts, beside those of its stream.
        needs: earlier jobs whose results it reads: what no schedule can change.
        num_bytes: bytes of a collective's full side, or what a region moves.
        slowdown: for a collective, by how much longer computation beside it takes, as a share.
    """

    name: str
    kind: str
    phase: str
    stream: str
    duration_us: float
    host_us: float = 0.0
    after: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    num_bytes: int = 0
    slowdown: float = 0.0


@dataclass(frozen=True)
class Bucket:
    """What one collective carries on each rank; buckets add up.

    Attributes:
        op: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        size: ranks.
        num_tensors: tensors.
        stored_bytes: of what goes in before a cast, such as float32 shards.
        sent_bytes: of what goes in, in the dtype it is gathered in or gradients come in.
        received_bytes: of the results.
    """

    op: str
    size: int
    num_tensors: int
    stored_bytes: int
    sent_bytes: int
    received_bytes: int

    @property
    def full_bytes(self) -> int:
        """Bytes of the full side: what a gather makes, what a reduction reads."""
        return self.received_bytes if self.op == "all_gather" else self.sent_bytes

    @property
    def wire_bytes(self) -> int:
        """The same as NCCL moves it: reductions in the dtype of their results."""
        if self.op == "all_gather":
            return self.received_bytes
        return max(self.sent_bytes, self.received_bytes * (self.size if self.op == "reduce_scatter" else 1))

    def __add__(self, other: Bucket) -> Bucket:
        return replace(
            self,
            num_tensors=self.num_tensors + other.num_tensors,
            stored_bytes=self.stored_bytes + other.stored_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
        )


class Issuer:
    """Issues a step's work and records it as jobs.

    A collective starts behind all computation that was issued before it, in a stream of its own; computation that is issued
    behind a wait starts after the end of what is waited for. So does the runtime: NCCL's stream, and each lane of the copy
    engines, wait for the current stream at every start.

    Attributes:
        jobs: what was issued.
        phase: what it belongs to.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.jobs: list[Job] = []
        self.phase = "forward"
        self._waited: dict[int, None] = {}
        self._last_compute: tuple[int, ...] = ()

    def compute(
        self, name: str, kind: str, us: float, host_us: float, needs: tuple[int, ...] = (), num_bytes: int = 0
    ) -> int:
        """Issue computation; the index of its job."""
        if self.hardware.host.blocks:  # the device is the host: issuing is part of the work
            us, host_us = us + host_us, 0.0
        job = Job(name, kind, self.phase, COMPUTE, us, host_us, tuple(self._waited), needs, num_bytes)
        self._waited.clear()
        self.jobs.append(job)
        self._last_compute = (len(self.jobs) - 1,)
        return self._last_compute[0]

    def start(self, name: str, bucket: Bucket, needs: tuple[int, ...] = ()) -> int:
        """Issue a collective; the index of its job. NCCL's is cast to its dtype by computation before it."""
        hw = self.hardware
        gathers = bucket.op == "all_gather"
        us, host_us = rates.collective_us(bucket.op, bucket.wire_bytes, bucket.size, hw), hw.host.collective_us
        if bucket.op != "all_reduce" and rates.by_copies(bucket.full_bytes, bucket.size, hw):
            us = rates.collective_us(bucket.op, bucket.full_bytes, bucket.size, hw)
            # shards are put where the others fetch them and where they belong; what has come from the others is averaged
            moved = (
                bucket.stored_bytes + 2 * bucket.sent_bytes if gathers else bucket.sent_bytes + bucket.received_bytes
            )
            us += rates.memory_us(moved, hw)
            host_us += hw.host.copied_tensor_us * bucket.num_tensors * (bucket.size - 1)
            stream, way = (GATHERS, "gather_copies") if gathers else (REDUCTIONS, "reduce_copies")
        else:
            before, behind = (
                (bucket.stored_bytes, bucket.sent_bytes) if gathers else (bucket.sent_bytes, bucket.wire_bytes)
            )
            if before != behind and bucket.size > 1:
                moved = before + behind
                cast_us = rates.memory_us(moved, hw)
                needs = (self.compute(f"{name}_cast", "cast", cast_us, hw.host.kernel_us, needs, moved),)
            stream, way = GROUP, "kernels"
        after = joined([needs, self._last_compute, tuple(self._waited)])
        slowdown = hw.slowdown.get(way, 0.0)
        self.jobs.append(
            Job(name, bucket.op, self.phase, stream, us, host_us, after, needs, bucket.full_bytes, slowdown)
        )
        return len(self.jobs) - 1

    def transfer(self, name: str, way: str, num_bytes: int, num_tensors: int, needs: tuple[int, ...] = ()) -> int:
        """Issue copies to the host (``OUT``) or from it (``IN``); the index of their job."""
        hw = self.hardware
        us, host_us = rates.host_copy_us(num_bytes, hw), hw.host.copied_tensor_us * num_tensors
        kind = "offload" if way == OUT else "reload"
        if hw.host.blocks:
            return self.compute(name, kind, us, host_us, needs, num_bytes)
        after = joined([needs, self._last_compute, tuple(self._waited)])
        self.jobs.append(Job(name, kind, self.phase, way, us, host_us, after, needs, num_bytes))
        return len(self.jobs) - 1

    def wait(self, jobs: Iterable[int]) -> None:
        """Let what is issued from now on start after these have ended."""
        self._waited.update(dict.fromkeys(jobs))

    @property
    def last(self) -> tuple[int, ...]:
        """The job that was issued last."""
        return (len(self.jobs) - 1,) if self.jobs else ()

    def process(self, name: str, kind: str, us: float, needs: tuple[int, ...], num_bytes: int) -> int:
        """Let the processors work on what is in the host's memory; the index of their job."""
        self.jobs.append(Job(name, kind, self.phase, CPU, us, 0.0, needs, needs, num_bytes))
        return len(self.jobs) - 1

    def update(self, num_params: int) -> None:
        """Issue AdamW on so many local parameters, which waits for everything."""
        everything = tuple(range(len(self.jobs)))
        self.phase = "optimizer"
        self.wait(everything)
        us = rates.optimizer_us(num_params, self.hardware)
        moved = rates.ADAMW_BYTES * num_params
        self.compute("update", "optimizer", us, self.hardware.host.step_us, everything, moved)

    def update_hosted(self, chunks: Sequence[int], step: str, *, rest: int = 0) -> None:
        """Issue AdamW on states that are on the host, chunk by chunk.

        Args:
            chunks: float32 parameters of each.
            step: ``device``: states come, are updated and go, in three buffers; the first may come while backward runs. ``cpu``:
                gradients and parameters come to the processors, parameters go back. ``in place``: all of them are there.
            rest: parameters with states on the device.
        """
        hw, everything = self.hardware, tuple(range(len(self.jobs)))
        self.phase = "optimizer"
        self.wait(everything)
        if rest:
            us, moved = rates.optimizer_us(rest, hw), rates.ADAMW_BYTES * rest
            self.compute("update_rest", "optimizer", us, hw.host.kernel_us, everything, moved)
        gone: list[int] = []
        for number, size in enumerate(chunks):
            name = f"update_{number}"
            free = (gone[number - NUM_SLOTS],) if number >= NUM_SLOTS else ()
            if step == "device":
                came = self._pass(f"{name}_states", IN, 8 * size, free)
                us, moved = rates.optimizer_us(size, hw), rates.ADAMW_BYTES * size
                self.wait((came,))
                done = self.compute(name, "optimizer", us, hw.host.kernel_us, (came, *everything), moved)
                gone.append(self._pass(f"{name}_states_back", OUT, 8 * size, (done,)))
                continue
            came = everything if step == "in place" else (self._pass(name, OUT, 8 * size, (*everything, *free)),)
            us = rates.ADAMW_BYTES * size / hw.host_bytes_per_s * 1e6
            done = self.process(name, "optimizer", us, came, rates.ADAMW_BYTES * size)
            gone.append(done if step == "in place" else self._pass(f"{name}_parameters", IN, 4 * size, (done,)))
        self.wait(gone)
        self.compute("update", "optimizer", 0.0, hw.host.step_us, tuple(gone))

    def _pass(self, name: str, way: str, num_bytes: int, needs: tuple[int, ...]) -> int:
        """Copies that wait for nothing but what they need."""
        us, kind = rates.host_copy_us(num_bytes, self.hardware), "offload" if way == OUT else "reload"
        self.jobs.append(Job(name, kind, self.phase, way, us, 0.0, needs, needs, num_bytes))
        return len(self.jobs) - 1


def joined(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Each index once, in order."""
    return tuple(dict.fromkeys(index for group in groups for index in group))
