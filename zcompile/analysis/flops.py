"""Floating-point operations of matmuls, attention and convolutions, by torch's own formulas."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils import flop_counter

from zcompile import compat, ops
from zcompile.ir import meta


def is_attention(node: fx.Node) -> bool:
    """Whether a node is one of torch's attention operators, forward or backward, of any device."""
    target: Any = node.target
    return (
        node.op == "call_function"
        and compat.is_overload(target)
        and "attention" in str(target)
        and {"query", "key", "value"} <= set(compat.argument_names(target))
    )


def node_flops(node: fx.Node) -> float:
    """Flops of a matmul, attention or convolution; 0 for every other operator. A multiplication with its addition counts as two.

    Attention with ``is_causal`` counts the half of the square that is computed.
    """
    if node.op != "call_function" or not compat.is_overload(node.target):
        return 0.0
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), meta.value)
    if is_attention(node):
        return _attention_flops(dict(zip(compat.argument_names(target), args, strict=False)) | dict(kwargs))
    if target in _LINEAR_CROSS_ENTROPY:
        return _linear_cross_entropy_flops(dict(zip(compat.argument_names(target), args, strict=False)) | dict(kwargs))
    formula = flop_counter.flop_registry.get(target.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=meta.value(node)))


_LINEAR_CROSS_ENTROPY = frozenset(
    {ops.linear_cross_entropy, ops.linear_cross_entropy_backward, ops.linear_cross_entropy_with_grads}
)


def _linear_cross_entropy_flops(given: dict[str, Any]) -> float:
    """The matmul of the logits, in backward once more; and those of the gradients that are wanted."""
    matmul = 2.0 * given["hidden"].numel() * given["weight"].shape[0]
    return matmul * (1 + sum(given["wanted"][:2]) if "wanted" in given else 1)


def _attention_flops(given: dict[str, Any]) -> float:
    query, key, value = (list(given[name].shape) for name in ("query", "key", "value"))
    key[1] = value[1] = query[1]  # queries that share a key have products of their own
    grad = next((given[name] for name in ("grad_out", "grad_out_") if name in given), None)
    if grad is None:
        flops = flop_counter.sdpa_flop_count(query, key, value)
    else:
        flops = flop_counter.sdpa_backward_flop_count(list(grad.shape), query, key, value)
    return flops * (0.5 if given.get("is_causal") else 1.0)
