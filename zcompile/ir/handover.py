"""Gathered parameters that one graph hands on to the next: what they are called, and the edits that hand them on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from zcompile.ir import meta
from zcompile.ir.graph import Graph, Kept, Step


def kept_value(param: str, dtype: torch.dtype) -> Kept:
    """What a parameter gathered in a dtype is called: it may be kept in two."""
    return Kept(f"{param}:{str(dtype).removeprefix('torch.')}")


def kept_parameter(kept: Kept) -> str:
    """The name of the parameter that a kept value is."""
    return kept.name.rpartition(":")[0] or kept.name


def hand_on(step: Step, values: Mapping[Kept, fx.Node]) -> dict[Kept, fx.Node]:
    """Return gathered values of forward as ``kept``, and add an input to backward for each.

    Args:
        step: has a backward, which does not take these values yet. Releases stay as they are.
        values: forward's nodes.

    Returns:
        backward's inputs.
    """
    assert step.backward is not None, "there is no backward to keep values for"
    outputs = step.forward.outputs
    step.forward.set_outputs(outputs + [(node, kept) for kept, node in values.items()])
    return take(step.backward, values, "kept")


def take(graph: Graph, values: Mapping[Kept, fx.Node], suffix: str) -> dict[Kept, fx.Node]:
    """Add an input to a graph for each gathered value of another place, and return them.

    Args:
        graph: takes none of these values yet.
        values: nodes of the same types; an input is called after its node.
        suffix: of the inputs' names.
    """
    anchor = next(iter(graph.fx.nodes))
    inputs = {}
    for kept, value in values.items():
        with graph.fx.inserting_before(anchor):
            node = inputs[kept] = graph.fx.placeholder(f"{value.name}_{suffix}")
        meta.set_value(node, meta.value(value))
        meta.set_origin(node, kept)
    return inputs
