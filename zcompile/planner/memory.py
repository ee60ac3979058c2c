"""What a rank holds at every moment of a step: the walk that the executor would do, with byte counts in the place of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy
import torch

from zcompile.analysis.memory import RegionMemory, tensor_bytes
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Grad, Graph, Step
from zcompile.lower.program import lower_program
from zcompile.placement import ParamSpec
from zcompile.planner import states
from zcompile.program import Call, Program, Release, Start, TensorType, Wait
from zcompile.runtime import peers
from zcompile.runtime.arenas import ALIGNMENT_BYTES, ArenaKey, ArenaLayout
from zcompile.runtime.gradients import KEEP_BYTES

#: the categories, and the parts that each is made of
PARTS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("shards", "model buffers"),
    "gradients": ("gradient shards",),
    "optimizer states": ("optimizer states",),
    "activations": ("saved for backward", "inputs and outputs", "between regions"),
    "temporary": ("gathered weights", "gathered, free", "reduction buckets", "region workspace", "exchange"),
    "reserve": ("arena gaps", "context and libraries", "fragmentation"),
}
CATEGORIES = tuple(PARTS)
CATEGORY_OF = {part: category for category, parts in PARTS.items() for part in parts}


@dataclass(frozen=True)
class Moment:
    """Memory around one instruction of a step.

    Attributes:
        phase: ``forward``, ``backward`` or ``optimizer``.
        name: what runs, such as ``forward_2`` or ``all_gather of layers.3``.
        during: the most bytes while it runs, by part.
        after: bytes when it has run, by part.
    """

    phase: str
    name: str
    during: Mapping[str, int]
    after: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The most bytes while it runs, of all parts."""
        return sum(self.during.values())


def by_category(parts: Mapping[str, int]) -> dict[str, int]:
    """Bytes by category, each with 0 where there is nothing."""
    sums = dict.fromkeys(CATEGORIES, 0)
    for part, num_bytes in parts.items():
        sums[CATEGORY_OF[part]] += num_bytes
    return sums


@dataclass(frozen=True)
class Transport:
    """How collectives move data, as far as it takes memory.

    Attributes:
        kind: ``host`` (gloo, on CPU) or ``device`` (NCCL).
        copies: whether large buckets go by the copy engines of one node.
    """

    kind: str = "host"
    copies: bool = False


