"""What computation costs, whatever it runs on: the kernels that a region becomes, with their flops and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile import compat
from zcompile.analysis.chains import is_view
from zcompile.analysis.flops import is_attention, node_flops
from zcompile.analysis.pieces import moved_bytes
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Region
from zcompile.ir.types import dtype_name, tensors


@dataclass(frozen=True)
class Cost:
    """Work.

    Attributes:
        flops: floating-point operations of matmuls, attention and convolutions, by dtype (``bf16``, ``f32``). Elementwise work
            is not counted: its bytes take longer everywhere.
        bytes_read: bytes that come from memory.
        bytes_written: bytes that go there.
    """

    flops: Mapping[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes moved."""
        return self.bytes_read + self.bytes_written

    @property
    def num_flops(self) -> float:
        """Flops of all dtypes."""
        return sum(self.flops.values())

    def __add__(self, other: Cost) -> Cost:
        return total((self, other))


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of costs."""
    flops: Counter[str] = Counter()
    read = written = 0
    for cost in costs:
        flops.update(cost.flops)
        read += cost.bytes_read
        written += cost.bytes_written
    return Cost(dict(flops), read, written)


def node_cost(node: fx.Node) -> Cost:
    """What one operator costs when it runs by itself: it reads its inputs and writes its results."""
    flops = node_flops(node)
    read = sum(_bytes_read(node, source) for source in node.all_input_nodes)
    return Cost({_dtype(node): flops} if flops else {}, read, meta.num_bytes(meta.value(node)))


@dataclass(frozen=True)
class Kernel:
    """What a region runs as one piece: a matmul, attention, convolution, or a group of operators that fuse.

    Attributes:
        kind: ``matmul``, ``attention``, ``convolution``, or ``memory`` for what only moves bytes.
        name: of its first node.
        cost: of the whole.
    """

    kind: str
    name: str
    cost: Cost


def region_cost(region: Region) -> Cost:
    """The work of one call of a region, counted at what its kernels read and write."""
    return total(kernel.cost for kernel in region_kernels(region))


def region_kernels(region: Region) -> list[Kernel]:
    """The kernels that a region becomes when elementwise operators and reductions fuse as Inductor fuses them.

    Matmuls, attention, convolutions, sorts and scatters are kernels of their own and bound the groups. Elementwise values are
    computed where they are read, unless a kernel of its own reads them, they are returned, or they read many others and are read
    several times. What is left, with reductions over rows, forms groups: those that feed each other or read the same. A group
    reads its inputs and writes what others read, each once. A reduction over other dimensions is a kernel of its own. Views,
    constants and picks cost nothing. Linear.
    """
    return _Fusion(region).kernels()


#: operators that fuse although torch does not tag them as pointwise
_FUSES = frozenset(
    "arange cat constant_pad_nd embedding empty empty_like expand fill full full_like gather index index_select iota lift_fresh_copy "
    "native_dropout native_dropout_backward new_empty new_full new_ones new_zeros ones ones_like rand randn rand_like randn_like "
    "scalar_tensor select_backward select_scatter slice_backward slice_scatter split_with_sizes_copy tril triu zeros "
    "zeros_like _to_copy _unsafe_index _unsafe_masked_index repeat roll flip inductor_random inductor_seed".split()
)
#: operators that reduce
_REDUCES = frozenset(
    "sum mean amax amin max min var var_mean std std_mean prod any all argmax argmin logsumexp norm linalg_vector_norm "
    "native_layer_norm native_group_norm _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "native_layer_norm_backward native_group_norm_backward nll_loss_forward".split()
)
#: operators that read only the rows of their first input that they pick
_PICKS = frozenset("embedding gather index index_select _unsafe_index _unsafe_masked_index".split())

#: an elementwise value that reads more values than the first, and is read several times, or more than the second, is stored
#: (``realize_reads_threshold`` and ``realize_acc_reads_threshold`` of Inductor)
_MAX_SHARED_READS, _MAX_READS = 4, 8


class _Fusion:
    """Groups the nodes of one region.

    A node's level counts the kernels that bound groups on the longest way to it. Only nodes of one level join, so that no group
    waits for itself.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.base: dict[fx.Node, fx.Node] = {}  # of a view or pick, what it is a part of
        self.level: dict[fx.Node, int] = {}
        self.reads: dict[fx.Node, dict[fx.Node, int]] = {}  # what computing a node reads: stored values, with the bytes
        self.stored: dict[fx.Node, str] = {}  # nodes whose value is in memory, with what makes them
        self.parent: dict[fx.Node, fx.Node] = {}  # union-find over stored nodes that fuse
        self.alike: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.forced = self._read_by_others()
        for node in region.fx.nodes:
            if node.op == "placeholder":
                self.base[node], self.level[node], self.stored[node] = node, 0, "input"
            elif node.op == "call_function":
                self._place(node)

    def _read_by_others(self) -> set[fx.Node]:
        """What must be stored because it is returned, or a kernel of its own reads it, itself or a view of it."""
        forced = set(self.region.results)
        for node in reversed(self.region.fx.nodes):
            if node.op == "call_function" and (
                (_is_part(node) and node in forced) or (not _is_part(node) and not _fuses(node))
            ):
                forced.update(node.all_input_nodes)
        return forced

    def _place(self, node: fx.Node) -> None:
        if _is_part(node):
            self.base[node] = self.base[node.all_input_nodes[0]]
            return
        self.base[node] = node
        reads = self.reads[node] = self._direct_reads(node)
        below = max((self.level[base] for base in reads), default=0)
        if not _fuses(node):
            self.level[node], self.stored[node] = below + 1, _kind(node)
        elif _reduces_across(node):
            self.level[node], self.stored[node] = below + 1, "memory"
        else:
            self.level[node] = below
            many = len(reads) > (_MAX_SHARED_READS if len(node.users) > 1 else _MAX_READS)
            if node in self.forced or _name(node) in _REDUCES or many:
                self.stored[node] = "group"
                self._join(node)

    def _direct_reads(self, node: fx.Node) -> dict[fx.Node, int]:
        reads: dict[fx.Node, int] = {}
        for source in node.all_input_nodes:
            base = self.base[source]
            found = {base: _bytes_read(node, source)} if base in self.stored else self.reads[base]
            for one, size in found.items():
                reads[one] = min(meta.num_bytes(meta.value(one)), reads.get(one, 0) + size)
        return reads

    def _join(self, node: fx.Node) -> None:
        """Put a stored node into the groups that it reads from, and into that which reads the same for as many elements."""
        self.parent[node] = node
        level, numel = self.level[node], _num_elements(node)
        for base in self.reads[node]:
            if base in self.parent and self.level[base] == level:
                self.parent[self._find(base)] = self._find(node)
            other = self.alike.setdefault((base, level, numel), node)
            self.parent[self._find(other)] = self._find(node)

    def _find(self, node: fx.Node) -> fx.Node:
        root = node
        while self.parent[root] is not root:
            root = self.parent[root]
        while self.parent[node] is not root:
            self.parent[node], node = root, self.parent[node]
        return root

    def kernels(self) -> list[Kernel]:
        """In the order of their first nodes."""
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node in self.parent:
            groups.setdefault(self._find(node), []).append(node)
        written = {self.base[node] for node in self.forced}
        for node, what in self.stored.items():
            if what != "input":
                group = self._find(node) if what == "group" else None
                written.update(b for b in self.reads[node] if b in self.parent and self._find(b) is not group)
        found = {
            nodes[0]: Kernel("memory", nodes[0].name, self._group_cost(nodes, written)) for nodes in groups.values()
        }
        for node, what in self.stored.items():
            if what not in ("input", "group"):
                flops = node_flops(node)
                cost = Cost({_dtype(node): flops} if flops else {}, sum(self.reads[node].values()), _num_bytes(node))
                found[node] = Kernel(what, node.name, cost)
        return [kernel for node in self.stored if node in found for kernel in (found[node], *_of_pieces(node))]

    def _group_cost(self, nodes: list[fx.Node], written: set[fx.Node]) -> Cost:
        inside = set(nodes)
        read: dict[fx.Node, int] = {}
        for node in nodes:
            for base, size in self.reads[node].items():
                if base not in inside:
                    read[base] = min(_num_bytes(base), max(read.get(base, 0), size))
        return Cost({}, sum(read.values()), sum(_num_bytes(n) for n in nodes if n in written))


