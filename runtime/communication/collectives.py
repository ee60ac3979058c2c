"""The collectives of one compiled model: started here, on our own process group, and waited for under watch."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zcompile import compat
from zcompile.errors import RankError
from zcompile.runtime.buffers import parts
from zcompile.runtime.communication.device_watch import DeviceWatches
from zcompile.runtime.communication.peers import MIN_BYTES, Copied, PeerCopies
from zcompile.runtime.ranks.agreement import Agreement

BACKEND_GRACE = 120.0  # seconds by which the backend's own timeout comes after ours, which says more

DRAIN_SECONDS = 5.0  # how long the device has to run out after the end of an agreement
HEAD_START = 1.0  # of these, before the group is aborted: that may itself wait for the device

OPS = {"avg": ReduceOp.AVG, "sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


class Ranks(Protocol):
    """What collectives need of a mesh."""

    size: int
    rank: int
    device: torch.device
    group: Any


class Pending:
    """Collectives that were started and not yet waited for; ``works`` end in the order in which those of one ``lane`` started."""

    __slots__ = ("_collectives", "_finish", "_kept", "description", "lane", "number", "works")

    def __init__(
        self,
        collectives: Collectives | None,
        works: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        kept: Any = None,
        description: str = "",
        number: int = 0,
        lane: str = "group",
    ) -> None:
        self._collectives = collectives
        self.works = works
        self.lane = lane
        self._finish = finish
        self._kept = kept  # tensors that must live until the wait
        self.description = description
        self.number = number

    def wait(self, description: str = "") -> None:
        """Have the results: on the host for gloo, in the order of the current stream for NCCL (the host goes on).

        Args:
            description: what is waited for, if it should be named otherwise than at the start.

        Raises:
            RankError: another rank failed, is gone or does something else.
        """
        if self._collectives is None:
            return
        self._collectives._finish(self, self.works, description or self.description)
        if self._finish is not None:
            self._finish()
        self._collectives, self.works, self._finish, self._kept = None, (), None, None


#: what one rank alone starts
DONE = Pending(None)


class Collectives:
    """Starts collectives on the model's own process group.

    Each call takes the tensors of one bucket and is one coalesced collective on NCCL, or copies of the copy engines where the
    ranks' GPUs reach each other and the bucket is large. On gloo each tensor is reduced by itself, so that a bucket's results
    do not depend on what else is in it. Tensors are contiguous and their list has the same shapes and dtypes on every rank.
    Results have the same bits in repeated runs.

    Every group of collectives must be announced with ``agreement.event`` first: that is what keeps different collectives
    of two ranks from meeting.

    Args:
        mesh: size, rank, device and process group; with one rank nothing is communicated.
        agreement: watches the waits.

    Attributes:
        peers: moves large buckets, where there is such a way.
        let_go: ends recordings of collectives: a group does not end before them, even when it is aborted.
    """

    def __init__(self, mesh: Ranks, agreement: Agreement) -> None:
        self._group = mesh.group
        self._size = mesh.size
        self._rank = mesh.rank
        self._agreement = agreement
        self._on_host = mesh.device.type == "cpu"
        self._unfinished = 0
        self._closed = False
        self._records = False
        self.let_go: Callable[[], None] = lambda: None
        self._device = mesh.device
        self.peers: PeerCopies | None = None
        self._watches = DeviceWatches(agreement, self._what_broke)
        if self._size > 1:
            compat.set_group_timeout(self._group, agreement.timeout + BACKEND_GRACE)
            agreement.watch_device(self._watches.oldest, self._abort)

    @property
    def peer_bytes(self) -> int:
        """Bytes on this rank that the copy engines write to and read from, outside of torch's allocator."""
        return 0 if self.peers is None else self.peers.num_bytes

    def all_gather(self, outputs: list[Tensor], inputs: list[Tensor], description: str = "all_gather") -> Pending:
        """Gather along dim 0: ``outputs[i]`` holds ``size`` times the elements of ``inputs[i]``, rank by rank. Inputs of another
        dtype are cast to the output's first."""
        _check_sizes("all_gather", outputs, inputs, self._size)
        if self._size == 1:
            for out, part in zip(outputs, inputs, strict=True):
                out.copy_(part.view(out.shape))
            return DONE
        peers = self._large(outputs)
        if peers is not None:
            return self._start(
                lambda: [peers.all_gather(outputs, inputs)], description, kept=(outputs, inputs), lane="all_gather"
            )
        if outputs[0].dtype != inputs[0].dtype:
            inputs = self._cast(inputs, outputs)
        # gloo joins a bucket's tensors into one of the first one's dtype, NCCL does not
        wire_out, wire_in = ([_bytes(t) if self._on_host else _real(t) for t in ts] for ts in (outputs, inputs))
        return self._start(
            lambda: [compat.start_all_gather(self._group, wire_out, wire_in)], description, kept=(wire_out, wire_in)
        )

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[Tensor], op: str = "avg", description: str = "reduce_scatter"
    ) -> Pending:
        """Reduce ``inputs[i]`` over ranks in the dtype of ``outputs[i]``, which is this rank's part of it along dim 0. Inputs may
        be narrower; they are left as they are on gloo, and on a device they are read until the wait."""
        _check_sizes("reduce_scatter", inputs, outputs, self._size)
        _check_op(op, inputs)
        if self._size == 1:
            for out, full in zip(outputs, inputs, strict=True):
                out.copy_(full.view(out.shape))
            return DONE
        peers = self._large(inputs) if op == "avg" else None
        if peers is not None:
            return self._start(
                lambda: [peers.reduce_scatter(outputs, inputs)],
                description,
                kept=(outputs, inputs),
                lane="reduce_scatter",
            )
        dtype = outputs[0].dtype
        if not self._on_host:
            if inputs[0].dtype != dtype:
                wide = [torch.empty_like(t, dtype=dtype) for t in inputs]
                compat.foreach_copy(wide, inputs)
                inputs = wide
            outs, ins = [_real(t) for t in outputs], [_real(t) for t in inputs]
            return self._start(
                lambda: [compat.start_reduce_scatter(self._group, outs, ins, OPS[op])], description, kept=(outs, ins)
            )
        buffers = [t.reshape(-1).to(dtype, copy=True) for t in inputs]  # as gloo does, but waits can end early

        def finish() -> None:
            for out, buffer in zip(outputs, buffers, strict=True):
                out.view(-1).copy_(buffer[self._rank * out.numel() : (self._rank + 1) * out.numel()])

        return self._start(lambda: self._reduce_each(buffers, op), description, finish)

    def all_reduce(self, tensors: list[Tensor], op: str = "avg", description: str = "all_reduce") -> Pending:
        """Reduce in place over ranks."""
        _check_op(op, tensors)
        if self._size == 1:
            return DONE
        wire = [_real(t) for t in tensors]
        if self._on_host:
            return self._start(lambda: self._reduce_each(wire, op), description, kept=wire)
        return self._start(lambda: [compat.start_all_reduce(self._group, wire, OPS[op])], description, kept=wire)

    def broadcast(self, tensors: list[Tensor], root: int = 0, description: str = "broadcast") -> Pending:
        """Overwrite ``tensors`` with those of rank ``root``."""
        if self._size == 1:
            return DONE
        wire = [_bytes(t) for t in tensors if t.numel()]
        return self._start(lambda: [compat.start_broadcast(self._group, t, root) for t in wire], description, kept=wire)

    def close(self) -> None:
        """Forget the process group. It belongs to the mesh; one with unfinished work is never destroyed, as that would block."""
        if self._unfinished and self._group is not None and self._on_host:
            compat.keep_forever(self._group)
        if self.peers is not None and not self._closed and not self._unfinished:
            torch.cuda.synchronize(self._device)  # the others may still read what lies in this rank's memory
        self._closed, self._group, self.peers = True, None, None
        self._watches.clear()

    # Recording. -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, collectives are recorded: none of them runs now, so none is counted or watched."""
        self._records, unfinished = True, self._unfinished
        try:
            if self.peers is None:
                yield
            else:
                with self.peers.recording():
                    yield
        finally:
            self._records, self._unfinished = False, unfinished  # one that failed has started what nobody waits for

    @contextlib.contextmanager
    def replaying(self, count: int, description: str) -> Iterator[None]:
        """The body gives ``count`` recorded collectives to the device, as one thing to watch."""
        if self._size == 1 or count == 0:
            yield
            return
        number = self._agreement.started(count)
        yield
        if not self._on_host:
            end = Copied.here()
            self._watches.note("replay", number, end, description)
            if self.peers is not None:
                self.peers.replayed = end

    # Inside. ----------------------------------------------------------------------------------------------------------

    def _reduce_each(self, tensors: list[Tensor], op: str) -> list[Any]:
        return [compat.start_one_all_reduce(self._group, t, OPS[op]) for t in tensors if t.numel()]

    def _large(self, whole: list[Tensor]) -> PeerCopies | None:
        """The way of the copy engines, where there is one and the bucket is worth it."""
        if self.peers is None or not whole[0].dtype.is_floating_point:
            return None
        return self.peers if sum(t.nbytes for t in whole) >= MIN_BYTES else None

    def _cast(self, shards: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        """Shards in the dtype of a gather: on a device right in their place of its output (NCCL gathers in place)."""
        if self._on_host:
            return [s.to(out.dtype) for s, out in zip(shards, outputs, strict=True)]
        casts = [parts(out, self._size)[self._rank].view(s.shape) for s, out in zip(shards, outputs, strict=True)]
        compat.foreach_copy(casts, shards)
        return casts

    def _start(
        self,
        start: Callable[[], Sequence[Any]],
        description: str,
        finish: Callable[[], None] | None = None,
        kept: Any = None,
        lane: str = "group",
    ) -> Pending:
        number = 0 if self._records else self._agreement.started()
        try:
            works = start()
        except RuntimeError as error:
            raise self._agreement.explain(error, description) from error
        self._unfinished += 1
        if not self._on_host and works and not self._records:
            self._watches.note(lane, number, works[-1], description)
        return Pending(self, works, finish, kept, description, number, lane)

    def _finish(self, pending: Pending, works: Sequence[Any], description: str) -> None:
        if not self._on_host:
            self._agreement.check()
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                raise self._agreement.explain(error, description) from error
            self._unfinished -= 1
            return
        for work in works:
            try:
                self._agreement.poll(
                    description, lambda seconds, work=work: _is_done(work, seconds), needs=pending.number
                )
            except _ConnectionBroke as broke:
                raise self._agreement.explain(broke.error, description) from broke.error
        self._unfinished -= 1

    def _what_broke(self) -> str:
        group = self._group
        return "" if group is None or self._on_host else compat.group_error(group, self._device)

    def _abort(self) -> None:
        """The agreement is broken: end what is in flight. Gloo ends it only with the processes, so keep its group alive."""
        group = self._group
        if group is None or self._closed:
            return
        if not self._on_host:
            if self.peers is not None:
                drained = threading.Event()
                for part in (partial(_drain, self.peers, drained), partial(self._exit_unless, drained)):
                    threading.Thread(target=part, daemon=True).start()
                drained.wait(HEAD_START)
            threading.Thread(
                target=self.let_go, daemon=True
            ).start()  # it may wait for the device, until that is told to stop
            compat.abort_group(group)
        elif self._unfinished:
            compat.keep_forever(group)

    def _exit_unless(self, drained: threading.Event) -> None:
        """A device that never runs out would hold back whoever waits for it, and no exception reaches there: end the process.

        In a thread that never asks the device: whoever does may itself be held back.
        """
        if drained.wait(DRAIN_SECONDS):
            return
        try:
            self._agreement.check()
        except RankError as error:
            text = f"{type(error).__name__}: {error}; the device does not answer any more, so this process ends"
            print(text, file=sys.stderr, flush=True)
        os._exit(1)


class _ConnectionBroke(Exception):
    """Gloo gave up on a collective."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.error = error


def _drain(peers: PeerCopies, drained: threading.Event) -> None:
    """Let barriers go, of which many may have been issued, until the copies' streams have run out."""
    while peers.unblock():
        time.sleep(0.001)
    drained.set()


def _is_done(work: Any, seconds: float) -> bool:
    """Wait at most ``seconds`` for a gloo work, which stays intact if that is too short."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if compat.is_short_wait_over(error):
            return False
        raise _ConnectionBroke(error) from error
    return True


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor``: what is only moved travels as bytes, in any dtype.

    Gloo joins a bucket's tensors into one of the first one's dtype: with two dtypes in a bucket it would gather garbage.
    """
    return tensor.view(-1).view(torch.uint8)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _check_sizes(name: str, large: list[Tensor], small: list[Tensor], size: int) -> None:
    assert len(large) == len(small), f"{name}: {len(large)} and {len(small)} tensors"
    for one, part in zip(large, small, strict=True):
        assert one.numel() == part.numel() * size, f"{name}: {tuple(one.shape)} is not {size} times {tuple(part.shape)}"
        kinds = {one.dtype.is_floating_point, part.dtype.is_floating_point}
        assert one.dtype == part.dtype or kinds == {True}, f"{name}: {one.dtype} and {part.dtype}"


def _check_op(op: str, tensors: list[Tensor]) -> None:
    assert op in OPS, f"unknown reduction {op!r}"
    assert op != "avg" or all(t.is_floating_point() or t.is_complex() for t in tensors), "integers have no average"
