"""Finds the first value that is not finite: checks what regions compute, and runs one that failed again operator by operator."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from zcompile import ops
from zcompile.errors import NonFiniteError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import (
    Buffer,
    Grad,
    Graph,
    Input,
    InputGrad,
    Kept,
    Offloaded,
    Origin,
    Output,
    Param,
    Region,
    Role,
    Saved,
    Tangent,
)
from zcompile.ir.handover import kept_parameter
from zcompile.ir.operators import is_random, operator_name
from zcompile.ir.printer import print_node
from zcompile.ir.types import tensors
from zcompile.lower import interpret
from zcompile.program import Call, Program

#: takes a list of tensors, which it may clear, and returns results
Body = Callable[[list[Any]], Sequence[Any]]

#: a random stream's state, and the function that puts it back
RandomState = tuple[Callable[[Tensor], Any], Tensor]

#: what gradients go into
REDUCTIONS = (ops.reduce_scatter, ops.all_reduce)

#: nodes shown before and after the one that is at fault
WINDOW = 3


@dataclass(frozen=True)
class Watch:
    """How to speak of values that are not finite.

    Attributes:
        prefix: how a message begins, such as ``[rank 0 of 2] ``.
        arguments: what the user calls each tensor argument.
    """

    prefix: str
    arguments: tuple[str, ...]


def watched(
    graph: Graph, program: Program, bodies: Mapping[str, Body], watch: Watch
) -> tuple[Program, dict[str, Body]]:
    """A program whose region calls end with a ``NonFiniteError`` where NaN or infinity first appears.

    Infinities may exist inside a region, and masks may hold them anywhere: what is made of literal infinities, of no floating
    data at all, or of infinities that came in from arguments, buffers and other regions is left alone, as long as it is
    neither a gradient nor a single number that the model returns. NaN never is.
    """
    found: dict[str, Body] = {}
    sites = iter([node for node in graph.body if node.target is ops.region_call])
    instructions = []
    for ins in program.instructions:
        if isinstance(ins, Call):
            name = f"{ins.body} at {len(found)}"
            found[name] = _Site(graph, next(sites), bodies[ins.body], watch)
            ins = dataclasses.replace(ins, body=name)
        instructions.append(ins)
    return dataclasses.replace(program, instructions=tuple(instructions)), found


@dataclass(frozen=True)
class _Found:
    """What is not finite in the value of a node: how many elements, and whether infinities are made of others that may be."""

    num_nan: int = 0
    num_inf: int = 0
    numel: int = 0
    excused: bool = False

    @property
    def num_bad(self) -> int:
        return self.num_nan + self.num_inf

    @property
    def is_bad(self) -> bool:
        return self.num_nan > 0 or (self.num_inf > 0 and not self.excused)

    def __str__(self) -> str:
        counts = ((self.num_nan, "nan"), (self.num_inf, "inf"))
        return (
            f"{' and '.join(f'{n} {what}' for n, what in counts if n)} in {self.numel} value{'s' * (self.numel != 1)}"
        )


class _Site:
    """A region as one place calls it."""

    def __init__(self, graph: Graph, call: fx.Node, body: Body, watch: Watch) -> None:
        name, self.arguments = calls.region(call)
        self.region: Region = graph.regions[name]
        self.direction = graph.direction.value
        self.body = body
        self.watch = watch
        self.origins = [_origin(node) for node in self.arguments]
        self.is_random = any(_draws(node) for node in self.region.fx.nodes)
        compute = [node for node in self.region.fx.nodes if node.op == "call_function"]
        places = meta.places(call)
        self.places = dict(zip(compute, places, strict=True)) if len(places) == len(compute) else {}
        roles = dict(graph.outputs)
        self.strict = {calls.index(pick) for pick in call.users if _is_strict(pick, roles.get(pick))}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        given = list(args)
        states = _random_states(given) if self.is_random else []
        results = self.body(args)
        if not all(bool(_floats(value).isfinite().all()) for value in results if _is_floating(value)):
            self._explain(given, states, results)
        return results

    def _explain(self, given: list[Any], states: list[RandomState], results: Sequence[Any]) -> None:
        """Raise, unless all that is not finite is excused."""
        after = _random_states(given) if states else []
        for restore, state in states:
            restore(state)
        found = self._run_again(given)
        for restore, state in after:
            restore(state)
        nodes = self.region.results
        real = [_look(value, found.get(node, _Found()).excused) for node, value in zip(nodes, results, strict=True)]
        bad = [index for index, each in enumerate(real) if each.is_bad or (each.num_inf and index in self.strict)]
        if not bad:
            return
        behind = _causes([nodes[index] for index in bad], found)
        wrong = [node for node in self.region.fx.nodes if node in behind]
        suspects = [node for node in wrong if found[node].is_bad]
        if suspects:
            self._raise(suspects[0], found, suspects)
        if wrong and wrong[0].op == "placeholder":
            self._raise(wrong[0], found, wrong)
        if wrong:  # a mask, as it seemed
            self._raise(wrong[-1], found, wrong)
        raise NonFiniteError(
            f"{self._start()}the compiled region gives {real[bad[0]]} for %{nodes[bad[0]].name}{self._where(nodes[bad[0]])}, and its "
            "operators one by one give finite values; compile with backend='eager' to go on"
        )

    def _run_again(self, given: list[Any]) -> dict[fx.Node, _Found]:
        """What is not finite in the region, by node."""
        found: dict[fx.Node, _Found] = {}
        constant: set[fx.Node] = set()
        for node, value, origin in zip(self.region.inputs, given, self.origins, strict=True):
            found[node] = _look(value, not isinstance(origin, (Param, Kept, Tangent)))
            if isinstance(origin, Param):
                found[node] = dataclasses.replace(found[node], numel=math.prod(origin.shape))  # without padding
            if not _is_floating(value):
                constant.add(node)

        def observe(node: fx.Node, value: Any) -> None:
            sources = node.all_input_nodes
            if all(source in constant for source in sources) and not _draws(node):
                constant.add(node)
            if "empty" in operator_name(node.target):  # memory that something else fills
                return
            excused = node in constant or any(map(math.isinf, _literals((node.args, node.kwargs))))
            excused = excused or any(s in found and found[s].num_inf and found[s].excused for s in sources)
            if isinstance(value, Tensor):
                found[node] = _look(value, excused)
            elif isinstance(value, (list, tuple)):
                picked = {calls.index(user) for user in node.users if edit.is_getitem(user)}
                looks = [_look(value[index], excused) for index in picked]
                found[node] = next((each for each in looks if each.num_bad), _Found())

        with torch.no_grad():
            interpret.build(self.region.fx, observe)(list(given))
        return found

    # Messages. --------------------------------------------------------------------------------------------------------

    def _start(self) -> str:
        return f"{self.watch.prefix}{self.direction}: "

    def _place(self, node: fx.Node) -> tuple[str, str]:
        """The source line and the submodule of a node."""
        return self.places.get(node, (meta.source(node), meta.module(node)))

    def _where(self, node: fx.Node) -> str:
        source, module = self._place(node)
        units = dict.fromkeys(o.unit for o in self.origins if isinstance(o, Param) and o.unit)
        text = f" in module '{module}'" if module else ""
        text += f" at {source}" if source else ""
        return f"{text} (region {self.region.name}{' of unit ' if units else ''}{', '.join(map(repr, units))})"

    def _raise(self, node: fx.Node, found: Mapping[fx.Node, _Found], wrong: list[fx.Node]) -> NoReturn:
        """The error that names ``node`` as the origin.

        Args:
            node: what to name.
            found: what is not finite in the region.
            wrong: the nodes that matter, in order.
        """
        if node.op == "placeholder":
            readers = [n for n in wrong if n.op != "placeholder" and node in _causes([n], found)]
            reader = next((n for n in readers if self._place(n)[0]), readers[0] if readers else None)
            text = f"{self._name(node)} has {found[node]}"
            if reader is not None:
                text += f", which {operator_name(reader.target)} reads{self._where(reader)}"
        else:
            text = f"{operator_name(node.target)} gives {found[node]}{self._where(node)}"
            infinite = [n for n in node.all_input_nodes if n in found and found[n].num_inf]
            if infinite:
                text += f"; it reads {', '.join(f'{self._name(n)} with {found[n]}' for n in infinite)}"
            if wrong[0] is not node:
                text += f"; infinities begin in {operator_name(wrong[0].target)}{self._where(wrong[0])}"
        nodes = list(self.region.fx.nodes)
        at = nodes.index(node)
        device = next((v.device.type for n in nodes for v in tensors(meta.value(n)) if v.device.type != "cpu"), "cpu")
        lines = [
            f"  {'>' if n is node else ' '} {self._line(n, device)}"
            for n in nodes[max(0, at - WINDOW) : at + WINDOW + 1]
            if n.op != "output"
        ]
        raise NonFiniteError("\n".join([self._start() + text, *lines]))

    def _line(self, node: fx.Node, device: str) -> str:
        line = print_node(node, device)
        return f"{line.rpartition(' = ')[0]} = {self._name(node)}" if node.op == "placeholder" else line

    def _name(self, node: fx.Node) -> str:
        """A value, as the user knows it."""
        if node.op != "placeholder":
            return f"%{node.name}"
        index = self.region.inputs.index(node)
        origin = self.origins[index]
        if isinstance(origin, Input):
            known = origin.index < len(self.watch.arguments)
            return f"argument {self.watch.arguments[origin.index] if known else origin.index}"
        if isinstance(origin, Param):
            return f"parameter '{origin.name}'"
        if isinstance(origin, Kept):
            return f"parameter '{kept_parameter(origin)}'"
        if isinstance(origin, Buffer):
            return f"buffer '{origin.name}'"
        if isinstance(origin, Tangent):
            return f"the gradient that arrives at output {origin.index}"
        if isinstance(origin, (Saved, Offloaded)):
            return f"the forward's value '{origin.name}'"
        return f"the value '{self.arguments[index].name}' of another region"


def _origin(node: fx.Node) -> Origin | None:
    """What a value of the top level is: an input of the graph, perhaps gathered; None for what was computed."""
    while True:
        source = calls.picked_from(node)
        if source is None:
            return meta.origin(node)
        if source.target is ops.wait and calls.source(source).target is ops.all_gather:
            node = calls.tensors(calls.source(source))[calls.index(node)]
        elif source.target is ops.wait and ops.is_transfer(calls.source(source).target):
            node = calls.tensors(calls.source(source))[calls.index(node)]
        elif source.target is ops.cast:
            node = calls.tensors(source)[calls.index(node)]
        else:
            return None


def _is_strict(node: fx.Node, role: Role | None) -> bool:
    """Whether an infinity is an error wherever it comes from: in gradients, and in single numbers that the model returns."""
    if isinstance(role, (Grad, InputGrad)) or any(user.target in REDUCTIONS for user in node.users):
        return True
    return isinstance(role, Output) and meta.tensor(node).numel() == 1


def _random_states(values: list[Any]) -> list[RandomState]:
    """The present states of the random streams that a region may draw from, each with what puts it back."""
    devices = sorted({t.device.index for t in values if isinstance(t, Tensor) and t.is_cuda})
    on_devices = [(partial(torch.cuda.set_rng_state, device=d), torch.cuda.get_rng_state(d)) for d in devices]
    return [(torch.set_rng_state, torch.get_rng_state()), *on_devices]


def _draws(node: fx.Node) -> bool:
    return is_random(node) or "rng_state" in str(node.target)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _floats(value: Tensor) -> Tensor:
    """The same values in a dtype that can be asked; 8-bit floats cannot."""
    return value.float() if value.itemsize == 1 else value


def _look(value: Any, excused: bool) -> _Found:
    if not _is_floating(value):
        return _Found()
    value = _floats(value)
    num_nan, num_inf = int(value.isnan().sum()), int(value.isinf().sum())
    return _Found(num_nan, num_inf, value.numel(), excused)


def _literals(arg: Any) -> Iterator[float]:
    """The float literals among arguments."""
    if isinstance(arg, float):
        yield arg
    elif isinstance(arg, dict):
        yield from _literals(list(arg.values()))
    elif isinstance(arg, (list, tuple)):
        for each in arg:
            yield from _literals(each)


def _causes(nodes: Sequence[fx.Node], found: Mapping[fx.Node, _Found]) -> set[fx.Node]:
    """Those of these nodes that are not finite, and what is not finite that they read, and so on."""
    causes: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in causes and node in found and found[node].num_bad:
            causes.add(node)
            waiting += node.all_input_nodes
    return causes
