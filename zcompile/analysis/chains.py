"""Parameter chains: views and casts of one parameter alone, computed again wherever they are needed and never saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zcompile import compat
from zcompile.ir import edit, meta
from zcompile.ir.graph import Param


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


#: arguments that switch an operator's randomness off, with the values that do
_OFF: dict[str, Any] = {"dropout_p": 0.0, "p": 0.0, "dropout": 0.0, "train": False, "training": False}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: its operator does, and its arguments do not switch that off."""
    target: Any = node.target
    if not compat.is_overload(target) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = compat.argument_names(target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        given.setdefault("dropout_p", 0.0)  # the schema's default
    return not any(name in given and given[name] == off for name, off in _OFF.items())
