"""Turns full parameters into local shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Param, Step
from zcompile.pipeline import Stats, StepPass
from zcompile.placement import ParamSpec, choose_shard_dim
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Shard(StepPass):
    """Replace each parameter placeholder by its padded local shard and the logical full value of it.

    Where a parameter is cast before anything else reads it, the cast moves onto the shard: less to compute and to send.

    Before and after, on two ranks::

        %w: f32[8, 4] = param 'layers.0.w' of [8, 4] unit 'layers.0'

        %w: f32[4, 4] = param 'layers.0.w' shard(0) of [8, 4] unit 'layers.0'
        %w_full: f32[8, 4] = zc.unshard(%w, 'dp', 2, 0, [8, 4]) @0

    Exact. Stage 0, parameters that ``ignore`` matches, and parameters too small to divide stay replicated.

    Attributes:
        stage: ZeRO stage 0-3; stages 1-3 store the same shards.
        size: ranks on the axis; 1 inserts nothing.
        axis: the mesh axis.
        ignore: glob patterns on parameter names, joined by ``|``.
    """

    name: ClassVar[str] = "shard"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.UNITS_PLANNED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.PARAMS_SHARDED})
    stage: int = 3
    size: int = 1
    axis: str = "dp"
    ignore: str = ""

    def run(self, target: Step, stats: Stats) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise PassError(f"stage is {self.stage}; it must be 0, 1, 2 or 3")
        for graph in target.graphs:
            graph.axes.setdefault(self.axis, self.size)
            start = graph.body[0] if graph.body else graph.output
            for node, param in list(graph.params()):
                if param.placement == "full":
                    self._place(graph, node, param, start, stats)

    def _place(self, graph: Graph, node: fx.Node, param: Param, start: fx.Node, stats: Stats) -> None:
        full = meta.tensor(node)
        dim = choose_shard_dim(
            param.shape,
            full.dtype,
            self.size,
            stage=self.stage,
            ignored=any(fnmatchcase(param.name, p) for p in self.ignore.split("|")),
        )
        if dim is None or self.size == 1:
            meta.set_origin(node, replace(param, placement="replicate"))
            stats["replicated parameters"] += 1
            return
        spec = ParamSpec(param.name, (), param.shape, full.dtype, param.trainable, dim, self.size)
        meta.set_origin(node, replace(param, placement="shard", shard_dim=dim))
        meta.set_value(node, edit.empty(full, spec.padded_local_shape))
        stats["sharded parameters"] += 1
        self._insert_full(graph, node, param, dim, start)

    def _insert_full(self, graph: Graph, node: fx.Node, param: Param, dim: int, start: fx.Node) -> None:
        """One logical full value for each dtype in which the shard is read, right before ``start``."""
        full: dict[torch.dtype, fx.Node] = {}
        for user in list(node.users):
            dtype = meta.tensor(user if _is_cast(user) else node).dtype
            if dtype not in full:
                with graph.fx.inserting_before(start):
                    full[dtype] = self._full(graph, node, param, dim, dtype)
            if _is_cast(user):
                user.replace_all_uses_with(full[dtype])
                graph.fx.erase_node(user)
            else:
                user.replace_input_with(node, full[dtype])

    def _full(self, graph: Graph, node: fx.Node, param: Param, dim: int, dtype: torch.dtype) -> fx.Node:
        args: list[object] = [node, self.axis, self.size, dim, list(param.shape)]
        if dtype != meta.tensor(node).dtype:
            args.append(dtype)
        return edit.call(graph.fx, ops.unshard, tuple(args), name=f"{node.name}_full")


def _is_cast(node: fx.Node) -> bool:
    return node.target in (torch.ops.prims.convert_element_type.default,)
