"""The split: one joint graph becomes a forward and a backward graph, with nothing of a parameter saved between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from zcompile import compat, ops
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import (
    Buffer,
    Direction,
    Grad,
    Graph,
    Input,
    InputGrad,
    InputMutation,
    Mutation,
    Origin,
    Param,
    Role,
    Saved,
    Step,
    Tangent,
    copy_fx,
    output_node,
)
from zcompile.ir.operators import is_random

#: what the partitioner calls the random states that backward reads
_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_STATE = "rng_state_output"


def split(joint: Graph, fake_mode: Any) -> Step:
    """Cut a joint graph in two with the min-cut partitioner.

    Parameters, and what was tagged as must-recompute, are read again in backward instead of being saved. Gradients that forward
    makes are saved, whatever was tagged.

    Args:
        joint: a joint graph; it is not changed.
        fake_mode: the fake mode of its values.

    Returns:
        the step; ``backward`` is None when nothing has a gradient.
    """
    name = joint.name.removesuffix(".joint")
    outputs = joint.outputs
    num_forward = sum(not isinstance(role, (Grad, InputGrad)) for _, role in outputs)
    if num_forward == len(outputs):
        forward = Graph(f"{name}.forward", Direction.FORWARD, copy_fx(joint.fx))
        for node in forward.inputs:
            if isinstance(meta.origin(node), Tangent):
                forward.fx.erase_node(node)
        return Step(forward, None)
    statics = [i for i, node in enumerate(joint.inputs) if isinstance(meta.origin(node), Param)]
    origins = {node.name: meta.origin(node) for node in joint.inputs}
    unread = {
        node.name for node in joint.inputs if not node.users
    }  # there because of what is written to it, or of its gradient
    module = fx.GraphModule(nn.Module(), copy_fx(joint.fx))
    for node in module.graph.nodes:
        if node.target in ops.RUN_ONCE:
            meta.set_saved(node)
    forward_module, backward_module = compat.min_cut_split(module, num_forward, statics, fake_mode)
    _name_random_states(forward_module.graph, backward_module.graph)
    _drop_needless_states(forward_module.graph, backward_module.graph)
    roles = [role for _, role in outputs]
    forward = _adopt(forward_module.graph, f"{name}.forward", Direction.FORWARD, roles[:num_forward], origins, unread)
    backward = _adopt(
        backward_module.graph, f"{name}.backward", Direction.BACKWARD, roles[num_forward:], origins, unread
    )
    _save_bases(forward, backward)
    return Step(forward, backward)


def _save_bases(forward: Graph, backward: Graph) -> None:
    """Save what a value is a view of, where both have all elements, and view it in backward.

    Transposes that backward wants are at the end of forward: its last region would make them for every layer.
    """
    outputs = forward.outputs
    views = {role.name: node for node, role in outputs if isinstance(role, Saved)}
    inputs = {origin.name: n for n in backward.inputs if isinstance(origin := meta.origin(n), Saved)}
    position = {node: index for index, node in enumerate(backward.fx.nodes)}
    for name, old in list(inputs.items()):
        chain = _view_chain(views[name])
        if not chain or not old.users:
            continue
        base = chain[-1].all_input_nodes[0]
        if base.name not in inputs:
            with backward.fx.inserting_before(old):
                new = inputs[base.name] = backward.fx.placeholder(base.name)
            meta.set_value(new, meta.value(base))
            meta.set_origin(new, Saved(base.name))
            outputs.append((base, Saved(base.name)))
        with backward.fx.inserting_before(min(old.users, key=position.__getitem__)):
            env = {base: inputs[base.name]}
            for view in reversed(chain):
                env[view] = backward.fx.node_copy(view, env.__getitem__)
        old.replace_all_uses_with(env[chain[0]])
        backward.fx.erase_node(old)
        outputs = [(node, role) for node, role in outputs if role != Saved(name)]
    forward.set_outputs(outputs)
    edit.erase_dead(forward.fx, keep=lambda node: not _is_view(node))


def _view_chain(node: fx.Node) -> list[fx.Node]:
    """A view, what it is a view of if that is one as well, and so on, while all have as many elements."""
    chain: list[fx.Node] = []
    while _is_view(node) and len(node.all_input_nodes) == 1 and isinstance(meta.value(node), torch.Tensor):
        source = meta.value(node.all_input_nodes[0])
        if not isinstance(source, torch.Tensor) or source.numel() != meta.tensor(node).numel():
            break
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain


def _adopt(
    graph: fx.Graph, name: str, direction: Direction, roles: list[Role], origins: dict[str, Any], unread: set[str]
) -> Graph:
    """A graph of the partitioner as ours: origins of placeholders by name, saved values by name, parameters never among them."""
    result = Graph(name, direction, copy_fx(graph))
    values: list[fx.Node | None] = [*calls.tensors(output_node(result.fx))]
    written = {_target(role) for role in roles} - {None}
    kept: list[tuple[fx.Node, Role]] = []
    for index, value in enumerate(values):
        if value is None:
            continue
        role = roles[index] if index < len(roles) else Saved(value.name)
        if isinstance(role, Saved) and isinstance(origins.get(value.name), Param):
            continue
        if isinstance(role, Saved):
            value = _unaliased(value)
        if isinstance(role, Saved) and meta.origin(_owner(value)) in written:
            value = _clone(result.fx, value)  # the old value is saved, and the call goes on to write the new one
        kept.append((value, role))
    result.set_outputs(kept)
    for alias in [n for n in reversed(result.body) if n.target in _ALIASES and not n.users]:
        result.fx.erase_node(alias)
    for node in result.body:
        meta.clear_recompute(node)
        if meta.value(node) is None and compat.is_higher_order(node.target):
            meta.set_value(node, _random_result(node))
    for node in result.inputs:
        origin = origins.get(node.name)
        saved = direction is Direction.BACKWARD and not isinstance(origin, (Param, Tangent))
        meta.set_origin(node, Saved(node.name) if saved or origin is None else origin)
        if not node.users and direction is Direction.FORWARD and node.name not in unread:
            result.fx.erase_node(node)
    return result


def _unaliased(value: fx.Node) -> fx.Node:
    """What a value is an alias of: an alias is made where attention's backward wants it, and would hold the value until then."""
    while value.target in _ALIASES:
        value = calls.source(value)
    return value


