"""A step on fixed memory: its forward and backward are recorded once and replayed, so the host issues each as a whole."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zcompile.errors import RankError
from zcompile.program import Port, Program, Runnable, Start, StepProgram, Transfer
from zcompile.runtime.executor import Executor
from zcompile.runtime.gradients import Chunks
from zcompile.runtime.pace import Pace
from zcompile.runtime.recorder import Recorder, Recording

#: steps that run before one is recorded: they compile kernels, and allocate what a recording may not
WARM_STEPS = 2

#: recordings of one model: what makes another one necessary will go on
MAX_RECORDINGS = 3

#: why a step is not replayed that follows one whose memory is needed
IN_USE = (
    "gradients or values of an earlier step are in use at the forward; call zero_grad() before it, and backward() once for each "
    "forward"
)

#: why a step is not replayed that would not be faster
DEVICE_BOUND = "the host issues it faster than the device runs it"

#: why a step is not replayed that moves values to the host
MOVES = "activations of it are offloaded"

#: why a step is not replayed whose full parameters outlive it
HELD = "weights stay gathered over a declared window"

#: what a forward leaves for its backward
_LEFT = ("saved", "kept")

#: gives what a program reads at a port
Read = Callable[[Port], Tensor]


class _Recorded:
    """One recorded program.

    Attributes:
        owned: by slot, what it returned, until that may go.
        results: by slot, the same on borrowed memory.
        num_collectives: how many it starts.
    """

    def __init__(
        self,
        recorder: Recorder,
        runnable: Runnable,
        slots: list[Any],
        copied: Sequence[Port],
        run: Callable[[Runnable, list[Any]], list[Any]],
    ) -> None:
        program = runnable.program
        self._copied = [(port, slots[port.slot]) for port in copied]
        # held, so that nothing else comes to lie there; parameters never move
        self._buffers = [(port, slots[port.slot]) for port in program.inputs if port.kind == "buffer"]
        recorded: tuple[Recording, list[Any]] = recorder.record(partial(run, runnable, slots))
        self._recording, self.owned = recorded
        self.results = {port.slot: recorder.borrow(self.owned[port.slot]) for port in program.outputs}
        self.num_collectives = sum(type(ins) is Start for ins in program.instructions)

    def holds(self, read: Read) -> bool:
        """Whether the buffers are where they were."""
        return all(read(port).data_ptr() == value.data_ptr() for port, value in self._buffers)

    def replay(self, read: Read) -> None:
        """Run on new values of what is copied."""
        for port, place in self._copied:
            place.copy_(read(port), non_blocking=True)
        self._recording.replay()


class Tape:
    """The recorded forward and backward of one step.

    The memory of a recording is used again by the next and by the next replay, so a forward may be replayed only when nobody
    needs what the last one left: its saved values (``lease``) and the gradients of its backward.

    Attributes:
        values: what the forward leaves for a backward, by name.
        kept: of that, gathered parameters.
        ends: the forward's other results.
    """

    def __init__(self, step: StepProgram, forward: _Recorded, backward: _Recorded, chunks: Chunks) -> None:
        self.step = step
        self.forward = forward
        self.backward = backward
        self.chunks = chunks
        ports = step.forward.program.outputs
        self.values = {port.key: forward.results[port.slot] for port in _ports(ports, "saved")}
        self.kept = {port.key: forward.results[port.slot] for port in _ports(ports, "kept")}
        self.ends = [port for port in ports if port.kind not in _LEFT]
        self._lease: weakref.ref[Any] = weakref.ref(self)

    def lease(self, holder: Any) -> None:
        """Say who uses the saved values, for as long as it lives."""
        self._lease = weakref.ref(holder)

    def is_free(self) -> bool:
        """Whether nobody needs what the last replay left."""
        holder = self._lease()
        return (holder is None or holder is self) and (self.chunks.stay or not self.chunks.are_held())


class Tapes:
    """Decides when a model's steps are recorded and replayed.

    One signature at a time has a tape: the first that ran ``WARM_STEPS`` times. What is not replayed runs as it is issued, with
    the same results, and the ranks need not do alike: the same collectives start in the same order.

    Args:
        executor: runs what is recorded.
        make: makes a recorder for each tape.
        say: told once why steps are not replayed.
        pace: says whether it is worth it; None: it is.

    Attributes:
        replays: steps whose forward was replayed.
        reason: why the latest step was not; empty when it was.
        hidden_bytes: memory of the recordings that the allocator counts as free.
        paused: why no step is replayed for now; empty: they are.
    """

    def __init__(
        self, executor: Executor, make: Callable[[], Recorder], say: Callable[[str], None], pace: Pace | None = None
    ) -> None:
        self.replays = 0
        self.reason = ""
        self.hidden_bytes = 0
        self.paused = ""
        self._executor = executor
        self._make = make
        self._say = say
        self._pace = pace
        self._said: set[str] = set()
        self._warm: dict[int, int] = {}
        self._tape: Tape | None = None
        self._recorder: Recorder | None = None
        self._recordings = 0
        self._over = ""
        executor.collectives.let_go = self.close

    # Forward. ---------------------------------------------------------------------------------------------------------

    def issuing_forward(self, step: StepProgram) -> contextlib.AbstractContextManager[None]:
        """The body issues a step's forward."""
        pace = None if self._over or step.backward is None else self._pace
        return contextlib.nullcontext() if pace is None else pace.forward()

    @contextlib.contextmanager
    def issuing_backward(self, step: StepProgram) -> Iterator[None]:
        """The body issues a step's backward, reductions and all."""
        pace = None if self._over else self._pace
        with contextlib.nullcontext() if pace is None else pace.backward():
            yield
        self._warm[id(step)] = self._warm.get(id(step), 0) + 1

    def refuse(self, reason: str) -> None:
        """Say why the latest step is not replayed."""
        self.reason = reason
        self._tell(reason)

    def forward(self, step: StepProgram, read: Read) -> Tape | None:
        """Replay a step's forward, which is recorded first if it is time to; None: it is to be issued."""
        self.reason = self._problem(step, read)
        if not self.reason and self._tape is None:
            self._record(step, read)
        if self.reason:
            if self._recordings or self._warm.get(id(step), 0) >= WARM_STEPS:
                self._tell(self.reason)
            return None
        tape = self._tape
        assert tape is not None
        self.replays += 1
        with self._executor.collectives.replaying(tape.forward.num_collectives, f"forward ({step.label}), replayed"):
            tape.forward.replay(read)
        return tape

    def _problem(self, step: StepProgram, read: Read) -> str:
        if self.paused:
            return self.paused
        tape = self._tape
        if tape is not None and tape.step is step and not tape.forward.holds(read):
            if not tape.is_free():
                return IN_USE
            self.close()
            tape = None
        if tape is None:
            if self._over:
                return self._over
            if any(type(ins) is Transfer for ins in step.forward.program.instructions):
                return MOVES
            if self._recordings == MAX_RECORDINGS:
                return "buffers were replaced too often"
            if self._pace is not None:
                if not self._pace.is_host_bound():
                    self._over = DEVICE_BOUND if self._pace.is_over else ""
                    return DEVICE_BOUND
                self._pace = None
            if self._warm.get(id(step), 0) < WARM_STEPS:
                return "it is not warm yet"
            shards = self._executor.shards
            if any(shards.parameter(name).grad is not None for name in step.trainable):
                return IN_USE
            return _unfit(step.forward.program, read, self._executor.buffers.device)
        if tape.step is not step:
            return "another signature is recorded"
        return "" if tape.is_free() else IN_USE

    # Recording. -------------------------------------------------------------------------------------------------------

    def _record(self, step: StepProgram, read: Read) -> None:
        self._recordings += 1
        recorder = self._recorder = self._make()
        try:
            with self._executor.recording():
                self._tape = self._recorded(recorder, step, read)
        except RankError:
            raise
        except RuntimeError as error:
            self.close()
            first = (str(error) or type(error).__name__).splitlines()[0]
            self.reason = self._over = f"the device cannot record it: {first}"
            return
        self.hidden_bytes = recorder.hidden_bytes()

    def _recorded(self, recorder: Recorder, step: StepProgram, read: Read) -> Tape:
        executor, backward = self._executor, step.backward
        assert backward is not None

        def run(runnable: Runnable, values: list[Any]) -> list[Any]:
            return executor.run(runnable.program, runnable.bodies, values)

        def run_backward(runnable: Runnable, values: list[Any]) -> list[Any]:
            values = run(runnable, values)
            executor.shards.prepare_gradients(step.trainable)
            return values

        inputs = _ports(step.forward.program.inputs, "input")
        values: list[Any] = [None] * step.forward.program.num_slots
        for port in step.forward.program.inputs:
            values[port.slot] = _fresh(read(port)) if port in inputs else read(port)
        forward = _Recorded(recorder, step.forward, values, inputs, run)
        outputs = step.forward.program.outputs
        left = {(port.kind, port.key): forward.owned[port.slot] for port in outputs if port.kind in _LEFT}
        ends = {port.key: forward.results[port.slot] for port in _ports(outputs, "output")}
        taken: list[Any] = [None] * backward.program.num_slots
        for port in backward.program.inputs:
            if port.kind == "param":
                taken[port.slot] = executor.shards.local(port.key)
            elif port.kind == "tangent":
                end, strides = ends[port.key], step.tangents[port.key]
                taken[port.slot] = torch.empty_strided(end.shape, strides, dtype=end.dtype, device=end.device).zero_()
            else:
                taken[port.slot] = left[port.kind, port.key]
        forward.owned = []
        left.clear()  # so that the backward's own memory may lie where they lay, once it has read them
        recorded = _Recorded(recorder, backward, taken, _ports(backward.program.inputs, "tangent"), run_backward)
        recorded.owned = []
        return Tape(step, forward, recorded, executor.shards.gradients.snapshot())

    # Backward. --------------------------------------------------------------------------------------------------------

    def backward(self, tape: Tape, tangents: Sequence[Any]) -> Mapping[int, Tensor] | None:
        """Replay a tape's backward, whose results come by slot; None, and it is to be issued, where gradients are there.

        Args:
            tape: of the forward.
            tangents: by output index.
        """
        if tape is not self._tape or not self._executor.shards.gradients.wake(tape.chunks):
            self._tell("gradients exist at the backward; call zero_grad() before it")
            return None
        label = f"backward ({tape.step.label}), replayed"
        with self._executor.collectives.replaying(tape.backward.num_collectives, label):
            tape.backward.replay(lambda port: tangents[port.key])
        return tape.backward.results

    # Ending. ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the recordings back. Harmless when called twice."""
        self._tape = None
        self.hidden_bytes = 0
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _tell(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._say(reason)


def _ports(ports: Sequence[Port], kind: str) -> list[Port]:
    return [port for port in ports if port.kind == kind]


def _fresh(tensor: Tensor) -> Tensor:
    """The same values and strides in other memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _unfit(program: Program, read: Read, device: torch.device) -> str:
    """Why a program's inputs cannot be put into memory of our own; empty if they can."""
    for port in program.inputs:
        value = read(port)
        if value.device != device:
            return f"{port.kind} {port.key} is on {value.device}"
        if port.kind == "input" and any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            return f"{port.kind} {port.key} is expanded"
    return ""
