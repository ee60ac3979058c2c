"""Gathers each unit before its first use and releases it after its last."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Graph, Param, Step
from zcompile.ir.handover import hand_on, kept_value
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Unshard(StepPass):
    """Schedule ``zc.unshard``: one all-gather a unit, waited for before the region that first needs it, released after the last.

    Before and after::

        %w_full: f32[8, 4] = zc.unshard(%w, 'dp', 2, 0, [8, 4])
        %mm: f32[2, 4] = aten.mm(%x, %w_full) @0

        %b: bucket = zc.all_gather([%w], 'dp', 2)
        %w_full: f32[8, 4] = zc.wait(%b)
        %mm: f32[2, 4] = aten.mm(%x, %w_full) @0
        zc.release([%w_full])

    A parameter that is computed in another dtype is cast first, on the shard: ``zc.cast``.
    Stage 3 gathers in forward and again in backward. Stages 1 and 2 gather in forward, hand the full parameters to backward
    (``kept``) and release them there. Exact; a gather costs the unit's bytes over the axis.

    Attributes:
        stage: ZeRO stage; 0 has nothing to gather.
    """

    name: ClassVar[str] = "unshard"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_GATHERED})
    stage: int = 3

    def run(self, target: Step, stats: Stats) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise PassError(f"stage is {self.stage}; it must be 0, 1, 2 or 3")
        forward = _Scheduler(target.forward, stats)
        forward.gather()
        if target.backward is None:
            forward.release()
            return
        backward = _Scheduler(target.backward, stats)
        kept: dict[_Key, fx.Node] = {}
        if self.stage in (1, 2):
            kept = {key: node for key, node in forward.gathered.items() if key in backward.full}
            inputs = hand_on(target, {kept_value(*key): node for key, node in kept.items()})
            backward.gathered.update(zip(kept, inputs.values(), strict=True))
            stats["parameters kept for backward"] += len(kept)
        forward.release(kept)
        backward.gather()
        backward.release()


#: which full value of which parameter: a parameter may be gathered in two dtypes
_Key = tuple[str, torch.dtype]


class _Scheduler:
    """Gathers and releases in one graph."""

    def __init__(self, graph: Graph, stats: Stats) -> None:
        self.graph = graph
        self.stats = stats
        self.full: dict[_Key, fx.Node] = {}
        self.units: dict[_Key, str] = {}
        self.gathered: dict[_Key, fx.Node] = {}
        for node in graph.body:
            if node.target is ops.unshard:
                param = _param_of(node)
                key = (param.name, meta.tensor(node).dtype)
                self.full[key] = node
                self.units[key] = param.unit
        self.first_node: dict[int, fx.Node] = {}
        self.last_node: dict[int, fx.Node] = {}
        for node in graph.body:
            region = meta.region(node)
            if region is not None:
                self.first_node.setdefault(region, node)
                self.last_node[region] = node
        self.last_region: dict[_Key, int] = {}

    def gather(self) -> None:
        """One all-gather and wait for each unit and dtype that is not kept, before the region that first reads it."""
        groups: dict[tuple[str, torch.dtype], list[_Key]] = {}
        for key in self.full:
            if key not in self.gathered:
                groups.setdefault((self.units[key], key[1]), []).append(key)
        for (unit, dtype), keys in groups.items():
            start = min(r for key in keys for r in self._regions(key))
            self._gather_unit(unit, dtype, keys, self.first_node[start])
        for key, node in self.full.items():
            self._use(key, node)

    def _regions(self, key: _Key) -> list[int]:
        users = self.full[key].users
        regions = [region for user in users if (region := meta.region(user)) is not None]
        assert len(regions) == len(users), f"{self.full[key].name} is read outside of every region"
        return regions

    def _gather_unit(self, unit: str, dtype: torch.dtype, keys: list[_Key], before: fx.Node) -> None:
        _, axis, size, _, _ = calls.unshard(self.full[keys[0]])
        sends = shards = [calls.source(self.full[key]) for key in keys]
        label = unit.replace(".", "_").replace("+", "_")
        with self.graph.fx.inserting_before(before):
            if meta.tensor(sends[0]).dtype != dtype:
                cast = edit.call(self.graph.fx, ops.cast, (sends, dtype), name=f"{label}_cast")
                sends = edit.unpack(self.graph.fx, cast, [f"{s.name}_cast" for s in sends])
            bucket = edit.call(self.graph.fx, ops.all_gather, (sends, axis, size), name=f"{label}_gather")
            wait = edit.call(self.graph.fx, ops.wait, (bucket,), name=f"{label}_wait")
            names = [f"{shard.name}_gathered" for shard in shards]
            for key, full in zip(keys, edit.unpack(self.graph.fx, wait, names), strict=True):
                self.gathered[key] = full
        self.stats["gathers"] += 1
        self.stats["gathered MiB"] += meta.num_bytes(meta.value(wait)) >> 20

    def _use(self, key: _Key, unshard: fx.Node) -> None:
        """Replace the logical full value by the gathered one, unpadded inside each region that reads it."""
        self.last_region[key] = max(self._regions(key))
        _, _, size, dim, shape = calls.unshard(unshard)
        by_region: dict[int, fx.Node] = {}
        for user in sorted(unshard.users, key=lambda n: meta.region(n) or 0):
            region = meta.region(user)
            assert region is not None
            if region not in by_region:
                with self.graph.fx.inserting_before(self.first_node[region]):
                    by_region[region] = unpad(self.graph, self.gathered[key], dim, shape, size, region)
                if by_region[region] is not self.gathered[key]:
                    self.first_node[region] = _first_new(by_region[region], self.gathered[key])
            user.replace_input_with(unshard, by_region[region])
        self.graph.fx.erase_node(unshard)

    def release(self, keep: Collection[_Key] = ()) -> None:
        """Release each gathered parameter after the last region that reads it, one call for each unit and region."""
        groups: dict[tuple[int, str], list[fx.Node]] = {}
        for key, node in self.gathered.items():
            if key not in keep:
                groups.setdefault((self.last_region[key], self.units[key]), []).append(node)
        ends = dict(self.last_node)
        for (region, _), nodes in sorted(groups.items(), key=lambda item: item[0][0]):
            with self.graph.fx.inserting_after(ends[region]):
                ends[region] = edit.call(self.graph.fx, ops.release, (nodes,), name="release")


def unpad(graph: Graph, gathered: fx.Node, dim: int, shape: list[int], size: int, region: int) -> fx.Node:
    """The logical full parameter from a gathered value (shards concatenated along dimension 0), as nodes of ``region``.

    A parameter sharded on dimension 0 costs nothing; on another dimension, one copy.
    """

    def op(target: Callable[..., Any], *args: object, **kwargs: object) -> fx.Node:
        node = edit.call(graph.fx, target, args, kwargs, name=f"{gathered.name}_full")
        meta.set_region(node, region)
        return node

    aten = torch.ops.aten
    full = gathered
    chunk = -(-shape[dim] // size)
    if dim != 0:
        local = [*shape[:dim], chunk, *shape[dim + 1 :]]
        full = op(aten.view.default, full, [size, *local])
        full = op(aten.permute.default, full, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        full = op(aten.clone.default, full, memory_format=torch.contiguous_format)
        full = op(aten.view.default, full, [*shape[:dim], size * chunk, *shape[dim + 1 :]])
    if chunk * size != shape[dim]:
        full = op(aten.slice.Tensor, full, dim, 0, shape[dim])
    return full


def _first_new(last: fx.Node, gathered: fx.Node) -> fx.Node:
    """The first node of the chain from ``gathered`` to ``last``."""
    node = last
    while calls.source(node) is not gathered:
        node = calls.source(node)
    return node


def _param_of(unshard: fx.Node) -> Param:
    origin = meta.origin(calls.source(unshard))
    assert isinstance(origin, Param)
    return origin
