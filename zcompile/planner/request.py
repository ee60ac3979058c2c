"""A model, its inputs and a machine, for which plans are made: each capture once, each change planned again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zcompile.capture.joint import Captured
from zcompile.config import Config
from zcompile.errors import ConfigError
from zcompile.planner import states
from zcompile.planner.advice import advise as with_advice
from zcompile.planner.advice import with_batch
from zcompile.planner.decide import Elsewhere, decide
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs
from zcompile.planner.memory import Setup
from zcompile.planner.plan import Plan, batch_of, make
from zcompile.planner.space import Space, offloads
from zcompile.planner.trace import Traced, trace_with
from zcompile.planner.variants import Limits, Variants, library_bytes
from zcompile.scheduled import Splits
from zcompile.verify.verifier import Verifier


@dataclass(frozen=True)
class Request:
    """What plans are made for.

    Attributes:
        name: of the model, for people.
        module: the plain model.
        inputs: one rank's micro-batch.
        hardware: the machine.
        optimizer: one of ``states.OPTIMIZERS``.
        notes: what a reader should know about the model.
        measured: times of regions by structure, as ``profile.region_times()`` gives them; None: all are computed.
    """

    name: str
    module: nn.Module
    inputs: Any
    hardware: Hardware
    optimizer: str = "adamw"
    notes: tuple[str, ...] = ()
    measured: Mapping[str, float] | None = None

    def plan(self, config: Config, world_size: int, *, advise: bool = True) -> Plan:
        """The plan with these options; ``advise`` also plans what could make it better.

        Raises:
            ConfigError: a budget of recomputation.
            PlanError: an optimizer or a world size that has no meaning.
            BudgetError: no combination of options keeps ``memory_budget``.
            CaptureError: the model cannot be captured.
        """
        states.num_states(self.optimizer)
        if config.recompute is not None and config.recompute_mode is None:
            raise ConfigError(
                f"recompute is {config.recompute!r}, a budget, which compile takes; plan 'full', 'selective', or a memory_budget"
            )
        if config.memory_budget is not None:
            return self._within_budget(config, world_size)
        start = time.process_time()
        for_gpu = self._for_gpu
        traced = trace_with(self.module, self.inputs, config, world_size, for_gpu=for_gpu)
        capture_s = time.process_time() - start
        costs = None if self.measured is None else Costs.measured_in(traced.step, self.hardware, self.measured)

        def make_plan(traced: Traced, inputs: Any) -> Plan:
            shared = costs and dataclasses.replace(costs, _known={})
            return make(
                self.name, traced, self.hardware, inputs, optimizer=self.optimizer, costs=shared, notes=self.notes
            )

        plan = make_plan(traced, self.inputs)
        if not advise:
            return plan

        def replan(options: dict[str, Any]) -> Plan:
            rest = dict(options)
            rows, world = rest.pop("example_inputs", None), rest.pop("world_size", world_size)
            if rows is None:
                return make_plan(traced.at(world_size=world, **rest), self.inputs)
            inputs = with_batch(self.inputs, rows)
            other = trace_with(self.module, inputs, dataclasses.replace(config, **rest), world, for_gpu=for_gpu)
            return make_plan(other, inputs)

        return with_advice(plan, replan, capture_s=capture_s)

    @property
    def _for_gpu(self) -> bool:
        """Whether the machine computes on another device than its host."""
        return not self.hardware.host.blocks

    def _within_budget(self, config: Config, world_size: int) -> Plan:
        """The plan with the options that a memory budget comes to.

        Raises:
            BudgetError: no combination keeps it.
        """
        machine = self.hardware
        traced = trace_with(self.module, self.inputs, config, world_size, for_gpu=self._for_gpu)
        budget = config.budget_bytes(machine.device_memory_bytes)
        assert budget is not None, "there is one"
        setup = Setup.on(machine, world_size, optimizer=self.optimizer, fused=config.backend == "inductor")
        variants = Variants(
            splits=Splits(traced.captured, Verifier("off")),
            config=config,
            specs=traced.specs,
            world_size=world_size,
            axis="dp",
            hardware=machine,
            setup=setup,
            limits=Limits(budget, library_bytes(setup), machine.device_memory_bytes, machine.host_memory_bytes),
            gpu=traced.gpu,
            measured=self.measured,
        )
        # what stages 1 and 2 do, stage 3 does where everything is kept
        stages = ((3, 0) if "policy" in config.free else (3, 2, 1, 0)) if "stage" in config.free else ()

        def capture(rows: int) -> Captured:
            return trace_with(self.module, with_batch(self.inputs, rows), config, world_size).captured

        space = Space.of(config, offloads(traced.specs), stages=stages if world_size > 1 else ())
        decision = decide(variants, space, Elsewhere(batch_of(self.inputs)[0], capture))
        choice = decision.chosen.choice
        chosen = traced.with_passes(choice.config(config), variants.pipeline(choice))
        costs = None if self.measured is None else Costs.measured_in(chosen.step, machine, self.measured)
        plan = make(self.name, chosen, machine, self.inputs, optimizer=self.optimizer, costs=costs, notes=self.notes)
        return dataclasses.replace(plan, decision=decision)
