"""The graphs of a training step: an fx graph with named inputs and outputs, mesh axes and regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import fx

from zcompile import ops
from zcompile.ir import calls, meta


class Direction(Enum):
    """Which part of a training step a graph is."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"


# What a placeholder is. -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A parameter, by its canonical name.

    Attributes:
        name: dotted name in the user's model.
        shape: the logical full shape.
        placement: ``"full"`` before the shard pass, ``"replicate"``, or ``"shard"`` (the padded local shard).
        shard_dim: the sharded dimension of ``shape``; -1 unless ``placement == "shard"``.
        unit: the unit that the parameter belongs to; empty before the unit plan.
        trainable: whether it wants a gradient.
    """

    name: str
    shape: tuple[int, ...]
    placement: str = "full"
    shard_dim: int = -1
    unit: str = ""
    trainable: bool = True


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model, read at every call."""

    name: str


@dataclass(frozen=True)
class Input:
    """A tensor leaf of the call's arguments, by position among the tensor leaves."""

    index: int


@dataclass(frozen=True)
class Tangent:
    """The gradient that arrives at output ``index``."""

    index: int


@dataclass(frozen=True)
class Saved:
    """A forward value that backward reads; an output of forward, an input of backward."""

    name: str


@dataclass(frozen=True)
class Kept:
    """A gathered parameter that stays alive from forward to backward; an output of forward, an input of backward."""

    name: str


@dataclass(frozen=True)
class Offloaded:
    """A saved value that is on the host from forward to backward; an output of forward, an input of backward."""

    name: str


Origin = Param | Buffer | Input | Tangent | Saved | Kept | Offloaded


# What an output is. ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Tensor leaf ``index`` of what the user's forward returned."""

    index: int


@dataclass(frozen=True)
class Grad:
    """The gradient of a parameter."""

    name: str


@dataclass(frozen=True)
class InputGrad:
    """The gradient of input ``index``."""

    index: int


@dataclass(frozen=True)
class Mutation:
    """The new value of buffer ``name``, to be copied into it."""

    name: str


@dataclass(frozen=True)
class InputMutation:
    """The new value of input ``index``, to be copied into it."""

    index: int


Role = Output | Grad | InputGrad | Mutation | InputMutation | Saved | Kept | Offloaded


@dataclass
class Region:
    """A run of compute between collectives: a pure graph, called by name from the top level."""

    name: str
    fx: fx.Graph

    @property
    def inputs(self) -> list[fx.Node]:
        """The placeholders, in argument order."""
        return [n for n in self.fx.nodes if n.op == "placeholder"]

    @property
    def results(self) -> list[fx.Node]:
        """The returned nodes, in order."""
        return calls.tensors(output_node(self.fx))


