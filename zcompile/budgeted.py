"""Which options a compiled model runs with under a memory budget: decided at its first training call, alike on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zcompile import compat
from zcompile.capture.joint import Call, Captured
from zcompile.config import Config
from zcompile.errors import BudgetError, ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Step
from zcompile.pipeline import Pipeline
from zcompile.placement import ParamSpec
from zcompile.planner.budget import tensor_bytes
from zcompile.planner.choice import Choice, Decision, size
from zcompile.planner.decide import Elsewhere, decide
from zcompile.planner.hosted import hardware_here, step_here
from zcompile.planner.space import Space, offloads
from zcompile.planner.variants import Limits, Variants, library_bytes
from zcompile.planner.walk import predict
from zcompile.report import device_state_bytes, optimizer_kind, state_bytes
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.optim.optimizer_guard import optimizers_of
from zcompile.runtime.sharding.full import broadcast, broadcast_object
from zcompile.scheduled import Splits
from zcompile.verify.ranks import collective_sequence
from zcompile.verify.verifier import Verifier

if TYPE_CHECKING:
    from zcompile.session import Session

log = logging.getLogger("zcompile")

#: by which share of its peak a step takes more that is replayed as CUDA graphs, beside its gradients: 6.8 GiB instead of 6.6 were
#: measured at 0.19B, which keeps them anyway
REPLAY_MEMORY = 0.05


def device_bytes(device: torch.device, option: str, value: object) -> int:
    """The memory of the device, where a share of it is asked for.

    Raises:
        ConfigError: the device is no GPU.
    """
    if not isinstance(value, float):
        return 1
    if device.type != "cuda":
        raise ConfigError(
            f"{option} is {value}, a share of a GPU's memory, and the model is on {device}; pass a size: '2GiB'"
        )
    return torch.cuda.get_device_properties(device).total_memory


def budget_bytes(config: Config, device: torch.device) -> int | None:
    """What ``memory_budget`` is on a device; None: there is none.

    Raises:
        ConfigError: a share of what is no GPU, or more than the device has.
    """
    budget = config.budget_bytes(device_bytes(device, "memory_budget", config.memory_budget))
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if budget > total:
            raise ConfigError(
                f"memory_budget is {size(budget)} and {device} has {size(total)}; pass at most that, such as 0.9 of it"
            )
    return budget


@dataclass(frozen=True)
class Offer:
    """What one rank brings to the decision; numbers that ranks exchange.

    Attributes:
        work: bytes of all values of its capture: the rank with the most decides.
        beside: bytes on its device that are no tensor of the model.
        host: bytes that it may still have on its host.
        hosts_states: 1 where its optimizers may have their states on the host.
    """

    work: float
    beside: float
    host: float
    hosts_states: float


class Budgeted:
    """A memory budget, and what it came to.

    The first training capture decides: the rank with the largest one plans, and all take what it chose. Later captures keep
    what cannot change any more, and on several ranks the collectives, which other ranks may start beside another capture.

    Attributes:
        budget_bytes: for all tensors of a rank.
        decision: of the latest training capture; None before the first.
    """

    def __init__(self, budget_bytes: int, config: Config) -> None:
        self.budget_bytes = budget_bytes
        self.decision: Decision | None = None
        self._asked = config
        self._limits = Limits(budget_bytes)
        self._optimizer = "adamw"
        self._first: Decision | None = None

    @classmethod
    def on(cls, device: torch.device, config: Config) -> Budgeted | None:
        """The budget of a model on a device, whose allocator is made ready for it; None: there is none.

        A budget is for tensors. Of a device that has little more, the allocator loses too much in pieces: of 40 GiB, 5 were once
        reserved and free when 1 was wanted (BENCHMARKS.md).

        Raises:
            ConfigError: a budget that has no meaning there.
        """
        budget = budget_bytes(config, device)
        if budget is None:
            return None
        if device.type == "cuda" and not compat.expand_segments():
            log.warning(
                "memory_budget: torch's allocator has been told not to use expandable_segments, so it may reserve more than the "
                "budget in pieces that are of no use; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True prevents that"
            )
        return cls(budget, config)

    def pipeline(
        self, session: Session, captured: Captured, call: Call, recapture: Callable[[Call], Captured]
    ) -> Pipeline:
        """The passes of a training capture, whose options become the session's.

        Args:
            session: of the model.
            captured: what is to be built.
            call: what it was captured from.
            recapture: captures another call.

        Raises:
            BudgetError: nothing keeps the budget; on every rank.
        """
        if self._first is None:
            return self._decide(session, captured, call, recapture)
        return self._decide_again(session, captured)

    # The first capture. -----------------------------------------------------------------------------------------------

    def _decide(
        self, session: Session, captured: Captured, call: Call, recapture: Callable[[Call], Captured]
    ) -> Pipeline:
        mesh = session.runner.shards.mesh
        if mesh.device.type == "cuda":
            torch.cuda.empty_cache()  # where the model lay before is in segments of a fixed size
        optimizers = optimizers_of(session.runner.shards)
        self._optimizer = optimizer_kind(optimizers[0] if optimizers else None)
        offers = exchange(mesh, self._offer(session, captured, call))
        most = max(range(len(offers)), key=lambda rank: offers[rank].work)
        self._limits = Limits(
            self.budget_bytes,
            int(max(offer.beside for offer in offers)),
            host_bytes=int(min(offer.host for offer in offers)),
        )
        outcome: Decision | tuple[str, int, list[str]] | None = None
        beat = Beat(mesh, most)
        if mesh.rank == most:
            try:
                variants = replace(self._variants(session, captured, self._asked), tick=beat.tick)
                space = self._space(
                    variants.specs,
                    hosts_states=all(offer.hosts_states for offer in offers),
                    alike=len({offer.work for offer in offers}) == 1,
                )
                outcome = decide(variants, space, self._elsewhere(call, recapture))
            except BudgetError as error:
                outcome = (str(error), error.least_bytes, error.changes)
        beat.end()
        outcome = broadcast_object(mesh, outcome, most)
        assert outcome is not None, "the rank with the most work decides"
        if not isinstance(outcome, Decision):
            text, least_bytes, changes = outcome
            raise BudgetError.of(text, least_bytes, changes)
        self._first = self.decision = outcome
        if mesh.rank == 0:
            log.info("%s: %s", session.name, outcome)
        peak = outcome.chosen.peak_bytes
        if self._asked.cuda_graphs is None and peak + replay_bytes(session, peak) > self.budget_bytes:
            session.runner.tapes = None  # there is no room for a recording
        return self._adopt(session, captured, outcome.chosen.choice)

    def _adopt(self, session: Session, captured: Captured, choice: Choice) -> Pipeline:
        """Make a choice the session's."""
        shards = session.runner.shards
        moments = choice.offloading.optimizer
        if moments is not None and shards.hosting.update is None:
            shards.hosting.host_states(moments, step_here(choice.offloading, shards.mesh.device), shards.layout)
            for optimizer in optimizers_of(shards):
                if isinstance(optimizer, AdamW):
                    optimizer.move_states()
        variants = self._variants(session, captured, self._asked)
        session.config = choice.config(self._asked)
        session.pipeline = variants.pipeline(
            choice if choice.recompute_pass is None else replace(choice, recompute=None)
        )
        return variants.pipeline(choice)

    def _offer(self, session: Session, captured: Captured, call: Call) -> Offer:
        shards = session.runner.shards
        optimizers = optimizers_of(shards)
        config = self._asked
        beside = library_bytes(session.setup()) + _others(session, call.tensors)
        if session.runner.tapes is not None and config.cuda_graphs:
            beside += replay_bytes(session, self.budget_bytes)
        memory = shards.hosting.memory
        return Offer(
            work=float(sum(meta.num_bytes(meta.value(node)) for node in captured.graph.fx.nodes)),
            beside=float(beside),
            host=float(memory.limit_bytes),
            hosts_states=float(bool(optimizers) and all(isinstance(o, AdamW) for o in optimizers)),
        )

    def _space(self, specs: Sequence[ParamSpec], *, hosts_states: bool, alike: bool) -> Space:
        config, notes = self._asked, []
        kinds = {"activations"} if config.cuda_graphs is not True and not config.debug_nonfinite else set()
        if hosts_states:
            kinds.add("optimizer")
        elif "offload" in config.free:
            notes.append(
                "offload='optimizer' is not offered: it needs zcompile.optim.AdamW, built before the first call"
            )
        return Space.of(config, offloads(specs, kinds), amounts=alike, notes=tuple(notes))

    def _elsewhere(self, call: Call, recapture: Callable[[Call], Captured]) -> Elsewhere:
        sizes = {t.shape[0] for t in call.tensors if t.dim()}
        rows = sizes.pop() if len(sizes) == 1 else 0
        changes: dict[str, Callable[[Choice], Choice]] = {}
        if self._asked.stage < 3:
            changes["stage=3"] = lambda choice: replace(choice, stage=3)
        if "offload" in self._asked.free:
            everything = "activations+optimizer+parameters"
            changes[f"offload='{everything}'"] = lambda choice: replace(choice, offload=everything)
        return Elsewhere(rows, lambda number: recapture(replace(call, tensors=_rows(call.tensors, number))), changes)

    # Later captures. --------------------------------------------------------------------------------------------------

    def _decide_again(self, session: Session, captured: Captured) -> Pipeline:
        """What fits, beside what cannot change: the place of optimizer states and, with other ranks, the collectives."""
        assert self._first is not None, "the first capture decided"
        first, several = self._first.chosen, session.runner.shards.mesh.size > 1
        kept = "+".join(part for part in first.choice.offload.split("+") if not part.startswith("activations"))
        fixed = {"policy", "stage"} if several else {"stage"}
        asked = replace(
            self._asked,
            policy=first.choice.policy if several else self._asked.policy,
            offload=kept or None if "offload" in self._asked.free else self._asked.offload,
            free=tuple(name for name in self._asked.free if name not in fixed),
        )
        variants = self._variants(session, captured, asked)
        same = first.choice
        space = Space.of(
            asked, (kept, "+".join(filter(None, ("activations", kept)))), amounts=not several, shares=False
        )
        if isinstance(same.recompute, float):
            most = variants.candidate(replace(same, recompute="full")).most_bytes
            same = replace(same, recompute=max(same.recompute * most / max(first.most_bytes, 1), 1e-4))
            space = replace(space, recomputes=(None, same.recompute, "selective", "full"))
        if several:
            agreed = session.sequences()
            variants = replace(variants, accepts=lambda step: sequences_of(step) in agreed)
        try:
            self.decision = decide(variants, space)
            choice = self.decision.chosen.choice
        except BudgetError:
            choice = same
            peak = replace(variants, accepts=None).candidate(choice).peak_bytes
            if peak > self.budget_bytes and session.runner.shards.mesh.rank == 0:
                log.warning(
                    "memory_budget is %s and a new capture of %s takes %s: nothing smaller is possible%s",
                    size(self.budget_bytes),
                    session.name,
                    size(peak),
                    " with the collectives that the ranks have agreed on" if several else "",
                )
        return self._adopt(session, captured, choice)

    def check_inference(self, session: Session, step: Step) -> None:
        """Say so if a step without a backward takes more."""
        shards = session.runner.shards
        memory = predict(step, tuple(shards.specs.values()), session.setup(self._optimizer))
        peak = tensor_bytes(memory) + self._limits.beside_bytes
        if peak > self.budget_bytes and shards.mesh.rank == 0:
            log.warning(
                "memory_budget is %s and a call of %s without gradients takes %s; pass fewer rows",
                size(self.budget_bytes),
                session.name,
                size(peak),
            )

    def _variants(self, session: Session, captured: Captured, config: Config) -> Variants:
        mesh = session.runner.shards.mesh
        return Variants(
            splits=Splits(captured, Verifier("off")),
            config=config,
            specs=tuple(session.runner.shards.specs.values()),
            world_size=mesh.size,
            axis=mesh.axis,
            hardware=hardware_here(mesh.device),
            setup=session.setup(self._optimizer),
            limits=self._limits,
        )


