"""Cutting a joint graph: nothing is copied or marked that need not be."""

import pytest
import torch

from tests.ir.captured import MODELS, joint_graph
from zcompile.capture.split import split
from zcompile.ir import edit, meta
from zcompile.passes import parse
from zcompile.passes.replay import replay


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
