"""Decides which micro-batches of a model are recorded and replayed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from zcompile.errors import RankError
from zcompile.program import Runnable, StepProgram, Transfer
from zcompile.runtime.executor import Executor
from zcompile.runtime.replay.pace import Pace
from zcompile.runtime.replay.recorder import Recorder
from zcompile.runtime.replay.tape import Kind, Read, Tape, Taping, ports, unfit

#: runs of a kind of micro-batch before one is recorded: they compile kernels, and allocate what a recording may not
WARM_STEPS = 2

#: how often all tapes of one model are made anew: what makes it necessary will go on
MAX_RECORDINGS = 3

#: tapes of one model: each holds its inputs, and what the driver needs for a graph
MAX_TAPES = 12

#: why a step is not replayed that follows one whose memory is needed
IN_USE = "values of an earlier forward are in use; call backward() once for each forward, before the next"

#: why a step is not replayed that would not be faster
DEVICE_BOUND = "the host issues it faster than the device runs it"

#: why a step is not replayed that moves values to the host
MOVES = "activations of it are offloaded"

#: why a step is not replayed whose reductions would leave local gradients out
OTHER_SUMS = "gradients of other parameters wait for its reductions than when it was recorded"

#: why a step is not replayed yet; nobody is told
NOT_WARM = "it is not warm yet"

#: gives the forward and the backward of a kind of micro-batch
Programs = Callable[[], tuple[Runnable, Runnable]]


class Tapes:
    """The tapes of one model.

    Each kind of micro-batch of each signature has a tape, once it ran ``WARM_STEPS`` times. What is not replayed runs as it is issued,
    with the same results, and the ranks need not do alike: the same collectives start in the same order.

    The memory of all tapes is the same, so a forward may be replayed only when nobody needs what the last one left (``lease``).

    Args:
        executor: runs what is recorded.
        make: makes a recorder.
        say: told once why steps are not replayed.
        pace: says whether it is worth it; None: it is.

    Attributes:
        replays: micro-batches whose forward was replayed.
        reason: why the latest was not; empty when it was.
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
        self._warm: dict[tuple[int, Kind], int] = {}
        self._tapes: dict[tuple[int, Kind, bool], Tape] = {}
        self._recorder: Recorder | None = None
        self._taping: Taping | None = None
        self._recordings = 0
        self._over = ""
        self._holder: Callable[[], Any] = lambda: None
        executor.collectives.let_go = self.close

    # Forward. ---------------------------------------------------------------------------------------------------------

    def issuing_forward(self, step: StepProgram) -> contextlib.AbstractContextManager[None]:
        """The body issues a step's forward."""
        pace = None if self._over or step.backward is None else self._pace
        return contextlib.nullcontext() if pace is None else pace.forward()

    @contextlib.contextmanager
    def issuing_backward(self, step: StepProgram, kind: Kind) -> Iterator[None]:
        """The body issues the backward of a kind of micro-batch, reductions and all."""
        pace = None if self._over else self._pace
        with contextlib.nullcontext() if pace is None else pace.backward():
            yield
        self._warm[id(step), kind] = self._warm.get((id(step), kind), 0) + 1

    def forward(self, step: StepProgram, kind: Kind, programs: Programs, read: Read) -> Tape | None:
        """Replay a forward, which is recorded first if it is time to; None: it is to be issued.

        Args:
            step: with a backward.
            kind: of micro-batch, as it is expected to end.
            programs: of this kind.
            read: gives what the forward reads.
        """
        adds = not kind.local and self._has_gradients(step)
        key = (id(step), kind, adds)
        tape = self._tapes.get(key)
        self.reason = self._problem(step, kind, tape, programs, read)
        if not self.reason and (tape is None or key not in self._tapes):
            tape = self._record(step, kind, programs, read, adds)
        if self.reason:
            if self.reason != NOT_WARM and (self._recordings or self._is_warm(step, kind)):
                self._tell(self.reason)
            return None
        assert tape is not None
        self.replays += 1
        with self._executor.collectives.replaying(tape.forward.num_collectives, f"forward ({step.label}), replayed"):
            tape.forward.replay(read)
        return tape

    def lease(self, holder: Any) -> None:
        """Say who uses what the latest forward left, for as long as it lives."""
        self._holder = weakref.ref(holder)

    def _is_warm(self, step: StepProgram, kind: Kind) -> bool:
        return self._warm.get((id(step), kind), 0) >= WARM_STEPS

    def _has_gradients(self, step: StepProgram) -> bool:
        """Whether gradients are there, or in use, where a backward would write them: also those of other steps, in the same chunks."""
        shards, chunks = self._executor.shards, None if self._taping is None else self._taping.chunks
        if shards.has_gradients(step.trainable):
            return True
        return chunks is not None and (shards.gradients.any_set(chunks.prepared) or chunks.are_held())

    def _problem(self, step: StepProgram, kind: Kind, tape: Tape | None, programs: Programs, read: Read) -> str:
        if self.paused:
            return self.paused
        if self._holder() is not None:
            return IN_USE
        if tape is not None:
            if tape.forward.holds(read):
                return "" if tape.finds(self._executor.accumulation.local) else OTHER_SUMS
            self.close()
        if self._over:
            return self._over
        program = step.forward.program
        if any(type(ins) is Transfer for ins in program.instructions):
            return MOVES
        if self._taping is None and self._recordings == MAX_RECORDINGS:
            return "buffers were replaced too often"
        if len(self._tapes) == MAX_TAPES:
            return f"{MAX_TAPES} kinds of steps are recorded"
        if self._pace is not None:
            if not self._pace.is_host_bound():
                self._over = DEVICE_BOUND if self._pace.is_over else ""
                return DEVICE_BOUND
            self._pace = None
        if not self._is_warm(step, kind):
            return NOT_WARM
        if kind.takes:
            # what the first micro-batch leaves lies where its forward gathers it, if that is recorded first
            places = {} if self._taping is None else self._taping.places
            if any(port.key not in places for port in ports(programs()[0].program.inputs, "kept")):
                return NOT_WARM
        return unfit(program, read, self._executor.buffers.device)

    # Recording. -------------------------------------------------------------------------------------------------------

    def _record(self, step: StepProgram, kind: Kind, programs: Programs, read: Read, adds: bool) -> Tape | None:
        if self._taping is None:
            self._recordings += 1
            self._recorder = self._make()
            self._taping = Taping(self._executor, self._recorder)
        recorder, taping = self._recorder, self._taping
        assert recorder is not None
        try:
            with self._executor.recording():
                tape = taping.record(step, kind, programs(), read, adds=adds)
        except RankError:
            raise
        except RuntimeError as error:
            self.close()
            first = (str(error) or type(error).__name__).splitlines()[0]
            self.reason = self._over = f"the device cannot record it: {first}"
            return None
        self._tapes[id(step), kind, adds] = tape
        if kind.sums:
            self._executor.accumulation.places |= tape.sums
        self.hidden_bytes = recorder.hidden_bytes()
        return tape

    # Backward. --------------------------------------------------------------------------------------------------------

    def backward(self, tape: Tape, kind: Kind, tangents: Sequence[Any]) -> Mapping[int, Tensor] | None:
        """Replay a tape's backward, whose results come by slot; None, and it is to be issued, where it is another one.

        Args:
            tape: of the forward.
            kind: of micro-batch, as it ends.
            tangents: by output index.
        """
        local = self._executor.accumulation.local
        if all(known is not tape for known in self._tapes.values()):
            return None  # other threads closed it
        if kind != tape.kind or not tape.finds(local):
            self._tell("a window or no_sync() begins or ends between a forward and its backward")
            return None
        if tape.chunks is not None and not self._executor.shards.gradients.wake(tape.chunks):
            self._tell("gradients exist at the backward; call zero_grad() before it")
            return None
        label = f"backward ({tape.step.label}), replayed"
        with self._executor.collectives.replaying(tape.backward.num_collectives, label):
            tape.backward.replay(lambda port: tangents[port.key])
        for name in tape.sums:
            del local[name]
        return tape.backward.results

    # Ending. ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the recordings back. Harmless when called twice."""
        self._tapes = {}
        self._taping = None
        self.hidden_bytes = 0
        self._executor.accumulation.places = {}
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _tell(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            self._say(reason)
