"""A model, its inputs and a machine, for which plans are made: each capture once, each change planned again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zcompile.config import Config
from zcompile.planner import states
from zcompile.planner.advice import advise as with_advice
from zcompile.planner.advice import with_batch
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs
from zcompile.planner.plan import Plan, make
from zcompile.planner.trace import Traced, trace_with


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
            PlanError: an optimizer or a world size that has no meaning.
            CaptureError: the model cannot be captured.
        """
        states.num_states(self.optimizer)
        start = time.process_time()
        for_gpu = not self.hardware.host.blocks
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
