"""Assigns parameters to units and compute nodes to regions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile.analysis.blocks import storage
from zcompile.analysis.chains import param_chains
from zcompile.analysis.units import MIB, needed_units, params_by_first_use, plan_units
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Grad, Graph, Param, Saved, Step, with_unit
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact

_MUL: Any = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class PlanUnits(StepPass):
    """Fix units and regions, before anything is scheduled.

    A region ends where the next unit is first needed, and where the first is, if gradients that forward made are ready before: their
    reduction need not wait. What belongs to which region never changes afterwards, so every schedule computes the same bits.
    Parameter chains move to (and are copied into) the regions that read them.

    Before and after::

        %w: f32[8, 8] = param 'layers.0.weight' of [8, 8]
        %mm: f32[4, 8] = aten.mm(%x, %w)

        %w: f32[8, 8] = param 'layers.0.weight' of [8, 8] unit 'layers.0'
        %mm: f32[4, 8] = aten.mm(%x, %w) @0

    Exact. Costs the copies of chains: views, or a cast in each region that reads it.

    Attributes:
        min_mib: consecutive blocks smaller than this are joined into one unit.
    """

    name: ClassVar[str] = "plan-units"
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_PLANNED})
    min_mib: float = 0

    def run(self, target: Step, stats: Stats) -> None:
        if self.min_mib < 0:
            raise PassError(f"smallest unit is {self.min_mib} MiB; it must not be negative")
        if any(param.unit for graph in target.graphs for _, param in graph.params()):
            return
        sizes = {p.name: meta.num_bytes(meta.value(n)) for g in target.graphs for n, p in g.params()}
        order = {p.name: None for g in target.graphs for p in params_by_first_use(g)}
        units = plan_units([(name, sizes[name]) for name in order], int(self.min_mib * MIB))
        unit_of = {param: unit.name for unit in units for param in unit.params}
        stats["units"] += len(units)
        for graph in target.graphs:
            for node, param in graph.params():
                meta.set_origin(node, with_unit(param, unit_of.get(param.name, "unused")))
            stats[f"{graph.direction.value} regions"] += _cut_regions(graph, stats)


def _cut_regions(graph: Graph, stats: Stats) -> int:
    """Give every compute node its region; returns how many there are."""
    chains = param_chains(graph.fx)
    made = {storage(node) for node, role in graph.outputs if isinstance(role, Grad)}
    made = {node for node in made if _is_multiple_of_saved(node)}
    seen: set[str] = set()
    index, is_ready = 0, False
    for node in graph.body:
        if node in chains:
            continue
        if edit.is_getitem(node):
            meta.set_region(node, _known(calls.source(node)))
            continue
        new = [u for u in needed_units(node, chains) if u not in seen]
        if new and (seen or is_ready):
            index += 1
        seen.update(new)
        is_ready |= node in made
        meta.set_region(node, index)
    stats["nodes moved to their readers"] += _sink_preludes(graph, chains)
    _sink_chains(graph, chains, stats)
    return index + 1 if graph.body else 0


def _is_multiple_of_saved(node: fx.Node) -> bool:
    """Whether a gradient is what forward made of it, times a factor."""
    source = node.args[0] if node.target is _MUL else None
    return isinstance(source, fx.Node) and isinstance(meta.origin(source), Saved)


def _sink_preludes(graph: Graph, chains: Collection[fx.Node]) -> int:
    """Move what is computed from graph inputs alone, and no parameter, to the region that first reads it; returns how many moved.

    Recomputation begins with such nodes. Computed a region early, their results would have to be kept until they are read.
    """
    early: dict[fx.Node, None] = {}
    for node in graph.body:
        sources = node.all_input_nodes
        if sources and all(n in early or (n.op == "placeholder" and not _is_param(n)) for n in sources):
            early[node] = None
    moved: set[fx.Node] = set()
    for node in reversed(early):
        readers = _readers(node)
        if not edit.is_getitem(node) and readers and not any(r.op == "output" for r in readers):
            region = min(_known(r) for r in readers)
            if region > _known(node):
                for part in (node, *filter(edit.is_getitem, node.users)):
                    meta.set_region(part, region)
                    moved.add(part)
    anchors: dict[int, fx.Node] = {}
    for node in graph.body:
        if node not in chains and node not in moved:
            anchors.setdefault(_known(node), node)
    for node in graph.body:
        if node in moved:
            anchors[_known(node)].prepend(node)
    return len(moved)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, or any result of an operator with several."""
    return [r for user in node.users for r in (user.users if edit.is_getitem(user) else [user])]


def _is_param(node: fx.Node) -> bool:
    return isinstance(meta.origin(node), Param)


def _known(node: fx.Node) -> int:
    region = meta.region(node)
    assert region is not None, f"{node.name} has no region"
    return region


def _sink_chains(graph: Graph, chains: dict[fx.Node, fx.Node], stats: Stats) -> None:
    """Copy chain nodes into each region that reads them, right before the first reader there; drop the originals."""
    copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def copy(node: fx.Node, reader: fx.Node, region: int) -> fx.Node:
        if node not in chains:
            return node
        if (node, region) not in copies:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copy(n, reader, region))
            with graph.fx.inserting_before(reader):
                new = graph.fx.create_node("call_function", node.target, args, kwargs, name=node.name)
            new.meta = dict(node.meta)
            meta.set_region(new, region)
            copies[node, region] = new
            stats["chain nodes placed"] += 1
        return copies[node, region]

    last_region = 0
    for reader in list(graph.fx.nodes):
        if reader in chains or reader.op == "placeholder":
            continue
        if reader.op != "output":
            last_region = _known(reader)
        if any(n in chains for n in reader.all_input_nodes):
            region = last_region
            local = partial(copy, reader=reader, region=region)
            reader.args, reader.kwargs = fx.map_arg((reader.args, reader.kwargs), local)
    for node in reversed(chains):
        graph.fx.erase_node(node)
