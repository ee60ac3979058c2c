"""From AOTAutograd's joint graph with descriptors to our joint Graph with origins and roles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from zcompile import compat
from zcompile.errors import CaptureError
from zcompile.ir import meta
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
    Role,
    Tangent,
)


@dataclass(frozen=True)
class ParamType:
    """What a capture needs to know about a parameter.

    Attributes:
        name: canonical name.
        shape: logical full shape.
        dtype: the dtype that the graph computes in.
        trainable: whether it requires grad.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class InputAlias:
    """An output that is an input or a buffer, or a view of one: made again from the real tensor at run time.

    ``size`` None means the tensor itself.
    """

    base: Input | Buffer
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


#: metadata that the split reads, and that our graphs keep
_KEEP = (
    "val",
    "stack_trace",
    "partitioner_tag",
    "seq_nr",
    "recompute",
    "ac_graph_id",
    "is_gradient_acc",
    "autograd_backward",
    "custom",
)


class Converter:
    """AOTAutograd's joint graph with descriptors -> our joint Graph with origins and roles."""

    def __init__(
        self, joint: Any, canonical: Mapping[str, str], params: Mapping[str, ParamType], num_outputs: int
    ) -> None:
        self.joint = joint
        self.module: fx.GraphModule = joint.graph_module
        self.canonical = canonical
        self.params = params
        self.num_outputs = num_outputs
        self.types = compat.aot_descriptors()
        self.new = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.by_origin: dict[Origin, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.constant_nodes: dict[str, fx.Node] = {}

    def run(self, name: str) -> tuple[Graph, dict[int, InputAlias], dict[str, torch.Tensor]]:
        """Convert; returns the graph, the outputs that alias inputs, and lifted constants."""
        input_origins: list[Origin] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                origin = self._origin(node.meta["desc"])
                input_origins.append(origin)
                if origin not in self.by_origin:
                    self.by_origin[origin] = self._placeholder(node, origin)
                self.env[node] = self.by_origin[origin]
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                self.env[node] = self._constant(node)
        for node in self.module.graph.nodes:
            if node.op == "call_function":
                self.env[node] = self._copy(node)
        aliases = self._aliases(input_origins)
        outputs = self._outputs(aliases)
        out = self.new.output([n for n, _ in outputs])
        meta.set_roles(out, [r for _, r in outputs])
        graph = Graph(f"{name}.joint", Direction.JOINT, self.new)
        written = {role.name for _, role in outputs if isinstance(role, Mutation)}
        graded = {role.name for _, role in outputs if isinstance(role, Grad)}
        written_inputs = {role.index for _, role in outputs if isinstance(role, InputMutation)}
        for node in graph.inputs:
            origin = meta.origin(node)
            is_written = (isinstance(origin, Buffer) and origin.name in written) or (
                isinstance(origin, Input) and origin.index in written_inputs
            )
            is_graded = isinstance(origin, Param) and origin.name in graded  # the gradient may not need its value
            if not node.users and not is_written and not is_graded and not isinstance(origin, Tangent):
                self.new.erase_node(node)
        return graph, aliases, self.constants

    def _origin(self, desc: Any) -> Origin:
        t = self.types
        if isinstance(desc, t.ParamAOTInput):
            param = self.params[self.canonical[desc.target.removeprefix("model.")]]
            return Param(param.name, param.shape, trainable=param.trainable)
        if isinstance(desc, t.BufferAOTInput):
            name = desc.target.removeprefix("model.")
            return Buffer(self.canonical.get(name, name))
        if isinstance(desc, t.PlainAOTInput):
            return Input(desc.idx)
        if isinstance(desc, t.TangentAOTInput) and isinstance(desc.output, t.PlainAOTOutput):
            return Tangent(desc.output.idx)
        if isinstance(desc, t.TangentAOTInput) and isinstance(desc.output, t.InputMutationAOTOutput):
            target = self._origin(desc.output.mutated_input)
            _refuse_parameter(target)
            what = f"argument {target.index}" if isinstance(target, Input) else f"'{getattr(target, 'name', target)}'"
            raise CaptureError(
                f"forward writes a value that needs a gradient into {what} in place, so that a later backward would go on into this "
                "call; write value.detach(), or return the value as an output"
            )
        if isinstance(desc, t.ForwardTokenAOTInput):
            effects = [n for n in self.module.graph.nodes if "with_effects" in str(n.target)]
            called = f" ({effects[0].args[1]} at {meta.source(effects[0]) or 'forward'})" if effects else ""
            raise CaptureError(
                f"forward calls an operator with side effects{called}, which a captured graph cannot order; replace it (for "
                "linear algebra by its variant without error checks, such as torch.linalg.inv_ex)"
            )
        raise CaptureError(
            f"the captured graph has an input that zcompile does not know: {desc}; please report the model"
        )

    def _placeholder(self, node: fx.Node, origin: Origin) -> fx.Node:
        text = {Param: "p", Buffer: "b", Input: "x", Tangent: "tangents"}[type(origin)]
        detail = str(getattr(origin, "name", getattr(origin, "index", ""))).replace("tangents", "tangent_")
        new = self.new.placeholder(re.sub(r"\W", "_", f"{text}_{detail}"))
        new.meta = {"val": node.meta["val"]}
        meta.set_origin(new, origin)
        return new

    def _constant(self, node: fx.Node) -> fx.Node:
        target = str(node.target)
        if target in self.constant_nodes:
            return self.constant_nodes[target]
        value: Any = self.module
        for part in target.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"the captured graph calls a subgraph '{target}', which zcompile cannot take apart; avoid higher-order operators there"
            )
        if value.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"forward uses a tensor of shape {list(value.shape)} that requires grad and belongs to no module that is registered in "
                "the model; register it (a parameter as an attribute, parameters in nn.ParameterList, modules in nn.ModuleList) or pass "
                "it as an argument"
            )
        name = f"constant.{len(self.constants)}"
        self.constants[name] = value
        new = self.new.placeholder(name.replace(".", "_"))
        first_call = next((n for n in self.new.nodes if n.op == "call_function"), None)
        if first_call is not None:
            first_call.prepend(new)
        new.meta = {"val": node.meta["val"]}
        meta.set_origin(new, Buffer(name))
        self.constant_nodes[target] = new
        return new

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.target in (torch.ops.aten.embedding.default,) and len(node.args) > 4 and node.args[4]:
            raise CaptureError(
                f"an embedding with sparse gradients is used at {meta.source(node) or 'forward'}; set sparse=False"
            )
        new = self.new.node_copy(node, lambda n: self.env[n])
        new.meta = {k: node.meta[k] for k in _KEEP if k in node.meta}
        stack = node.meta.get("nn_module_stack") or node.meta.get(
            "fwd_nn_module_stack"
        )  # None in either where there is none
        if stack:
            meta.set_module(new, compat.dynamo_module(next(reversed(stack.values()))[0]))
        return new

    def _aliases(self, input_origins: list[Origin]) -> dict[int, InputAlias]:
        found = {}
        for index, info in enumerate(compat.aot_metadata(self.joint).output_info[: self.num_outputs]):
            kind = compat.output_kind(info)
            base = None if kind == "fresh" else input_origins[info.base_idx]
            if not isinstance(base, (Input, Buffer)):
                continue
            if kind == "is_input":
                found[index] = InputAlias(base)
            else:
                found[index] = InputAlias(base, *self._view(index))
        return found

    def _view(self, output_index: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        out = self.module.graph.find_nodes(op="output")[0]
        for value, desc in zip(out.args[0], out.meta["desc"], strict=True):
            if isinstance(desc, self.types.PlainAOTOutput) and desc.idx == output_index:
                fake = value.meta["val"]  # fake inputs and buffers start at offset 0
                return tuple(fake.shape), tuple(fake.stride()), fake.storage_offset()
        raise AssertionError(f"output {output_index} is not among the captured outputs")

    def _outputs(self, aliases: Mapping[int, InputAlias]) -> list[tuple[fx.Node, Role]]:
        out = self.module.graph.find_nodes(op="output")[0]
        forward: list[tuple[fx.Node, Role]] = []
        backward: list[tuple[fx.Node, Role]] = []
        for value, desc in zip(out.args[0], out.meta["desc"], strict=True):
            if value is None or desc is None:
                continue
            role = self._role(desc)
            if isinstance(role, Output) and (role.index in aliases or role.index >= self.num_outputs):
                continue
            (backward if isinstance(role, (Grad, InputGrad)) else forward).append((self.env[value], role))
        return forward + backward

    def _role(self, desc: Any) -> Role:
        t = self.types
        if isinstance(desc, t.PlainAOTOutput):
            return Output(desc.idx)
        if isinstance(desc, t.InputMutationAOTOutput):
            origin = self._origin(desc.mutated_input)
            if isinstance(origin, Buffer):
                return Mutation(origin.name)
            if isinstance(origin, Input):
                return InputMutation(origin.index)
            _refuse_parameter(origin)
        if isinstance(desc, t.GradAOTOutput):
            origin = self._origin(desc.grad_of)
            if isinstance(origin, Param):
                return Grad(origin.name)
            assert isinstance(origin, Input), f"autograd gives a gradient of {origin}"
            return InputGrad(origin.index)
        raise CaptureError(
            f"the captured graph has an output that zcompile does not know: {desc}; please report the model"
        )


def _refuse_parameter(target: Origin) -> None:
    if isinstance(target, Param):
        raise CaptureError(
            f"forward writes to parameter '{target.name}' in place; write to a buffer instead, or change parameters between steps "
            "(an embedding's max_norm does that, too)"
        )
