"""The walk that the executor would do over one graph, slot by slot, with byte counts in the place of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from zcompile.analysis.memory import RegionMemory, tensor_bytes
from zcompile.analysis.units import unit_key
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Graph
from zcompile.lower.program import lower_program
from zcompile.planner.ledger import ON_HOST, Storage, Value, type_bytes
from zcompile.program import Call, Program, Release, Start, TensorType, Transfer, Wait
from zcompile.runtime.communication import peers
from zcompile.runtime.offload.host import pages
from zcompile.runtime.sharding.arenas import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from zcompile.planner.walk import StepWalk


#: for each storage that ends: the arguments that live in it, and its bytes
Dying = tuple[tuple[tuple[int, ...], int], ...]


class GraphWalk:
    """The walk over one graph: the executor's, slot by slot."""

    def __init__(self, walk: StepWalk, graph: Graph, phase: str) -> None:
        self.walk = walk
        self.graph = graph
        self.phase = phase
        self.program: Program = lower_program(graph)
        self.slots: list[Value] = [()] * self.program.num_slots
        self.gathered: dict[int, tuple[TensorType, str]] = {}
        self.params: dict[int, str] = {}
        self.pending: dict[int, list[Storage]] = {}
        self.staying: set[int] = set()  # reductions that do not run
        self.leaving: dict[int, list[int]] = {}  # gradients that go to the host when they are reduced
        self.parts = self._parts()

    def run(self) -> None:
        self._load()
        for ins in self.program.instructions:
            if isinstance(ins, Call):
                self._call(ins)
            elif isinstance(ins, Start) and ins.op != "all_gather" and not self.walk.batch.reduces:
                self._stay(ins)
            elif isinstance(ins, Start):
                self._start(ins)
            elif isinstance(ins, Transfer):
                self._transfer(ins)
            elif isinstance(ins, Wait) and ins.ticket in self.staying:
                self._free(ins.frees)
            elif isinstance(ins, Wait):
                for storage in self.pending.pop(ins.ticket, ()):
                    self.walk.drop(storage)
                self._free(ins.frees)
                self._free(self.leaving.pop(ins.ticket, ()))
                self.walk.record(self.phase, "wait", "wait", {})
            else:
                assert isinstance(ins, Release)
                for slot in ins.slots:
                    self.walk.pool.give(*self.gathered.pop(slot))
                self.walk.record(self.phase, "release", "release", {})
        self._leave()

    def _parts(self) -> dict[int, str]:
        """What each slot is for, where it is known from who reads it."""
        parts: dict[int, str] = {}
        for ins in self.program.instructions:
            if isinstance(ins, Start) and ins.op != "all_gather":
                parts.update(dict.fromkeys(ins.inputs, "reduction buckets"))
            elif isinstance(ins, Transfer) and ins.op == "offload":
                parts.update(dict.fromkeys(ins.inputs, "saved for backward"))
        kinds = {"grad": "reduction buckets", "output": "inputs and outputs", "saved": "saved for backward"}
        for kind, part in kinds.items():
            parts.update((port.slot, part) for port in self.program.outputs if port.kind == kind)
        return parts

    def _load(self) -> None:
        walk = self.walk
        read = {i for ins in self.program.instructions if isinstance(ins, Call) for i in ins.inputs}
        types = {slot.slot: node for slot, node in zip(self.program.inputs, self.graph.inputs, strict=True)}
        for port in self.program.inputs:
            if port.kind == "param":
                self.params[port.slot] = port.key
                if walk.parameters_on_host and port.slot in read:
                    self._set(port.slot, (Storage("uploaded", walk.specs[port.key].padded_local_bytes),))
            elif port.kind == "kept":
                self.gathered[port.slot] = walk.kept.pop(port.key)
            elif port.kind == "saved":
                self._set(port.slot, walk.saved[port.key])
            elif port.kind == "offloaded":
                self._set(port.slot, walk.offloaded[port.key])
            else:
                node = types[port.slot]
                part = "model buffers" if isinstance(meta.origin(node), Buffer) else "inputs and outputs"
                name = f"{port.kind} {port.key}"
                if name not in walk.inputs:
                    value = meta.tensor(node)
                    storage = Storage(part, tensor_bytes(value), tuple(value.shape))
                    walk.hold(storage)
                    walk.inputs[name] = (storage,)
                    if port.kind != "buffer":
                        walk.users.append(storage)
                self._set(port.slot, walk.inputs[name])
        for value in walk.saved.values():  # the slots alone hold what was saved from now on
            for storage in value:
                walk.drop(storage)
        walk.saved = {}

    def _set(self, slot: int, value: Value) -> None:
        self.slots[slot] = value
        for storage in value:
            self.walk.hold(storage)

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for storage in self.slots[slot]:
                self.walk.drop(storage)
            self.slots[slot] = ()

    def _call(self, ins: Call) -> None:
        regions, peaks = self.walk.regions, self.walk.peaks  # all micro-batches run the same ones
        name = (self.phase, ins.body)
        if name not in regions:
            regions[name] = RegionMemory(self.graph.regions[ins.body], fused=self.walk.setup.fused)
        region = regions[name]
        dying = self._dying(ins)
        key = (*name, dying)
        if key not in peaks:
            peaks[key] = region.extra(dying)
        during = {**self._now(), "region workspace": peaks[key]}
        owned: dict[int, Storage] = {}
        results: list[tuple[int, Value]] = []
        for slot, (own, shared) in zip(ins.outputs, region.storages.results, strict=True):
            if slot < 0:
                continue
            part = self.parts.get(slot, "between regions")
            value = []
            for storage in own:
                made = owned.setdefault(storage.number, Storage(part, storage.num_bytes, storage.shape))
                if _RANK[part] < _RANK[made.part]:
                    made.part = part
                value.append(made)
            value += [s for position in shared for s in self.slots[ins.inputs[position]]]
            results.append((slot, tuple(dict.fromkeys(value))))
        for slot, value in results:
            self._set(slot, value)
        self._free(ins.frees)
        self.walk.record(self.phase, "region", self._region_name(ins), during)

    def _region_name(self, ins: Call) -> str:
        """The region with the units whose parameters this call reads."""
        names = [self.gathered[slot][1] if slot in self.gathered else self.params.get(slot, "") for slot in ins.inputs]
        units = list(dict.fromkeys(unit_key(name)[0] for name in names if name))
        shown = ", ".join(units[:3]) + (", ..." if len(units) > 3 else "")
        return f"{ins.body} ({shown})" if units else ins.body

    def _dying(self, ins: Call) -> Dying:
        """For each storage that only freed slots hold: the arguments that live in it, and its bytes."""
        freed = Counter(storage for slot in ins.frees for storage in self.slots[slot])
        found = []
        for storage, count in freed.items():
            if storage.holders == count:
                positions = tuple(i for i, slot in enumerate(ins.inputs) if storage in self.slots[slot])
                found.append((positions, storage.num_bytes))
        return tuple(found)

    def _now(self) -> dict[str, int]:
        now = {part: num_bytes for part, num_bytes in self.walk.totals.items() if num_bytes}
        now["gathered weights"] = self.walk.pool.live_bytes
        return now

    def _start(self, ins: Start) -> None:
        walk, held = self.walk, []
        staged = self._stage(ins)
        if walk.parameters_on_host:
            if ins.op == "all_gather":
                staged += sum(walk.specs[self.params[source]].padded_local_bytes for source in ins.inputs)
            else:
                self.leaving[ins.ticket] = [s for s, name in zip(ins.outputs, ins.grads, strict=True) if name]
        if staged:
            storage = Storage("reduction buckets" if ins.op != "all_gather" else "exchange", staged)
            walk.hold(storage)
            held.append(storage)
        self.pending[ins.ticket] = held
        if ins.op == "all_gather":
            for source, slot, kind in zip(ins.inputs, ins.outputs, ins.types, strict=True):
                spec = walk.specs[self.params[source]]
                self.gathered[slot] = (kind, spec.name)
                walk.pool.take(kind, spec.name)
        else:
            for name, slot, kind in zip(ins.grads, ins.outputs, ins.types, strict=True):
                apart = walk.parameters_on_host or (bool(name) and walk.batch.adds_shards(walk.specs[name]))
                if name in walk.sums:
                    held.append(self._take_local(name, kind))
                if name and walk.specs[name].dtype == kind.dtype and not apart:
                    walk.touch([name])
                else:
                    self._set(slot, (Storage("reduction buckets", type_bytes(kind)),))
        walk.record(self.phase, "collective", ins.label, {})

    def _stay(self, ins: Start) -> None:
        """A reduction that does not run: gradients stay on their rank, as it would read them."""
        self.staying.add(ins.ticket)
        for source, slot, kind in zip(ins.inputs, ins.outputs, ins.types, strict=True):
            numel, dtype = self._sent(source)
            wide = Storage("reduction buckets", numel * kind.dtype.itemsize)
            self._set(slot, self.slots[source] if dtype == kind.dtype else (wide,))

    def _take_local(self, name: str, kind: TensorType) -> Storage:
        """What is sent instead of a gradient that was added to those of earlier micro-batches."""
        walk, taken = self.walk, self.walk.sums.pop(name)
        window = walk.batch.window
        assert window is not None, "sums are a window's"
        dtype = window.local_dtype(walk.specs[name])
        if dtype == kind.dtype:
            return taken
        walk.drop(taken)
        narrow = Storage("reduction buckets", taken.num_bytes // dtype.itemsize * kind.dtype.itemsize)
        walk.hold(narrow)
        return narrow

    def _transfer(self, ins: Transfer) -> None:
        """Copies of storages, each made once for all values that live in it."""
        made: dict[Storage, Storage] = {}
        part = ON_HOST if ins.op == "offload" else "reloaded"
        for read, written in zip(ins.inputs, ins.outputs, strict=True):
            for storage in self.slots[read]:
                if storage not in made:
                    made[storage] = Storage(part, storage.num_bytes, storage.shape)
                    if part == ON_HOST:
                        self.walk.host["activations"] += pages(storage.num_bytes)
            self._set(written, tuple(made[s] for s in self.slots[read]))
        self.walk.record(self.phase, "transfer", ins.label, {})

    def _stage(self, ins: Start) -> int:
        """Bytes that a collective takes from its start to its wait, beside what goes in and comes out."""
        walk = self.walk
        whole, size = sum(map(type_bytes, ins.types)), walk.size
        if ins.op == "all_reduce":
            return 0
        if ins.op == "reduce_scatter":
            sent = [
                (numel, kind.dtype if name in walk.sums else dtype)
                for (numel, dtype), name, kind in zip(map(self._sent, ins.inputs), ins.grads, ins.types, strict=True)
            ]
            if walk.setup.copies and sum(n * d.itemsize for n, d in sent) >= peers.MIN_BYTES:
                piece = sum(_aligned(n // size * d.itemsize) for n, d in sent)
                walk.exchange["reduce_scatter"] = max(walk.exchange["reduce_scatter"], (size - 1) * piece)
                return 0
            widens = any(d != kind.dtype for (_, d), kind in zip(sent, ins.types, strict=True))
            return whole * size if walk.setup.on_host or widens else 0
        if walk.setup.copies and whole >= peers.MIN_BYTES:
            staged = sum(_aligned(type_bytes(kind) // size) for kind in ins.types)
            walk.exchange["all_gather"] = max(walk.exchange["all_gather"], staged)
            return 0
        return whole // size if walk.setup.on_host and ins.cast is not None else 0

    def _sent(self, slot: int) -> tuple[int, torch.dtype]:
        """Elements and dtype of what a reduction reads."""
        return self._sent_types[slot]

    @cached_property
    def _sent_types(self) -> dict[int, tuple[int, torch.dtype]]:
        types: dict[int, tuple[int, torch.dtype]] = {}
        for ins in self.program.instructions:
            if isinstance(ins, Call):
                types.update(
                    (slot, (math.prod(kind.shape), kind.dtype))
                    for slot, kind in zip(ins.outputs, ins.types, strict=True)
                )
        for port, node in zip(self.program.inputs, self.graph.inputs, strict=True):
            types[port.slot] = (meta.tensor(node).numel(), meta.tensor(node).dtype)
        return types

    def _leave(self) -> None:
        """The end of a graph: saved values, outputs and kept weights stay, everything else goes with the slots."""
        walk = self.walk
        for port in self.program.outputs:
            if port.kind == "kept":
                walk.kept[port.key] = self.gathered[port.slot]
            elif port.kind == "offloaded":
                walk.offloaded[port.key] = self.slots[port.slot]
            elif port.kind == "saved":
                walk.saved[port.key] = self.slots[port.slot]
                for storage in self.slots[port.slot]:
                    walk.hold(storage)
            elif port.kind == "output":
                for storage in self.slots[port.slot]:
                    walk.hold(storage)
                    walk.users.append(storage)
        if self.phase == "backward":
            walk.add_up()
        self._free(range(len(self.slots)))
        walk.record(self.phase, "end", f"end of {self.phase}", {})


#: which part a storage counts to when several results live in it
_RANK = {"saved for backward": 0, "inputs and outputs": 1, "reduction buckets": 2, "between regions": 3}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