@dataclass
class Graph:
    """One graph of a step.

    Attributes:
        name: for people, such as ``llama.forward``.
        direction: joint, forward or backward.
        fx: the nodes. Placeholders carry an ``Origin``, the output node a ``Role`` for each returned value.
        axes: mesh axes by name, with their sizes; empty in a graph with nothing distributed in it.
        regions: distinct regions by name; empty before outlining.
    """

    name: str
    direction: Direction
    fx: fx.Graph
    axes: dict[str, int] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)

    @property
    def inputs(self) -> list[fx.Node]:
        """The placeholders, in order."""
        return [n for n in self.fx.nodes if n.op == "placeholder"]

    @property
    def body(self) -> list[fx.Node]:
        """The nodes that do something, in order."""
        return [n for n in self.fx.nodes if n.op not in ("placeholder", "output")]

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return output_node(self.fx)

    @property
    def outputs(self) -> list[tuple[fx.Node, Role]]:
        """Each returned node with its role, in order."""
        return list(zip(calls.tensors(self.output), meta.roles(self.output), strict=True))

    def set_outputs(self, outputs: list[tuple[fx.Node, Role]]) -> None:
        """Replace what the graph returns."""
        self.output.args = ([n for n, _ in outputs],)
        meta.set_roles(self.output, [r for _, r in outputs])

    def params(self) -> Iterator[tuple[fx.Node, Param]]:
        """Each parameter placeholder with its description."""
        for node in self.inputs:
            origin = meta.origin(node)
            if isinstance(origin, Param):
                yield node, origin

    def find(self, origin: Origin) -> fx.Node | None:
        """The placeholder with this origin; parameters match by name."""
        for node in self.inputs:
            have = meta.origin(node)
            if have == origin or (isinstance(have, Param) and isinstance(origin, Param) and have.name == origin.name):
                return node
        return None

    def copy(self) -> Graph:
        """An independent copy; values' types are shared, nodes are not."""
        regions = {name: Region(name, copy_fx(r.fx)) for name, r in self.regions.items()}
        return Graph(self.name, self.direction, copy_fx(self.fx), dict(self.axes), regions)

    def snapshot(self, earlier: Graph) -> Graph:
        """A copy to look at: fx graphs that are as they were in ``earlier``, another snapshot, are shared with it."""
        regions: dict[str, Region] = {}
        for name, region in self.regions.items():
            old = earlier.regions.get(name)
            regions[name] = old if old is not None and same_fx(region.fx, old.fx) else Region(name, copy_fx(region.fx))
        nodes = earlier.fx if same_fx(self.fx, earlier.fx) else copy_fx(self.fx)
        return Graph(self.name, self.direction, nodes, dict(self.axes), regions)

    def __str__(self) -> str:
        from zcompile.ir.text import print_graph

        return print_graph(self)


@dataclass
class Step:
    """The graphs of one captured training step, as the step passes see them.

    Attributes:
        forward: what ``model(...)`` runs.
        backward: what ``loss.backward()`` runs; None when nothing needs a gradient.
    """

    forward: Graph
    backward: Graph | None

    @property
    def graphs(self) -> list[Graph]:
        """The graphs that exist, forward first."""
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    def copy(self) -> Step:
        """An independent copy."""
        return Step(self.forward.copy(), None if self.backward is None else self.backward.copy())

    def __str__(self) -> str:
        return "\n".join(str(g) for g in self.graphs)


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of an fx graph."""
    return next(n for n in reversed(graph.nodes) if n.op == "output")


def copy_fx(graph: fx.Graph) -> fx.Graph:
    """A copy of an fx graph that keeps names and metadata."""
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copied = env[node] = new.node_copy(node, env.__getitem__)
        if copied.name != node.name:
            copied.name = node.name
    return new


def same_fx(graph: fx.Graph, copied: fx.Graph) -> bool:
    """Whether an fx graph is still what it was when it was copied: names, operators, arguments and metadata, in order."""
    if len(graph.nodes) != len(copied.nodes):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    for node, twin in zip(graph.nodes, copied.nodes, strict=True):
        if (node.op, node.target, node.name) != (twin.op, twin.target, twin.name):
            return False
        if node.meta.keys() != twin.meta.keys() or any(twin.meta[key] is not node.meta[key] for key in node.meta):
            return False
        if not _same_argument(node.args, twin.args, twins) or not _same_argument(node.kwargs, twin.kwargs, twins):
            return False
        twins[node] = twin
    return True


def _same_argument(a: Any, b: Any, twins: Mapping[fx.Node, fx.Node]) -> bool:
    """A copy has the very literals of the original, so that 1 and 1.0 are told apart."""
    if isinstance(a, fx.Node):
        return twins.get(a) is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same_argument(x, y, twins) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_argument(value, b[key], twins) for key, value in a.items())
    if isinstance(a, slice):
        return all(_same_argument(getattr(a, end), getattr(b, end), twins) for end in ("start", "stop", "step"))
    return a is b


def is_compute(node: fx.Node) -> bool:
    """Whether a node is computation of the model: an operator or region call that is not a ``zc`` operator."""
    return node.op == "call_function" and not ops.is_zc(node.target)


def with_unit(param: Param, unit: str) -> Param:
    """The same parameter as a member of ``unit``."""
    return replace(param, unit=unit)