@dataclass(frozen=True)
class Memory:
    """The memory of one rank over a step, in its steady state: not the first one, before ``zero_grad`` has run once.

    Attributes:
        moments: in the order of the schedule.
        parameter_bytes: stored shards, with padding; what ``model.report()`` calls so.
        gradient_bytes: of gradients after a backward.
        optimizer_bytes: of optimizer states after a step.
        saved_bytes: of what forward leaves for backward, shared storage once, gathered weights apart.
        gathered_peak_bytes: the most that gathered parameters take at once.
        gathered_held_bytes: of the buffers for them, which are used again and never given back.
        exchange_bytes: what the copy engines exchange through, outside of torch's allocator.
        formulas: bytes by what is in this class, in the number of ranks ``W``, for parameters that are divided as they are here.
    """

    moments: tuple[Moment, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    gathered_peak_bytes: int
    gathered_held_bytes: int
    exchange_bytes: int
    formulas: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @cached_property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment, reserve included."""
        return self.peak.num_bytes


def predict(
    step: Step,
    specs: Sequence[ParamSpec],
    *,
    optimizer: str = "adamw",
    rank: int = 0,
    fused: bool = True,
    transport: Transport = Transport(),
    reserve_bytes: int = 0,
    fragmentation: float = 0.0,
) -> Memory:
    """The memory of a scheduled step.

    Args:
        step: forward and backward after all passes.
        specs: the parameters, divided as the step has them.
        optimizer: one of ``states.OPTIMIZERS``.
        rank: whose; ranks differ in rows of optimizer states only.
        fused: whether a compiler fuses regions (``backend="inductor"``).
        transport: what collectives take.
        reserve_bytes: taken by the device's context and libraries.
        fragmentation: the share of what the allocator holds that lies in gaps: a guess.
    """
    return _Walk(step, specs, optimizer, rank, fused, transport, reserve_bytes, fragmentation).run()


class _Storage:
    """Memory with those who hold it: slots, the user, autograd."""

    __slots__ = ("holders", "num_bytes", "part")

    def __init__(self, part: str, num_bytes: int) -> None:
        self.part = part
        self.num_bytes = num_bytes
        self.holders = 0


_Value = tuple[_Storage, ...]


class _Pool:
    """The buffers of gathered parameters, as ``runtime.buffers`` hands them out."""

    def __init__(self) -> None:
        self.live: Counter[TensorType] = Counter()
        self.most: Counter[TensorType] = Counter()
        self.live_bytes = 0
        self.params: Counter[tuple[str, torch.dtype]] = Counter()
        self.peak: tuple[int, Counter[tuple[str, torch.dtype]]] = (0, Counter())

    def take(self, kind: TensorType, name: str) -> None:
        self.live[kind] += 1
        self.most[kind] = max(self.most[kind], self.live[kind])
        self.live_bytes += _bytes(kind)
        self.params[name, kind.dtype] += 1

    def give(self, kind: TensorType, name: str) -> None:
        self.live[kind] -= 1
        self.live_bytes -= _bytes(kind)
        self.params[name, kind.dtype] -= 1

    def note_peak(self) -> None:
        if self.live_bytes > self.peak[0]:
            self.peak = (self.live_bytes, +self.params)

    @property
    def held_bytes(self) -> int:
        return sum(count * _bytes(kind) for kind, count in self.most.items())


class _Walk:
    def __init__(
        self,
        step: Step,
        specs: Sequence[ParamSpec],
        optimizer: str,
        rank: int,
        fused: bool,
        transport: Transport,
        reserve_bytes: int,
        fragmentation: float,
    ) -> None:
        self.step = step
        self.specs = {spec.name: spec for spec in specs}
        self.fused = fused
        self.transport = transport
        self.reserve_bytes, self.fragmentation = reserve_bytes, fragmentation
        self.size = specs[0].world_size if specs else 1
        self.layout = ArenaLayout(specs)
        self.index = {spec.name: i for i, spec in enumerate(specs)}
        self.trained = (
            [] if step.backward is None else [r.name for _, r in step.backward.outputs if isinstance(r, Grad)]
        )
        self.optimizer_bytes = states.optimizer_bytes(specs, set(self.trained), optimizer, rank)
        self.optimizer = optimizer
        self.totals: Counter[str] = Counter()
        self.pool = _Pool()
        self.moments: list[tuple[str, str, dict[str, int], dict[str, int]]] = []
        self.homes: set[ArenaKey | int] = set()
        self.exchange = {"all_gather": 0, "reduce_scatter": 0}
        self.saved: dict[str, _Value] = {}
        self.kept: dict[str, tuple[TensorType, str]] = {}
        self.users: list[_Storage] = []
        self.inputs: dict[str, _Value] = {}

    def run(self) -> Memory:
        trainable = sum(size * key.dtype.itemsize for key, size in self.layout.sizes.items() if key.trainable)
        keeps = trainable <= KEEP_BYTES
        self.totals["shards"] = states.parameter_bytes(self.specs.values())
        self.totals["arena gaps"] = self._gaps()
        self.totals["optimizer states"] = self.optimizer_bytes
        self.totals["context and libraries"] = self.reserve_bytes
        if keeps:
            self._touch(self.trained)
        _GraphWalk(self, self.step.forward, "forward").run()
        saved_bytes = sum(s.num_bytes for s in {s for value in self.saved.values() for s in value})
        if self.step.backward is not None:
            _GraphWalk(self, self.step.backward, "backward").run()
            self._touch(self.trained)
        for storage in self.users:
            self.drop(storage)
        if self.step.backward is not None:
            self.record("optimizer", self.optimizer, {})
        held = self.pool.held_bytes
        exchange = sum(self.exchange.values())
        return Memory(
            tuple(self._moment(*m, held, exchange) for m in self.moments),
            states.parameter_bytes(self.specs.values()),
            self.totals["gradient shards"],
            self.optimizer_bytes,
            saved_bytes,
            self.pool.peak[0],
            held,
            exchange,
            self._formulas(),
        )

    # Memory that comes and goes. --------------------------------------------------------------------------------------

    def hold(self, storage: _Storage) -> None:
        if storage.holders == 0:
            self.totals[storage.part] += storage.num_bytes
        storage.holders += 1

    def drop(self, storage: _Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0:
            self.totals[storage.part] -= storage.num_bytes

    def _touch(self, names: Iterable[str]) -> None:
        """Have the gradient memory of parameters, which comes by the chunk."""
        for name in names:
            index = self.index[name]
            place = self.layout.places[index]
            home = place.key if place is not None and place.key.trainable else index
            if home not in self.homes:
                self.homes.add(home)
                members = [index] if isinstance(home, int) else self.layout.members[home]
                specs = list(self.specs.values())
                self.totals["gradient shards"] += sum(specs[i].padded_local_bytes for i in members)

    touch = _touch

    def record(self, phase: str, name: str, during: Mapping[str, int]) -> None:
        """Note the present state, and what there was beside it while ``name`` ran."""
        self.pool.note_peak()
        after = {part: num_bytes for part, num_bytes in self.totals.items() if num_bytes}
        after["gathered weights"] = self.pool.live_bytes
        self.moments.append((phase, name, dict(during) or after, after))

    def _moment(
        self, phase: str, name: str, during: dict[str, int], after: dict[str, int], held: int, exchange: int
    ) -> Moment:
        """Add what is known at the end of the walk only: buffers that are never given back."""
        full = []
        for parts in (during, after):
            parts = dict(parts)
            parts["gathered, free"] = held - parts.get("gathered weights", 0)
            parts["exchange"] = parts.get("exchange", 0) + exchange
            own = sum(parts.values()) - exchange - parts.get("context and libraries", 0)
            parts["fragmentation"] = int(own * self.fragmentation)
            full.append({part: num_bytes for part, num_bytes in parts.items() if num_bytes})
        return Moment(phase, name, *full)

    def _gaps(self) -> int:
        """Bytes of the parameter arenas that belong to no parameter."""
        arenas = sum(size * key.dtype.itemsize + ALIGNMENT_BYTES for key, size in self.layout.sizes.items())
        return arenas - states.parameter_bytes(s for s in self.specs.values() if s.padded_local_numel)

    def _formulas(self) -> dict[str, sympy.Expr]:
        specs = list(self.specs.values())
        chunks = [i for home in self.homes for i in ([home] if isinstance(home, int) else self.layout.members[home])]
        trained = [self.specs[name] for name in dict.fromkeys(self.trained)]
        steps = states.STEP_BYTES * len(trained) if self.optimizer in ("adam", "adamw") else 0
        live = self.pool.peak[1]
        return {
            "parameter_bytes": states.shard_formula((s, s.dtype.itemsize) for s in specs),
            "gradient_bytes": states.shard_formula((specs[i], specs[i].dtype.itemsize) for i in chunks),
            "optimizer_bytes": states.num_states(self.optimizer)
            * states.shard_formula((s, s.dtype.itemsize) for s in trained)
            + steps,
            "gathered_peak_bytes": states.WORLD
            * states.shard_formula((self.specs[name], dtype.itemsize) for name, dtype in live.elements()),
        }


class _GraphWalk:
    """The walk over one graph: the executor's, slot by slot."""

    def __init__(self, walk: _Walk, graph: Graph, phase: str) -> None:
        self.walk = walk
        self.graph = graph
        self.phase = phase
        self.program: Program = lower_program(graph)
        self.slots: list[_Value] = [()] * self.program.num_slots
        self.gathered: dict[int, tuple[TensorType, str]] = {}
        self.params: dict[int, str] = {}
        self.pending: dict[int, list[_Storage]] = {}
        self.regions: dict[str, RegionMemory] = {}
        self.peaks: dict[tuple[str, tuple[tuple[tuple[int, ...], int], ...]], int] = {}
        self.parts = self._parts()

    def run(self) -> None:
        self._load()
        for ins in self.program.instructions:
            if isinstance(ins, Call):
                self._call(ins)
            elif isinstance(ins, Start):
                self._start(ins)
            elif isinstance(ins, Wait):
                for storage in self.pending.pop(ins.ticket):
                    self.walk.drop(storage)
                self._free(ins.frees)
                self.walk.record(self.phase, "wait", {})
            else:
                assert isinstance(ins, Release)
                for slot in ins.slots:
                    self.walk.pool.give(*self.gathered.pop(slot))
                self.walk.record(self.phase, "release", {})
        self._leave()

    def _parts(self) -> dict[int, str]:
        """What each slot is for, where it is known from who reads it."""
        parts: dict[int, str] = {}
        for ins in self.program.instructions:
            if isinstance(ins, Start) and ins.op != "all_gather":
                parts.update(dict.fromkeys(ins.inputs, "reduction buckets"))
        kinds = {"grad": "reduction buckets", "output": "inputs and outputs", "saved": "saved for backward"}
        for kind, part in kinds.items():
            parts.update((port.slot, part) for port in self.program.outputs if port.kind == kind)
        return parts

    def _load(self) -> None:
        walk = self.walk
        types = {slot.slot: node for slot, node in zip(self.program.inputs, self.graph.inputs, strict=True)}
        for port in self.program.inputs:
            if port.kind == "param":
                self.params[port.slot] = port.key
            elif port.kind == "kept":
                self.gathered[port.slot] = walk.kept.pop(port.key)
            elif port.kind == "saved":
                self._set(port.slot, walk.saved[port.key])
            else:
                node = types[port.slot]
                part = "model buffers" if isinstance(meta.origin(node), Buffer) else "inputs and outputs"
                name = f"{port.kind} {port.key}"
                if name not in walk.inputs:
                    storage = _Storage(part, tensor_bytes(meta.tensor(node)))
                    walk.hold(storage)
                    walk.inputs[name] = (storage,)
                    if port.kind != "buffer":
                        walk.users.append(storage)
                self._set(port.slot, walk.inputs[name])
        for value in walk.saved.values():  # the slots alone hold what was saved from now on
            for storage in value:
                walk.drop(storage)
        walk.saved = {}

    def _set(self, slot: int, value: _Value) -> None:
        self.slots[slot] = value
        for storage in value:
            self.walk.hold(storage)

    def _free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for storage in self.slots[slot]:
                self.walk.drop(storage)
            self.slots[slot] = ()

    def _call(self, ins: Call) -> None:
        if ins.body not in self.regions:
            self.regions[ins.body] = RegionMemory(self.graph.regions[ins.body], fused=self.walk.fused)
        region = self.regions[ins.body]
        dying = self._dying(ins)
        key = (ins.body, dying)
        if key not in self.peaks:
            self.peaks[key] = region.extra(dying)
        during = {**self._now(), "region workspace": self.peaks[key]}
        owned: dict[int, _Storage] = {}
        results: list[tuple[int, _Value]] = []
        for slot, (own, shared) in zip(ins.outputs, region.storages.results, strict=True):
            if slot < 0:
                continue
            part = self.parts.get(slot, "between regions")
            value = []
            for storage in own:
                made = owned.setdefault(storage.number, _Storage(part, storage.num_bytes))
                if _RANK[part] < _RANK[made.part]:
                    made.part = part
                value.append(made)
            value += [s for position in shared for s in self.slots[ins.inputs[position]]]
            results.append((slot, tuple(dict.fromkeys(value))))
        for slot, value in results:
            self._set(slot, value)
        self._free(ins.frees)
        self.walk.record(self.phase, ins.body, during)

    def _dying(self, ins: Call) -> tuple[tuple[tuple[int, ...], int], ...]:
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
        if staged:
            storage = _Storage("reduction buckets" if ins.op != "all_gather" else "exchange", staged)
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
                if name and walk.specs[name].dtype == kind.dtype:
                    walk.touch([name])
                else:
                    self._set(slot, (_Storage("reduction buckets", _bytes(kind)),))
        walk.record(self.phase, ins.label, {})

    def _stage(self, ins: Start) -> int:
        """Bytes that a collective takes from its start to its wait, beside what goes in and comes out."""
        walk = self.walk
        whole, size = sum(map(_bytes, ins.types)), walk.size
        if ins.op == "all_reduce":
            return 0
        if ins.op == "reduce_scatter":
            sent = [self._sent(slot) for slot in ins.inputs]
            if walk.transport.copies and sum(n * d.itemsize for n, d in sent) >= peers.MIN_BYTES:
                piece = sum(_aligned(n // size * d.itemsize) for n, d in sent)
                walk.exchange["reduce_scatter"] = max(walk.exchange["reduce_scatter"], size * piece)
                return 0
            widens = any(d != kind.dtype for (_, d), kind in zip(sent, ins.types, strict=True))
            return whole * size if walk.transport.kind == "host" or widens else 0
        if walk.transport.copies and whole >= peers.MIN_BYTES:
            staged = sum(_aligned(_bytes(kind) // size) for kind in ins.types)
            walk.exchange["all_gather"] = max(walk.exchange["all_gather"], staged)
            return 0
        return whole // size if walk.transport.kind == "host" and ins.cast is not None else 0

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
            elif port.kind == "saved":
                walk.saved[port.key] = self.slots[port.slot]
                for storage in self.slots[port.slot]:
                    walk.hold(storage)
            elif port.kind == "output":
                for storage in self.slots[port.slot]:
                    walk.hold(storage)
                    walk.users.append(storage)
        if self.phase == "backward":
            walk.touch(walk.trained)
            walk.record(self.phase, "accumulate gradients", {})
        self._free(range(len(self.slots)))
        walk.record(self.phase, "end", {})


#: which part a storage counts to when several results live in it
_RANK = {"saved for backward": 0, "inputs and outputs": 1, "reduction buckets": 2, "between regions": 3}


def _bytes(kind: TensorType) -> int:
    return math.prod(kind.shape) * kind.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
