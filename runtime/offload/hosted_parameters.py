"""Parameters in the host's memory, as a running program sees them: what regions read is uploaded, gradients leave as they come."""

from __future__ import annotations

from typing import Any

from zcompile.program import Call, Program, Start
from zcompile.runtime.communication.collectives import Pending
from zcompile.runtime.offload.hosting import Hosting
from zcompile.runtime.sharding.shards import ParameterShards


class DirectReads:
    """The parameters that regions read without a gather: those that are whole on every rank."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._slots: dict[int, list[int]] = {}

    def upload(self, program: Program, slots: list[Any]) -> None:
        """Put copies on the device into the slots of a program that begins."""
        found = self._slots.get(id(program))
        if found is None:
            params = {port.slot for port in program.inputs if port.kind == "param"}
            read = {i for ins in program.instructions if isinstance(ins, Call) for i in ins.inputs}
            found = self._slots[id(program)] = sorted(params & read)
        if found:
            for slot, copy in zip(found, self._hosting.upload([slots[i] for i in found]), strict=True):
                slots[slot] = copy


class ToHost:
    """A reduction whose results go on to the host's memory when they are there."""

    __slots__ = ("_ins", "_shards", "_slots", "_started", "lane", "works")

    def __init__(self, started: Pending, ins: Start, slots: list[Any], shards: ParameterShards) -> None:
        self._started = started
        self.works, self.lane = started.works, started.lane
        self._ins = ins
        self._slots = slots
        self._shards = shards

    def wait(self) -> None:
        """Have the results, and start the copies of those that are gradients and nothing else, where none is added to."""
        self._started.wait()
        self.works = ()
        shards, targets, sources = self._shards, [], []
        for name, slot in zip(self._ins.grads, self._ins.outputs, strict=True):
            if name and shards.parameter(name).grad is None:
                memory = shards.grad_local(name)
                sources.append(self._slots[slot].to(memory.dtype))
                targets.append(memory)
                self._slots[slot] = memory
        if targets:
            shards.hosting.leave(targets, sources)