def _name_random_states(forward: fx.Graph, backward: fx.Graph) -> None:
    """Saved values are matched by name; the partitioner matches the random states that it saves by position only."""
    states = [
        n
        for n in calls.tensors(output_node(forward))
        if n is not None and edit.is_getitem(n) and _saves_state(n.args[0])
    ]
    wanted = [n for n in backward.nodes if n.op == "placeholder" and n.name.startswith(_STATE)]
    for state, placeholder in zip(states, wanted, strict=True):
        state.name = placeholder.name


def _drop_needless_states(forward: fx.Graph, backward: fx.Graph) -> None:
    """Operators that could draw random numbers, and do not with these arguments, need no state (on a GPU, reading it waits).

    Such as attention without dropout, where it is computed again.
    """
    dropped: set[str] = set()
    for node in list(forward.nodes):
        if _saves_state(node):
            plain = _inner_call(forward, node, node.args[0], node.args[1:])
            if is_random(plain):
                forward.erase_node(plain)
                continue
            for item in list(node.users):
                if calls.index(item) == 0:
                    dropped.add(item.name)
                    output = output_node(forward)
                    output.args = ([value for value in calls.tensors(output) if value is not item],)
                else:
                    item.replace_all_uses_with(plain)
                forward.erase_node(item)
            forward.erase_node(node)
    for placeholder in [n for n in backward.nodes if n.op == "placeholder" and n.name in dropped]:
        for node in list(placeholder.users):
            node.replace_all_uses_with(_inner_call(backward, node, node.args[1], node.args[2:]))
            backward.erase_node(node)
        backward.erase_node(placeholder)


def _inner_call(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """What runs inside of a node that saves or restores a random state, as a node before it."""
    with graph.inserting_before(node):
        return edit.call(graph, target, args, node.kwargs, like=node)


def _saves_state(node: Any) -> bool:
    return node.target is compat.higher_order_operator("run_and_save_rng_state")


def _random_result(node: fx.Node) -> Any:
    """The type of a random operator's result inside of what saves or restores its random state."""
    if _saves_state(node):
        state = next(meta.value(u) for u in node.users if edit.is_getitem(u) and calls.index(u) == 0)
        return (state, edit.infer(node.args[0], node.args[1:], node.kwargs))  # type: ignore[arg-type]
    return edit.infer(node.args[1], node.args[2:], node.kwargs)  # type: ignore[arg-type]


def _target(role: Role) -> Origin | None:
    """The buffer or input that a returned value is written to."""
    if isinstance(role, Mutation):
        return Buffer(role.name)
    return Input(role.index) if isinstance(role, InputMutation) else None


def _owner(node: fx.Node) -> fx.Node:
    """What a value is a view of, in the end; itself, if it is no view."""
    while node.op == "call_function" and node.all_input_nodes:
        if not _is_view(node) and not edit.is_getitem(node):
            break
        node = node.all_input_nodes[0]
    return node


def _is_view(node: fx.Node) -> bool:
    return compat.is_overload(node.target) and any(compat.shared_arguments(node.target))


def _clone(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A copy of a value at the end of a graph."""
    with graph.inserting_before(output_node(graph)):
        return edit.call(graph, torch.ops.aten.clone.default, (value,))
