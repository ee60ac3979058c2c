"""Parameter chains: views and casts of one parameter alone, computed again wherever they are needed and never saved."""

from __future__ import annotations

import torch
from torch import fx

from zcompile.ir import edit, meta
from zcompile.ir.graph import Param
from zcompile.ir.operators import is_random


def is_view(node: fx.Node) -> bool:
    """Whether an operator returns views of its input (``permute``, ``slice``, ``split``, ...)."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def param_chains(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes that depend on one parameter alone and are as good as that parameter, mapped to its placeholder.

    A node belongs to a chain when its only input node is a parameter or a node of a chain, and it is a view, or computes no
    fewer elements than it reads (a cast). Random operators never do.
    """
    chains: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or len(node.all_input_nodes) != 1:
            continue
        source = node.all_input_nodes[0]
        root = source if isinstance(meta.origin(source), Param) else chains.get(source)
        if root is not None and _extends(node, source):
            chains[node] = root
    return chains


def _extends(node: fx.Node, source: fx.Node) -> bool:
    if edit.is_getitem(node) or is_view(node):
        return True
    out, inp = meta.value(node), meta.value(source)
    if not isinstance(out, torch.Tensor) or not isinstance(inp, torch.Tensor):
        return False
    return out.numel() >= inp.numel() and not is_random(node)
