"""A micro-batch on fixed memory: its forward and backward are recorded once and replayed, so the host issues each as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zcompile import compat
from zcompile.program import Port, Program, Runnable, Start, StepProgram
from zcompile.runtime.executor import Executor
from zcompile.runtime.replay.recorder import Recorder, Recording
from zcompile.runtime.sharding.gradients import Chunks

#: what a forward leaves for its backward
_LEFT = ("saved", "kept")

#: gives what a program reads at a port
Read = Callable[[Port], Tensor]


class Kind(NamedTuple):
    """What sets the micro-batches of one step apart: which programs they run, and which gradients these find.

    Attributes:
        takes: forward reads full parameters that the backward before it left.
        leaves: backward leaves full parameters to the next forward.
        local: backward keeps its gradients on this rank.
        sums: reductions of backward take along gradients that earlier ones kept on this rank.
    """

    takes: bool = False
    leaves: bool = False
    local: bool = False
    sums: bool = False


class Recorded:
    """One recorded program.

    Args:
        recorder: makes the recording.
        runnable: what to record.
        slots: its slot table, filled in.
        copied: ports whose values are copied to where ``slots`` has them before each replay.
        run: runs it; returns the slot table.

    Attributes:
        owned: by slot, what it returned, until that may go.
        shared: of what it leaves for a backward, buffers of the model, by name.
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
        buffers = {port.slot: value for port, value in self._buffers}
        recorded: tuple[Recording, list[Any]] = recorder.record(partial(run, runnable, slots))
        self._recording, self.owned = recorded
        self.shared = {port.key: buffers[port.slot] for port in ports(program.outputs, "saved") if port.slot in buffers}
        self.results = {port.slot: recorder.borrow(self.owned[port.slot]) for port in program.outputs}
        self.num_collectives = sum(type(ins) is Start for ins in program.instructions)

    def holds(self, read: Read) -> bool:
        """Whether the buffers are those that were recorded."""
        return all(read(port) is value for port, value in self._buffers)

    def replay(self, read: Read) -> None:
        """Run on new values of what is copied."""
        for port, place in self._copied:
            value = read(port)
            if value.data_ptr() != place.data_ptr():
                place.copy_(value, non_blocking=True)
        self._recording.replay()


class Tape:
    """The recorded forward and backward of one kind of micro-batch.

    All tapes of a model lie in the same memory: what one leaves is overwritten by the next replay of any.

    Attributes:
        kind: what it was recorded for.
        values: what the forward leaves for its backward, by name.
        kept: of that, gathered parameters.
        ends: the forward's other results.
        chunks: where the backward writes gradients; None: they come in memory of its own, to be added or moved from there.
        sums: the local gradients that its reductions take along, by parameter.
        shared: of ``values``, buffers of the model.
    """

    def __init__(
        self,
        step: StepProgram,
        kind: Kind,
        forward: Recorded,
        backward: Recorded,
        chunks: Chunks | None,
        sums: Mapping[str, Tensor],
        outputs: Sequence[Port],
        grads: Iterable[str],
    ) -> None:
        self.step = step
        self.kind = kind
        self.forward = forward
        self.backward = backward
        self.chunks = chunks
        self.sums = sums
        self.shared = forward.shared
        self.values = {port.key: forward.results[port.slot] for port in ports(outputs, "saved")}
        self.kept = {port.key: forward.results[port.slot] for port in ports(outputs, "kept")}
        self.ends = [port for port in outputs if port.kind not in _LEFT]
        self._grads = frozenset(grads)

    def finds(self, local: Mapping[str, Tensor]) -> bool:
        """Whether its reductions take along just these of the local gradients."""
        if not self.kind.sums:
            return True
        found = {name: value for name, value in local.items() if name in self._grads}
        return found.keys() == self.sums.keys() and all(found[name] is value for name, value in self.sums.items())