def _of_pieces(node: fx.Node) -> list[Kernel]:
    """The kernels between the matmuls of an operator that works in pieces, as one."""
    read, written = moved_bytes(node)
    return [Kernel("memory", f"pieces of {node.name}", Cost({}, read, written))] if read else []


def _num_bytes(node: fx.Node) -> int:
    return meta.num_bytes(meta.value(node))


def _num_elements(node: fx.Node) -> int:
    """Over how many elements a node goes: those that it reads, when it reduces."""
    sources = node.all_input_nodes[:1] if _name(node) in _REDUCES else [node]
    return sum(t.numel() for source in sources for t in tensors(meta.value(source)))


def _is_part(node: fx.Node) -> bool:
    """Whether a node is a view of its input, or one of several results."""
    return bool(node.all_input_nodes) and (edit.is_getitem(node) or is_view(node))


def _bytes_read(node: fx.Node, source: fx.Node) -> int:
    """What a node reads of one input: a picked table only where it is picked, an expanded value once."""
    size = meta.num_bytes(meta.value(source))
    base = source
    while edit.is_getitem(base) or (base.op == "call_function" and base.all_input_nodes and is_view(base)):
        base = base.all_input_nodes[0]
        if calls.picked_from(base) is None and not isinstance(meta.value(base), (list, tuple)):
            size = min(size, meta.num_bytes(meta.value(base)))
    if _name(node) in _PICKS and node.all_input_nodes[0] is source:
        size = min(size, meta.num_bytes(meta.value(node)))
    return size


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return getattr(target, "_opname", getattr(target, "__name__", ""))


def _fuses(node: fx.Node) -> bool:
    if not compat.is_overload(node.target):
        return False
    target: Any = node.target
    name = _name(node)
    return torch.Tag.pointwise in target.tags or name in _FUSES or name in _REDUCES


def _reduces_across(node: fx.Node) -> bool:
    """Whether a node reduces other dimensions than the last ones, in a pass of its own over what it reads."""
    if _name(node) not in _REDUCES or not node.all_input_nodes:
        return False
    source, result = meta.value(node.all_input_nodes[0]), meta.value(node)
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor) or source.dim() == 0:
        return False
    dims: Any = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple, int)) else ()
    listed = [dims] if isinstance(dims, int) else [d for d in dims if isinstance(d, int)]
    return bool(listed) and not any(d % source.dim() == source.dim() - 1 for d in listed)


def _kind(node: fx.Node) -> str:
    if is_attention(node):
        return "attention"
    if "conv" in _name(node):
        return "convolution" if node_flops(node) else "memory"
    return "matmul" if node_flops(node) else "memory"


def _dtype(node: fx.Node) -> str:
    """The dtype that an operator computes in: that of the first floating tensor it reads."""
    for source in node.all_input_nodes:
        for tensor in tensors(meta.value(source)):
            if tensor.is_floating_point():
                return dtype_name(tensor.dtype)
    return "f32"
