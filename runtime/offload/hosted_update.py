"""AdamW on states in the host's memory: they pass through the device chunk by chunk, or the processors update them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zcompile.runtime.offload.host import Event, HostMemory, Lanes
from zcompile.runtime.optim.adamw_update import AdamWOptions, Segment, Segments, adamw_, update

#: buffers that chunks pass through: one is filled while one is updated and one is emptied
NUM_SLOTS = 3

#: chunks are whole multiples of this, so that vector units cut them as they cut the whole
CHUNK_ALIGNMENT = 1024

#: what torch's fused kernel for processors takes
FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(eq=False)
class _Slot:
    """Memory for one chunk of each tensor that passes.

    Attributes:
        buffers: on the device, or page-locked on the host.
        emptied: what was in it has been copied on.
        filled: what it holds has arrived.
    """

    buffers: list[Tensor]
    emptied: Event | None = None
    filled: Event | None = None


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A piece of the flat memory that one update covers.

    Attributes:
        hosted: its states on the host, ``exp_avg`` first.
        on_device: where the parameters and gradients are on the device: their places.
        staged: the same piece with states in the buffers of its slot.
    """

    hosted: list[Tensor]
    place: slice
    staged: Segments | None


class HostedUpdate:
    """Updates states of one model that are on the host.

    With ``step="device"`` the states of a chunk are copied to the device, updated there by the kernel that updates all states
    otherwise, and copied back: the same bits as without offloading. Copies in, the update and copies out of three chunks
    overlap; the first chunks come in while backward still runs, and the last go out while the next forward does.

    With ``step="cpu"`` gradients and parameters of a chunk are copied to the host, and the processors update it while the next
    are on their way. With ``step="in place"`` parameters and gradients are on the host.

    Args:
        device: of the gradients.
        memory: the host's.
        lanes: the ways to it.
        step: ``device``, ``cpu`` or ``in place``.
        chunk_bytes: size of a chunk of one state.

    Attributes:
        largest: elements of the largest arena of each dtype; no chunk is larger.
    """

    def __init__(self, device: torch.device, memory: HostMemory, lanes: Lanes, step: str, chunk_bytes: int) -> None:
        self.device = device
        self.memory = memory
        self.lanes = lanes
        self.step = step
        self.chunk_bytes = chunk_bytes
        self._slots: dict[tuple[torch.dtype, int], list[_Slot]] = {}
        self._chunks: weakref.WeakKeyDictionary[Segments, list[_Chunk]] = weakref.WeakKeyDictionary()
        self._started = False
        self.largest: dict[torch.dtype, int] = {}

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        if self.step != "device":
            return 0
        return sum(buffer.nbytes for slots in self._slots.values() for slot in slots for buffer in slot.buffers)

    def begin(self) -> None:
        """Begin a step: what the last one copied to the host is there before anything comes from it."""
        if self._started and self.device.type != "cpu":
            self.lanes.stream("in").wait_stream(self.lanes.stream("out"))

    def settle(self) -> None:
        """Let the host wait until all states are there, before anyone but the next step reads them."""
        if self._started:
            self.lanes.settle("out")
            self._started = False

    def update(self, parts: Sequence[tuple[Segments, AdamWOptions]], grad: Tensor) -> None:
        """Update pieces of one arena, each with its own options; see ``adamw_update.update``.

        Args:
            parts: parameters with states on the host.
            grad: the gradient arena, on the parameters' device.
        """
        self._started = True
        for segments, options in parts:
            if self.step == "in place":
                self._in_place(segments, options, grad)
            elif self.step == "cpu":
                self._on_cpu(segments, options, grad)
            else:
                self._streamed(segments, options, grad)

    # States pass through the device. ----------------------------------------------------------------------------------

    def _streamed(self, segments: Segments, options: AdamWOptions, grad: Tensor) -> None:
        lanes, slots = self.lanes, self._device_slots(segments)
        for number, chunk in enumerate(self._cut(segments, slots)):
            slot = slots[number % NUM_SLOTS]
            staged = [b[: h.numel()] for b, h in zip(slot.buffers, chunk.hosted, strict=True)]
            lanes.join(lanes.copy("in", staged, chunk.hosted, after=(slot.emptied,)))
            assert chunk.staged is not None
            update([(chunk.staged, options)], grad=grad)
            slot.emptied = lanes.copy("out", chunk.hosted, staged, after=(lanes.now(),))

    def _device_slots(self, segments: Segments) -> list[_Slot]:
        dtype, count = segments.exp_avg.dtype, 2 + (segments.max_exp_avg_sq is not None)
        key = (dtype, count)
        if key not in self._slots:
            numel = self._chunk_numel(dtype)
            made = [
                _Slot([torch.zeros(numel, dtype=dtype, device=self.device) for _ in range(count)])
                for _ in range(NUM_SLOTS)
            ]
            ready = self.lanes.now()  # the zeros are written before anything comes in
            for slot in made:
                slot.emptied = ready
            self._slots[key] = made
        return self._slots[key]

    # The processors update. -------------------------------------------------------------------------------------------

    def _on_cpu(self, segments: Segments, options: AdamWOptions, grad: Tensor) -> None:
        lanes, chunks, slots = self.lanes, self._cut(segments, None), self._host_slots(segments.param, grad)
        now = lanes.now()

        def fetch(number: int) -> None:
            slot, place = slots[number % NUM_SLOTS], chunks[number].place
            numel = place.stop - place.start
            buffers, sources = [b[:numel] for b in slot.buffers], [segments.param[place], grad[place]]
            slot.filled = lanes.copy("out", buffers, sources, after=(now, slot.emptied))

        for number in range(min(NUM_SLOTS - 1, len(chunks))):
            fetch(number)
        for number, chunk in enumerate(chunks):
            if number + NUM_SLOTS - 1 < len(chunks):
                fetch(number + NUM_SLOTS - 1)
            slot = slots[number % NUM_SLOTS]
            if slot.filled is not None:
                slot.filled.synchronize()
            param, gradient = (b[: chunk.hosted[0].numel()] for b in slot.buffers)
            processor_adamw_(param, gradient, chunk.hosted, options)
            slot.emptied = lanes.copy("in", [segments.param[chunk.place]], [param], after=())
            lanes.join(slot.emptied)

    def _host_slots(self, param: Tensor, grad: Tensor) -> list[_Slot]:
        key = (param.dtype, 2)
        if key not in self._slots:
            numel = self._chunk_numel(param.dtype)
            kinds = (param.dtype, grad.dtype)
            self._slots[key] = [
                _Slot([self.memory.zeros(numel, dtype, "optimizer states") for dtype in kinds])
                for _ in range(NUM_SLOTS)
            ]
        return self._slots[key]

    def _in_place(self, segments: Segments, options: AdamWOptions, grad: Tensor) -> None:
        for chunk in self._cut(segments, None):
            processor_adamw_(segments.param[chunk.place], grad[chunk.place], chunk.hosted, options)

    # Chunks. ----------------------------------------------------------------------------------------------------------

    def _chunk_numel(self, dtype: torch.dtype) -> int:
        return chunk_numel(self.chunk_bytes, dtype, self.largest.get(dtype))

    def _cut(self, segments: Segments, slots: Sequence[_Slot] | None) -> list[_Chunk]:
        """The chunks of an update; found once."""
        known = self._chunks.get(segments)
        if known is None:
            known = self._chunks[segments] = list(self._chunks_of(segments, slots))
        return known

    def _chunks_of(self, segments: Segments, slots: Sequence[_Slot] | None) -> Iterator[_Chunk]:
        step, number = self._chunk_numel(segments.exp_avg.dtype), 0
        states = [s for s in (segments.exp_avg, segments.exp_avg_sq, segments.max_exp_avg_sq) if s is not None]
        for segment in segments.table:
            for offset in range(0, segment.numel, step):
                numel = min(step, segment.numel - offset)
                param, state = segment.param_start + offset, segment.state_start + offset
                staged = None
                if slots is not None:
                    buffers = slots[number % NUM_SLOTS].buffers
                    staged = dataclasses.replace(
                        segments,
                        exp_avg=buffers[0],
                        exp_avg_sq=buffers[1],
                        max_exp_avg_sq=buffers[2] if len(buffers) > 2 else None,
                        table=(Segment(param, 0, numel),),
                    )
                yield _Chunk([s[state : state + numel] for s in states], slice(param, param + numel), staged)
                number += 1


