"""Text to graph: every value gets a fake tensor, names are kept, mistakes are shown with their line."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from zcompile import compat, ops
from zcompile.errors import TextError
from zcompile.ir import edit, meta
from zcompile.ir.graph import (
    Buffer,
    Direction,
    Grad,
    Graph,
    Input,
    InputGrad,
    InputMutation,
    Mutation,
    Origin,
    Output,
    Param,
    Region,
    Role,
    Step,
    Tangent,
)
from zcompile.ir.operators import operator_name, returns_list, returns_many, returns_nothing
from zcompile.ir.printer import WORDS
from zcompile.ir.scanner import Bucket, Scanner
from zcompile.ir.types import find_device

_HEADER = re.compile(r"graph (?P<name>\S+)(?:\s+axis (?P<axes>\w+=\d+(?:, *\w+=\d+)*))?(?:\s+device (?P<device>\w+))?")
_NAME = re.compile(r"%(\w+)")
_BY_WORD = {word: kind for kind, word in WORDS.items()}
_ROLES_ONLY = (Output, Grad, InputGrad, Mutation, InputMutation)
_ORIGINS_ONLY = (Param, Buffer, Input, Tangent)
_MISSING = object()  # the type of a result that the text does not give


def parse_graph(text: str) -> Graph:
    """The one graph of a text.

    Raises:
        TextError: with the line number, the line and what was expected.
    """
    graphs = parse_graphs(text)
    if len(graphs) != 1:
        raise TextError(f"the text has {len(graphs)} graphs; expected one")
    return graphs[0]


def parse_step(text: str) -> Step:
    """The forward and, if there is one, backward graph of a text.

    Raises:
        TextError: with the line number, the line and what was expected.
    """
    graphs = parse_graphs(text)
    directions = [g.direction for g in graphs]
    if directions not in ([Direction.FORWARD], [Direction.FORWARD, Direction.BACKWARD]):
        names = ", ".join(g.name for g in graphs) or "none"
        raise TextError(
            f"the graphs of the text are {names}; expected a forward graph and at most one backward graph after it"
        )
    return Step(*graphs) if len(graphs) == 2 else Step(graphs[0], None)


def parse_graphs(text: str) -> list[Graph]:
    """Every graph of a text; all values belong to one fake mode.

    Raises:
        TextError: with the line number, the line and what was expected.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    starts = [i for i, (_, line) in enumerate(lines) if line.startswith("graph ")]
    if lines and starts[:1] != [0]:
        Scanner(lines[0][0], lines[0][1]).fail("a text starts with a graph", "graph NAME.forward")
    with compat.new_fake_mode():
        ends = [*starts[1:], len(lines)]
        return [_GraphParser(lines[a:b]).parse() for a, b in zip(starts, ends, strict=False)]


@dataclass
class _Call:
    """What one line calls."""

    op: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_region(self) -> bool:
        return self.target is ops.region_call

    @property
    def returns_list(self) -> bool:
        return self.is_region or returns_list(self.target)

    @property
    def base_name(self) -> str:
        """The name of the node when the text does not give one: that of the operator or region."""
        text = str(self.args[0]) if self.is_region else operator_name(self.target)
        parts = text.split(".")
        return re.sub(r"\W", "_", text if self.is_region or len(parts) < 2 else parts[1])

    def has_results(self, names: list[str | None], types: list[Any]) -> bool:
        """Whether the names on the line are those of the results, not of the node itself."""
        if len(names) != 1 or ops.is_start(self.target):
            return len(names) > 1
        if names[0] is not None and isinstance(types[0], (list, tuple)):
            return False
        return self.returns_list or returns_many(self.target)


@dataclass
class _Nodes:
    """One fx graph under construction.

    Attributes:
        taken: names that the text uses; a node that the text does not name keeps clear of them.
        fx: the graph.
        values: nodes by name.
    """

    taken: set[str]
    fx: fx.Graph = field(default_factory=fx.Graph)
    values: dict[str, fx.Node] = field(default_factory=dict)

    def add(self, call: _Call, name: str, val: Any) -> fx.Node:
        """Add a node with exactly this name; fx alone would change some, such as ``sum``."""
        node = self.fx.create_node(call.op, call.target, call.args, call.kwargs, name=name)
        node.name = name
        meta.set_value(node, val)
        self.values[name] = node
        return node

    def unpack(self, node: fx.Node, names: list[str | None]) -> list[fx.Node]:
        """Add the ``getitem`` of each named result."""
        return [
            self.add(_Call("call_function", operator.getitem, (node, index)), name, meta.value(node)[index])
            for index, name in enumerate(names)
            if name is not None
        ]

    def free_name(self, wanted: str) -> str:
        """``wanted``, or with a number when the text uses it."""
        name, number = wanted, 0
        while name in self.taken or name in self.values:
            number += 1
            name = f"{wanted}_{number}"
        return name


