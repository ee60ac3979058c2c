"""The memory that a region takes while it runs: which of its values exist, which share storage, and the most that is alive at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from zcompile import compat
from zcompile.analysis.aliases import Aliases
from zcompile.analysis.flow import Result
from zcompile.analysis.pieces import workspace_bytes
from zcompile.ir import edit, meta
from zcompile.ir.graph import Region
from zcompile.ir.operators import operator_name

#: operators that Inductor fuses into whatever reads them, beside those that torch tags as pointwise
_FUSED = frozenset(
    {
        "constant_pad_nd", "convert_element_type", "copy", "embedding", "full", "full_like", "gather", "index", "iota",
        "masked_fill", "native_dropout", "rand", "scalar_tensor", "where",
    }
)  # fmt: skip
#: operators whose results are buffers, while what they read need not be: reductions, and writes into a copy of something
_ROOTS = frozenset(
    {
        "all", "amax", "amin", "any", "argmax", "argmin", "cumsum", "index_add", "index_put", "max", "mean", "min", "prod",
        "scatter", "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "sum", "var", "var_mean",
        "_unsafe_index_put", "_unsafe_masked_index_put_accumulate",
    }
)  # fmt: skip


class Own(NamedTuple):
    """A storage that a region allocates and returns, by its number within the region, with the shape it was allocated for."""

    number: int
    num_bytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RegionStorages:
    """How the results of a region lie in memory.

    Attributes:
        results: for each result its storages: those that the region made, and positions of inputs that it is a view of.
        owned: the storages that leave the region.
    """

    results: tuple[tuple[tuple[Own, ...], tuple[int, ...]], ...]
    owned: tuple[Own, ...]


class RegionMemory:
    """The storages of one region and how long each is needed.

    Args:
        region: pure computation.
        fused: values that Inductor would fuse away do not exist (a model: pointwise results that only other fused operators
            or reductions read); else every value exists, as the interpreter has it.
    """

    def __init__(self, region: Region, *, fused: bool) -> None:
        self._nodes = list(region.fx.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._inputs = region.inputs
        aliases = Aliases(region.fx, {})
        returned = {s for node in region.results for s in aliases.of(node)}
        existing = self._existing(fused, returned, aliases)
        ends = self._ends(existing)
        self._last: dict[Result, int] = {}
        for node in self._nodes:
            if edit.is_getitem(node):
                continue
            for source in node.all_input_nodes:
                for storage in aliases.of(source):
                    self._last[storage] = max(self._last.get(storage, 0), ends[node])
        self._born: dict[int, list[Result]] = {}
        for node in self._nodes:
            if node.op == "call_function" and not edit.is_getitem(node) and node in existing:
                values = meta.value(node)
                many = isinstance(values, (list, tuple))
                for slot in range(len(values) if many else 1):
                    storage = Result(node, slot)
                    held = aliases.results(node)
                    if storage in (held[slot] if slot < len(held) else ()):
                        self._born.setdefault(self._index[node], []).append(storage)
        numbers: dict[Result, Own] = {}
        position = {node: i for i, node in enumerate(self._inputs)}
        results = []
        for node in region.results:
            own, shared = [], []
            for storage in sorted(aliases.of(node), key=lambda s: (self._index[s.node], s.slot)):
                if storage.node in position:
                    shared.append(position[storage.node])
                else:
                    own.append(numbers.setdefault(storage, Own(len(numbers), storage_bytes(storage), _shape(storage))))
            results.append((tuple(own), tuple(shared)))
        self._returned = returned
        self.storages = RegionStorages(tuple(results), tuple(numbers.values()))

    def _existing(self, fused: bool, returned: set[Result], aliases: Aliases) -> set[fx.Node]:
        """The nodes whose results are in memory of their own."""
        calls = [n for n in self._nodes if n.op == "call_function" and not edit.is_getitem(n)]
        if not fused:
            return set(calls)
        needed = {storage.node for storage in returned}
        for node in calls:
            if not _is_fused(node) and not _is_root(node) and not _is_view(node):
                needed.update(s.node for source in node.all_input_nodes for s in aliases.of(source))
        return {n for n in calls if n in needed or not _is_fused(n)}

    def _ends(self, existing: set[fx.Node]) -> dict[fx.Node, int]:
        """Until when each node goes on reading its inputs: a view, or a value that does not exist, is read where its readers are."""
        ends: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            mine = self._index[node]
            passes_on = node.op == "call_function" and (node not in existing or _is_view(node))
            ends[node] = max((ends[u] for u in node.users), default=mine) if passes_on else mine
        return ends

    def extra(self, dying: Sequence[tuple[tuple[int, ...], int]]) -> int:
        """The most bytes beyond those that were alive before the call, while it runs.

        Args:
            dying: for each storage that nobody needs after the call: the inputs that live in it, and its bytes. A region
                lets go of it after its own last read.
        """
        freed: dict[int, int] = {}
        for positions, num_bytes in dying:
            last = max((self._last.get(Result(self._inputs[p], 0), 0) for p in positions), default=0)
            freed[last] = freed.get(last, 0) + num_bytes
        alive = most = 0
        for index in range(len(self._nodes)):
            born = self._born.get(index, ())
            alive += sum(storage_bytes(s) for s in born)
            most = max(most, alive + workspace_bytes(self._nodes[index]))
            for storage in born:
                if storage not in self._returned:
                    end = max(self._last.get(storage, index), index)
                    freed[end] = freed.get(end, 0) + storage_bytes(storage)
            alive -= freed.get(index, 0)
        return most


def storage_bytes(storage: Result) -> int:
    """Bytes of the memory that a result was allocated with."""
    value = meta.value(storage.node)
    return tensor_bytes(value[storage.slot] if isinstance(value, (list, tuple)) else value)


def _shape(storage: Result) -> tuple[int, ...]:
    value = meta.value(storage.node)
    return tuple((value[storage.slot] if isinstance(value, (list, tuple)) else value).shape)


def tensor_bytes(value: object) -> int:
    """Bytes that a tensor of this type is allocated with, its strides counted: a broadcast dimension takes none."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return span * value.element_size()


def _name(node: fx.Node) -> str:
    """``sum`` for ``aten.sum.dim_IntList``."""
    parts = operator_name(node.target).split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _is_fused(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _FUSED


def _is_root(node: fx.Node) -> bool:
    return _name(node) in _ROOTS


def _is_view(node: fx.Node) -> bool:
    return compat.is_overload(node.target) and any(compat.shared_arguments(node.target))
