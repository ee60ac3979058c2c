"""Collectives straight on a process group: what a mesh uses until it is given watched ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zcompile import compat

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Started(Protocol):
    """Collectives that were started."""

    def wait(self) -> None: ...


class Starter(Protocol):
    """Starts collectives on lists of contiguous tensors; both this module's and the watched ones do."""

    def all_gather(self, outputs: list[Tensor], inputs: list[Tensor], description: str = ...) -> Started: ...
    def all_reduce(self, tensors: list[Tensor], op: str = ..., description: str = ...) -> Started: ...
    def broadcast(self, tensors: list[Tensor], root: int = ..., description: str = ...) -> Started: ...


class Works:
    """Works of a process group, waited for in order; tensors that they use are kept until then."""

    def __init__(self, works: Sequence[Any], kept: Any) -> None:
        self._works, self._kept = works, kept

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._kept = (), None


class DirectCollectives:
    """Collectives on ``group``, bounded by the group's own timeout; nobody says which rank is missing."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_gather(self, outputs: list[Tensor], inputs: list[Tensor], description: str = "all_gather") -> Works:
        """Gather along dim 0; any dtype."""
        wire = [raw(t) for t in outputs], [raw(t) for t in inputs]
        return Works([compat.start_all_gather(self._group, *wire)], wire)

    def all_reduce(self, tensors: list[Tensor], op: str = "avg", description: str = "all_reduce") -> Works:
        """Reduce in place, each tensor by itself."""
        return Works([compat.start_one_all_reduce(self._group, t, REDUCTIONS[op]) for t in tensors], tensors)

    def broadcast(self, tensors: list[Tensor], root: int = 0, description: str = "broadcast") -> Works:
        """Overwrite tensors with those of rank ``root``; any dtype."""
        wire = [raw(t) for t in tensors if t.numel()]
        return Works([compat.start_broadcast(self._group, t, root) for t in wire], wire)


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor: a flat uint8 view, which every backend can move, whatever the dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
