"""Regions compiled with Inductor, each distinct structure once a process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from zcompile import compat
from zcompile.ir import edit, meta
from zcompile.ir.graph import Direction, Graph, Region, copy_fx
from zcompile.ir.text import print_graph

#: takes a list of tensors, which it clears, and returns the region's results
Compiled = Callable[[list[torch.Tensor]], Sequence[Any]]

#: compiled regions of this process by their text: equal text means equal structure, types and device
_CACHE: dict[str, Compiled] = {}


def compile_region(region: Region) -> Compiled:
    """Compile a region, or find it compiled already."""
    text = print_graph(Graph("region.forward", Direction.FORWARD, region.fx))
    text += str({t.device for n in region.inputs for t in _tensors(meta.value(n))})  # the text names no device index
    if text not in _CACHE:
        _CACHE[text] = _compile(region, hashlib.sha256(text.encode()).hexdigest())
    return _CACHE[text]


def _compile(region: Region, tag: str) -> Compiled:
    inputs = [meta.tensor(n) for n in region.inputs]
    values = [v for n in region.fx.nodes for v in _tensors(meta.value(n))]
    module = fx.GraphModule(nn.Module(), copy_fx(region.fx))
    compiled = compat.inductor_compile(module, inputs, edit.fake_mode_of(values), tag)
    shapes = {i: tuple(v.shape) for i, v in enumerate(map(meta.value, region.results)) if 1 in v.shape and v.dim() > 1}
    return _with_shapes(compiled, shapes) if shapes else compiled


def _with_shapes(compiled: Compiled, shapes: dict[int, tuple[int, ...]]) -> Compiled:
    """Give results their size-1 dimensions back.

    Inductor of torch 2.11 drops those of a kept reduction dimension when it fuses reductions of different orders (the
    gradient of an RMSNorm weight); in a whole graph a view always follows, as the result of a region it does not.
    """

    def run(args: list[torch.Tensor]) -> Sequence[Any]:
        results = list(compiled(args))
        for index, shape in shapes.items():
            if results[index].dim() != len(shape):
                results[index] = results[index].view(shape)
        return results

    return run


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