class Taping:
    """Records the tapes of one model.

    Args:
        executor: runs what is recorded.
        recorder: of all tapes.

    Attributes:
        places: where full parameters lie from a backward to the next forward, by name; not used for anything else.
        chunks: where backwards write gradients; None: none did yet.
    """

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self.places: dict[str, Tensor] = {}
        self.chunks: Chunks | None = None
        self._num_tapes = 0
        self._executor = executor
        self._recorder = recorder

    def record(
        self, step: StepProgram, kind: Kind, programs: tuple[Runnable, Runnable], read: Read, *, adds: bool
    ) -> Tape:
        """Record a micro-batch.

        Args:
            step: that it belongs to.
            kind: of micro-batch.
            programs: its forward and backward.
            read: gives values that the forward reads.
            adds: gradients are there or held by somebody, so that reduced ones need memory of their own.

        Raises:
            RuntimeError: the device does something that cannot be recorded.
        """
        executor, (first, second) = self._executor, programs
        shards = executor.shards
        sums = dict(executor.accumulation.local) if kind.sums else {}
        apart = adds or kind.local
        taken: list[str] = []
        if not apart:
            self._ready_chunks(step)

        def run(runnable: Runnable, values: list[Any]) -> list[Any]:
            return executor.run(runnable.program, runnable.bodies, values)

        def run_backward(runnable: Runnable, values: list[Any]) -> list[Any]:
            with executor.reducing(sums, apart=apart) as left:
                values = run(runnable, values)
            taken[:] = [name for name in sums if name not in left]
            if not apart:
                shards.prepare_gradients(step.trainable)
                shards.gradients.clear_holes()
            self._settle(values, ports(runnable.program.outputs, "kept"))
            return values

        copied = [port for port in first.program.inputs if port.kind in ("input", "kept")]
        values: list[Any] = [None] * first.program.num_slots
        for port in first.program.inputs:
            if port.kind == "kept":
                values[port.slot] = self.places[port.key]
            else:
                values[port.slot] = _fresh(read(port)) if port.kind == "input" else read(port)
        forward = Recorded(self._recorder, first, values, copied, run)
        del values
        taken_over = self._handed_over(step, forward, programs)
        forward.owned = []  # so that the backward's own memory may lie where they lay, once it has read them
        backward = Recorded(self._recorder, second, taken_over, ports(second.program.inputs, "tangent"), run_backward)
        for port in ports(second.program.outputs, "kept"):
            backward.results[port.slot] = self.places[port.key]
        backward.owned = []
        if not apart:
            self.chunks = shards.gradients.snapshot()
            shards.drop_gradients()  # what the recording took is not zero where it must be before a replay
        self._num_tapes += 1
        chunks = None if apart else self.chunks
        taken_sums = {name: sums[name] for name in taken}
        return Tape(step, kind, forward, backward, chunks, taken_sums, first.program.outputs, second.program.grads)

    def _ready_chunks(self, step: StepProgram) -> None:
        """Let the chunks exist that a recording is to write to, unless it may take them itself.

        What a recording takes may lie where it and earlier ones have activations. Its own forward runs when no gradient is there,
        but others may run at any time: so the first recording alone does that, of a model whose gradients go before each forward.
        """
        gradients = self._executor.shards.gradients
        if self.chunks is not None:
            woken = gradients.wake(self.chunks)
            assert woken, "gradients are in use where a recording is to write them"
        elif self._num_tapes or gradients.stay:
            self._executor.shards.prepare_gradients(step.trainable)

    def _handed_over(self, step: StepProgram, forward: Recorded, programs: tuple[Runnable, Runnable]) -> list[Any]:
        """The slot table of a backward, with what its forward leaves."""
        outputs, program = programs[0].program.outputs, programs[1].program
        left = {(port.kind, port.key): forward.owned[port.slot] for port in outputs if port.kind in _LEFT}
        ends = {port.key: forward.results[port.slot] for port in ports(outputs, "output")}
        slots: list[Any] = [None] * program.num_slots
        for port in program.inputs:
            if port.kind == "param":
                slots[port.slot] = self._executor.shards.local(port.key)
            elif port.kind == "tangent":
                end, strides = ends[port.key], step.tangents[port.key]
                slots[port.slot] = torch.empty_strided(end.shape, strides, dtype=end.dtype, device=end.device).zero_()
            else:
                slots[port.slot] = left[port.kind, port.key]
        return slots

    def _settle(self, values: list[Any], left: Sequence[Port]) -> None:
        """Let what a backward leaves to the next forward lie in its places: those of the first backward that leaves it."""
        moves: tuple[list[Tensor], list[Tensor]] = ([], [])
        for port in left:
            value, place = values[port.slot], self.places.setdefault(port.key, values[port.slot])
            values[port.slot] = place
            if value.data_ptr() != place.data_ptr():
                moves[0].append(place)
                moves[1].append(value)
        if moves[0]:
            # a backward that gathers again may have gathered into what the forward found in another's place
            compat.foreach_copy(moves[0], [value.clone() for value in moves[1]])


def ports(found: Iterable[Port], kind: str) -> list[Port]:
    """Those of one kind."""
    return [port for port in found if port.kind == kind]


def unfit(program: Program, read: Read, device: torch.device) -> str:
    """Why a program's inputs cannot be put into memory of our own; empty if they can."""
    for port in program.inputs:
        value = read(port)
        if value.device != device:
            return f"{port.kind} {port.key} is on {value.device}"
        if port.kind == "input" and any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
            return f"{port.kind} {port.key} is expanded"
    return ""


def _fresh(tensor: Tensor) -> Tensor:
    """The same values and strides in other memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