class Beat:
    """Lets ranks wait for one that plans, however long that takes: each wait ends when it says that it is still at it.

    Args:
        mesh: the ranks.
        root: who plans.
    """

    def __init__(self, mesh: Mesh, root: int) -> None:
        self._mesh = mesh
        self._root = root
        self._latest = time.monotonic()

    def tick(self) -> None:
        """Say so, if that is a while ago. Called by the one that plans."""
        if time.monotonic() - self._latest > self._mesh.timeout / 4:
            self._say(0)

    def end(self) -> None:
        """The one that plans is done; the others wait for that here."""
        if self._mesh.rank == self._root:
            self._say(1)
            return
        while not self._say(0):
            pass

    def _say(self, done: int) -> int:
        flag = torch.tensor([done])
        broadcast(self._mesh, [flag], self._root)
        self._latest = time.monotonic()
        return int(flag)


def exchange(mesh: Mesh, mine: Offer) -> list[Offer]:
    """What all ranks bring. Collective."""
    if not mesh.is_distributed:
        return [mine]
    mesh.announce("memory_budget")
    sent = torch.tensor([*vars(mine).values()], dtype=torch.float64, device=mesh.device)
    everyone = sent.new_empty(mesh.size * sent.numel())
    mesh.collectives.all_gather([everyone], [sent], "all_gather of what a memory budget needs").wait()
    values = mesh.to_host(everyone, "what all ranks need")
    return [Offer(*values[i : i + sent.numel()]) for i in range(0, len(values), sent.numel())]


