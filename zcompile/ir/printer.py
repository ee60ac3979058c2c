"""Graph to text: one line a node, its type right after its name, nothing that differs between machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch import fx

from zcompile import ops
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import (
    Buffer,
    Grad,
    Graph,
    Input,
    InputGrad,
    InputMutation,
    Kept,
    Mutation,
    Offloaded,
    Origin,
    Output,
    Param,
    Region,
    Role,
    Saved,
    Step,
    Tangent,
)
from zcompile.ir.operators import operator_name, returns_list, returns_many, returns_nothing
from zcompile.ir.types import literal, tensors, type_text

#: the word in front of each origin's or role's name or index
WORDS: dict[type[Any], str] = {
    Param: "param",
    Buffer: "buffer",
    Input: "input",
    Tangent: "tangent",
    Saved: "saved",
    Kept: "kept",
    Offloaded: "offloaded",
    Output: "output",
    Grad: "grad",
    InputGrad: "input_grad",
    Mutation: "mutation",
    InputMutation: "input_mutation",
}


def print_step(step: Step) -> str:
    """The text of a step: its graphs, forward first."""
    return "\n".join(print_graph(g) for g in step.graphs)


def print_graph(graph: Graph) -> str:
    """The text of a graph, without a newline at the end. The same graph gives the same text on every machine."""
    device = _device(graph)
    lines = [_header(graph, device), "  inputs:"]
    lines.extend(f"    {print_node(node, device)}" for node in graph.inputs)
    for region in graph.regions.values():
        lines.extend(_region(region, device))
    lines.append("  body:")
    lines.extend(_body(graph.body, device))
    lines.append(f"  {print_node(graph.output, device)}")
    return "\n".join(line.rstrip() for line in lines)


def print_region(region: Region) -> str:
    """The text of a region, without a newline at the end."""
    devices = [t.device.type for node in region.fx.nodes for t in tensors(meta.value(node))]
    return "\n".join(_region(region, next((d for d in devices if d != "cpu"), "cpu")))


def print_node(node: fx.Node, device: str = "cpu") -> str:
    """The line of one node of a graph, without indentation; a node with several results shows its own name.

    Args:
        node: a node of the top level, or a placeholder or compute node of a region.
        device: the device type that is not printed.
    """
    if node.op == "output":
        outputs = zip_longest(calls.tensors(node), meta.roles(node))
        return "return " + ", ".join(f"{describe(role)} {literal(value)}" for value, role in outputs)
    if node.op == "placeholder":
        return f"%{node.name}: {type_text(meta.value(node), device)} = {_origin(meta.origin(node))}"
    return f"{_targets(node, [], device)}{_call(node)}{_tags(node)}"


def describe(what: Origin | Role | None) -> str:
    """The short text of an origin or role: ``param 'w'``, ``output 0``, ``grad 'w'``; ``unknown`` for None."""
    if what is None:
        return "unknown"
    name = what.index if isinstance(what, (Input, Tangent, Output, InputGrad, InputMutation)) else what.name
    return f"{WORDS[type(what)]} {name!r}"


def _header(graph: Graph, device: str) -> str:
    text = f"graph {graph.name}"
    if graph.axes:
        text += "  axis " + ", ".join(f"{name}={size}" for name, size in graph.axes.items())
    return text if device == "cpu" else f"{text}  device {device}"


def _device(graph: Graph) -> str:
    """The first device type other than cpu among the graph's values; cpu without one."""
    for g in (graph.fx, *(r.fx for r in graph.regions.values())):
        for node in g.nodes:
            for t in tensors(meta.value(node)):
                if t.device.type != "cpu":
                    return t.device.type
    return "cpu"


def _origin(origin: Origin | None) -> str:
    text = describe(origin)
    if not isinstance(origin, Param):
        return text
    if origin.placement != "full":
        text += " replicate" if origin.placement == "replicate" else f" shard({origin.shard_dim})"
    text += f" of {literal(list(origin.shape))}"
    if origin.unit:
        text += f" unit {origin.unit!r}"
    return text if origin.trainable else f"{text} frozen"


def _region(region: Region, device: str) -> Iterator[str]:
    inputs = ", ".join(f"%{n.name}: {type_text(meta.value(n), device)}" for n in region.inputs)
    yield f"  region {region.name}({inputs}):"
    yield from _body([n for n in region.fx.nodes if n.op not in ("placeholder", "output")], device)
    yield "    return " + ", ".join(literal(value) for value in _returned(region.fx))


def _returned(graph: fx.Graph) -> Sequence[Any]:
    return next((calls.tensors(n) for n in reversed(graph.nodes) if n.op == "output"), ())


def _body(nodes: Sequence[fx.Node], device: str) -> Iterator[str]:
    position = 0
    while position < len(nodes):
        node = nodes[position]
        results = _results_after(nodes, position)
        position += 1 + len(results)
        yield f"    {_targets(node, results, device)}{_call(node)}{_tags(node)}"


def _results_after(nodes: Sequence[fx.Node], position: int) -> list[fx.Node]:
    """The ``getitem`` nodes right after a node, when its line can name them instead of the node itself."""
    node = nodes[position]
    val = meta.value(node)
    if not isinstance(val, (list, tuple)) or not val or ops.is_start(node.target):
        return []
    is_list = node.target is ops.region_call or returns_list(node.target)
    if len(val) == 1 and (not is_list or isinstance(val[0], (list, tuple))):
        return []  # one name on the line would read as the node's own
    picked: dict[int, fx.Node] = {}
    for item in nodes[position + 1 : position + 1 + len(node.users)]:
        if not edit.is_getitem(item) or item.args[0] is not node or _tags(item) != _tags(node):
            return []
        index = item.args[1]
        if not isinstance(index, int) or not 0 <= index < len(val) or index in picked:
            return []
        picked[index] = item
    return list(picked.values()) if len(picked) == len(node.users) else []


def _targets(node: fx.Node, results: list[fx.Node], device: str) -> str:
    val = meta.value(node)
    if results:
        by_index = {item.args[1]: item for item in results}
        return ", ".join(_target(by_index.get(i), v, node, device) for i, v in enumerate(val)) + " = "
    if val is None and not node.users and returns_nothing(node.target):
        return ""
    shown = "bucket" if ops.is_start(node.target) else type_text(val, device)
    return f"%{node.name}: {shown} = "


def _target(item: fx.Node | None, val: Any, node: fx.Node, device: str) -> str:
    """One result of a node with several: its name and type, or ``_`` when nobody reads it."""
    if item is not None:
        return f"%{item.name}: {type_text(meta.value(item), device)}"
    inferable = returns_many(node.target) or returns_list(node.target) or node.target is ops.region_call
    return "_" if inferable else f"_: {type_text(val, device)}"


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"attr {node.target!r}"
    if node.target is ops.region_call and len(node.args) == 2:
        name, passed = calls.region(node)
        return f"call {name}({', '.join(literal(a) for a in passed)})"
    args = [literal(a) for a in node.args] + [f"{name}={literal(a)}" for name, a in node.kwargs.items()]
    return f"{operator_name(node.target)}({', '.join(args)})"


def _tags(node: fx.Node) -> str:
    index = meta.region(node)
    tag = " !recompute" if meta.recompute(node) else " !save" if meta.saved(node) else ""
    return tag + ("" if index is None else f" @{index}")
