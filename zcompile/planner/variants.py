"""One capture with many combinations of options: each scheduled, its peak and its time predicted, and what they share made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zcompile import passes
from zcompile.capture.surroundings import collector_paused
from zcompile.config import Config
from zcompile.errors import PlanError
from zcompile.ir.graph import Step
from zcompile.parameters import divided
from zcompile.passes.memory.chunk_loss import ChunkLoss
from zcompile.passes.zero.outline import Outline
from zcompile.pipeline import Pipeline, Stats
from zcompile.placement import ParamSpec
from zcompile.planner.budget import tensor_bytes, with_recompute
from zcompile.planner.choice import Candidate, Choice
from zcompile.planner.course import simulate_course
from zcompile.planner.hardware import Hardware
from zcompile.planner.hosted import step_of
from zcompile.planner.issue import Costs
from zcompile.planner.memory import Setup
from zcompile.planner.unscheduled import Unscheduled, outline_step
from zcompile.planner.walk import predict
from zcompile.planner.window import Window
from zcompile.scheduled import Splits

#: what cuBLAS keeps for products: 32 MiB on a Hopper GPU for each thread that calls it, of which forward and backward are one each,
#: and gaps between small tensors. Measured peaks were 60 to 110 MiB above the predicted ones
LIBRARY_BYTES = 112 << 20


def library_bytes(setup: Setup) -> int:
    """What libraries take of the memory that torch's allocator gives."""
    return 0 if setup.on_host else LIBRARY_BYTES


@dataclass(frozen=True)
class Limits:
    """What a combination must keep.

    Attributes:
        budget_bytes: for all tensors of a rank.
        beside_bytes: of it, what is no tensor of the model.
        device_bytes: for everything, reserve included; None: no matter.
        host_bytes: in the host's memory; None: no matter.
    """

    budget_bytes: int
    beside_bytes: int = 0
    device_bytes: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Variants:
    """Plans combinations for one capture. What is chosen is verified when it is built, so that nothing need be here.

    Attributes:
        splits: of the capture that is planned; its verifier checks every combination.
        config: the options that no combination changes.
        specs: the parameters, divided in any way.
        world_size: ranks.
        axis: of the mesh.
        hardware: the machine.
        setup: what memory depends on beside the graphs and what is offloaded.
        limits: what is to be kept.
        gpu: the type of device that the capture has where a GPU is to compute.
        measured: times of regions by structure, as ``profile.region_times()`` gives them.
        accepts: whether a step may run at all; one that may not does not fit.
        tick: called before each combination is planned.
    """

    splits: Splits
    config: Config
    specs: Sequence[ParamSpec]
    world_size: int
    axis: str
    hardware: Hardware
    setup: Setup
    limits: Limits
    gpu: str = "cuda"
    measured: Mapping[str, float] | None = None
    accepts: Callable[[Step], bool] | None = None
    tick: Callable[[], None] | None = None
    _bases: dict[tuple[str, int], tuple[Unscheduled, Costs]] = field(default_factory=dict)

    def pipeline(self, choice: Choice, world_size: int | None = None) -> Pipeline:
        """The passes of a choice."""
        config = choice.config(self.config)
        pipeline = passes.default_pipeline(config, size=world_size or self.world_size, axis=self.axis, gpu=self.gpu)
        saved = choice.recompute_pass
        return pipeline if saved is None else with_recompute(pipeline, saved)

    def step(self, choice: Choice, world_size: int | None = None) -> Step:
        """The scheduled step of a choice."""
        return self._scheduled(choice, world_size or self.world_size)[0]

    def candidate(self, choice: Choice, world_size: int | None = None) -> Candidate:
        """A choice, planned.

        Raises:
            PassError, PipelineError: options that cannot be had for this model.
        """
        if self.tick is not None:
            self.tick()
        world, limits, offloading = world_size or self.world_size, self.limits, choice.offloading
        with collector_paused():
            step, base, costs = self._scheduled(choice, world)
            window = Window.of(choice.config(self.config), self.pipeline(choice, world), world)
            setup = replace(self.setup, offloading=offloading, step=step_of(offloading, self.hardware), window=window)
            memory = predict(step, base.specs, setup)
            options: dict[str, Any] = {
                "offloading": offloading,
                "costs": costs,
                "cuda_graphs": self.config.cuda_graphs if self.config.can_replay else False,
            }
            course = simulate_course(step, window, self.hardware, world, **options)
        peak = tensor_bytes(memory) + limits.beside_bytes
        fits = (
            peak <= limits.budget_bytes
            and (limits.device_bytes is None or memory.peak_bytes <= limits.device_bytes)
            and (limits.host_bytes is None or memory.host_bytes <= limits.host_bytes)
            and (self.accepts is None or self.accepts(step))
        )
        stats = {entry.name: entry.stats for entry in self.splits.of(self.pipeline(choice, world)).history}
        blocks, losses = stats.get("recompute", {}), stats.get("chunk-loss", {})
        return Candidate(
            choice=choice,
            peak_bytes=peak,
            step_us=course.step_us / course.num_micro_batches,
            host_bytes=memory.host_bytes,
            fits=fits,
            saved_bytes=blocks.get("bytes", 0),
            most_bytes=blocks.get("bytes at the least time", 0),
            moved_bytes=memory.host.get("activations", 0),
            state_bytes=memory.host.get("optimizer states", 0),
            pieces=losses.get("losses in pieces", 0),
        )

    def num_units(self, choice: Choice) -> int:
        """Units of parameters that are gathered together."""
        step = self._base(self.pipeline(choice), choice, self.world_size)[0].step
        return len({p.unit for graph in step.graphs for _, p in graph.params()})

    @cached_property
    def losses(self) -> Stats:
        """What ``loss_chunk="auto"`` would do."""
        stats = Stats()
        ChunkLoss().run(self.splits.captured.graph.copy(), stats)
        return stats

    def _scheduled(self, choice: Choice, world_size: int) -> tuple[Step, Unscheduled, Costs]:
        pipeline = self.pipeline(choice, world_size)
        base, costs = self._base(pipeline, choice, world_size)
        return base.candidate(pipeline.passes[_scheduling(pipeline) :]), base, costs

    def _base(self, pipeline: Pipeline, choice: Choice, world_size: int) -> tuple[Unscheduled, Costs]:
        """What all schedules of a choice begin with."""
        begin = Pipeline(pipeline.passes[: _scheduling(pipeline)])
        key = (str(begin), world_size)
        if key not in self._bases:
            specs = divided(self.specs, choice.config(self.config), world_size)
            base = outline_step(self.splits.of(pipeline), begin, specs, self.splits.verifier)
            self._bases[key] = (base, self._costs(base.step))
        return self._bases[key]

    def _costs(self, step: Step) -> Costs:
        if self.measured:
            try:
                return Costs.measured_in(step, self.hardware, self.measured)
            except PlanError:  # none of its regions was: as with other amounts of recomputation
                pass
        return Costs(self.hardware)


def _scheduling(pipeline: Pipeline) -> int:
    """The place of the first pass that moves something."""
    return next(i for i, p in enumerate(pipeline.passes) if isinstance(p, Outline)) + 1
