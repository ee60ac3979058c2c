"""Gradients that are cast up are not rounded to the compute dtype before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile.analysis.chains import is_view
from zcompile.ir import edit, meta
from zcompile.ir.graph import Grad, Graph
from zcompile.pipeline import JointPass, Stats

_aten: Any = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
#: products, with the overload that gives what it added up in a dtype of its own
_PRODUCTS: dict[Any, Any] = {_aten.mm.default: _aten.mm.dtype, _aten.bmm.default: _aten.bmm.dtype}
#: what products of these dtypes are added up in, and what products can be asked for
_WIDE = torch.float32
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WideGradients(JointPass):
    """Let products that are gradients of fp32 parameters give fp32 themselves, and drop casts down that are undone.

    Before and after::

        %g: bf16[8, 4] = aten.mm(%x_t, %gy)
        %g_t: bf16[4, 8]{1, 4} = aten.permute(%g, [1, 0])
        %g_t_f32: f32[4, 8]{1, 4} = prims.convert_element_type(%g_t, f32)
        %s_low: bf16[8] = prims.convert_element_type(%s, bf16)
        %s_f32: f32[8] = prims.convert_element_type(%s_low, f32)
        return grad 'w' %g_t_f32, grad 'scale' %s_f32

        %g_wide: f32[8, 4] = aten.mm.dtype(%x_t, %gy, f32)
        %g_t: f32[4, 8]{1, 4} = aten.permute(%g_wide, [1, 0])
        return grad 'w' %g_t, grad 'scale' %s

    A matrix unit adds products of bf16 up in fp32 anyway. To cast its rounded result reads and writes 6 bytes for each parameter; to
    write the sum itself takes hardly longer than to write what it rounds to. Only values with no other reader change, so nothing is
    saved or read in a wider dtype. Exact but for that rounding, which is left out.

    Attributes:
        device: the type of device whose products are asked for fp32; others have no such kernel.
    """

    name: ClassVar[str] = "wide-gradients"
    device: str = "cuda"

    @property
    def exact(self) -> bool:
        return False

    def run(self, target: Graph, stats: Stats) -> None:
        grads = dict.fromkeys(value for value, role in target.outputs if isinstance(role, Grad))
        for grad in grads:
            if meta.tensor(grad).device.type == self.device:
                _widen(target.fx, grad, stats)


def _widen(graph: fx.Graph, grad: fx.Node, stats: Stats) -> None:
    """Let a gradient not be rounded on its way, where it is."""
    path: list[fx.Node] = []  # from what rounds it to what is returned
    node, cast = grad, None
    while node.op == "call_function" and (node is grad or len(node.users) == 1):
        path.insert(0, node)
        if cast is None and _is_cast(node, of=_LOW, to=(_WIDE,)):
            if meta.tensor(node).stride() != meta.tensor(node.all_input_nodes[0]).stride():
                return  # a part of a product: the cast takes it out
            cast = node
        elif cast is not None and (node.target in _PRODUCTS or _is_cast(node, of=(_WIDE,), to=_LOW)):
            _rewrite(graph, path, cast, stats)
            return
        elif not is_view(node):
            return
        node = node.all_input_nodes[0]


def _is_cast(node: fx.Node, *, of: tuple[torch.dtype, ...], to: tuple[torch.dtype, ...]) -> bool:
    return node.target is _CAST and meta.tensor(node).dtype in to and meta.tensor(node.all_input_nodes[0]).dtype in of


def _rewrite(graph: fx.Graph, path: list[fx.Node], cast: fx.Node, stats: Stats) -> None:
    """Let the first of a path not round, and views of it be views of the wide value, so that the cast has nothing left to do."""
    first = path[0]
    if first.target is _CAST:
        (wide,) = first.all_input_nodes
        stats["casts dropped"] += 1
    else:
        with graph.inserting_before(first):
            product, args = _PRODUCTS[first.target], (*first.args, _WIDE)
            wide = edit.call(graph, product, args, name=f"{first.name}_wide", like=first)
        meta.copy_split(wide, first)
        stats["products widened"] += 1
    first.replace_all_uses_with(wide)
    for node in path[1:]:
        meta.set_value(node, edit.infer(node.target, node.args, node.kwargs))  # type: ignore[arg-type]
    cast.replace_all_uses_with(cast.all_input_nodes[0])
    for node in (cast, first):
        graph.erase_node(node)
