"""The interface of a capture: what goes in, what comes out, and what each output may be computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from zcompile.analysis.flow import Result
from zcompile.analysis.reads import Reads
from zcompile.ir import meta
from zcompile.ir.graph import Grad, Graph, Kept, Offloaded, Origin, Param, Role, Saved, Step, Tangent
from zcompile.ir.handover import kept_parameter
from zcompile.ir.printer import describe, print_node
from zcompile.verify.inference import agree, type_name, type_of
from zcompile.verify.subject import Subject

#: what forward hands to backward
HANDED_ON = (Saved, Kept, Offloaded)


@dataclass(frozen=True)
class Interface:
    """What later graphs must keep. Names are those of the text form: ``param 'w'``, ``output 0``, ``grad 'w'``.

    Attributes:
        params: logical shape and trainability of each parameter.
        inputs: the type of each buffer, input and tangent.
        outputs: the type of each output, input gradient and mutation; None for parameter gradients, whose shapes change.
        reads: for each returned value, the inputs it is computed from (a bit mask over ``bits``), which no pass on a step
            changes: this is what tells two gradients of one shape apart. Backward's saved values count as inputs. A pass
            on the joint graph may make the set smaller (drop an input that makes no difference), never larger.
        bits: the bit of every input that ``reads`` speaks about.
        is_step: whether this is the interface of a split step.
    """

    params: Mapping[str, tuple[tuple[int, ...], bool]]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    reads: Mapping[str, int]
    bits: Mapping[str, int]
    is_step: bool

    @staticmethod
    def of(target: Step | Graph) -> Interface:
        """The interface of a well-formed joint graph or step."""
        graphs = target.graphs if isinstance(target, Step) else [target]
        params: dict[str, tuple[tuple[int, ...], bool]] = {}
        inputs: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        reads: dict[str, int] = {}
        bits: dict[str, int] = {}
        for graph in graphs:
            for node in graph.inputs:
                origin = _origin(node)
                if isinstance(origin, Param):
                    params[origin.name] = (origin.shape, origin.trainable)
                elif not isinstance(origin, HANDED_ON):
                    inputs[describe(origin)] = type_of(meta.value(node))
            for node, role in _results(graph):
                outputs[describe(role)] = None if isinstance(role, Grad) else type_of(meta.value(node))
            sources = _Sources(graph, bits)
            reads.update((_key(role), sources.of(node)) for node, role in graph.outputs if not isinstance(role, Kept))
        return Interface(params, inputs, outputs, reads, bits, isinstance(target, Step))

    def without_dropped(self, target: Graph) -> Interface:
        """The same without the outputs of the model that ``target`` no longer returns."""
        returned = {describe(role) for _, role in target.outputs}
        gone = {name for name in self.outputs if name.startswith("output ") and name not in returned}
        return replace(self, outputs={name: type_ for name, type_ in self.outputs.items() if name not in gone})

    def check(self, subjects: list[Subject]) -> None:
        """Check that the graphs of a step (or the joint graph) still have this interface.

        Raises:
            VerifyError: naming the input or output that is missing, new, of another type or computed from other inputs.
        """
        found: set[str] = set()
        bits = dict(self.bits)
        for subject in subjects:
            for node in subject.graph.inputs:
                self._check_input(subject, node)
            for node, role in _results(subject.graph):
                found.add(describe(role))
                self._check_output(subject, node, role)
            sources = _Sources(subject.graph, bits)
            for node, role in subject.graph.outputs:
                if not isinstance(role, Kept):
                    self._check_reads(subject, node, _key(role), sources.of(node))
        for missing in self.outputs:
            if missing not in found:
                last = subjects[-1]
                last.refuse(last.graph.output, f"no longer returns {missing}, which the capture did")

    def _check_reads(self, subject: Subject, node: fx.Node, role: str, reads: int) -> None:
        expected = self.reads.get(role)
        if expected is None:
            return
        have = reads & ((1 << len(self.bits)) - 1)
        for inputs, problem in ((have & ~expected, "depends on"), (expected & ~have, "does not depend on")):
            if inputs and (self.is_step or problem == "depends on"):
                names = ", ".join(name for name, bit in self.bits.items() if inputs >> bit & 1)
                opposite = "does" if problem == "does not depend on" else "does not"
                subject.refuse(node, f"is returned as {role} but {problem} {names}, which it {opposite} in the capture")

    def _check_input(self, subject: Subject, node: fx.Node) -> None:
        origin = _origin(node)
        if isinstance(origin, HANDED_ON):
            return
        if isinstance(origin, Param):
            expected: Any = self.params.get(origin.name)
            if expected is None:
                subject.refuse(node, f"is parameter '{origin.name}', which the capture does not have")
            if (origin.shape, origin.trainable) != expected:
                shape, trainable = expected
                subject.refuse(
                    node,
                    f"is parameter '{origin.name}' of {list(origin.shape)}, trainable {origin.trainable}; "
                    f"in the capture it is of {list(shape)}, trainable {trainable}",
                )
            return
        have, want = type_of(meta.value(node)), self.inputs.get(describe(origin))
        if want is None:
            subject.refuse(node, f"is {describe(origin)}, which the capture does not have")
        if not agree(want, have, layout=True):
            subject.refuse(
                node, f"is {describe(origin)} of type {type_name(have)}; in the capture it is {type_name(want)}"
            )

    def _check_output(self, subject: Subject, node: fx.Node, role: Role) -> None:
        if describe(role) not in self.outputs:
            subject.refuse(node, f"is returned as {describe(role)}, which the capture does not return")
        want, have = self.outputs[describe(role)], type_of(meta.value(node))
        if want is not None and not agree(want, have, layout=False):
            subject.refuse(
                node,
                f"is returned as {describe(role)} of type {type_name(have)}; in the capture it is {type_name(want)}",
            )


def _results(graph: Graph) -> Iterator[tuple[fx.Node, Role]]:
    """What leaves the step: everything returned that backward does not take over from forward."""
    return ((node, role) for node, role in graph.outputs if not isinstance(role, HANDED_ON))


def _origin(node: fx.Node) -> Origin:
    origin = meta.origin(node)
    assert origin is not None, f"{node.name} has no origin"
    return origin


def _key(what: Origin | Role) -> str:
    """The name of an input or a role among ``reads``: a kept parameter counts as the parameter, a value on the host as saved."""
    if isinstance(what, Kept):
        return f"param {kept_parameter(what)!r}"
    return describe(Saved(what.name) if isinstance(what, Offloaded) else what)


class _Sources(Reads):
    """Reads down to the graph's inputs, with the bits that ``bits`` gives them by name; new names get new bits."""

    def __init__(self, graph: Graph, bits: dict[str, int]) -> None:
        self._bits = bits
        super().__init__(graph.fx, graph.regions, through_waits=True)

    def leaf(self, result: Result) -> int:
        return 1 << self._bits.setdefault(_key(_origin(result.node)), len(self._bits))


