"""What one compiled model keeps in the host's memory, and how it gets there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zcompile.offloading import Moments, Offloading
from zcompile.runtime.offload.host import Copies, HostMemory, Lanes
from zcompile.runtime.offload.hosted_update import HostedUpdate
from zcompile.runtime.sharding.arenas import ArenaKey, ArenaLayout, aligned_empty, aligned_zeros, allocate

log = logging.getLogger("zcompile")

STATES, PARAMETERS, GRADIENTS = "optimizer states", "parameters", "gradients"

#: states of AdamW for each parameter, without amsgrad
NUM_MOMENTS = 2

#: buckets of gradients that leave at once; the memory of older ones is free for what comes
LEAVING = 2


class Hosting:
    """Where the memory of one model is.

    Attributes:
        device: what computes.
        memory: on the host.
        lanes: the ways to it.
        parameters: whether shards and gradients are on the host.
        update: updates states that are on the host; None where all are on the device.
    """

    def __init__(self, device: torch.device, memory: HostMemory, offloading: Offloading, step: str = "device") -> None:
        self.device = device
        self.memory = memory
        self.lanes = Lanes(device)
        self.parameters = offloading.parameters is not None
        self.update: HostedUpdate | None = None
        self._share = 1.0
        self._hosted: frozenset[int] = frozenset()
        self._leaving: list[Copies] = []
        if self.parameters or offloading.optimizer is not None:
            self._update_there(offloading.optimizer or Moments(), "in place" if self.parameters else step)

    def _update_there(self, moments: Moments, step: str) -> None:
        self.update = HostedUpdate(self.device, self.memory, self.lanes, step, int(moments.chunk_mib * 2**20))
        self._share = moments.share

    def host_states(self, moments: Moments, step: str, layout: ArenaLayout) -> None:
        """Have the states of optimizers on the host from now on. Those that there are stay until ``AdamW.move_states``.

        Raises:
            HostMemoryError: there is not enough room.
        """
        self._update_there(moments, step)
        self._promise_states(layout)

    @property
    def home(self) -> torch.device:
        """The device of parameters and gradients, as users see it."""
        return torch.device("cpu") if self.parameters else self.device

    @property
    def step(self) -> str:
        """Where states on the host are updated."""
        return "device" if self.update is None else self.update.step

    def hosts_states(self, index: int) -> bool:
        """Whether the states of a parameter are on the host."""
        return index in self._hosted

    def promise(self, layout: ArenaLayout, *, speaks: bool) -> None:
        """Keep room for what comes later: states, and gradients. Where that saves little, ``speaks`` lets the log say so.

        Raises:
            HostMemoryError: there is not enough.
        """
        trainable = sum(size * key.dtype.itemsize for key, size in layout.sizes.items() if key.trainable)
        if speaks and self.parameters and not any(layout.sharded_sizes.values()):
            log.warning(
                "offload='parameters': every parameter is whole on every rank, so the device holds all of them while a step runs, and "
                "gains room for gradients and the optimizer alone"
            )
        if speaks and self.update is not None and not trainable:
            log.warning("no parameter is trainable, so there are no optimizer states to offload")
        if self.parameters:
            self.memory.promise(trainable, GRADIENTS)
        self._promise_states(layout)

    def _promise_states(self, layout: ArenaLayout) -> None:
        if self.update is None:
            return
        self._hosted = layout.leading(self._share)
        places = [place for index in self._hosted if (place := layout.places[index]) is not None]
        self.memory.promise(NUM_MOMENTS * sum(p.extent * p.key.dtype.itemsize for p in places), STATES)
        for key, size in layout.sizes.items():
            if key.trainable:
                self.update.largest[key.dtype] = max(size, self.update.largest.get(key.dtype, 0))

    def allocate(self, sizes: Mapping[ArenaKey, int]) -> dict[ArenaKey, Tensor]:
        """The flat parameter memory."""
        if not self.parameters:
            return allocate(sizes, self.device)
        return {key: self.memory.zeros(size, key.dtype, PARAMETERS) for key, size in sizes.items()}

    def gradients(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Flat memory for gradients, of undefined contents."""
        if self.parameters:
            return self.memory.zeros(numel, dtype, GRADIENTS)
        return aligned_empty(numel, dtype, self.device)

    def states(self, numel: int, dtype: torch.dtype, *, hosted: bool) -> Tensor:
        """A flat state of zeros."""
        return self.memory.zeros(numel, dtype, STATES) if hosted else aligned_zeros(numel, dtype, self.device)

    # Parameters that come, gradients that go. -------------------------------------------------------------------------

    @contextlib.contextmanager
    def arriving(self, shards: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Copies of shards on the device, and the way in as the current stream: what is started inside comes behind them, and
        computation need not wait. Only for what is waited for itself, such as collectives."""
        if self.device.type == "cpu":
            yield [shard.clone() for shard in shards]
            return
        way = self.lanes.stream("in")
        way.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(way):
            yield [shard.to(self.device, non_blocking=True) for shard in shards]

    def upload(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Copies of shards on the device, for computation."""
        copies = [torch.empty_like(shard, device=self.device) for shard in shards]
        self.lanes.start("in", copies, shards).wait()
        return copies

    def leave(self, targets: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Start copies of reduced gradients into their memory on the host; ``arrived`` ends them."""
        self._leaving.append(self.lanes.start("out", targets, gradients))
        while len(self._leaving) > LEAVING:
            self._leaving.pop(0).wait()

    def arrived(self) -> None:
        """Have all gradients on the host: the host waits."""
        for copies in self._leaving:
            copies.wait()
        self._leaving.clear()
        self.lanes.settle("out")
