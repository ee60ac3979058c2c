"""A scheduled step as jobs in the order in which the host issues them: what each takes, where it runs, what it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from zcompile import ops
from zcompile.analysis.cost import region_kernels
from zcompile.errors import PlanError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Kept, Origin, Output, Region, Role, Saved, Step, Tangent
from zcompile.planner import rates
from zcompile.planner.hardware import Hardware

#: the streams of the runtime: computation, NCCL's collectives, and the two lanes of the copy engines
COMPUTE, GROUP, GATHERS, REDUCTIONS = "compute", "group", "gathers", "reductions"
STREAMS = (COMPUTE, GROUP, GATHERS, REDUCTIONS)


@dataclass(frozen=True)
class Job:
    """One piece of device work. Jobs are in a list, in the order in which they are issued, and name others by their index.

    Attributes:
        name: of its node.
        kind: ``region``, ``cast``, ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``optimizer``.
        phase: ``forward``, ``backward`` or ``optimizer``.
        stream: one of ``STREAMS``; jobs of a stream run in the order of the list.
        duration_us: time of the device when nothing runs beside it.
        host_us: time of the host to issue it.
        after: earlier jobs that end before it starts, beside those of its stream.
        needs: earlier jobs whose results it reads: what no schedule can change.
        num_bytes: bytes of a collective's full side, or what a region moves.
        slowdown: for a collective, what computation beside it loses of its speed.
    """

    name: str
    kind: str
    phase: str
    stream: str
    duration_us: float
    host_us: float = 0.0
    after: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    num_bytes: int = 0
    slowdown: float = 0.0


@dataclass(frozen=True)
class RegionCost:
    """What one call of a region takes."""

    device_us: float
    num_kernels: int
    num_bytes: int


@dataclass
class Costs:
    """What regions take on a machine; each distinct one is looked at once, also when many steps share it.

    Args:
        hardware: the machine.
        region_us: measured device times of regions by name, instead of computed ones.
    """

    hardware: Hardware
    region_us: Mapping[str, float] = field(default_factory=dict)
    _known: dict[str, RegionCost] = field(default_factory=dict)

    def region(self, region: Region) -> RegionCost:
        """What a call of a region takes."""
        key = f"{region.name} {region.fx}"
        if key not in self._known:
            kernels = region_kernels(region)
            us = self.region_us.get(region.name, sum(rates.kernel_us(k, self.hardware) for k in kernels))
            self._known[key] = RegionCost(us, len(kernels), sum(k.cost.num_bytes for k in kernels))
        return self._known[key]


def step_jobs(step: Step, costs: Costs, world_size: int, *, optimizer: bool = True) -> list[Job]:
    """The jobs of a step.

    A collective starts behind all computation that was issued before it, in a stream of its own; computation that is issued
    behind a wait starts after the end of what is waited for. So does the runtime: NCCL's stream, and each lane of the copy
    engines, wait for the current stream at every start.

    Args:
        step: scheduled and outlined.
        costs: of its regions, on a machine.
        world_size: ranks that the step was scheduled for.
        optimizer: whether an update by AdamW follows.

    Raises:
        PlanError: the step was scheduled for another number of ranks, or is not outlined.
    """
    check_scheduled(step, world_size)
    builder = _Builder(step, costs)
    if optimizer and step.backward is not None:
        builder.update(local_params(step))
    return builder.jobs


def check_scheduled(step: Step, world_size: int) -> None:
    """Check that a step can be simulated for so many ranks.

    Raises:
        PlanError: it was scheduled for others, or computes outside of regions.
    """
    if world_size < 1:
        raise PlanError(f"world size is {world_size}; it must be at least 1")
    for graph in step.graphs:
        for axis, size in graph.axes.items():
            if size != world_size:
                raise PlanError(
                    f"graph '{graph.name}' was scheduled for {size} ranks on axis '{axis}' and {world_size} are to be simulated; "
                    "schedule it for these"
                )
        for node in graph.body:
            if not (node.target is ops.region_call or ops.is_zc(node.target) or edit.is_getitem(node)):
                raise PlanError(f"node '{node.name}' computes outside of every region; run 'outline' before simulating")


def local_params(step: Step) -> int:
    """Elements of the trainable parameters that a rank updates."""
    found = {p.name: meta.tensor(n).numel() for g in step.graphs for n, p in g.params() if p.trainable}
    return sum(found.values())


class _Builder:
    """Walks the graphs in order and appends jobs."""

    def __init__(self, step: Step, costs: Costs) -> None:
        self.costs = costs
        self.hardware = costs.hardware
        self.jobs: list[Job] = []
        self.phase = ""
        self.made: dict[fx.Node, tuple[int, ...]] = {}  # the jobs that a value comes from
        self.handed_on: dict[Origin | Role, tuple[int, ...]] = {}
        self.waited: dict[int, None] = {}  # what ends before the next computation starts
        self.last_compute: tuple[int, ...] = ()
        for graph in step.graphs:
            self.phase = graph.direction.value
            for node in graph.inputs:
                self.made[node] = self._origin_jobs(meta.origin(node))
            for node in graph.body:
                self._node(node, graph.regions)
            for node, role in graph.outputs:
                self.handed_on[role] = self.made[node]

    def _origin_jobs(self, origin: Origin | None) -> tuple[int, ...]:
        if isinstance(origin, (Saved, Kept)):
            return self.handed_on.get(origin, ())
        return self.handed_on.get(Output(origin.index), ()) if isinstance(origin, Tangent) else ()

    def _node(self, node: fx.Node, regions: Mapping[str, Region]) -> None:
        needs = _joined(self.made[source] for source in node.all_input_nodes)
        if node.target is ops.region_call:
            cost = self.costs.region(regions[calls.region(node)[0]])
            host = self.hardware.host
            host_us = host.region_us + cost.num_kernels * host.kernel_us
            needs = self._compute(node.name, "region", cost.device_us, host_us, needs, cost.num_bytes)
        elif ops.is_collective(node.target):
            needs = self._collective(node, needs)
        elif node.target is ops.wait:
            self.waited.update(dict.fromkeys(needs))
        self.made[node] = needs

    def update(self, num_params: int) -> None:
        """Append the optimizer, which waits for everything."""
        everything = tuple(range(len(self.jobs)))
        us = rates.optimizer_us(num_params, self.hardware)
        self.phase = "optimizer"
        self.waited.update(dict.fromkeys(everything))
        self._compute("update", "optimizer", us, self.hardware.host.step_us, everything, rates.ADAMW_BYTES * num_params)

    def _compute(
        self, name: str, kind: str, us: float, host_us: float, needs: tuple[int, ...], num_bytes: int
    ) -> tuple[int, ...]:
        after = tuple(self.waited)
        self.waited.clear()
        if self.hardware.host.blocks:  # the device is the host: issuing is part of the work
            us, host_us = us + host_us, 0.0
        return self._append(Job(name, kind, self.phase, COMPUTE, us, host_us, after, needs, num_bytes))

    def _append(self, job: Job) -> tuple[int, ...]:
        self.jobs.append(job)
        index = (len(self.jobs) - 1,)
        if job.stream == COMPUTE:
            self.last_compute = index
        return index

    def _collective(self, node: fx.Node, needs: tuple[int, ...]) -> tuple[int, ...]:
        hw = self.hardware
        op = str(getattr(node.target, "_opname", ""))
        _, size = calls.axis(node)
        sends = calls.tensors(node)
        sent, received = sum(_num_bytes(n) for n in sends), _num_bytes(node)
        full = received if op == "all_gather" else sent
        unpacked = sum(_num_bytes(_before_cast(n)) for n in sends)
        host_us = hw.host.collective_us
        if size > 1 and op != "all_reduce" and rates.by_copies(full, size, hw):
            us = rates.collective_us(op, full, size, hw)
            # shards are put where the others fetch them, or what has come from the others is averaged
            us += rates.memory_us(unpacked + sent if op == "all_gather" else sent + received, hw)
            host_us += hw.host.copied_tensor_us * len(sends) * (size - 1)
            stream, way = (GATHERS, "gather_copies") if op == "all_gather" else (REDUCTIONS, "reduce_copies")
        else:
            wire = full
            if op == "all_gather":
                moved = 0 if unpacked == sent else unpacked + sent
            else:
                wire = max(received * (size if op == "reduce_scatter" else 1), sent)
                moved = 0 if wire == sent else sent + wire
            if moved and size > 1:
                needs = self._compute(
                    f"{node.name}_cast", "cast", rates.memory_us(moved, hw), hw.host.kernel_us, needs, moved
                )
            us = rates.collective_us(op, wire, size, hw)
            stream, way = GROUP, "kernels"
        after = _joined([needs, self.last_compute, tuple(self.waited)])
        slowdown = hw.slowdown.get(way, 0.0)
        return self._append(Job(node.name, op, self.phase, stream, us, host_us, after, needs, full, slowdown))


def _joined(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index for group in groups for index in group))


def _num_bytes(node: fx.Node) -> int:
    return meta.num_bytes(meta.value(node))


def _before_cast(send: fx.Node) -> fx.Node:
    """What a collective sends before a ``zc.cast``."""
    source = calls.picked_from(send)
    if source is None or source.target is not ops.cast:
        return send
    return calls.tensors(source)[calls.index(send)]
