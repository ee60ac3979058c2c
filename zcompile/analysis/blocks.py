"""The repeated blocks of a model in its joint graph: which forward nodes belong to each."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from zcompile.analysis.chains import is_view, param_chains
from zcompile.analysis.units import unit_key
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Grad, Graph, InputGrad, Param


@dataclass(frozen=True)
class Block:
    """The forward of one block of a list of blocks.

    Attributes:
        name: its module path, such as ``layers.3``.
        nodes: its forward nodes in order, without parameter chains.
    """

    name: str
    nodes: tuple[fx.Node, ...]


def forward_nodes(joint: Graph) -> set[fx.Node]:
    """What the forward's own results are computed from, and all results of these operators: those that only backward picks, too."""
    todo = [value for value, role in joint.outputs if value is not None and not isinstance(role, (Grad, InputGrad))]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found | {user for node in found for user in node.users if edit.is_getitem(user)}


def forward_blocks(joint: Graph) -> list[Block]:
    """Cut the forward into its blocks, each where the fewest bytes pass from one to the next.

    A block begins somewhere between the last node that needs parameters of what comes before it and the first that needs its
    own. Of the places between, the last with the fewest bytes that live across it is taken: behind the residual addition of
    a transformer, where one tensor crosses. What is in front of the first block and behind the last belongs to none. Linear.

    Args:
        joint: a joint graph before the split.
    """
    forward, chains = forward_nodes(joint), param_chains(joint.fx)
    order = [node for node in joint.body if node in forward and node not in chains]
    needs = [_blocks_needed(node, chains) for node in order]
    crossing = _crossing_bytes(order)
    starts: list[tuple[str, int]] = []
    seen: set[str] = set()
    last = -1  # the last node that needed any parameter
    for index, names in enumerate(needs):
        new = [name for name in names if name not in seen]
        if new:
            seen.update(new)
            places = range(last + 1, index + 1)
            starts.append((new[-1], min(places, key=lambda i: (crossing[i], -i))))
        if names:
            last = index
    blocks = []
    for (name, start), (_, stop) in zip(starts, [*starts[1:], ("", len(order))], strict=True):
        if name.rpartition(".")[2].isdigit() and stop < len(order):
            blocks.append(Block(name, tuple(order[start:stop])))
    return blocks


def storage(node: fx.Node) -> fx.Node:
    """What a value is a view or a pick of, in the end; itself, if it is neither."""
    while node.op == "call_function" and (is_view(node) or edit.is_getitem(node)):
        source = calls.source(node)
        if edit.is_getitem(node) and not is_view(source):
            return node  # a result of its own
        node = source
    return node


def _blocks_needed(node: fx.Node, chains: dict[fx.Node, fx.Node]) -> list[str]:
    """The units whose parameters a node reads, by module path."""
    names = []
    for source in node.all_input_nodes:
        origin = meta.origin(chains.get(source, source))
        if isinstance(origin, Param):
            names.append(unit_key(origin.name)[0])
    return names


def _crossing_bytes(order: list[fx.Node]) -> list[int]:
    """For each node, the bytes of earlier results that it or a later node reads. Views count as what they are views of."""
    position = {node: index for index, node in enumerate(order)}
    last_read: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        for source in node.all_input_nodes:
            root = storage(source)
            if root in position:
                last_read[root] = index
    change = [0] * (len(order) + 1)
    for root, index in last_read.items():
        size = meta.num_bytes(meta.value(root))
        change[position[root] + 1] += size
        change[index + 1] -= size
    total, crossing = 0, []
    for delta in change[:-1]:
        total += delta
        crossing.append(total)
    return crossing
