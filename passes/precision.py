"""Gives low-precision parameters fp32 masters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Grad, Graph
from zcompile.ir.types import FLOATS, dtype_name
from zcompile.pipeline import JointPass, Stats


@dataclass(frozen=True)
class Precision(JointPass):
    """Make the parameters of one dtype fp32, cast where they are read; their gradients are cast back.

    The graph was captured with parameters in the compute dtype, so every upcast of the model itself is in it.

    Before and after::

        %w: bf16[8, 4] = param 'w' of [8, 4]
        %mm: bf16[2, 4] = aten.mm(%x, %w)
        return grad 'w' %g

        %w: f32[8, 4] = param 'w' of [8, 4]
        %w_bf16: bf16[8, 4] = prims.convert_element_type(%w, bf16)
        %mm: bf16[2, 4] = aten.mm(%x, %w_bf16)
        %g_f32: f32[8, 4] = prims.convert_element_type(%g, f32)
        return grad 'w' %g_f32

    Exact in itself: the same low-precision values are computed with. The shard pass moves the casts onto the shards.

    Attributes:
        dtype: the compute dtype, ``bf16`` or ``f16``.
    """

    name: ClassVar[str] = "precision"
    dtype: str = "bf16"

    def run(self, target: Graph, stats: Stats) -> None:
        if self.dtype not in ("bf16", "f16"):
            raise PassError(f"precision dtype is '{self.dtype}'; it must be bf16 or f16")
        low = FLOATS[self.dtype]
        masters = set()
        for node, param in target.params():
            if meta.tensor(node).dtype == low:
                masters.add(param.name)
                _cast_reads(target, node, low)
                stats["parameters with masters"] += 1
        outputs = target.outputs
        for index, (value, role) in enumerate(outputs):
            if isinstance(role, Grad) and role.name in masters:
                made = value if value.op != "placeholder" else target.inputs[-1]
                with target.fx.inserting_after(made):  # right there: a cast at the end would hold every reduction back
                    up = edit.call(target.fx, _CAST, (value, torch.float32), name=f"{value.name}_f32", like=value)
                meta.set_backward(up)
                outputs[index] = (up, role)
                stats["gradients cast"] += 1
        target.set_outputs(outputs)


_CAST = torch.ops.prims.convert_element_type.default


def _cast_reads(graph: Graph, node: fx.Node, low: torch.dtype) -> None:
    readers = list(node.users)
    value = meta.tensor(node)
    meta.set_value(node, edit.empty(value, value.shape, torch.float32))
    if not readers:
        return
    with graph.fx.inserting_before(graph.body[0] if graph.body else graph.output):
        cast = edit.call(graph.fx, _CAST, (node, low), name=f"{node.name}_{dtype_name(low)}")
    for reader in readers:
        reader.replace_input_with(node, cast)
