"""Explicit causal masks become ``is_causal=True``, so that attention gets its flash kernel back.

It works on Dynamo's graph, before autograd: one call of ``scaled_dot_product_attention`` is rewritten instead of a forward and
a backward kernel with different arguments. Hugging Face models traced by Dynamo build such a mask from ``arange`` alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zcompile import compat

#: masks with more elements are not examined: computing them would cost more memory than attention itself
MAX_MASK_ELEMENTS = 1 << 28


def recognise_causal_masks(module: fx.GraphModule) -> int:
    """Rewrite every attention whose mask is the causal one, in place; returns how many.

    A mask counts as causal when it is computed from constants alone, and what it then is equals the lower triangle in every
    batch and head: boolean, or additive with 0 inside and the lowest value (or minus infinity) outside.
    """
    known: dict[fx.Node, bool] = {}
    values: dict[fx.Node, Any] = {}
    rewritten = 0
    for node in module.graph.nodes:
        if not compat.is_attention(node.target):
            continue
        mask = _argument(node, 3, "attn_mask")
        if not isinstance(mask, fx.Node) or _argument(node, 5, "is_causal"):
            continue
        if mask not in known:
            known[mask] = _is_causal(mask, values)
        if known[mask]:
            node.args = (*node.args[:3], None, _argument(node, 4, "dropout_p") or 0.0, True)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "dropout_p", "is_causal")}
            rewritten += 1
    if rewritten:
        module.graph.eliminate_dead_code()
        module.recompile()
    return rewritten


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _is_causal(mask: fx.Node, values: dict[fx.Node, Any]) -> bool:
    example = mask.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.dim() < 2 or example.numel() > MAX_MASK_ELEMENTS:
        return False
    try:
        value = _evaluate(mask, values)
    except _Unknown:
        return False
    rows, columns = value.shape[-2:]
    inside = torch.ones(rows, columns, dtype=torch.bool, device=value.device).tril()
    if rows != columns:
        return False
    if value.dtype == torch.bool:
        return bool((value == inside).all())
    if not value.is_floating_point():
        return False
    outside = value <= torch.finfo(value.dtype).min
    return bool(((value == 0) == inside).all()) and bool((outside == ~inside).all())


class _Unknown(Exception):
    """A value that depends on an input, a parameter or a random number."""


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """The real value of a node that depends on constants alone."""
    order: list[fx.Node] = []
    stack = [(node, False)]
    seen: set[fx.Node] = set()
    while stack:
        current, expanded = stack.pop()
        if expanded:
            order.append(current)
        elif current not in seen and current not in values:
            seen.add(current)
            if current.op not in ("call_function", "call_method") or compat.is_random_call(current.target):
                raise _Unknown
            stack.append((current, True))
            stack.extend((source, False) for source in current.all_input_nodes)
    with torch.no_grad():
        for current in order:
            args, kwargs = fx.map_arg((current.args, current.kwargs), lambda n: values[n])
            if current.op == "call_method":
                values[current] = getattr(args[0], str(current.target))(*args[1:], **kwargs)
            else:
                function: Any = current.target
                values[current] = function(*args, **kwargs)
    return values[node]
