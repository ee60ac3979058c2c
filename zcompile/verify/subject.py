"""One graph under verification: what several checks need of it, and how it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.aliases import Aliases
from zcompile.analysis.flow import Result
from zcompile.analysis.reads import Copies, Reads
from zcompile.errors import VerifyError
from zcompile.ir import calls, meta
from zcompile.ir.graph import Grad, Graph, Kept, Param, Region
from zcompile.ir.handover import kept_parameter
from zcompile.ir.printer import print_node
from zcompile.ir.types import tensors
from zcompile.placement import ParamSpec

#: nodes shown before and after the refused one
WINDOW = 3


@dataclass(frozen=True)
class Collective:
    """A started collective and its wait."""

    start: fx.Node
    wait: fx.Node

    @property
    def tensors(self) -> list[fx.Node]:
        """What goes in, in order."""
        return calls.tensors(self.start)

    @property
    def axis(self) -> str:
        """The mesh axis."""
        return calls.axis(self.start)[0]

    @property
    def results(self) -> list[Result]:
        """What comes out, in order."""
        return [Result(self.wait, index) for index in range(len(self.tensors))]

    @property
    def is_gather(self) -> bool:
        """Whether this is an all-gather; else it is a reduction."""
        return self.start.target is ops.all_gather


class Subject:
    """A graph with its analyses, each computed at most once.

    Args:
        graph: the graph. Everything but ``nodes``, ``position`` and ``refuse`` needs it well formed.
        params: the parameters of the whole step, by name, with their dtype; those of ``graph`` alone by default.
    """

    def __init__(self, graph: Graph, params: Mapping[str, tuple[Param, torch.dtype]] | None = None) -> None:
        self.graph = graph
        self._params = params
        self.nodes = list(graph.fx.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}

    @cached_property
    def aliases(self) -> Aliases:
        """Shared memory."""
        return Aliases.of_graph(self.graph)

    @cached_property
    def reads(self) -> Reads:
        """What values were computed from; the results of waits are leaves."""
        return Reads.of_graph(self.graph, through_waits=False)

    @cached_property
    def copies(self) -> Copies:
        """Values that only repeat another."""
        return Copies(self.graph.fx, self.graph.regions)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective with its wait, in the order they start."""
        started = [n for n in self.nodes if ops.is_collective(n.target)]
        return [Collective(n, next(iter(n.users))) for n in started]

    @cached_property
    def gathers(self) -> list[Collective]:
        """The all-gathers, in the order they start."""
        return [c for c in self.collectives if c.is_gather]

    @cached_property
    def reductions(self) -> list[Collective]:
        """The reduce-scatters and all-reduces, in the order they start."""
        return [c for c in self.collectives if not c.is_gather]

    @cached_property
    def params(self) -> Mapping[str, tuple[Param, torch.dtype]]:
        """The parameters of the step by name, with the dtype that they are stored in."""
        if self._params is not None:
            return self._params
        return {param.name: (param, meta.tensor(node).dtype) for node, param in self.graph.params()}

    @cached_property
    def gathered(self) -> dict[Result, Param | None]:
        """The results of gathers and the kept inputs, with the sharded parameter that each one is; None when it is not one's."""
        found: dict[Result, Param | None] = {}
        for gather in self.gathers:
            for result, tensor in zip(gather.results, gather.tensors, strict=True):
                found[result] = self.param_behind(tensor)
        for node in self.graph.inputs:
            origin = meta.origin(node)
            if isinstance(origin, Kept):
                found[Result(node, 0)] = self.params.get(kept_parameter(origin), (None,))[0]
        return found

    @cached_property
    def reduced(self) -> dict[Result, str]:
        """The results of reductions that are returned as gradients, with the parameter's name."""
        names: dict[Result, str] = {}
        for node, role in self.graph.outputs:
            if isinstance(role, Grad):
                picked = picked_result(node)
                if picked is not None:
                    names[picked] = role.name
        return names

    def param_behind(self, node: fx.Node) -> Param | None:
        """The sharded parameter whose shard (or a cast of it) a value is; None when it is anything else."""
        leaves = self.reads.leaves_of(node)
        origin = meta.origin(leaves[0].node) if len(leaves) == 1 else None
        return origin if isinstance(origin, Param) and origin.placement == "shard" else None

    def spec(self, param: Param) -> ParamSpec:
        """Where a parameter's values live, for its shapes."""
        size = next(iter(self.graph.axes.values()), 1)
        dim = param.shard_dim if param.placement == "shard" else None
        dtype = self.params[param.name][1]
        return ParamSpec(param.name, (), param.shape, dtype, param.trainable, dim, size)

    def refuse(self, node: fx.Node, problem: str, region: Region | None = None) -> NoReturn:
        """Raise the error: ``%node in forward <problem>``, the user's source line and the nodes around."""
        where = self.graph.name if region is None else f"region '{region.name}' of {self.graph.name}"
        lines = [f"%{node.name} in {where} {problem}"]
        source = meta.source(node)
        if source:
            lines.append(f"  from {source}")
        around = self.nodes if region is None else list(region.fx.nodes)
        at = around.index(node)
        device = next((v.device.type for n in around for v in tensors(meta.value(n)) if v.device.type != "cpu"), "cpu")
        for shown in around[max(0, at - WINDOW) : at + WINDOW + 1]:
            lines.append(f"  {'>' if shown is node else ' '} {_line(shown, device)}")
        raise VerifyError("\n".join(lines))


def _line(node: fx.Node, device: str) -> str:
    try:
        return print_node(node, device)
    except Exception:  # a malformed node is what the error is about; it must not hide it
        return str(node.format_node())


def picked_result(node: fx.Node) -> Result | None:
    """The result of a ``zc.wait`` that a node picks; None when it does not."""
    source = calls.picked_from(node)
    return Result(source, calls.index(node)) if source is not None and source.target is ops.wait else None
