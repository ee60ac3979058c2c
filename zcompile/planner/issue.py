"""The jobs of a scheduled step: its top-level graphs, issued in their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from zcompile import ops
from zcompile.analysis.aliases import Aliases
from zcompile.analysis.cost import region_kernels
from zcompile.analysis.schedule import is_reduction
from zcompile.analysis.structure import region_key
from zcompile.errors import PlanError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Grad, Graph, Kept, Offloaded, Origin, Output, Region, Role, Saved, Step, Tangent
from zcompile.offloading import Offloading
from zcompile.planner import hosted, rates
from zcompile.planner.hardware import Hardware
from zcompile.planner.jobs import IN, OUT, Bucket, Issuer, Job, joined
from zcompile.planner.window import MicroBatch, Window


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
        measured: the same by structure, as ``profile.region_times()`` gives them.
        scale: what computed times are multiplied with.
    """

    hardware: Hardware
    region_us: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    _known: dict[str, RegionCost] = field(default_factory=dict)

    @classmethod
    def measured_in(cls, step: Step, hardware: Hardware, measured: Mapping[str, float]) -> Costs:
        """Costs by measured times of regions. Those that were not measured take what is computed for them, times the ratio of
        measured and computed times of the others.

        Args:
            step: the step that was measured, or one that shares regions with it.
            hardware: the machine.
            measured: microseconds of regions by structure.

        Raises:
            PlanError: no region of the step was measured.
        """
        computed, seen = cls(hardware), [0.0, 0.0]
        for region in (region for graph in step.graphs for region in graph.regions.values()):
            us = measured.get(region_key(region))
            if us is not None:
                seen = [seen[0] + us, seen[1] + computed.region(region).device_us]
        if not seen[1]:
            raise PlanError(
                f"measured has {len(measured)} regions and none of them is in the step that is planned; measure the same model with "
                "the same precision, recomputation and batch, or leave measured out"
            )
        return cls(hardware, measured=measured, scale=seen[0] / seen[1])

    def region(self, region: Region) -> RegionCost:
        """What a call of a region takes."""
        if region.name not in self._known:
            kernels = region_kernels(region)
            us = self.region_us.get(region.name)
            if us is None and self.measured:
                us = self.measured.get(region_key(region))
            if us is None:
                us = self.scale * sum(rates.kernel_us(k, self.hardware) for k in kernels)
            self._known[region.name] = RegionCost(us, len(kernels), sum(k.cost.num_bytes for k in kernels))
        return self._known[region.name]

    def host_us(self, region: Region) -> float:
        """What the host spends on a call of a region."""
        return self.hardware.host.region_us + self.region(region).num_kernels * self.hardware.host.kernel_us


def step_jobs(
    step: Step,
    costs: Costs,
    world_size: int,
    *,
    offloading: Offloading | None = None,
    micro_batch: MicroBatch | None = None,
) -> list[Job]:
    """The jobs of a step, with those of an update by AdamW where it does not belong to a micro-batch with others behind it.

    Args:
        step: scheduled and outlined.
        costs: of its regions, on a machine.
        world_size: ranks that the step was scheduled for.
        offloading: what is on the host beside values that the graphs move there.
        micro_batch: whose graphs the step has, in a window; None: it is complete in itself.

    Raises:
        PlanError: the step was scheduled for another number of ranks, or is not outlined.
    """
    check_scheduled(step, world_size)
    offloading = offloading or Offloading()
    batch = micro_batch or MicroBatch.alone(step)
    issuer = Issuer(costs.hardware.shared(world_size))
    walk = _Walk(batch, costs, issuer, parameters_on_host=offloading.parameters is not None)
    if batch.updates and step.backward is not None:
        if offloading.parameters is None and offloading.optimizer is None:
            walk.issuer.update(local_params(step))
        else:
            params = local_params(step)
            there = params if offloading.optimizer is None else round(params * offloading.optimizer.share)
            chunks = hosted.chunks(there, offloading.optimizer)
            walk.issuer.update_hosted(chunks, hosted.step_of(offloading, costs.hardware), rest=params - there)
    return walk.issuer.jobs


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


