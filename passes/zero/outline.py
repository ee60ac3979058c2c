"""Moves each region's computation into a region of its own; equal regions share one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.chains import is_view
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Region, Step, is_compute
from zcompile.ir.operators import is_random
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Outline(StepPass):
    """Leave only the schedule at the top level: gathers, waits, region calls, reductions, releases.

    Before and after::

        %mm: f32[2, 4] = aten.mm(%x, %w_full) @0
        %y: f32[2, 4] = aten.relu(%mm) @0

        region forward_0(%a0: f32[2, 4], %a1: f32[4, 4]):
          %mm: f32[2, 4] = aten.mm(%a0, %a1)
          %y: f32[2, 4] = aten.relu(%mm)
          return %y
        ...
        %y: f32[2, 4] = call forward_0(%x, %w_full)

    Regions of the same structure (operators, literals, types of inputs) share one body, so that a compiler sees each distinct
    region once, however deep the model is. Views and constants are computed again where they are read. Exact.
    """

    name: ClassVar[str] = "outline"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_PLANNED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.OUTLINED})
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_PLANNED})

    def run(self, target: Step, stats: Stats) -> None:
        for graph in target.graphs:
            if not any(meta.region(node) is not None for node in graph.body):
                continue
            _make_local(graph)
            runs = _runs(graph)
            bodies: dict[Any, str] = {}
            for run in runs:
                _outline(graph, run, bodies, stats)
            stats[f"{graph.direction.value} regions"] += len(runs)
            stats[f"distinct {graph.direction.value} regions"] += len(graph.regions)


@dataclass
class _Run:
    """Consecutive compute nodes of one region."""

    region: int
    nodes: list[fx.Node] = field(default_factory=list)


def _runs(graph: Graph) -> list[_Run]:
    runs: list[_Run] = []
    for node in graph.body:
        region = meta.region(node)
        if region is None:
            continue
        if not runs or runs[-1].region != region:
            runs.append(_Run(region))
        runs[-1].nodes.append(node)
    return runs


def _make_local(graph: Graph) -> None:
    """Compute again in each region what costs nothing to have there: views of one value, and values made from nothing.

    Then bases cross between regions instead of views, and no constant (zeros to scatter into, positions) crosses at all.
    """
    first: dict[int, fx.Node] = {}
    for node in graph.body:
        region = meta.region(node)
        if region is not None:
            first.setdefault(region, node)
    copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def local(node: fx.Node, region: int) -> fx.Node:
        if meta.region(node) in (None, region) or not _is_free(node):
            return node
        if (node, region) not in copies:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: local(n, region))
            with graph.fx.inserting_before(first[region]):
                new = graph.fx.create_node("call_function", node.target, args, kwargs, name=node.name)
            new.meta = dict(node.meta)
            meta.set_region(new, region)
            copies[node, region] = new
        return copies[node, region]

    for reader in graph.body:
        region = meta.region(reader)
        if region is not None:
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), lambda n, r=region: local(n, r))
    edit.erase_dead(graph.fx, keep=lambda n: not is_compute(n) or not _is_free(n))


def _is_free(node: fx.Node) -> bool:
    """Whether a node is a view of one value, or a tensor made from literals alone."""
    if node.op != "call_function" or not isinstance(meta.value(node), torch.Tensor) or edit.is_getitem(node):
        return False
    sources = len(node.all_input_nodes)
    return (sources == 1 and is_view(node)) or (sources == 0 and not is_random(node))


def _outline(graph: Graph, run: _Run, bodies: dict[Any, str], stats: Stats) -> None:
    inside = set(run.nodes)
    inputs: dict[fx.Node, None] = {}
    for node in run.nodes:
        inputs.update(dict.fromkeys(n for n in node.all_input_nodes if n not in inside))
    results = [n for n in run.nodes if any(u not in inside for u in n.users) and not _is_tuple(n)]
    name = f"{graph.direction.value}_{len(graph.regions)}"
    body, key = _body(run.nodes, list(inputs), results)
    if key not in bodies:
        bodies[key] = name
        graph.regions[name] = Region(name, body)
    else:
        stats["regions shared"] += 1
    with graph.fx.inserting_after(run.nodes[-1]):
        call = graph.fx.create_node("call_function", ops.region_call, (bodies[key], list(inputs)), name=bodies[key])
    meta.set_value(call, [meta.value(r) for r in results])
    meta.set_places(call, run.nodes)
    cursor = call
    for index, result in enumerate(results):
        with graph.fx.inserting_after(cursor):
            cursor = edit.call_getitem(graph.fx, call, index)
        final = result.name
        result.replace_all_uses_with(cursor, delete_user_cb=lambda user: user not in inside)
        result.name, cursor.name = f"{final}_", final
    for node in reversed(run.nodes):
        graph.fx.erase_node(node)


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(meta.value(node), (list, tuple))


def _body(nodes: list[fx.Node], inputs: list[fx.Node], results: list[fx.Node]) -> tuple[fx.Graph, Any]:
    """The region's graph with canonical names, and a key that is equal for regions of equal structure."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    key: list[Any] = []
    for index, node in enumerate(inputs):
        env[node] = graph.placeholder(f"a{index}")
        meta.set_value(env[node], meta.value(node))
        key.append(_type_key(meta.value(node)))
    number = {node: index for index, node in enumerate(env)}
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        new = graph.create_node("call_function", node.target, args, kwargs, name=_stem(node))
        meta.set_value(new, meta.value(node))
        meta.copy_place(new, node)
        key.append((node.target, _literal_key(node.args, number), _literal_key(node.kwargs, number)))
        env[node] = new
        number[node] = len(number)
    graph.output([env[r] for r in results])
    key.append(tuple(number[r] for r in results))
    return graph, tuple(key)


def _stem(node: fx.Node) -> str:
    """The operator's own name, so that equal regions print alike."""
    target = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", "value"))).strip("_") or "value"


def _type_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device.type)
    return tuple(_type_key(v) for v in value)


def _literal_key(arg: Any, number: dict[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return ("node", number[arg])
    if isinstance(arg, (list, tuple)):
        return tuple(_literal_key(a, number) for a in arg)
    if isinstance(arg, dict):
        return tuple((k, _literal_key(v, number)) for k, v in arg.items())
    if isinstance(arg, slice):
        return ("slice", arg.start, arg.stop, arg.step)
    return (type(arg).__name__, repr(arg))
