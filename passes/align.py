"""Pads large matrix products to sizes that fast kernels take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile.analysis.aliases import Aliases
from zcompile.analysis.flops import node_flops
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph
from zcompile.pipeline import JointPass, Stats

_aten: Any = torch.ops.aten
#: the products, with how many arguments stand before their factors: what is added to them
_PRODUCTS: dict[Any, int] = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
#: what vector loads and tensor cores want the rows of matrices to be multiples of
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Align(JointPass):
    """Pad the matrices of large products with zeros where their rows in memory are no multiple of 16 bytes.

    Before and after, for a head with 50257 classes and the gradient of its weight::

        %w_t: bf16[2048, 50257]{1, 2048} = aten.permute(%w, [1, 0])
        %logits: bf16[8192, 50257] = aten.mm(%h, %w_t)
        ...
        %of_w: bf16[50257, 2048] = aten.mm(%of_logits_t, %h)

        %w_padded: bf16[50264, 2048] = aten.constant_pad_nd(%w, [0, 0, 0, 7]) !recompute
        %w_padded_t: bf16[2048, 50264]{1, 2048} = aten.permute(%w_padded, [1, 0])
        %logits_aligned: bf16[8192, 50264] = aten.mm(%h, %w_padded_t)
        %logits: bf16[8192, 50257]{50264, 1} = aten.slice.Tensor(%logits_aligned, 1, 0, 50257)
        ...
        %of_w_aligned: bf16[50264, 2048] = aten.mm(%of_logits_padded_t, %h)
        %of_w: bf16[50257, 2048] = aten.slice.Tensor(%of_w_aligned, 0, 0, 50257)

    Padding of what the step computes fuses into the kernel that computes it; a parameter is copied. Factors of forward are padded
    again in backward: no more is saved than without. Results are parts of padded ones, without a copy; one that is returned, or
    read by somebody who needs the strides that it had, is copied, and the copy read by all. Exact but for rounding: zeros are
    added, and other kernels run.

    Attributes:
        device: the type of device whose products are aligned.
        intensity: flops for each byte of its three matrices from which a product is aligned: copies of them are cheap beside it.
            All its sizes are at least as large then, in bf16. While its memory moves a byte, an H100 can do 295 in bf16, an H200 206
            and an A100 156.
    """

    name: ClassVar[str] = "align"
    device: str = "cuda"
    intensity: float = 256

    @property
    def exact(self) -> bool:
        return False

    def run(self, target: Graph, stats: Stats) -> None:
        if self.intensity < 0:
            raise PassError(f"intensity is {self.intensity} flops a byte; it must not be negative")
        products = [node for node in target.body if node.target in _PRODUCTS and self._pays(node)]
        returned = _returned(target, products)
        padding = _Padding(target.fx, stats)
        for node in products:
            missing = _missing(node)
            if any(missing):
                padding.rewrite(node, *missing, returned=node in returned)

    def _pays(self, node: fx.Node) -> bool:
        """Whether a product runs on the device, with fixed sizes, and does enough flops for the bytes that it moves."""
        matrices = [meta.tensor(node), *map(meta.tensor, _factors(node))]
        if matrices[0].device.type != self.device or not all(m.is_floating_point() for m in matrices):
            return False
        if not all(isinstance(size, int) for m in matrices for size in m.shape):
            return False
        if any(stride == 0 and size > 1 for m in matrices for size, stride in zip(m.shape, m.stride(), strict=True)):
            return False  # one matrix for a whole batch, which padding would repeat
        flops = node_flops(node)
        return flops > 0 and flops >= self.intensity * sum(map(meta.num_bytes, matrices))


def _factors(node: fx.Node) -> list[Any]:
    first = _PRODUCTS[node.target]
    return list(node.args[first : first + 2])


def _is_flipped(matrix: torch.Tensor) -> bool:
    """Whether columns lie densely in memory, and rows do not; for a batch, in each matrix of it."""
    return matrix.stride(-1) != 1 and matrix.stride(-2) == 1


def _missing(node: fx.Node) -> tuple[int, int, int]:
    """By how much rows, inner size and columns of a product are to grow: those that lie densely in one of the three matrices."""
    a, b = map(meta.tensor, _factors(node))
    multiple = _ALIGNMENT_BYTES // a.element_size()
    dense = {"rows" if _is_flipped(a) else "inner", "inner" if _is_flipped(b) else "columns", "columns"}
    sizes = {"rows": a.shape[-2], "inner": a.shape[-1], "columns": b.shape[-1]}
    rows, inner, columns = (-size % multiple if name in dense else 0 for name, size in sizes.items())
    return rows, inner, columns


def _returned(graph: Graph, products: list[fx.Node]) -> set[fx.Node]:
    """The products whose memory the graph returns."""
    if not products:
        return set()
    aliases = Aliases.of_graph(graph)
    shared = aliases.join([aliases.of(value) for value, _ in graph.outputs])
    return {node for node in products if not shared.isdisjoint(aliases.of(node))}


@dataclass
class _Padding:
    """Pads matrices, each once for all products that want the same of it."""

    graph: fx.Graph
    stats: Stats
    padded: dict[tuple[fx.Node, int, int], fx.Node] = field(default_factory=dict)
    transposed: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def rewrite(self, node: fx.Node, rows: int, inner: int, columns: int, *, returned: bool) -> None:
        """Compute a product with so many more rows and columns, and so much larger an inner size; its readers read their part."""
        value = meta.tensor(node)
        a, b = _factors(node)
        with self.graph.inserting_before(node):
            added = [self._addend(x, node, rows, columns) for x in node.args[: _PRODUCTS[node.target]]]
            factors = (self._matrix(a, node, rows, inner), self._matrix(b, node, inner, columns))
            part = self._call(node, node.target, *added, *factors, name=f"{node.name}_aligned", **node.kwargs)
            for dim, more in ((value.dim() - 2, rows), (value.dim() - 1, columns)):
                if more:
                    part = self._call(
                        node, _aten.slice.Tensor, part, dim, 0, value.shape[dim], name=f"{node.name}_part"
                    )
            has_moved = meta.tensor(part).stride() != value.stride()
            if has_moved and (returned or not edit.restride(node, meta.tensor(part))):
                dense = {"name": f"{node.name}_dense", "memory_format": torch.contiguous_format}
                part = self._call(node, _aten.clone.default, part, **dense)
                self.stats["results copied"] += 1
        node.replace_all_uses_with(part)
        self.graph.erase_node(node)
        self.stats["products aligned"] += 1

    def _call(self, like: fx.Node, op: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        node = edit.call(self.graph, op, args, kwargs, name=name, like=like)
        meta.copy_split(node, like)
        return node

    def _matrix(self, matrix: fx.Node, like: fx.Node, rows: int, columns: int) -> fx.Node:
        """A matrix with zeros behind its rows and columns, padded as it lies in memory: nothing is turned around."""
        if not rows and not columns:
            return matrix
        source, is_turned = matrix, False
        while _is_transpose(source):
            source, is_turned = source.all_input_nodes[0], not is_turned
        if _is_flipped(meta.tensor(source)):
            source, is_turned = self._transpose(source, like), not is_turned
        key = (source, columns, rows) if is_turned else (source, rows, columns)
        if key not in self.padded:
            self.padded[key] = self._pad(*key, like)
            self.stats["matrices padded"] += 1
        return self._transpose(self.padded[key], like) if is_turned else self.padded[key]

    def _addend(self, addend: Any, like: fx.Node, rows: int, columns: int) -> fx.Node:
        """What is added to a product, padded in the dimensions that are not broadcast."""
        shape = meta.tensor(addend).shape
        more_rows = rows if len(shape) > 1 and shape[-2] != 1 else 0
        more_columns = columns if shape and shape[-1] != 1 else 0
        return self._pad(addend, more_rows, more_columns, like) if more_rows or more_columns else addend

    def _pad(self, node: fx.Node, rows: int, columns: int, like: fx.Node) -> fx.Node:
        amounts = [0, columns, 0, rows] if rows else [0, columns]
        padded = self._call(like, _aten.constant_pad_nd.default, node, amounts, name=f"{node.name}_padded")
        if not meta.is_backward(padded) and (not meta.is_tagged(padded) or meta.saved(padded)):
            meta.set_recompute(padded)  # backward pads what is saved anyway
        return padded

    def _transpose(self, node: fx.Node, like: fx.Node) -> fx.Node:
        if node not in self.transposed:
            order = list(range(meta.tensor(node).dim()))
            order[-2:] = order[:-3:-1]
            self.transposed[node] = self._call(like, _aten.permute.default, node, order, name=f"{node.name}_t")
        return self.transposed[node]


def _is_transpose(node: fx.Node) -> bool:
    """Whether a node turns each matrix of its input around, and nothing else."""
    if node.target is not _aten.permute.default:
        return False
    order = [d % meta.tensor(node).dim() for d in node.args[1]]  # type: ignore[union-attr]
    return len(order) > 1 and order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]
