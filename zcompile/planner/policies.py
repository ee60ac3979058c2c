"""The policy bench: policies by name, spec or file, each verified and simulated on many numbers of ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zcompile import passes
from zcompile.capture.surroundings import collector_paused
from zcompile.errors import PlanError, ZCompileError
from zcompile.ir.graph import Step
from zcompile.pipeline import Pass, Pipeline, StepPass
from zcompile.planner.hardware import Hardware
from zcompile.planner.issue import Costs
from zcompile.planner.memory import Memory, Setup
from zcompile.planner.search import best_policy, optimum
from zcompile.planner.simulate import Timeline, simulate
from zcompile.planner.unscheduled import Unscheduled
from zcompile.planner.walk import predict

#: policies by name, beside every spec of schedule passes; ``auto`` searches among them for each machine and number of ranks
NAMED = {"none": "none", "prefetch": "prefetch", "keep": "keep", "auto": "auto"}


@dataclass(frozen=True)
class Policy:
    """A way to schedule collectives.

    Attributes:
        name: as it was asked for.
        passes: what it runs; None: what a search finds.
    """

    name: str
    passes: tuple[Pass[Any], ...] | None


@dataclass(frozen=True)
class Result:
    """One policy on one number of ranks.

    Attributes:
        policy: its name.
        spec: the passes that ran, as ``zcompile.compile(policy=...)`` takes them.
        world_size: ranks.
        step_us: simulated time of a step.
        exposed_us: of it, while computation waits for collectives.
        peak_bytes: predicted memory of a rank at its peak.
        fits: whether that is within the device's memory.
        bound_us: what no schedule of these collectives can beat.
        gap: by which share the step is longer than the bound.
        optimal_us: the best step that any order and grouping gives; None where it was not searched for.
    """

    policy: str
    spec: str
    world_size: int
    step_us: float
    exposed_us: float
    peak_bytes: int
    fits: bool
    bound_us: float
    gap: float
    optimal_us: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def find_policy(text: str) -> Policy:
    """A policy by name, as a spec whose passes are joined by ``+`` or commas, or as a class in a file.

    ``none``, ``prefetch``, ``keep{units=2}+prefetch{lookahead=2}`` mean what they mean to ``zcompile.compile``. ``auto`` searches.
    ``./my_policy.py:MyPolicy{option=value}`` is a ``StepPass`` of the user's, which runs alone.

    Raises:
        PlanError: a name that is not known, or a file or class that is not there.
        PipelineError: options that the passes do not have.
    """
    name, colon, rest = text.partition(".py:")
    if colon:
        return Policy(text, (_from_file(Path(f"{name}.py"), rest),))
    if text == "auto":
        return Policy(text, None)
    try:
        return Policy(text, passes.schedule(text.replace("+", ",")))
    except ZCompileError as error:
        raise PlanError(
            f"policy '{text}' is not known ({error}); the known ones are {', '.join(NAMED)}, schedule passes joined by + such as "
            "keep{units=2}+prefetch, and ./file.py:Class"
        ) from error


def _from_file(path: Path, spec: str) -> Pass[Any]:
    class_name, brace, options = spec.partition("{")
    if not path.is_file():
        raise PlanError(f"policy file '{path}' cannot be read: there is no such file")
    found = importlib.util.spec_from_file_location(f"zcompile_policy_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise PlanError(f"policy file '{path}' cannot be imported: {type(error).__name__}: {error}") from error
    made = {
        n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, StepPass) and v is not StepPass
    }
    kind = made.get(class_name)
    if kind is None or not hasattr(kind, "name"):
        raise PlanError(
            f"policy file '{path}' has no class '{class_name}' that is a StepPass with a name; it has {', '.join(made) or 'none'}"
        )
    return Pipeline.parse(f"{kind.name}{brace}{options}", {kind.name: kind}).passes[0]


def memory_of(step: Step, base: Unscheduled, hardware: Hardware) -> Memory:
    """The predicted memory of a scheduled step on a machine."""
    return predict(step, base.specs, Setup.on(hardware, base.world_size))


def compare(
    steps: Iterable[Unscheduled],
    policies: Sequence[Policy],
    hardware: Hardware,
    *,
    optimal: bool = False,
    measured: Mapping[str, float] | None = None,
) -> Iterator[Result]:
    """Schedule, verify and simulate every policy on every number of ranks.

    Args:
        steps: the step before its policy, one for each number of ranks.
        policies: what to compare.
        hardware: the machine.
        optimal: search for the best schedule as well; only steps of few units.
        measured: times of regions by structure, as ``profile.region_times()`` gives them: what a search decides by, too.

    Raises:
        PlanError: none of a step's regions was measured.
        VerifyError: a policy breaks the graph; the note names it.
    """
    for base in steps:
        costs = Costs(hardware) if measured is None else Costs.measured_in(base.step, hardware, measured)
        best = optimum(base, costs).step_us if optimal else None
        for policy in policies:
            with collector_paused():
                result = measure(base, policy, costs, best)
            yield result


def measure(base: Unscheduled, policy: Policy, costs: Costs, optimal_us: float | None = None) -> Result:
    """One policy on one step."""
    hardware = costs.hardware
    chosen = policy.passes
    if chosen is None:
        chosen = best_policy(base, costs, lambda step: memory_of(step, base, hardware).peak_bytes)
    try:
        step = base.schedule(chosen)
    except ZCompileError as error:
        error.add_note(f"policy '{policy.name}' on {base.world_size} ranks")
        raise
    line: Timeline = simulate(step, hardware, base.world_size, costs=costs)
    peak = memory_of(step, base, hardware).peak_bytes
    return Result(
        policy=policy.name,
        spec=",".join(map(str, chosen)) or "none",
        world_size=base.world_size,
        step_us=line.step_us,
        exposed_us=line.exposed_us,
        peak_bytes=peak,
        fits=peak <= hardware.device_memory_bytes,
        bound_us=line.bounds.step_us,
        gap=line.gap,
        optimal_us=optimal_us,
    )