def bucket_of(start: fx.Node) -> Bucket:
    """What a started collective carries."""
    op = str(getattr(start.target, "_opname", ""))
    sends = calls.tensors(start)
    stored, sent = sum(num_bytes(_before_cast(n)) for n in sends), sum(num_bytes(n) for n in sends)
    return Bucket(op, calls.axis(start)[1], len(sends), stored, sent, num_bytes(start))


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's value."""
    return meta.num_bytes(meta.value(node))


def _before_cast(send: fx.Node) -> fx.Node:
    source = calls.picked_from(send)
    if source is None or source.target is not ops.cast:
        return send
    return calls.tensors(source)[calls.index(send)]


class _Walk:
    """Issues the nodes of the graphs in order."""

    def __init__(self, batch: MicroBatch, costs: Costs, issuer: Issuer, *, parameters_on_host: bool) -> None:
        self.batch = batch
        self.costs = costs
        self.parameters_on_host = parameters_on_host
        self.issuer = issuer
        self.made: dict[fx.Node, tuple[int, ...]] = {}  # the jobs that a value comes from
        self.handed_on: dict[Origin | Role, tuple[int, ...]] = {}
        self.memory: dict[fx.Node, object] = {}
        self.hosted: dict[Offloaded, object] = {}
        self.local: list[fx.Node] = []  # reductions that do not run
        for graph in batch.step.graphs:
            self.issuer.phase = graph.direction.value
            for node in graph.inputs:
                self.made[node] = self._jobs_behind(meta.origin(node))
            self._find_shared(graph)
            if parameters_on_host:
                self._upload(graph)
            for node in graph.body:
                self._issue(node, graph.regions)
            for node, role in graph.outputs:
                self.handed_on[role] = self.made[node]
        if batch.window is not None and batch.step.backward is not None:
            self._add_up(batch.window, batch.step.backward)

    def _upload(self, graph: Graph) -> None:
        """What regions read of parameters on the host comes at the graph's start."""
        read = [n for n, _ in graph.params() if any(user.target is ops.region_call for user in n.users)]
        if read:
            job = self.issuer.transfer(f"{graph.direction.value}_upload", IN, sum(map(num_bytes, read)), len(read))
            self.issuer.wait((job,))
            self.made.update((node, (job,)) for node in read)

    def _find_shared(self, graph: Graph) -> None:
        """The memory of what is moved: values that share it are moved once."""
        if not any(ops.is_transfer(node.target) for node in graph.body):
            return
        aliases = Aliases.of_graph(graph)
        for node in graph.body:
            if node.target is ops.offload:
                self.memory.update((tensor, aliases.of(tensor)) for tensor in calls.tensors(node))
        for node, role in graph.outputs:
            if isinstance(role, Offloaded):
                wait = calls.picked_from(node)
                assert wait is not None, "what is on the host was waited for"
                self.hosted[role] = self.memory[calls.tensors(calls.source(wait))[calls.index(node)]]
        for node in graph.inputs:
            origin = meta.origin(node)
            if isinstance(origin, Offloaded):
                self.memory[node] = self.hosted[origin]

    def _jobs_behind(self, origin: Origin | None) -> tuple[int, ...]:
        if isinstance(origin, (Saved, Kept, Offloaded)):
            return self.handed_on.get(origin, ())
        return self.handed_on.get(Output(origin.index), ()) if isinstance(origin, Tangent) else ()

    def _issue(self, node: fx.Node, regions: Mapping[str, Region]) -> None:
        needs = joined(self.made[source] for source in node.all_input_nodes)
        if node.target is ops.region_call:
            region = regions[calls.region(node)[0]]
            cost = self.costs.region(region)
            host_us = self.costs.host_us(region)
            needs = (self.issuer.compute(node.name, "region", cost.device_us, host_us, needs, cost.num_bytes),)
        elif is_reduction(node) and not self.batch.reduces:
            self.local.append(node)
        elif ops.is_collective(node.target):
            bucket = bucket_of(node)
            if self.batch.takes_local and is_reduction(node):
                bucket, needs = self._take_local(node, bucket, needs)
            if self.parameters_on_host and bucket.op == "all_gather":
                upload = f"{node.name}_upload"
                needs = (*needs, self.issuer.transfer(upload, IN, bucket.stored_bytes, bucket.num_tensors, needs))
                bucket = replace(bucket, stored_bytes=bucket.sent_bytes)  # they are cast where they arrive
            needs = (self.issuer.start(node.name, bucket, needs),)
        elif ops.is_transfer(node.target):
            sizes = {self.memory.get(t, t): num_bytes(t) for t in calls.tensors(node)}
            way = OUT if node.target is ops.offload else IN
            needs = (self.issuer.transfer(node.name, way, sum(sizes.values()), len(sizes), needs),)
        elif node.target is ops.wait and calls.source(node) not in self.local:
            self.issuer.wait(needs)
            started = calls.source(node)
            if self.parameters_on_host and ops.is_collective(started.target) and started.target is not ops.all_gather:
                self.issuer.transfer(f"{node.name}_to_host", OUT, num_bytes(started), len(node.users), needs)
        self.made[node] = needs

    # Gradients of a window. -------------------------------------------------------------------------------------------

    def _take_local(self, node: fx.Node, bucket: Bucket, needs: tuple[int, ...]) -> tuple[Bucket, tuple[int, ...]]:
        """Add what a reduction would send to what earlier micro-batches have left, which is sent, wide."""
        gradients = self._full(node)
        moved = [
            g.sent_bytes + 2 * g.sum_bytes + (g.sum_bytes + g.wide_bytes) * (g.sum_bytes != g.wide_bytes)
            for g in gradients
        ]
        job = self._accumulate(f"{node.name}_add", moved, needs)
        return replace(bucket, sent_bytes=sum(g.wide_bytes for g in gradients)), (job,)

    def _add_up(self, window: Window, backward: Graph) -> None:
        """At the end of a backward, add its gradients to those of earlier micro-batches, or keep a copy of the first ones."""
        reads = 1 + self.batch.adds  # of a sum, and writes
        needs = joined(self.made[node] for node, role in backward.outputs if isinstance(role, Grad))
        if not self.batch.reduces:
            # regions make them wide: they write that once, and read what is narrow once more
            moved = [
                g.wide_bytes + reads * g.sum_bytes + (g.sent_bytes + g.wide_bytes) * (g.sent_bytes != g.wide_bytes)
                for node in self.local
                for g in self._full(node)
            ]
            self._accumulate("add_local_gradients", moved, needs)
        elif not window.defers:
            params = {
                param.name: meta.tensor(node) for graph in self.batch.step.graphs for node, param in graph.params()
            }
            moved = []
            for node, role in backward.outputs:
                if isinstance(role, Grad):
                    dtype = params[role.name].dtype
                    wide = window.sum_dtype(dtype)
                    if self.batch.adds or wide != dtype:
                        moved.append(num_bytes(node) + reads * meta.tensor(node).numel() * wide.itemsize)
            if moved and self.parameters_on_host:
                us = sum(moved) / self.costs.hardware.host_bytes_per_s * 1e6
                self.issuer.process("accumulate_gradients", "accumulate", us, (*needs, *self.issuer.last), sum(moved))
            elif moved:
                self._accumulate("accumulate_gradients", [sum(moved)], needs)

    def _full(self, node: fx.Node) -> list[_Full]:
        """What a reduction sends, one after the other."""
        window = self.batch.window
        assert window is not None, "a micro-batch of a window keeps gradients"
        found = []
        for send, result in zip(calls.tensors(node), meta.value(node), strict=True):
            numel = meta.tensor(send).numel()
            wide = result.dtype.itemsize * numel
            found.append(_Full(num_bytes(send), wide, window.sum_dtype(result.dtype).itemsize * numel))
        return found

    def _accumulate(self, name: str, moved: list[int], needs: tuple[int, ...]) -> int:
        """Issue kernels that move so many bytes each."""
        hw = self.costs.hardware
        us, host_us = sum(rates.memory_us(num, hw) for num in moved), hw.host.copied_tensor_us * len(moved)
        return self.issuer.compute(name, "accumulate", us, host_us, needs, sum(moved))


class _Full(NamedTuple):
    """Bytes of a full gradient: as a region gives it, as its reduction gives it, and of the sum over a window."""

    sent_bytes: int
    wide_bytes: int
    sum_bytes: int