def chunk_numel(chunk_bytes: int, dtype: torch.dtype, largest: int | None = None) -> int:
    """Elements of a chunk: whole multiples of the alignment, and no more than the largest arena has."""
    numel = chunk_bytes // dtype.itemsize
    numel = numel if largest is None else min(numel, largest + CHUNK_ALIGNMENT - 1)
    return max(numel // CHUNK_ALIGNMENT, 1) * CHUNK_ALIGNMENT


def processor_adamw_(param: Tensor, grad: Tensor, states: Sequence[Tensor], options: AdamWOptions) -> None:
    """Update memory of the host in place with torch's fused kernel, which reads and writes everything once.

    Args:
        param, grad: flat and alike.
        states: first and second moment, and the second's maximum with ``amsgrad``; alike.
        options: the numbers of the update.
    """
    first, second, maxima = (*states, None)[:3]
    assert first is not None and second is not None
    if param.dtype not in FUSED_DTYPES or grad.dtype != param.dtype:
        adamw_([(param, grad, first, second, maxima)], options)
        return
    adamw(
        [param],
        [grad],
        [first],
        [second],
        [] if maxima is None else [maxima],
        [torch.tensor(options.step - 1, dtype=torch.float32)],  # the kernel counts it up first
        fused=True,
        amsgrad=maxima is not None,
        beta1=options.beta1,
        beta2=options.beta2,
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=options.maximize,
    )
