"""Regions compiled with Inductor, each distinct structure once a process."""

from __future__ import annotations

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
        _CACHE[text] = _compile(region)
    return _CACHE[text]


def _compile(region: Region) -> Compiled:
    inputs = [meta.tensor(n) for n in region.inputs]
    values = [v for n in region.fx.nodes for v in _tensors(meta.value(n))]
    module = fx.GraphModule(nn.Module(), copy_fx(region.fx))
    return compat.inductor_compile(module, inputs, edit.fake_mode_of(values))


def _tensors(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
