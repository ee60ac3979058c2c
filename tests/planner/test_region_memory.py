"""The memory inside a region: that of the interpreter exactly, and what a compiler fuses away."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from zcompile import compat
from zcompile.analysis.memory import RegionMemory, tensor_bytes
from zcompile.ir import meta
from zcompile.ir.graph import Region
from zcompile.lower import interpret

aten = torch.ops.aten
prims: Any = torch.ops.prims


class Live(TorchDispatchMode):
    """Counts the bytes of storages that some tensor object holds."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.live = self.peak = 0

    def watch(self, tensor: Tensor) -> None:
        key, num_bytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if not self.holders.get(key):
            self.live += num_bytes
        self.holders[key] = self.holders.get(key, 0) + 1
        weakref.finalize(tensor, self.drop, key, num_bytes)

    def drop(self, key: int, num_bytes: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.live -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, Tensor):
                self.watch(tensor)
        self.peak = max(self.peak, self.live)
        return out


def attention(x: fx.Proxy, w: fx.Proxy, v: fx.Proxy) -> tuple[Any, ...]:
    """Views that keep a base alive, a softmax, a value with two readers, several results in one storage."""
    y = aten.mm.default(x, w)
    a, b = aten.slice.Tensor(y, 1, 0, 32), aten.slice.Tensor(y, 1, 32, 64)
    m = aten.amax.default(a, [1], True)
    e = aten.exp.default(aten.sub.Tensor(a, m))
    p = aten.div.Tensor(e, aten.sum.dim_IntList(e, [1], True))
    q = aten.mul.Tensor(aten.mul.Tensor(p, 2.0), v)
    z = aten.mm.default(aten.permute.default(q, [1, 0]), aten.relu.default(b))
    return aten.view.default(z, [-1]), p, aten.permute.default(z, [1, 0])


def region(function: Any, *shapes: tuple[int, ...]) -> Region:
    traced = fx.Tracer().trace(function)
    mode = compat.new_fake_mode()
    with mode:
        values: dict[fx.Node, Any] = {}
        shape = iter(shapes)
        for node in traced.nodes:
            if node.op == "placeholder":
                values[node] = torch.empty(next(shape))
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = node.target(*args, **kwargs)
            if node in values:
                meta.set_value(node, values[node])
    return Region("r", traced)


@pytest.mark.parametrize("dying", [(), (0,), (0, 1, 2)])
def test_every_value_of_the_interpreter_counts(dying: tuple[int, ...]) -> None:
    shapes = ((64, 16), (16, 64), (64, 32))
    r = region(attention, *shapes)
    inputs = [torch.randn(s) for s in shapes]
    kept = [t for i, t in enumerate(inputs) if i not in dying]
    run = interpret.build(r.fx)
    with torch.no_grad(), Live() as live:
        for tensor in inputs:
            live.watch(tensor)
        del tensor
        before = live.peak = live.live
        results = run(inputs)
    assert len(results) == 3 and len(kept) == 3 - len(dying)
    bytes_of = [4 * s[0] * s[1] for s in shapes]
    memory = RegionMemory(r, fused=False)
    assert memory.extra([((i,), bytes_of[i]) for i in dying]) == live.peak - before
    sizes = [own.num_bytes for own in memory.storages.owned]
    assert sorted(sizes) == [32 * 32 * 4, 64 * 32 * 4]
    assert memory.storages.results[0] == memory.storages.results[2], "two results in one storage"


def test_what_fuses_takes_no_memory() -> None:
    """exp and the multiplication exist in no buffer; what a matmul reads and gives, and what is returned, do."""
    r = region(attention, (64, 16), (16, 64), (64, 32))
    fused, whole = RegionMemory(r, fused=True).extra(()), RegionMemory(r, fused=False).extra(())
    big = 64 * 32 * 4
    # y, relu(b), q, p and z: m and the sum are rows
    rows = 2 * 64 * 4
    assert 2 * big + big * 3 <= fused + rows and fused <= 2 * big + 3 * big + 32 * 32 * 4 + rows
    assert fused < whole or fused == whole


def put(table: Any, index: Any, values: Any) -> Any:
    """The gradient of an embedding, as decomposed."""
    rows, index = aten.full_like.default(table, 0.0), prims.convert_element_type.default(index, torch.int64)
    return (aten._unsafe_masked_index_put_accumulate.default(rows, aten.ge.Scalar(index, 0), [index], values),)


def test_what_is_written_into_is_there_once() -> None:
    """A compiler fills the memory of the result with what it is a copy of."""
    r = region(put, (512, 64), (16, 1), (16, 64))
    table, rest = 512 * 64 * 4, 16 * (8 + 1)
    assert RegionMemory(r, fused=False).extra(()) == 2 * table + rest
    assert table <= RegionMemory(r, fused=True).extra(()) <= table + rest


def test_a_broadcast_tensor_takes_what_it_stores() -> None:
    assert tensor_bytes(torch.empty(1, 8).expand(1000, 8)) == 32
    assert tensor_bytes(torch.empty(4, 6)[:, :3]) == 84  # its last element is the 21st
    assert tensor_bytes(torch.empty(0, 6)) == 0