def sequences_of(step: Step) -> tuple[str, ...]:
    """The collectives of a training step, as ranks compare them."""
    return tuple(collective_sequence(graph).digest for graph in step.graphs)


def replay_bytes(session: Session, peak_bytes: int) -> int:
    """What a step takes more at most that is replayed, by its peak when it is issued.

    Its gradients have memory that nothing else has, unless they lie where activations lay: at 4.1B on one GPU, with offloaded states,
    a step with 33.7 GiB took 43.7, of which 15.3 are gradients.
    """
    specs = session.runner.shards.specs.values()
    gradients = sum(spec.padded_local_bytes for spec in specs if spec.requires_grad)
    return int(REPLAY_MEMORY * peak_bytes) + gradients


def _others(session: Session, inputs: list[Tensor]) -> int:
    """Bytes that torch's allocator has given for what no prediction of this model counts."""
    shards = session.runner.shards
    device = shards.mesh.device
    if device.type != "cuda":
        return 0
    parameters, _, gradients, _ = state_bytes(shards)
    mine = 0 if shards.hosting.parameters else parameters + gradients
    mine += device_state_bytes(shards, optimizers_of(shards))
    mine += session.runner.executor.buffers.held_bytes
    mine += sum(t.nbytes for t in (*session.model.buffers(), *inputs) if t.device == device)
    return max(torch.cuda.memory_allocated(device) - mine, 0)


def _rows(tensors: list[Tensor], number: int) -> list[Tensor]:
    """The same inputs with another number of rows, as views of the first."""
    return [t[:number] if t.dim() else t for t in tensors]
