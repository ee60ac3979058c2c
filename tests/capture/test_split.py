"""Cutting a joint graph: nothing is copied or marked that need not be."""

import pytest
import torch
from torch import nn

from tests.ir.captured import MODELS, joint_graph
from zcompile.capture.split import split
from zcompile.ir import edit, meta
from zcompile.ir.graph import Saved
from zcompile.passes import parse
from zcompile.passes.replay import replay
from zcompile.planner.trace import trace


@pytest.mark.parametrize("case", MODELS)
def test_saved_values_are_not_copied(case: str) -> None:
    joint = joint_graph(case)
    clones = [n for n in joint.body if n.target is torch.ops.aten.clone.default]
    step = split(joint, edit.fake_mode_of([meta.tensor(joint.inputs[0])]))
    assert len([n for n in step.forward.body if n.target is torch.ops.aten.clone.default]) <= len(clones)


def test_nodes_to_recompute_lose_their_mark_and_are_not_saved() -> None:
    joint = joint_graph("plain")
    replay(joint, parse("recompute-params"))
    marked = {n.name for n in joint.body if meta.recompute(n)}
    assert marked
    step = split(joint, edit.fake_mode_of([meta.tensor(joint.inputs[0])]))
    assert not any(meta.recompute(n) for g in step.graphs for n in g.body)
    assert step.backward is not None and not marked & {n.name for n in step.backward.inputs}


class Turned(nn.Module):
    """GPT-2's linear layer: the gradient of its weight reads the input turned around, which the split makes in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.addmm(self.bias, x.view(-1, 8).tanh(), self.weight).view(x.shape)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Turned() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_the_end_of_forward_does_not_grow_with_the_layers() -> None:
    """Backward makes the views that it wants, of values which are saved as they are."""
    sizes = []
    for layers in (3, 6):
        step = trace(Stack(layers), torch.zeros(2, 3, 8), world_size=1).step
        saved = [node for node, role in step.forward.outputs if isinstance(role, Saved)]
        assert saved and all(meta.tensor(node).is_contiguous() for node in saved)
        sizes.append([len(region.fx.nodes) for region in step.forward.regions.values()])
    assert sizes[0] == sizes[1], "forward has the same distinct regions whatever the depth"
