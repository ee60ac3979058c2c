"""The walk that the executor would do over a scheduled step, with byte counts in the place of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import sympy

from zcompile.analysis.memory import RegionMemory
from zcompile.ir.graph import Grad, Step
from zcompile.placement import ParamSpec
from zcompile.planner import hosted, states
from zcompile.planner.graph_walk import Dying, GraphWalk
from zcompile.planner.ledger import ON_HOST, Pool, Storage, Value
from zcompile.planner.memory import Memory, Moment, Setup
from zcompile.planner.symbols import bytes_formula
from zcompile.planner.window import MicroBatch, micro_batches
from zcompile.program import TensorType
from zcompile.runtime.offload.host import pages
from zcompile.runtime.sharding.arenas import ALIGNMENT_BYTES, ArenaKey, ArenaLayout
from zcompile.runtime.sharding.gradients import KEEP_BYTES


def predict(step: Step, specs: Sequence[ParamSpec], setup: Setup | None = None) -> Memory:
    """The memory of a scheduled step.

    Args:
        step: forward and backward after all passes.
        specs: the parameters, divided as the step has them.
        setup: what else it depends on.

    Raises:
        PlanError: an optimizer that is not known.
    """
    return StepWalk(step, specs, setup or Setup()).run()


class StepWalk:
    """The whole step: what both graphs share, and what goes from one to the other.

    Attributes (beside what is counted):
        batch: the micro-batch that is walked.
        sums: full gradients of earlier micro-batches on this rank, by parameter.
    """

    def __init__(self, step: Step, specs: Sequence[ParamSpec], setup: Setup) -> None:
        self.step = step
        self.specs = {spec.name: spec for spec in specs}
        self.setup = setup
        self.size = specs[0].world_size if specs else 1
        self.layout = ArenaLayout(specs)
        self.index = {spec.name: i for i, spec in enumerate(specs)}
        self.trained = (
            [] if step.backward is None else [r.name for _, r in step.backward.outputs if isinstance(r, Grad)]
        )
        self.optimizer_bytes = states.optimizer_bytes(specs, set(self.trained), setup.optimizer, setup.rank)
        self.totals: Counter[str] = Counter()
        self.pool = Pool()
        self.moments: list[tuple[str, str, str, dict[str, int], dict[str, int], str]] = []
        self.homes: set[ArenaKey | int] = set()
        self.exchange = {"all_gather": 0, "reduce_scatter": 0}
        self.saved: dict[str, Value] = {}
        self.offloaded: dict[str, Value] = {}
        self.host: Counter[str] = Counter()
        self.kept: dict[str, tuple[TensorType, str]] = {}
        self.users: list[Storage] = []
        self.inputs: dict[str, Value] = {}
        self.gradient_bytes = 0
        self.parameters_on_host = setup.offloading.parameters is not None
        self.batch = MicroBatch.alone(step)
        self.sums: dict[str, Storage] = {}
        self.regions: dict[tuple[str, str], RegionMemory] = {}
        self.peaks: dict[tuple[str, str, Dying], int] = {}

    def run(self) -> Memory:
        trainable = sum(size * key.dtype.itemsize for key, size in self.layout.sizes.items() if key.trainable)
        keeps = trainable <= KEEP_BYTES or self.parameters_on_host
        self._place_states()
        self.totals["context and libraries"] = self.setup.context_bytes
        if keeps:
            self.touch(self.trained)
        saved: dict[Storage, None] = {}
        for batch in micro_batches(self.step, self.setup.window):
            self.batch = batch
            self.host["activations"] = 0  # those of the micro-batch before are gone
            GraphWalk(self, batch.step.forward, "forward").run()
            saved = {s: None for value in self.saved.values() for s in value}
            if batch.step.backward is not None:
                GraphWalk(self, batch.step.backward, "backward").run()
            self._end_micro_batch()
        self.saved_formula = bytes_formula(((s.shape, s.num_bytes) for s in saved), self.setup.symbols)
        if self.step.backward is not None:
            self.record("optimizer", "optimizer", self.setup.optimizer, {})
        held = self.pool.held_bytes
        exchange = sum(self.exchange.values())
        return Memory(
            tuple(self._moment(*m, held, exchange) for m in self.moments),
            states.parameter_bytes(self.specs.values()),
            self.gradient_bytes,
            self.optimizer_bytes,
            sum(s.num_bytes for s in saved),
            self.pool.peak[0],
            held,
            exchange,
            self._formulas(),
            dict(+self.host),
        )

    def add_up(self) -> None:
        """A backward ends: its gradients come to those of earlier micro-batches."""
        window, trained = self.batch.window, [self.specs[name] for name in dict.fromkeys(self.trained)]
        if self.batch.reduces:
            self.touch(self.trained)
            if window is not None and not self.batch.adds:
                self.totals["gradient sums"] = sum(map(window.wide_bytes, trained))
        elif window is not None and not self.sums:
            self.sums = {spec.name: Storage("local gradients", window.local_bytes(spec)) for spec in trained}
            for storage in self.sums.values():
                self.hold(storage)
        self.record("backward", "end", "accumulate gradients" if self.batch.reduces else "add local gradients", {})
        if self.batch.updates:
            self.totals["gradient sums"] = 0
            while self.sums:  # of gradients that are in no reduction of the graph
                self.drop(self.sums.popitem()[1])

    def _end_micro_batch(self) -> None:
        """What the caller holds of a micro-batch goes."""
        for storage in self.users:
            self.drop(storage)
        self.users = []
        self.inputs = {name: value for name, value in self.inputs.items() if name.startswith("buffer ")}

    def _place_states(self) -> None:
        """Parameters and optimizer states, which are there all the time: on the device or on the host."""
        offloading, layout = self.setup.offloading, self.layout
        if self.parameters_on_host:
            self.host["parameters"] = hosted.parameter_bytes(layout)
        else:
            self.totals["shards"] = states.parameter_bytes(self.specs.values())
            self.totals["arena gaps"] = self._gaps()
        if not self.parameters_on_host and offloading.optimizer is None:
            self.totals["optimizer states"] = self.optimizer_bytes
            return
        trained = [self.index[name] for name in dict.fromkeys(self.trained)]
        share = 1.0 if offloading.optimizer is None else offloading.optimizer.share
        count = states.num_states(self.setup.optimizer)
        self.host["optimizer states"], self.totals["optimizer states"] = hosted.state_bytes(
            layout, trained, count, share
        )
        if offloading.optimizer is not None and not self.parameters_on_host and trained:
            buffers = hosted.buffer_bytes(layout, offloading.optimizer)
            if self.setup.step == "cpu":
                self.host["optimizer states"] += buffers
            else:
                self.totals["optimizer buffers"] = buffers

    # Memory that comes and goes. --------------------------------------------------------------------------------------

    def hold(self, storage: Storage) -> None:
        if storage.holders == 0 and storage.part != ON_HOST:
            self.totals[storage.part] += storage.num_bytes
        storage.holders += 1

    def drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if storage.holders == 0 and storage.part != ON_HOST:
            self.totals[storage.part] -= storage.num_bytes

    def touch(self, names: Iterable[str]) -> None:
        """Have the gradient memory of parameters, which comes by the chunk."""
        specs = list(self.specs.values())
        for name in names:
            index = self.index[name]
            place = self.layout.places[index]
            home = place.key if place is not None and place.key.trainable else index
            if home not in self.homes:
                self.homes.add(home)
                members = [index] if isinstance(home, int) else self.layout.members[home]
                num_bytes = sum(specs[i].padded_local_bytes for i in members)
                self.gradient_bytes += num_bytes
                if not self.parameters_on_host:
                    self.totals["gradient shards"] += num_bytes
                elif not isinstance(home, int):
                    self.host["gradients"] += pages(self.layout.sizes[home] * home.dtype.itemsize)

    def record(self, phase: str, kind: str, name: str, during: Mapping[str, int]) -> None:
        """Note the present state, and what there was beside it while ``name`` ran."""
        self.pool.note_peak()
        after = {part: num_bytes for part, num_bytes in self.totals.items() if num_bytes}
        after["gathered weights"] = self.pool.live_bytes
        self.moments.append((phase, kind, name, dict(during) or after, after, self.batch.place))

    def _moment(
        self,
        phase: str,
        kind: str,
        name: str,
        during: dict[str, int],
        after: dict[str, int],
        place: str,
        held: int,
        exchange: int,
    ) -> Moment:
        """Add what is known at the end of the walk only: buffers that are never given back."""
        full = []
        for parts in (during, after):
            parts = dict(parts)
            parts["gathered, free"] = held - parts.get("gathered weights", 0)
            parts["exchange"] = parts.get("exchange", 0) + exchange
            own = sum(parts.values()) - exchange - parts.get("context and libraries", 0)
            parts["fragmentation"] = int(own * self.setup.fragmentation)
            full.append({part: num_bytes for part, num_bytes in parts.items() if num_bytes})
        return Moment(phase, kind, name, full[0], full[1], place)

    def _gaps(self) -> int:
        """Bytes of the parameter arenas that belong to no parameter."""
        arenas = sum(size * key.dtype.itemsize + ALIGNMENT_BYTES for key, size in self.layout.sizes.items())
        return arenas - states.parameter_bytes(s for s in self.specs.values() if s.padded_local_numel)

    def _formulas(self) -> dict[str, sympy.Expr]:
        specs = list(self.specs.values())
        chunks = [i for home in self.homes for i in ([home] if isinstance(home, int) else self.layout.members[home])]
        trained = [self.specs[name] for name in dict.fromkeys(self.trained)]
        steps = states.STEP_BYTES * len(trained) if self.setup.optimizer in ("adam", "adamw") else 0
        live = self.pool.peak[1]
        return {
            "parameter_bytes": states.shard_formula((s, s.dtype.itemsize) for s in specs),
            "gradient_bytes": states.shard_formula((specs[i], specs[i].dtype.itemsize) for i in chunks),
            "optimizer_bytes": states.num_states(self.setup.optimizer)
            * states.shard_formula((s, s.dtype.itemsize) for s in trained)
            + steps,
            "saved_bytes": self.saved_formula,
            "gathered_peak_bytes": states.WORLD
            * states.shard_formula((self.specs[name], dtype.itemsize) for name, dtype in live.elements()),
        }