class _GraphParser:
    def __init__(self, lines: list[tuple[int, str]]) -> None:
        self.lines = lines
        self.position = 0
        self.device = "cpu"
        self.regions: dict[str, Region] = {}

    def parse(self) -> Graph:
        name, direction, axes = self._header()
        nodes = _Nodes(self._names_ahead())
        self._section("inputs:")
        while (s := self._next(nodes, "inputs, a region or 'body:'")).kind() == "ref":
            self._input(s, nodes)
        while s.accept("region"):
            self._region(s)
            s = self._next(nodes, "a region or 'body:'")
        if s.line != "body:":
            s.unexpected("an input such as %x: f32[4] = input 0, a region or 'body:'")
        outputs, roles = self._lines(nodes, self._output)
        output = nodes.fx.output(outputs)
        meta.set_roles(output, roles)
        if self.position < len(self.lines):
            Scanner(*self.lines[self.position]).fail("a line after 'return'", "the end of the graph")
        return Graph(name, direction, nodes.fx, axes, self.regions)

    # Lines. -----------------------------------------------------------------------------------------------------------

    def _next(self, nodes: _Nodes | None, expected: str) -> Scanner:
        if self.position == len(self.lines):
            number, line = self.lines[-1]
            Scanner(number, line).fail("the text ends after this line", expected)
        self.position += 1
        number, line = self.lines[self.position - 1]
        return Scanner(number, line, nodes.values if nodes is not None else None)

    def _section(self, title: str) -> None:
        s = self._next(None, f"'{title}'")
        if s.line != title:
            s.unexpected(f"'{title}'")

    def _names_ahead(self) -> set[str]:
        return {name for _, line in self.lines[self.position :] for name in _NAME.findall(line)}

    def _header(self) -> tuple[str, Direction, dict[str, int]]:
        number, line = self.lines[0]
        self.position = 1
        match = _HEADER.fullmatch(line)
        if match is None:
            raise TextError(
                f"line {number}: not a graph header; expected graph NAME.forward  axis dp=2  device cuda\n    {line}"
            )
        suffix = match["name"].rsplit(".", 1)[-1]
        if suffix not in {d.value for d in Direction}:
            raise TextError(
                f"line {number}: graph name ends with '{suffix}'; expected .joint, .forward or .backward\n    {line}"
            )
        axes = dict(item.strip().split("=") for item in match["axes"].split(",")) if match["axes"] else {}
        self.device = match["device"] or "cpu"
        if find_device(self.device) is None:
            raise TextError(f"line {number}: unknown device '{self.device}'; expected one such as cuda\n    {line}")
        return match["name"], Direction(suffix), {axis: int(size) for axis, size in axes.items()}

    def _lines(self, nodes: _Nodes, result: Callable[[Scanner], tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Read the lines of a body up to and with its ``return``."""
        while not (s := self._next(nodes, "a 'return' line")).accept("return"):
            self._line(s, nodes)
        pairs = []
        while s.kind():
            pairs.append(result(s))
            if s.kind():
                s.expect(",")
        return [value for value, _ in pairs], [role for _, role in pairs]

    # Inputs, outputs, regions. ----------------------------------------------------------------------------------------

    def _define(self, s: Scanner, nodes: _Nodes) -> str:
        name = s.name()
        if name in nodes.values:
            s.fail(f"%{name} is defined twice", "a new name")
        return name

    def _input(self, s: Scanner, nodes: _Nodes) -> None:
        name = self._define(s, nodes)
        s.expect(":")
        val = s.type(self.device)
        s.expect("=")
        origin = self._origin(s)
        s.end()
        node = nodes.add(_Call("placeholder", name), name, val)
        if origin is not None:
            meta.set_origin(node, origin)

    def _origin(self, s: Scanner) -> Origin | None:
        kind = self._kind(s, "param, buffer, input, tangent, saved, kept or offloaded", barred=_ROLES_ONLY)
        if kind is None:
            return None
        if kind is not Param:
            return kind(self._key(s, kind))
        name, placement, shard_dim = s.string(), "full", -1
        if s.accept("replicate"):
            placement = "replicate"
        elif s.accept("shard", "("):
            placement, shard_dim = "shard", s.integer()
            s.expect(")")
        s.expect("of")
        s.expect("[")
        shape = tuple(s.list_of(s.integer, "]"))
        unit = s.string() if s.accept("unit") else ""
        return Param(name, shape, placement, shard_dim, unit, not s.accept("frozen"))

    def _output(self, s: Scanner) -> tuple[Any, Role | None]:
        expected = "output, grad, mutation, input_grad, input_mutation, saved, kept or offloaded"
        kind = self._kind(s, expected, barred=_ORIGINS_ONLY)
        role = None if kind is None else kind(self._key(s, kind))
        return s.literal(), role

    def _kind(self, s: Scanner, expected: str, barred: tuple[type[Any], ...]) -> type[Any] | None:
        word = s.peek()
        kind = _BY_WORD.get(word)
        if s.kind() != "word" or (kind is None and word != "unknown") or kind in barred:
            s.unexpected(expected)
        s.position += 1
        return kind

    def _key(self, s: Scanner, kind: type[Any]) -> Any:
        return s.integer() if "index" in kind.__dataclass_fields__ else s.string()

    def _region(self, s: Scanner) -> None:
        name = s.take("word", "the name of the region")
        if name in self.regions:
            s.fail(f"region '{name}' is defined twice", "a new name")
        nodes = _Nodes(self._names_ahead())
        s.expect("(")

        def argument() -> None:
            arg = self._define(s, nodes)
            s.expect(":")
            nodes.add(_Call("placeholder", arg), arg, s.type(self.device))

        s.list_of(argument, ")")
        s.expect(":")
        s.end()
        values, _ = self._lines(nodes, lambda line: (line.literal(), None))
        nodes.fx.output(values)
        self.regions[name] = Region(name, nodes.fx)

    # Body lines. ------------------------------------------------------------------------------------------------------

    def _line(self, s: Scanner, nodes: _Nodes) -> None:
        names: list[str | None] = []
        types: list[Any] = []
        if s.kind() == "ref" or s.peek() == "_":
            while True:
                names.append(None if s.accept("_") else self._define(s, nodes))
                types.append(s.type(self.device) if s.accept(":") else _MISSING)
                if not s.accept(","):
                    break
            s.expect("=")
        call = self._call(s, nodes)
        recompute, save = s.accept("!", "recompute"), s.accept("!", "save")
        index = s.integer() if s.accept("@") else None
        s.end()
        for node in self._make(s, nodes, call, names, types):
            if recompute:
                meta.set_recompute(node)
            if save:
                meta.set_saved(node)
            if index is not None:
                meta.set_region(node, index)

    def _call(self, s: Scanner, nodes: _Nodes) -> _Call:
        s.values = nodes.values
        if s.accept("attr"):
            return _Call("get_attr", s.string())
        if s.accept("call"):
            name = s.take("word", "the name of a region")
            if name not in self.regions:
                s.fail(f"unknown region '{name}'", f"one of {', '.join(self.regions) or 'those above; there are none'}")
            s.expect("(")
            return _Call("call_function", ops.region_call, (name, s.list_of(s.literal, ")")))
        target = s.operator()
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def argument() -> None:
            if s.kind() == "word" and s.peek(1) == "=":
                key = s.take("word", "a keyword")
                s.expect("=")
                kwargs[key] = s.literal()
            elif kwargs:
                s.unexpected("a keyword argument such as dtype=f32")
            else:
                args.append(s.literal())

        s.expect("(")
        s.list_of(argument, ")")
        return _Call("call_function", target, tuple(args), kwargs)

    def _make(self, s: Scanner, nodes: _Nodes, call: _Call, names: list[str | None], types: list[Any]) -> list[fx.Node]:
        """Add the node of a line and, when the line names its results, their ``getitem`` nodes."""
        if call.has_results(names, types):
            node = nodes.add(call, nodes.free_name(call.base_name), self._results(s, call, types))
            return [node, *nodes.unpack(node, names)]
        if not names and not returns_nothing(call.target):
            s.fail(f"the result of {call.base_name} has no name", "%name: type = ... (or _ for a result not used)")
        name = names[0] if names and names[0] is not None else nodes.free_name(call.base_name)
        val = types[0] if types else None
        if val is Bucket and not ops.is_start(call.target):
            s.fail(f"{operator_name(call.target)} starts nothing that is waited for", "the type of a tensor")
        return [nodes.add(call, name, self._infer(s, call) if val is _MISSING or val is Bucket else val)]

    def _results(self, s: Scanner, call: _Call, types: list[Any]) -> Any:
        """The fake values of a node with several results: those of the text, the others inferred."""
        if call.is_region or any(t is _MISSING for t in types):
            inferred = self._infer(s, call)
            count = len(inferred) if isinstance(inferred, (list, tuple)) else 1
            if count != len(types):
                s.fail(f"{len(types)} names for {count} results", "one name, or _, for each result")
            types = [i if t is _MISSING else t for t, i in zip(types, inferred, strict=True)]
        return types if call.returns_list else tuple(types)

    def _infer(self, s: Scanner, call: _Call) -> Any:
        if call.is_region:
            return [meta.value(r) for r in self.regions[call.args[0]].results]
        try:
            return edit.infer(call.target, call.args, call.kwargs)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            problem = f"{operator_name(call.target)} does not accept these arguments ({reason})"
            s.fail(problem, "arguments that fit the operator")
