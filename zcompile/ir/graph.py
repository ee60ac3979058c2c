"""The graphs of a training step: an fx graph with named inputs and outputs, mesh axes and regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

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
        env[node] = new.node_copy(node, lambda n: env[n])
        env[node].name = node.name
    return new


def is_compute(node: fx.Node) -> bool:
    """Whether a node is computation of the model: an operator or region call that is not a ``zc`` operator."""
    return node.op == "call_function" and not ops.is_zc(node.target)


def with_unit(param: Param, unit: str) -> Param:
    """The same parameter as a member of ``unit``."""
    return replace(param, unit=unit)
