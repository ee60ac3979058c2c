"""What makes a graph a graph: names, order, vocabulary, inputs with origins, outputs with roles, pure regions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from zcompile import compat, ops
from zcompile.ir import meta
from zcompile.ir.graph import Kept, Offloaded, Param, Region, Saved
from zcompile.ir.operators import operator_name
from zcompile.ir.printer import describe
from zcompile.verify.inference import Inference, agree, type_name, type_of
from zcompile.verify.subject import Subject

_Refuse = Callable[[fx.Node, str], Any]


def check_structure(subject: Subject, inference: Inference) -> None:
    """Check what every later check relies on: order, names, vocabulary, origins, roles and region calls."""
    graph = subject.graph
    _check_nodes(subject.nodes, subject.refuse, inference)
    _check_inputs(subject)
    _check_outputs(subject)
    for name, region in graph.regions.items():
        nodes = list(region.fx.nodes)
        if region.name != name:
            subject.refuse(subject.nodes[-1], f"belongs to a graph that lists region '{region.name}' as '{name}'")

        def refuse(node: fx.Node, problem: str, region: Region = region) -> Any:
            subject.refuse(node, problem, region)

        _check_nodes(nodes, refuse, inference)
        for node in nodes:
            if ops.is_zc(node.target) or node.target is ops.region_call:
                refuse(node, f"calls {operator_name(node.target)}; regions hold compute only")
    for node in subject.nodes:
        if node.target is ops.region_call:
            _check_region_call(subject, node)


def check_types(subject: Subject, inference: Inference) -> None:
    """Check the recorded type of every call against what its fake kernel makes of its arguments."""
    for region in subject.graph.regions.values():
        for node in region.fx.nodes:
            problem = inference.check(node) if node.op == "call_function" else None
            if problem:
                subject.refuse(node, problem, region)
    for node in subject.nodes:
        if node.op == "call_function" and node.target is not ops.region_call:
            problem = inference.check(node)
            if problem:
                subject.refuse(node, problem)


def _check_nodes(nodes: list[fx.Node], refuse: _Refuse, inference: Inference) -> None:
    """What holds for the top level and for regions alike."""
    names: set[str] = set()
    before: set[fx.Node] = set()
    body_begun = False
    for node in nodes:
        if node.name in names:
            refuse(node, "has the name of an earlier node; names are unique")
        names.add(node.name)
        for source in node.all_input_nodes:
            if source not in before:
                refuse(node, f"reads %{source.name}, which comes later or is not in the graph")
        before.add(node)
        if node.op == "placeholder":
            if body_begun:
                refuse(node, "is an input after the body began; inputs come first")
            if not isinstance(meta.value(node), torch.Tensor):
                refuse(node, "is an input without a tensor type")
        elif node.op == "output":
            if node is not nodes[-1]:
                refuse(node, "is the output but not the last node")
            returned = node.args[0] if node.args else None
            if not isinstance(returned, (list, tuple)) or not all(isinstance(n, fx.Node) for n in returned):
                refuse(node, "returns something other than a list of nodes")
        else:
            body_begun = True
            _check_target(node, refuse, inference)
    if not nodes or nodes[-1].op != "output":
        refuse(nodes[-1], "is the last node but not the output")


def _check_target(node: fx.Node, refuse: _Refuse, inference: Inference) -> None:
    target: Any = node.target
    if node.op != "call_function":
        refuse(node, f"is a {node.op}; a graph holds calls of operators only")
    if target is ops.region_call:
        return
    if not inference.knows(target):
        refuse(node, f"calls {operator_name(target)}, which is no operator that graphs may hold")
    if compat.is_overload(target) and compat.is_mutating(target):
        refuse(node, f"calls {operator_name(target)}, which writes into its argument; graphs are functional")
    if target is operator.getitem and isinstance(node.args[0], fx.Node):
        val, index = meta.value(node.args[0]), node.args[1]
        if isinstance(val, (list, tuple)) and not (isinstance(index, int) and 0 <= index < len(val)):
            refuse(node, f"picks result {index} of %{node.args[0].name}, which has {len(val)}")


def _check_inputs(subject: Subject) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in subject.graph.inputs:
        origin = meta.origin(node)
        if origin is None:
            subject.refuse(node, "is an input that does not say what it is")
        key = describe(origin)
        if key in seen:
            subject.refuse(node, f"is {key}, and so is %{seen[key].name}; each input comes once")
        seen[key] = node
        shape = tuple(meta.tensor(node).shape)
        if isinstance(origin, Param) and origin.placement != "shard" and shape != origin.shape:
            subject.refuse(
                node,
                f"is the whole parameter '{origin.name}' of shape {list(origin.shape)} but has shape {list(shape)}",
            )


def _check_outputs(subject: Subject) -> None:
    output = subject.graph.output
    returned: Any = output.args[0]
    roles = meta.roles(output)
    if len(returned) != len(roles):
        subject.refuse(output, f"returns {len(returned)} values with {len(roles)} roles")
    seen: set[str] = set()
    for node, role in zip(returned, roles, strict=True):
        if describe(role) in seen:
            subject.refuse(node, f"is returned as {describe(role)}, which another value is already; each comes once")
        seen.add(describe(role))
        if not isinstance(meta.value(node), torch.Tensor):
            subject.refuse(
                node, f"is returned as {describe(role)} but is {type_name(type_of(meta.value(node)))}, not a tensor"
            )
        direction = subject.graph.direction.value
        if (isinstance(role, (Saved, Offloaded)) and direction != "forward") or (
            isinstance(role, Kept) and direction == "joint"
        ):
            subject.refuse(node, f"is returned as {describe(role)} by a {direction} graph")


def _check_region_call(subject: Subject, node: fx.Node) -> None:
    name: Any = node.args[0]
    region = subject.graph.regions.get(name)
    if region is None:
        known = ", ".join(subject.graph.regions) or "none"
        subject.refuse(node, f"calls region '{name}', which the graph does not have; it has {known}")
    args: Any = node.args[1]
    inputs = region.inputs
    if len(args) != len(inputs):
        subject.refuse(node, f"calls region '{name}' with {len(args)} arguments; it takes {len(inputs)}")
    for arg, wanted in zip(args, inputs, strict=True):
        if not isinstance(arg, fx.Node):
            subject.refuse(node, f"passes {arg!r} to region '{name}' for %{wanted.name}; regions take values of nodes")
        have, want = type_of(meta.value(arg)), type_of(meta.value(wanted))
        if not agree(want, have, layout=True):
            subject.refuse(
                node,
                f"passes %{arg.name} of type {type_name(have)} to region '{name}' for %{wanted.name} of type {type_name(want)}",
            )
    recorded = type_of(meta.value(node))
    results = tuple(type_of(meta.value(n)) for n in region.results)
    if not isinstance(meta.value(node), (list, tuple)) or not agree(results, recorded, layout=True):
        subject.refuse(node, f"is recorded as {type_name(recorded)} but region '{name}' returns {type_name(results)}")


def called_nodes(subject: Subject) -> Iterable[tuple[fx.Node, Region | None]]:
    """Every node of a graph and of its regions, with the region."""
    for node in subject.nodes:
        yield node, None
    for region in subject.graph.regions.values():
        for node in region.fx.nodes:
            yield node, region
