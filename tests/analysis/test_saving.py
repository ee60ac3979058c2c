"""What blocks may save: where they begin, and choices that are the best there are."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import fx, nn

from zcompile.analysis import saving
from zcompile.analysis.blocks import Block, forward_blocks, forward_nodes
from zcompile.analysis.saving import Saving, save_expensive, savings, structure, within
from zcompile.ir import edit, meta
from zcompile.ir.graph import Direction, Graph, Output
from zcompile.planner.trace import trace


class Residual(nn.Module):
    """A transformer's block without attention: norm in front, residual behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Residual() for _ in range(depth)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


def test_one_tensor_passes_from_block_to_block() -> None:
    joint = trace(Stack(3), torch.zeros(5, 8), world_size=1).captured.graph
    forward = forward_nodes(joint)
    blocks = forward_blocks(joint)
    assert [b.name for b in blocks] == ["layers.0", "layers.1", "layers.2"]
    for block in blocks:
        handed = saving.handed_on(block, forward)
        assert [tuple(meta.tensor(n).shape) for n in handed] == [(5, 8)]
        assert block.nodes[-1] in handed and str(block.nodes[-1].target) == "aten.add.Tensor"
    assert len({structure(b, forward) for b in blocks}) == 1


def test_a_model_without_a_list_has_no_blocks() -> None:
    joint = trace(nn.Sequential(nn.Linear(3, 3)), torch.zeros(2, 3), world_size=1).captured.graph
    assert forward_blocks(joint) == []  # its one block ends with the forward


# The choices. ---------------------------------------------------------------------------------------------------------


def random_block(seed: int) -> tuple[Block, set[fx.Node], set[int]]:
    """Elementwise and matrix operators over a few values; some of them are read by backward, the last by the next block."""
    draw = random.Random(seed)
    graph = fx.Graph()
    x = graph.placeholder("x")
    meta.set_value(x, torch.empty(4, 4))
    nodes: list[fx.Node] = []
    for _ in range(5):
        a, b = (draw.choice([x, *nodes[-3:]]) for _ in range(2))
        target = draw.choice([torch.ops.aten.mm.default, torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor])
        node = edit.call(graph, target, (a, b))
        if draw.random() < 0.3:
            wide = draw.choice([torch.float64, torch.float32, torch.float16])
            node = edit.call(graph, torch.ops.prims.convert_element_type.default, (node, wide))
            node = edit.call(graph, torch.ops.prims.convert_element_type.default, (node, torch.float32))
        nodes.append(node)
    last = nodes[-1]
    body = [n for n in graph.nodes if n.op == "call_function" and n in ancestors(last)]
    outside = edit.call(graph, torch.ops.aten.neg.default, (last,))
    needed = {i for i in range(len(body)) if draw.random() < 0.4}
    for index in needed:
        edit.call(graph, torch.ops.aten.sin.default, (body[index],))
    graph.output([outside])
    edit.erase_dead(graph, keep=lambda n: n.target is torch.ops.aten.sin.default)
    joint = Graph("m.joint", Direction.JOINT, graph)
    meta.set_roles(joint.output, [Output(0)])
    return Block("layers.0", tuple(body)), forward_nodes(joint), needed


def ancestors(node: fx.Node) -> set[fx.Node]:
    return {node}.union(*(ancestors(source) for source in node.all_input_nodes))


def cost_of(block: Block, saved: set[int], needed: set[int], free: set[fx.Node]) -> tuple[int, float]:
    """Bytes and nominal time of saving exactly these, by walking back from what backward needs."""
    place = {node: index for index, node in enumerate(block.nodes)}
    todo, again, used = list(needed), set(), set()
    while todo:
        index = todo.pop()
        if block.nodes[index] in free:
            continue
        if index in saved:
            used.add(index)
        elif index not in again:
            again.add(index)
            todo += [place[n] for n in block.nodes[index].all_input_nodes if n in place]
    num_bytes = sum(meta.num_bytes(meta.value(block.nodes[i])) for i in used)
    return num_bytes, sum(saving._us(saving._recompute_cost(block.nodes[i])) for i in again)


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_beats_those_found(seed: int) -> None:
    block, forward, needed = random_block(seed)
    free = saving.handed_on(block, forward)
    found = savings(block, forward)
    for choice in found:
        assert cost_of(block, set(choice.saved), needed, free) == pytest.approx((choice.num_bytes, choice.us))
    assert [c.num_bytes for c in found] == sorted({c.num_bytes for c in found})
    assert [c.us for c in found] == sorted({c.us for c in found}, reverse=True)
    places = range(len(block.nodes))
    everything = [
        cost_of(block, set(some), needed, free)
        for size in range(len(places) + 1)
        for some in itertools.combinations(places, size)
    ]
    assert found[0].num_bytes == min(b for b, _ in everything)
    assert found[-1].us == pytest.approx(min(us for _, us in everything))
    for price in saving._PRICES:
        best = min(b + us * price for b, us in everything)
        assert min(c.num_bytes + c.us * price for c in found) <= best * 1.001 + len(places)


def test_expensive_results_are_not_computed_again() -> None:
    for seed in range(6):
        block, forward, _ = random_block(seed)
        assert save_expensive(block, forward).flops == 0


def test_a_budget_is_kept_at_the_least_time() -> None:
    ladder = [
        Saving(frozenset(), 0, 10.0, 1e9),
        Saving(frozenset({1}), 60, 2.0, 0.0),
        Saving(frozenset({1, 2}), 100, 0.0, 0.0),
    ]

    def spent(limit: float) -> tuple[int, float, list[int]]:
        chosen = within([ladder] * 3, limit)
        return sum(c.num_bytes for c in chosen), sum(c.us for c in chosen), [c.num_bytes for c in chosen]

    assert spent(300) == (300, 0.0, [100, 100, 100])
    assert spent(299) == (260, 2.0, [60, 100, 100])
    assert spent(180) == (180, 6.0, [60, 60, 60])
    assert spent(179) == (120, 14.0, [0, 60, 60])
    assert spent(0) == (0, 30.0, [0, 0, 0])
    assert spent(-1) == (0, 30.0, [0, 0, 0])  # as few as there can be
