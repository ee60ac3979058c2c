"""Watches training steps as they run: what the device was given, when it did it, and when collectives ended."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zcompile.program import Call, Instruction, Program, Release, Start, StepProgram, TensorType, Transfer, Wait
from zcompile.runtime.profiling.clock import Mark, clock_of, is_done
from zcompile.runtime.profiling.watched import Flight, Piece, RawStep, Run
from zcompile.runtime.sharding.shards import Slot
from zcompile.runtime.step import StepRunner

#: why steps are not replayed meanwhile
PAUSED = "it is being profiled, which shows nothing of what happens inside a replay"

#: units that the label of a region names
MOST_UNITS = 3


class Profiler:
    """Watches a model's next training steps, while it is armed.

    A step begins with a forward that records gradients when the one before has had a backward and its gradients are used up: an
    optimizer stepped, or ``zero_grad`` dropped them. So micro-batches whose gradients add up are one step. The first step shows
    memory and takes no times: reading the allocator's state costs the host. A step in which something ran for the first time
    is dropped, as that compiles, and the next one is taken in its place.

    Nothing waits for the device inside a step that is timed. Disarmed, it has left no trace in the runtime.

    Args:
        runner: of the model.
        num_steps: how many to time.

    Attributes:
        steps: those that were timed.
        first: the one that shows memory.
        dropped: why each step was that was left out.
        paused_replays: whether steps were replayed before.
        is_armed: whether it watches.
    """

    def __init__(self, runner: StepRunner, num_steps: int) -> None:
        self.num_steps = num_steps
        self.steps: list[RawStep] = []
        self.first: RawStep | None = None
        self.dropped: list[str] = []
        self.paused_replays = runner.tapes is not None and runner.tapes.replays > 0
        self.is_armed = False
        self._runner = runner
        self._device = runner.shards.mesh.device
        self._clock = clock_of(self._device)
        self._current: RawStep | None = None
        self._run: Run | None = None
        self._update: Mark | None = None
        self._labels: dict[int, dict[int, str]] = {}
        self._hooks: list[Any] = []
        self._has_ended = False

    @property
    def on_host(self) -> bool:
        """Whether the host computes, so that its work and the device's cannot be told apart."""
        return self._clock.on_host

    @property
    def num_backwards(self) -> int:
        """How many backwards the step that runs has had."""
        parts = [] if self._current is None else self._current.parts
        return sum(isinstance(part, Run) and part.phase == "backward" for part in parts)

    # Armed and disarmed. ----------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Watch from the next training forward on. The methods of the runtime that tell of steps are this object's until then."""
        runner, own = self._runner, weakref.WeakMethod
        runner.run_forward, runner.run_backward = self._forward, self._backward
        runner.executor.reduce_local = self._reduce_local
        runner.executor.observer = self
        if runner.tapes is not None:
            runner.tapes.paused = PAUSED
        before, after = own(self._before_update), own(self._after_update)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: _call(before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: _call(after, optimizer)),
        ]
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)
        self.is_armed = True

    def stop(self) -> None:
        """End the step that runs, which counts if it had its backward, and watch no more. Harmless when called twice."""
        if self.is_armed and self._current is not None and self._current.trained:
            self._turn()
        if self.is_armed:
            self._end()

    def _end(self) -> None:
        self.abandon()
        if self.steps and not self._has_ended:
            with self._waiting():
                self._clock.end()
            self._has_ended = True

    def _waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the host waits for the device, which may itself wait for a rank that is lost."""
        agreement = self._runner.shards.mesh.agreement
        return contextlib.nullcontext() if agreement is None else agreement.waiting("the end of a profiled step")

    def abandon(self) -> None:
        """Watch no more; the step that runs does not count. Waits for nothing. Harmless when called twice."""
        if not self.is_armed:
            return
        self.is_armed = False
        runner = self._runner
        del runner.run_forward, runner.run_backward, runner.executor.reduce_local
        runner.executor.observer = None
        if runner.tapes is not None:
            runner.tapes.paused = ""
        for hook in self._hooks:
            hook.remove()
        self._current = self._run = None

    def read(self) -> list[RawStep]:
        """The steps, with the device's times of all moments. For when it is not armed any more."""
        self._end()  # if an error came before it
        for step in self.steps:
            self._clock.read(step.marks())
        return self.steps

    # Steps. -----------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """End the present step and begin another, or end the whole."""
        current, now = self._current, self._clock.mark()
        if current is not None:
            current.end = now
            if not all(part.complete for part in current.parts if isinstance(part, Run)):
                current.flaw = "it ended with an error"
            if current.flaw:
                self.dropped.append(current.flaw)
            elif self.first is None:
                self.first = current
            else:
                self.steps.append(current)
        self._current = None
        if len(self.steps) == self.num_steps:
            self._end()
            return
        if self.first is None:
            with self._waiting():
                self._clock.begin()
            now = self._clock.mark()
        self._current = RawStep(now, now)

    def _begins(self, step: StepProgram) -> bool:
        """Whether a training forward is the first of its step."""
        current = self._current
        if current is None or (current.trained and current.updated):
            return True
        shards, held = self._runner.shards, self._runner.executor.accumulation
        return (
            current.trained and not held.names() and all(shards.parameter(name).grad is None for name in step.trainable)
        )

    def _forward(self, step: StepProgram, constants: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        trains = step.backward is not None
        if trains and self._begins(step):
            self._turn()
        return self._ran(
            "forward" if trains else "evaluation",
            step,
            lambda: StepRunner.run_forward(self._runner, step, constants, inputs),
        )

    def _backward(self, step: StepProgram, saved: Any, tangents: Sequence[Any], keep: bool) -> Any:
        if self._current is not None and saved.tape is not None:
            self._current.flaw = "its backward was replayed, as its forward had been"
        result = self._ran("backward", step, lambda: StepRunner.run_backward(self._runner, step, saved, tangents, keep))
        if self._current is not None:
            self._current.trained = True
            self._current.updated = False
        return result

    def _ran(self, phase: str, step: StepProgram, body: Callable[[], Any]) -> Any:
        """What ``body`` returns, which runs a program of the present step."""
        current = self._current
        if current is None:
            return body()
        now = self._clock.mark()
        run = self._run = Run(phase, step, now, now)
        current.parts.append(run)
        try:
            result = body()
        finally:
            self._run = None
        run.end, run.complete = self._clock.mark(), True
        return result

    # Instructions. ----------------------------------------------------------------------------------------------------

    def watch(
        self, program: Program, first: bool, slots: list[Any], pending: Mapping[int, Any]
    ) -> Iterable[Instruction]:
        """See ``Observer.watch``."""
        current, run = self._current, self._run
        if current is None or run is None:
            return program.instructions
        if first:
            current.flaw = "something ran for the first time, and was compiled"
        labels = self._labels.get(id(program))
        if labels is None:
            labels = self._labels[id(program)] = _labels(program)
        if self.first is None:
            return self._weighed(program, run, labels, slots)
        return self._timed(program, run, labels, slots, pending)

    def _weighed(
        self, program: Program, run: Run, labels: Mapping[int, str], slots: Sequence[Any]
    ) -> Iterator[Instruction]:
        assert self._current is not None
        memory = self._current.memory
        for index, ins in enumerate(program.instructions):
            yield ins
            memory.append((run.phase, labels[index], _alive(slots, self._device)))

    def _timed(
        self,
        program: Program,
        run: Run,
        labels: Mapping[int, str],
        slots: Sequence[Any],
        pending: Mapping[int, Any],
    ) -> Iterator[Instruction]:
        clock, size = self._clock, self._runner.shards.mesh.size
        end = clock.mark()
        for index, ins in enumerate(program.instructions):
            if isinstance(ins, Release):  # no work of the device
                yield ins
                run.pieces.append(Piece(program.nodes[index], "release", labels[index], end, end))
                continue
            sent = 0 if isinstance(ins, (Call, Wait)) else _full_bytes(ins, slots, size)
            begin = end  # a mark costs the host as much as a launch: where it is slow, two of them made steps a third longer
            yield ins
            end = clock.mark()
            ticket = -1 if isinstance(ins, Call) else ins.ticket
            run.pieces.append(Piece(program.nodes[index], _kind(ins), labels[index], begin, end, ticket, sent))
            if isinstance(ins, Wait):
                if ticket in run.flights:
                    run.flights[ticket].works = ()
            elif isinstance(ins, Transfer) or (isinstance(ins, Start) and size > 1):
                started = pending[ticket]
                works = started.works
                seen = clock.follow(started.lane, works) if works else end
                run.flights[ticket] = Flight(started.lane, end, seen, works if clock.on_host else ())
            for flight in run.flights.values() if clock.on_host else ():
                if flight.works and is_done(flight.works):
                    flight.end, flight.works = end, ()

    def _reduce_local(self, names: Sequence[str], label: str) -> Any:
        begin = self._clock.mark()
        result = type(self._runner.executor).reduce_local(self._runner.executor, names, label)
        self._note("reduce_local", "reduction", "reduction of local gradients", begin)
        return result

    # Updates. ---------------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer) -> None:
        if self._current is not None and self._owns(optimizer):
            self._update = self._clock.mark()

    def _after_update(self, optimizer: Optimizer) -> None:
        begin, self._update = self._update, None
        if begin is not None and self._current is not None and self._owns(optimizer):
            self._note("update", "optimizer", type(optimizer).__name__, begin)
            self._current.updated = True

    def _owns(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer steps a parameter of this model."""
        mine = self._runner.shards
        found = (Slot.of(p) for group in optimizer.param_groups for p in group["params"])
        return any(slot is not None and slot[0] is mine for slot in found)

    def _note(self, name: str, kind: str, label: str, begin: Mark) -> None:
        """Add a piece that is outside of programs; what runs inside of one is a part of that."""
        if self._current is not None and self._run is None:
            self._current.parts.append(Piece(name, kind, label, begin, self._clock.mark()))


def _call(method: Callable[[], Callable[[Optimizer], None] | None], optimizer: Optimizer) -> None:
    living = method()
    if living is not None:
        living(optimizer)


def _kind(ins: Instruction) -> str:
    if isinstance(ins, Call):
        return "region"
    return "wait" if isinstance(ins, Wait) else getattr(ins, "op", "release")


def _labels(program: Program) -> dict[int, str]:
    """For each instruction what it is about: a region with the units whose gathered parameters it reads."""
    labels: dict[int, str] = {}
    units: dict[int, str] = {}
    started: dict[int, str] = {}
    for index, ins in enumerate(program.instructions):
        if isinstance(ins, Call):
            read = list(dict.fromkeys(unit for i in ins.inputs if i in units for unit in units[i].split(", ")))
            shown = ", ".join(read[:MOST_UNITS]) + ", ..." * (len(read) > MOST_UNITS)
            labels[index] = f"{ins.body} ({shown})" if read else ins.body
        elif isinstance(ins, Wait):
            labels[index] = started[ins.ticket]
        elif isinstance(ins, Release):
            labels[index] = "release of " + ", ".join(dict.fromkeys(units.get(i, "?") for i in ins.slots))
        else:
            labels[index] = started[ins.ticket] = ins.label
            if ins.op == "all_gather":
                units.update(dict.fromkeys(ins.outputs, ins.label.removeprefix(f"{ins.op} of ")))
    return labels


def _full_bytes(ins: Any, slots: Sequence[Any], size: int) -> int:
    """Bytes of a collective's full side, as plans count them: what a gather makes, what a reduction reads."""
    if ins.op == "all_gather":
        return sum(map(_type_bytes, ins.types))
    return sum(slots[i].nbytes for i in ins.inputs)


def _type_bytes(kind: TensorType) -> int:
    numel = 1
    for extent in kind.shape:
        numel *= extent
    return numel * kind.dtype.itemsize


def _alive(slots: Sequence[Any], device: torch.device) -> int:
    """What torch's allocator has handed out; on the CPU, which has no such count, what the program's values hold."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    storages = {s.data_ptr(): s.nbytes() for v in slots if v is not None for s in [v.untyped_storage()]}
    return sum(storages.values())
