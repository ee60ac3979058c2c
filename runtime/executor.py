"""Runs programs: regions, collectives, buffers. It knows instructions and tensors, never a pass or a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zcompile import compat
from zcompile.errors import RegionError
from zcompile.program import Call, Instruction, Program, Release, Start, TensorType, Transfer, Wait
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.communication.collectives import Collectives, Pending
from zcompile.runtime.offload.host import Copies, Mover
from zcompile.runtime.offload.hosted_parameters import DirectReads, ToHost
from zcompile.runtime.sharding.shards import ParameterShards

#: takes a list of tensors, which it may clear, and returns results
Body = Callable[[list[Tensor]], Sequence[Any]]


class Observer(Protocol):
    """Looks on while programs run."""

    def watch(
        self, program: Program, first: bool, slots: list[Any], pending: Mapping[int, Any]
    ) -> Iterable[Instruction]:
        """Yield a program's instructions one by one: each is done when the next is asked for.

        Args:
            program: what runs.
            first: it has not run before.
            slots: its slot table.
            pending: what it started and did not wait for, by ticket.
        """
        ...


def as_written(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Operators inside compute in the dtypes that they are given: a graph holds the casts that autocast made, once."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class Executor:
    """Runs programs of one compiled model.

    Args:
        shards: parameters and gradients.
        collectives: the model's own collectives.
        buffers: memory of gathered parameters.
        accumulation: local gradients that reductions take along.
        mover: copies values to the host and back.

    Attributes:
        takes_local: whether reductions of the next program take them along.
        observer: is told of every instruction; None: programs run unobserved.
    """

    def __init__(
        self,
        shards: ParameterShards,
        collectives: Collectives,
        buffers: Buffers,
        accumulation: Accumulation,
        mover: Mover,
    ) -> None:
        self.shards = shards
        self.collectives = collectives
        self.buffers = buffers
        self.accumulation = accumulation
        self.mover = mover
        self.takes_local = True
        self._apart = False
        self.observer: Observer | None = None
        self._checked: set[int] = set()
        if shards.mesh.device.type == "cuda":
            from zcompile.runtime.kernels import cross_entropy  # Triton is imported where it is used

            cross_entropy.register()
        self._direct = DirectReads(shards.hosting)

    def run(self, program: Program, bodies: Mapping[str, Body], slots: list[Any]) -> list[Any]:
        """Run a program.

        Args:
            program: what to run.
            bodies: the regions by name.
            slots: the slot table with the inputs filled in; it is used up.

        Returns:
            the slot table; read the outputs at their slots.
        """
        with torch.no_grad(), as_written(self.buffers.device):
            self._run(program, bodies, slots)
        return slots

    def _run(self, program: Program, bodies: Mapping[str, Body], slots: list[Any]) -> None:
        pending: dict[int, Pending | ToHost | Copies] = {}
        first = id(program) not in self._checked  # programs live as long as their captures, which outlive this executor
        self._checked.add(id(program))
        if self.shards.hosting.parameters:
            self._direct.upload(program, slots)
        instructions: Iterable[Instruction] = program.instructions
        if self.observer is not None:
            instructions = self.observer.watch(program, first, slots, pending)
        for ins in instructions:
            if type(ins) is Call:
                _call(ins, bodies[ins.body], slots, check=first)
            elif type(ins) is Start:
                pending[ins.ticket] = self._start(ins, slots)
            elif type(ins) is Transfer:
                pending[ins.ticket] = self.mover.start(ins, slots)
            elif type(ins) is Wait:
                pending.pop(ins.ticket).wait()
                for i in ins.frees:
                    slots[i] = None
            else:
                assert type(ins) is Release
                self.buffers.give([slots[i] for i in ins.slots])
                for i in ins.slots:
                    slots[i] = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, programs are recorded: their buffers and collectives belong to the recording."""
        with self.buffers.apart(), self.collectives.recording():
            yield

    @contextlib.contextmanager
    def reducing(self, local: Mapping[str, Tensor], *, apart: bool) -> Iterator[Mapping[str, Tensor]]:
        """Inside, reductions take along these local gradients alone, and no others are known.

        Args:
            local: by parameter.
            apart: results come in memory of their own, wherever ``.grad`` will be.

        Returns:
            those that no reduction took.
        """
        held = self.accumulation
        before = held.local, self.takes_local, self._apart
        left = held.local = dict(local)
        self.takes_local, self._apart = True, apart
        try:
            yield left
        finally:
            held.local, self.takes_local, self._apart = before

    def _start(self, ins: Start, slots: list[Any]) -> Pending | ToHost:
        sends: list[Tensor] = [slots[i] for i in ins.inputs]
        if ins.op == "all_gather":
            outputs = self.buffers.take(ins.types)
            if self.shards.hosting.parameters:
                with self.shards.hosting.arriving(sends) as arrived:
                    started = self.collectives.all_gather(outputs, arrived, ins.label)
            else:
                started = self.collectives.all_gather(outputs, sends, ins.label)
        else:
            if self.takes_local and self.accumulation.local:
                # what was added up may be wider than what one backward sends
                sends = [
                    (self.accumulation.take_local(name, t) if name else t).to(kind.dtype)
                    for name, t, kind in zip(ins.grads, sends, ins.types, strict=True)
                ]
            outputs = self._gradient_memory(ins)
            if ins.op == "reduce_scatter":
                started = self.collectives.reduce_scatter(outputs, sends, description=ins.label)
            else:
                compat.foreach_copy(outputs, sends)
                started = self.collectives.all_reduce(outputs, description=ins.label)
        for i, out in zip(ins.outputs, outputs, strict=True):
            slots[i] = out
        if ins.op != "all_gather" and self.shards.hosting.parameters:
            return ToHost(started, ins, slots, self.shards)
        return started

    def _gradient_memory(self, ins: Start) -> list[Tensor]:
        """Where reduced gradients go: right into the gradient arena where nothing is accumulated yet."""
        in_place = not (self._apart or self.shards.hosting.parameters)
        outputs = []
        for name, kind in zip(ins.grads, ins.types, strict=True):
            if name and in_place and self.shards.parameter(name).grad is None:
                memory = self.shards.grad_local(name)
                if memory.dtype == kind.dtype and tuple(memory.shape) == kind.shape:
                    outputs.append(memory)
                    continue
            outputs.append(torch.empty(kind.shape, dtype=kind.dtype, device=self.buffers.device))
        return outputs

    def reduce_local(self, names: Sequence[str], label: str) -> list[tuple[str, Tensor]]:
        """Reduce local gradients, which are not held any more; (parameter, padded shard) pairs in the model's order."""
        reduced = []
        for name in sorted(names, key=self.shards.index):
            spec = self.shards.specs[name]
            send = self.accumulation.local.pop(name)
            if spec.is_sharded:
                out = torch.empty(spec.padded_local_shape, dtype=send.dtype, device=send.device)
                self.collectives.reduce_scatter([out], [send], description=f"{label} of {name}").wait()
            else:
                out = send
                self.collectives.all_reduce([out], description=f"{label} of {name}").wait()
            reduced.append((name, out.to(self.shards.hosting.home)))
        return reduced


def _call(ins: Call, body: Body, slots: list[Any], *, check: bool) -> None:
    """Run a region. A function of its own, as variables of a loop would hold its results while the next region runs."""
    args = [slots[i] for i in ins.inputs]
    for i in ins.frees:
        slots[i] = None
    results = body(args)
    if check:
        _check_results(ins, results)
    for i, value in zip(ins.outputs, results, strict=True):
        if i >= 0:
            slots[i] = value


def _check_results(call: Call, results: Sequence[Any]) -> None:
    """Check what a region gave at its first run: a compiler that changed a shape or dtype is found where it did.

    Raises:
        RegionError: naming the region, the result and what it should be.
    """
    for index, (value, want) in enumerate(zip(results, call.types, strict=True)):
        have = TensorType(tuple(value.shape), value.dtype)
        if have != want:
            raise RegionError(
                f"result {index} of region '{call.body}' is {have.dtype} {list(have.shape)} and the graph says "
                f"{want.dtype} {list(want.shape)}; compile with backend='eager' to go on, and report the region"
            )
