"""Averages parameter gradients over the axis, each rank keeping its shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from zcompile import ops
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Grad, Graph, Param, Step
from zcompile.ir.types import FLOATS
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Reduce(StepPass):
    """Reduce each unit's gradients as soon as the last of them is ready.

    Before and after::

        %g: f32[8, 4] = aten.mm(%a, %b) @0
        return grad 'layers.0.w' %g

        %g: f32[8, 4] = aten.mm(%a, %b) @0
        %r: bucket = zc.reduce_scatter([%g], 'dp', 2)
        %g_reduced: f32[4, 4] = zc.wait(%r)
        return grad 'layers.0.w' %g_reduced

    Sharded parameters get the mean of their own rows (padded like the shard), replicated ones an all-reduced mean.
    A gradient that is only the widened form of a narrower one is sent narrow and averaged wide: the widening moves into the
    reduction, which then has half of the bytes to move::

        %g: bf16[8, 4] = aten.mm(%a, %b) @0
        %g_f32: f32[8, 4] = prims.convert_element_type(%g, f32) @0
        return grad 'layers.0.w' %g_f32

        %g: bf16[8, 4] = aten.mm(%a, %b) @0
        %r: bucket = zc.reduce_scatter([%g], 'dp', 2, f32)

    On one rank the mean is the gradient itself, which comes to its place as soon as it is there: held until the end, it would be
    there twice.

    Exact in the gradients' own dtype. Stages 1 to 3 reduce alike; what differs is when: inside ``no_sync`` the runtime keeps full
    gradients and reduces later.

    Attributes:
        stage: ZeRO stage; 0 all-reduces everything.
        dtype: dtype of the reduction, such as ``bf16``; None: the gradient's own.
        local: reduce nothing: gradients stay on their rank, full, in the form in which a reduction reads them (``no_sync``).
    """

    name: ClassVar[str] = "reduce"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.GRADS_REDUCED})
    stage: int = 3
    dtype: str | None = None
    local: bool = False

    @property
    def exact(self) -> bool:
        return self.dtype is None

    def run(self, target: Step, stats: Stats) -> None:
        if self.dtype is not None and self.dtype not in FLOATS:
            raise PassError(f"reduce dtype is '{self.dtype}'; it must be one of {', '.join(FLOATS)}")
        if target.backward is None or not target.backward.axes:
            return
        ((axis, size),) = target.backward.axes.items()
        params = {param.name: param for graph in target.graphs for _, param in graph.params()}
        dtype = None if self.dtype is None else FLOATS[self.dtype]
        _Reducer(target.backward, params, axis, size, dtype, self.local, stats).run()


class _Group(NamedTuple):
    """What the gradients of one reduction have in common: its dtype, the dtype that is sent, and how they are placed."""

    unit: str
    dtype: torch.dtype
    sent: torch.dtype
    sharded: bool


class _Reducer:
    """Reductions of one backward graph."""

    def __init__(
        self,
        graph: Graph,
        params: dict[str, Param],
        axis: str,
        size: int,
        dtype: torch.dtype | None,
        local: bool,
        stats: Stats,
    ) -> None:
        self.graph = graph
        self.params = params
        self.axis = axis
        self.size = size
        self.dtype = dtype
        self.local = local
        self.stats = stats
        self.last_node: dict[int, fx.Node] = {}
        for node in graph.fx.nodes:
            region = meta.region(node)
            if region is not None:
                self.last_node[region] = node

    def run(self) -> None:
        """Reduce every gradient output that is not reduced yet."""
        outputs = self.graph.outputs
        groups: dict[_Group, list[int]] = {}
        for index, (value, role) in enumerate(outputs):
            if isinstance(role, Grad) and not _is_reduced(value):
                param = self.params[role.name]
                dtype = self.dtype or meta.tensor(value).dtype
                source = self._source(value)
                sent = dtype if source is value else meta.tensor(source).dtype
                groups.setdefault(_Group(param.unit, dtype, sent, param.placement == "shard"), []).append(index)
        ready = {key: max(self._ready(outputs[i][0]) for i in indices) for key, indices in groups.items()}
        for key in sorted(groups, key=lambda k: ready[k]):
            indices = groups[key]
            reduced = self._reduce_unit(key, [(outputs[i][0], self._param(outputs[i][1])) for i in indices], ready[key])
            for i, value in zip(indices, reduced, strict=True):
                outputs[i] = (value, outputs[i][1])
        widened = [value for value, _ in self.graph.outputs if _is_widening(value)]
        self.graph.set_outputs(outputs)
        for value in dict.fromkeys(widened):
            if not value.users:
                self.graph.fx.erase_node(value)

    def _source(self, value: fx.Node) -> fx.Node:
        """What is sent for a gradient: what it is the widened form of, where the reduction can widen it."""
        if self.local or not _is_widening(value):
            return value  # what stays on a rank is added up there, wide
        source = calls.source(value)
        return source if self.dtype in (None, meta.tensor(value).dtype, meta.tensor(source).dtype) else value

    def _param(self, role: object) -> Param:
        assert isinstance(role, Grad)
        return self.params[role.name]

    def _ready(self, value: fx.Node) -> int:
        """The region after which a gradient exists; inputs of the graph exist from the start."""
        region = meta.region(value)
        return 0 if region is None else region

    def _reduce_unit(self, group: _Group, grads: list[tuple[fx.Node, Param]], region: int) -> list[fx.Node]:
        sharded = group.sharded
        sends = [
            self._prepare(self._source(value), group.sent, param if sharded else None, region) for value, param in grads
        ]
        if self.local:
            return sends
        label = group.unit.replace(".", "_").replace("+", "_")
        target = ops.reduce_scatter if sharded else ops.all_reduce
        arguments: list[Any] = [sends, self.axis, self.size]
        if group.sent != group.dtype:
            arguments.append(group.dtype)
        with self.graph.fx.inserting_after(self._end(region)):
            bucket = edit.call(self.graph.fx, target, tuple(arguments), name=f"{label}_reduce")
        with self.graph.fx.inserting_after(bucket):
            wait = edit.call(self.graph.fx, ops.wait, (bucket,), name=f"{label}_wait")
        cursor, results = wait, []
        for index, (_, param) in enumerate(grads):
            with self.graph.fx.inserting_after(cursor):
                cursor = edit.call_getitem(self.graph.fx, wait, index, f"grad_{param.name.replace('.', '_')}")
            results.append(cursor)
        self.stats["reductions"] += 1
        self.stats["reduced MiB"] += sum(meta.num_bytes(meta.value(s)) for s in sends) >> 20
        return results

    def _end(self, region: int) -> fx.Node:
        return self.last_node[region] if region in self.last_node else self.graph.inputs[-1]

    def _prepare(self, value: fx.Node, dtype: torch.dtype, param: Param | None, region: int) -> fx.Node:
        """The gradient as the collective reads it: padded, sharded dimension first, contiguous."""
        aten = torch.ops.aten

        def op(target: Callable[..., Any], *args: object, **kwargs: object) -> fx.Node:
            with self.graph.fx.inserting_after(self._end(region)):
                node = edit.call(self.graph.fx, target, args, kwargs, name=f"{value.name}_send")
            meta.set_region(node, region)
            self.last_node[region] = node
            return node

        send = value
        if meta.tensor(send).dtype != dtype:
            send = op(torch.ops.prims.convert_element_type.default, send, dtype)
        if param is not None and tuple(meta.tensor(value).shape) == param.shape:  # else it has that form already
            dim, rows = param.shard_dim, param.shape[param.shard_dim]
            chunk = -(-rows // self.size)
            if chunk * self.size != rows:
                behind = len(param.shape) - 1 - dim
                send = op(aten.constant_pad_nd.default, send, [0, 0] * behind + [0, chunk * self.size - rows], 0)
            if dim != 0:
                before, after = list(param.shape[:dim]), list(param.shape[dim + 1 :])
                send = op(aten.view.default, _contiguous(send, op), [*before, self.size, chunk, *after])
                send = op(aten.permute.default, send, [dim, *range(dim), *range(dim + 1, len(param.shape) + 1)])
                send = op(aten.clone.default, send, memory_format=torch.contiguous_format)
                first, *rest = [*before, chunk, *after]
                send = op(aten.view.default, send, [self.size * first, *rest])
        return _contiguous(send, op)


def _contiguous(node: fx.Node, op: Callable[..., fx.Node]) -> fx.Node:
    if meta.tensor(node).is_contiguous():
        return node
    return op(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)


def _is_widening(value: fx.Node) -> bool:
    """Whether a value is another one in a wider floating dtype, and nothing else."""
    if value.target is not torch.ops.prims.convert_element_type.default:
        return False
    wide, narrow = meta.tensor(value), meta.tensor(calls.source(value))
    return narrow.dtype.is_floating_point and wide.dtype.is_floating_point and wide.itemsize > narrow.itemsize


def _is_reduced(value: fx.Node) -> bool:
    source = calls.picked_from(value)
    return source is not None and source.target is ops.wait
