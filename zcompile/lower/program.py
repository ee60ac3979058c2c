"""Lower the top level of a graph to a program for the runtime."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zcompile import ops
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import (
    Buffer,
    Grad,
    Graph,
    Input,
    InputGrad,
    InputMutation,
    Kept,
    Mutation,
    Offloaded,
    Origin,
    Output,
    Param,
    Role,
    Saved,
    Tangent,
)
from zcompile.ir.operators import operator_name
from zcompile.program import Call, Instruction, Port, Program, Release, Start, TensorType, Transfer, Wait

_KINDS: dict[type, str] = {
    Param: "param",
    Buffer: "buffer",
    Input: "input",
    Tangent: "tangent",
    Saved: "saved",
    Kept: "kept",
    Offloaded: "offloaded",
    Output: "output",
    Grad: "grad",
    InputGrad: "input_grad",
    Mutation: "mutation",
    InputMutation: "input_mutation",
}


def lower_program(graph: Graph) -> Program:
    """The program of an outlined graph.

    Raises:
        PassError: the graph still has computation outside of regions.
    """
    return _Lowering(graph).run()


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.slots: dict[fx.Node, int] = {}
        self.num_slots = 0
        self.tickets: dict[fx.Node, int] = {}
        self.instructions: list[Instruction] = []
        self.last_read = self._last_reads()
        self.unit_of = {param.name: param.unit for _, param in graph.params()}
        self.grads = self._grad_of_result()

    def run(self) -> Program:
        inputs, nodes = [], []
        for node in self.graph.inputs:
            origin = meta.origin(node)
            assert origin is not None
            inputs.append(Port(_KINDS[type(origin)], _key(origin), self._slot(node)))
        for node in self.graph.body:
            if node.target is ops.region_call:
                self._call(node)
            elif ops.is_collective(node.target):
                self._start(node)
            elif ops.is_transfer(node.target):
                self._transfer(node)
            elif node.target is ops.wait:
                self._wait(node)
            elif node.target is ops.release:
                self.instructions.append(Release(tuple(self.slots[n] for n in calls.tensors(node))))
            elif not edit.is_getitem(node) and node.target is not ops.cast:
                raise PassError(
                    f"node '{node.name}' computes outside of every region; end the pipeline's ZeRO passes with 'outline'"
                )
            nodes += [node.name] * (len(self.instructions) - len(nodes))
        read: set[fx.Node] = set(self.graph.inputs)
        outputs = []
        for node, role in self.graph.outputs:
            outputs.append(Port(_KINDS[type(role)], _key(role), self._slot(node), shared=node in read))
            read.add(node)
        return Program(
            self.graph.name, self.num_slots, tuple(inputs), tuple(self.instructions), tuple(outputs), tuple(nodes)
        )

    def _slot(self, node: fx.Node) -> int:
        if node not in self.slots:
            self.slots[node] = self.num_slots
            self.num_slots += 1
        return self.slots[node]

    def _last_reads(self) -> dict[fx.Node, fx.Node]:
        """The last node that reads each value; what a collective reads is read until its wait."""
        last: dict[fx.Node, fx.Node] = {}
        wait_of = {calls.source(w): w for w in self.graph.body if w.target is ops.wait}
        position = {n: i for i, n in enumerate(self.graph.fx.nodes)}
        for node in self.graph.fx.nodes:
            reader = wait_of.get(node) or node
            for source in node.all_input_nodes:
                if source not in last or position[last[source]] < position[reader]:
                    last[source] = reader
        return last

    def _frees(self, node: fx.Node, values: list[fx.Node]) -> tuple[int, ...]:
        return tuple(self.slots[v] for v in dict.fromkeys(values) if self.last_read.get(v) is node)

    def _results(self, node: fx.Node) -> tuple[int, ...]:
        """The slot of each result; -1 where nobody picks it."""
        slots = [-1] * len(meta.value(node))
        for user in node.users:
            if edit.is_getitem(user):
                slots[calls.index(user)] = self._slot(user)
        return tuple(slots)

    def _call(self, node: fx.Node) -> None:
        name, values = calls.region(node)
        inputs = tuple(self.slots[a] for a in values)
        types = tuple(TensorType(tuple(v.shape), v.dtype) for v in meta.value(node))
        self.instructions.append(Call(name, inputs, self._results(node), self._frees(node, values), types))

    def _start(self, node: fx.Node) -> None:
        wait = next(u for u in node.users if u.target is ops.wait)
        ticket = self.tickets[wait] = len(self.tickets)
        sends, cast = self._before_cast(calls.tensors(node))
        outputs = self._all_results(wait)
        types = tuple(TensorType(tuple(v.shape), v.dtype) for v in meta.value(node))
        grads = tuple(self.grads.get((wait, index), "") for index in range(len(outputs)))
        op = operator_name(node.target).removeprefix("zc.")
        inputs = tuple(self.slots[s] for s in sends)
        self.instructions.append(Start(op, inputs, outputs, types, grads, cast, f"{op} {self._label(node)}", ticket))

    def _transfer(self, node: fx.Node) -> None:
        wait = next(u for u in node.users if u.target is ops.wait)
        ticket = self.tickets[wait] = len(self.tickets)
        types = tuple(TensorType(tuple(v.shape), v.dtype) for v in meta.value(node))
        op = operator_name(node.target).removeprefix("zc.")
        inputs = tuple(self.slots[s] for s in calls.tensors(node))
        self.instructions.append(Transfer(op, inputs, self._all_results(wait), types, f"{op} '{node.name}'", ticket))

    def _all_results(self, wait: fx.Node) -> tuple[int, ...]:
        """The slot of each result, also of those that nobody reads: they are written all the same."""
        outputs = list(self._results(wait))
        for index, slot in enumerate(outputs):
            if slot < 0:
                outputs[index] = self.num_slots
                self.num_slots += 1
        return tuple(outputs)

    def _before_cast(self, sends: list[fx.Node]) -> tuple[list[fx.Node], torch.dtype | None]:
        """What goes into a collective before its ``zc.cast``, which the runtime does into the collective's own buffers."""
        sources: list[fx.Node] = []
        for send in sends:
            source = calls.picked_from(send)
            if source is None or source.target is not ops.cast:
                return sends, None
            sources.append(calls.tensors(source)[calls.index(send)])
        return sources, meta.tensor(sends[0]).dtype

    def _wait(self, node: fx.Node) -> None:
        sends = calls.tensors(calls.source(node))
        self.instructions.append(Wait(self.tickets[node], self._frees(node, [s for s in sends if s in self.slots])))

    def _label(self, node: fx.Node) -> str:
        """The units that a collective carries, for errors."""
        units: dict[str, None] = {}
        for send in self._before_cast(calls.tensors(node))[0]:
            origin = meta.origin(send)
            if isinstance(origin, Param):
                units[origin.unit or origin.name] = None
        wait = next(u for u in node.users if u.target is ops.wait)
        for index in range(len(meta.value(wait))):
            if name := self.grads.get((wait, index)):
                units[self.unit_of.get(name, name)] = None
        return f"of {', '.join(units)}" if units else f"'{node.name}'"

    def _grad_of_result(self) -> dict[tuple[fx.Node, int], str]:
        """For each result of a wait that is exactly one parameter's gradient, that parameter."""
        found: dict[tuple[fx.Node, int], str] = {}
        for node, role in self.graph.outputs:
            source = calls.picked_from(node)
            if isinstance(role, Grad) and source is not None and source.target is ops.wait:
                key = (source, calls.index(node))
                found[key] = "" if key in found or len(node.users) > 1 else role.name
        return found


def _key(what: Origin | Role) -> Any:
    return what.index if isinstance(what, (Input, Tangent, Output, InputGrad, InputMutation)) else what.name