def check_step(step: Step, forward: Subject, backward: Subject | None) -> None:
    """Check that forward hands to backward what backward takes, and backward to the next forward what that takes, each once."""
    handed = {describe(role): node for node, role in step.forward.outputs if isinstance(role, HANDED_ON)}
    taken: dict[str, fx.Node] = {}
    for node in [] if backward is None else backward.graph.inputs:
        origin = _origin(node)
        if isinstance(origin, HANDED_ON):
            taken[describe(origin)] = node
            assert backward is not None
            if describe(origin) not in handed:
                backward.refuse(node, f"is {describe(origin)}, which forward does not return")
            have, want = type_of(meta.value(node)), type_of(meta.value(handed[describe(origin)]))
            if not agree(want, have, layout=True):
                backward.refuse(
                    node, f"is {describe(origin)} of type {type_name(have)}; forward returns {type_name(want)}"
                )
        elif isinstance(origin, Tangent):
            assert backward is not None
            outputs = {describe(role): n for n, role in step.forward.outputs}
            output = outputs.get(f"output {origin.index}")
            if output is None:
                backward.refuse(node, f"is {describe(origin)}, but forward has no output {origin.index}")
            have, want = type_of(meta.value(node)), type_of(meta.value(output))
            if not agree(want, have, layout=False):
                backward.refuse(
                    node, f"is {describe(origin)} of type {type_name(have)}; the output is {type_name(want)}"
                )
    for what, node in handed.items():
        if what not in taken:
            forward.refuse(node, f"is returned as {what}, which backward does not take")
    _check_handed_round(forward, backward)


def _check_handed_round(forward: Subject, backward: Subject | None) -> None:
    """What forward takes, the backward before it in the window hands on; it has the type, and nothing is left over."""
    handed: dict[Origin | Role, fx.Node] = {}
    if backward is not None:
        handed = {role: node for node, role in backward.graph.outputs if isinstance(role, HANDED_ON)}
    taken = {_origin(node): node for node in forward.graph.inputs if isinstance(_origin(node), HANDED_ON)}
    for origin, node in taken.items():
        given = handed.get(origin)
        if given is None:
            forward.refuse(node, f"is {describe(origin)}, which no backward hands on to the next forward")
        have, want = type_of(meta.value(node)), type_of(meta.value(given))
        if not agree(want, have, layout=True):
            forward.refuse(node, f"is {describe(origin)} of type {type_name(have)}; backward returns {type_name(want)}")
    for role, node in handed.items():
        if role not in taken and backward is not None:
            backward.refuse(node, f"is returned as {describe(role)}, which the next forward does not take")


def check_params_agree(subjects: list[Subject]) -> None:
    """Check that a parameter is stored the same way wherever the graphs of a step read it."""
    first: dict[str, fx.Node] = {}
    for subject in subjects:
        for node, param in subject.graph.params():
            other = first.setdefault(param.name, node)
            if meta.origin(other) != param or type_of(meta.value(other)) != type_of(meta.value(node)):
                subject.refuse(
                    node,
                    f"differs between the graphs of the step: '{print_node(node)}' here, '{print_node(other)}' in forward",
                )
