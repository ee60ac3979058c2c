"""The sequence of collectives of a step, as text and hash, which ranks compare before they run it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zcompile.ir import meta
from zcompile.ir.graph import Graph, Step
from zcompile.ir.operators import operator_name
from zcompile.ir.types import dtype_name
from zcompile.verify.subject import Collective, Subject


@dataclass(frozen=True)
class Sequence:
    """Every collective of a step in program order, one line each.

    Lines say direction, operator, axis, dtype, and for each tensor its parameter and the shape sent. They do not depend on input
    shapes, names of nodes or anything else that may differ between ranks.
    """

    lines: tuple[str, ...]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the lines, in hexadecimal."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def collective_sequence(target: Step | Graph) -> Sequence:
    """The sequence of collectives of a verified step or graph."""
    graphs = target.graphs if isinstance(target, Step) else [target]
    return Sequence(tuple(line for graph in graphs for line in _lines(Subject(graph))))


def _lines(subject: Subject) -> list[str]:
    return [_line(subject, collective) for collective in subject.collectives]


def _line(subject: Subject, collective: Collective) -> str:
    sends = []
    num_bytes = 0
    for result, tensor in zip(collective.results, collective.tensors, strict=True):
        if collective.is_gather:
            param = subject.gathered[result]
            name = "" if param is None else param.name
        else:
            name = subject.reduced.get(result, "")
        value = meta.tensor(tensor)
        num_bytes += meta.num_bytes(value)
        sends.append(f"'{name}' {dtype_name(value.dtype)}{list(value.shape)}")
    axis, size = collective.axis, subject.graph.axes[collective.axis]
    call = f"{subject.graph.direction.value} {operator_name(collective.start.target)} {axis}={size}"
    arguments: Any = collective.start.args
    for dtype in arguments[3:]:
        call += f" in {dtype_name(dtype)}"
    return f"{call} {num_bytes} bytes: {', '.join(sends)}"
