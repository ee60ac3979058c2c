"""Capture: the model and one call become one pure joint graph with full-size parameters."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from zcompile import compat
from zcompile.capture.causal import recognise_causal_masks
from zcompile.capture.fakes import eager_run, fake_inputs, fake_state, first_line
from zcompile.capture.tree import Path, Structure, build, fetch, flatten
from zcompile.errors import CaptureError, ConfigError
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
class Call:
    """One call of the model, taken apart.

    Attributes:
        tensors: the tensor leaves of the arguments.
        structure: rebuilds ``(args, kwargs)`` from them.
        training: whether gradients are recorded.
        autocast: the dtype of the ambient autocast on the compute device; None when it is off.
        input_dtype: floating inputs are cast to this; None leaves them.
        differentiable: names or indices of outputs that may get a gradient; None for the default rule.
    """

    tensors: list[torch.Tensor]
    structure: Structure
    training: bool
    autocast: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    differentiable: tuple[str | int, ...] | None = None


@dataclass(frozen=True)
class InputAlias:
    """An output that is an input, or a view of one: made again from the real input at run time.

    ``size`` None means the input itself.
    """

    input_index: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


@dataclass
class Captured:
    """The result of a capture.

    Attributes:
        graph: the joint graph.
        structure: rebuilds the user's output from the output leaves.
        num_outputs: number of output leaves.
        output_names: a readable name for each output leaf.
        differentiable: indices of the output leaves that have a tangent.
        detached: indices of float output leaves that have none although their value depends on parameters.
        aliases: output leaves that are inputs or views of inputs.
        constants: tensors that the program created from Python values, by buffer name in the graph.
        fake_mode: the mode of the graph's values.
        num_causal: attentions whose explicit mask was found to be the causal one.
    """

    graph: Graph
    structure: Structure
    num_outputs: int
    output_names: list[str]
    differentiable: list[int]
    detached: list[int]
    aliases: dict[int, InputAlias]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fake_mode: Any = None
    num_causal: int = 0


@dataclass(frozen=True)
class _OutputPlan:
    paths: tuple[Path, ...]
    detach: tuple[bool, ...]
    clone: tuple[bool, ...]


class _Wrapper(nn.Module):
    """Calls the model on rebuilt arguments and returns only tensors, detached where no gradient may arrive."""

    def __init__(self, model: nn.Module, call: Call, device_type: str, plan: _OutputPlan) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.device_type = device_type
        self.plan = plan

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = cast_inputs(leaves, self.call.input_dtype)
        args, kwargs = build(self.call.structure, tensors)
        if self.call.autocast is None:
            out = self.model.forward(*args, **kwargs)
        else:
            with torch.autocast(self.device_type, dtype=self.call.autocast):
                out = self.model.forward(*args, **kwargs)
        results = []
        for path, detach, clone in zip(self.plan.paths, self.plan.detach, self.plan.clone, strict=True):
            tensor = fetch(out, path)
            tensor = tensor.detach() if detach else tensor
            results.append(tensor.clone() if clone else tensor)
        return tuple(results)


def cast_inputs(leaves: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Floating leaves in ``dtype``, others as they are."""
    return list(leaves) if dtype is None else [t.to(dtype) if t.is_floating_point() else t for t in leaves]


def capture(
    model: nn.Module, call: Call, params: Mapping[int, ParamType], device: torch.device, name: str = "model"
) -> Captured:
    """Capture ``model`` for one call.

    Args:
        model: the user's module; it is only touched while this function runs.
        call: the arguments and the modes of the call.
        params: what to know of each parameter, by ``id`` of the Parameter object.
        device: where the computation runs.
        name: name of the graph.

    Raises:
        CaptureError: the model cannot be captured; says where, why and what to do.
    """
    check_capturable(model)
    mode = compat.new_fake_mode()
    canonical = _canonical_names(model, params)
    types = {key: (p.shape, p.dtype, p.trainable and call.training) for key, p in params.items()}
    leaves = fake_inputs(call.tensors, mode)
    if not call.training:
        leaves = [t.detach() for t in leaves]
    with (
        fake_state(model, mode, types, device) as fake_names,
        torch.set_grad_enabled(call.training),
        torch.autocast(device.type, enabled=False),
        contextlib.ExitStack() as stack,
    ):
        out, plan, structure, names = _plan_outputs(model, call, leaves, mode, device.type, fake_names)
        wrapper = _Wrapper(model, call, device.type, plan)
        traced = _dynamo(wrapper, leaves)
        num_causal = recognise_causal_masks(traced)
        joint = compat.aot_joint(stack, traced, tuple(leaves))
        graph, aliases, constants = _Converter(joint, canonical, {p.name: p for p in params.values()}, leaves).run(name)
        del out, traced
    with_tangent = sorted(o.index for o in (meta.origin(n) for n in graph.inputs) if isinstance(o, Tangent))
    detached = [i for i, d in enumerate(plan.detach) if d]
    return Captured(graph, structure, len(plan.paths), names, with_tangent, detached, aliases, constants, mode, num_causal)


def check_capturable(model: nn.Module) -> None:
    """Refuse, by name, what a capture would drop or get wrong without a word.

    Raises:
        CaptureError: a submodule with hooks, or an embedding with sparse gradients.
    """
    for path, module in model.named_modules():
        if module is not model and (kinds := compat.module_hooks(module)):
            raise CaptureError(
                f"module '{path}' has a {kinds[0]}, which a captured graph would drop; remove the hook and return what it "
                "needs as an output of forward, or register it on the whole model"
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise CaptureError(
                f"module '{path}' is an embedding with sparse=True; sparse gradients cannot be reduced: set sparse=False"
            )


def _canonical_names(model: nn.Module, params: Mapping[int, ParamType]) -> dict[str, str]:
    """Every dotted name of a parameter or buffer, with the name that stands for all names of the same tensor."""
    names = {name: params[id(p)].name for name, p in model.named_parameters(remove_duplicate=False)}
    first: dict[int, str] = {}
    for name, b in model.named_buffers(remove_duplicate=False):
        names[name] = first.setdefault(id(b), name)
    return names


def _plan_outputs(
    model: nn.Module, call: Call, leaves: list[torch.Tensor], mode: Any, device_type: str, fake_names: Mapping[int, str]
) -> tuple[Any, _OutputPlan, Structure, list[str]]:
    """Run once on fake tensors: which outputs there are, which are differentiable, which share memory."""
    args, kwargs = build(call.structure, cast_inputs(leaves, call.input_dtype))
    with torch.autocast(device_type, dtype=call.autocast, enabled=call.autocast is not None):
        out = eager_run(model, mode, args, kwargs)
    tensors, structure, paths = flatten(out)
    names = [_path_name(p) for p in paths]
    for tensor, name in zip(tensors, names, strict=True):
        if param := fake_names.get(compat.storage_id(tensor)):
            raise CaptureError(
                f"output {name} is parameter '{param}' or a view of it, which is sharded after this call; return a clone of it"
            )
    wanted = _differentiable(call, tensors, paths, names)
    detach = tuple(t.requires_grad and i not in wanted for i, t in enumerate(tensors))
    input_storages = {compat.storage_id(t) for t in leaves}
    seen: set[int] = set()
    clone = []
    for tensor in tensors:
        storage = compat.storage_id(tensor)
        clone.append(storage in seen and storage not in input_storages)
        seen.add(storage)
    return out, _OutputPlan(tuple(paths), detach, tuple(clone)), structure, names


def _differentiable(call: Call, tensors: list[torch.Tensor], paths: list[Path], names: list[str]) -> set[int]:
    """Indices of the outputs that may get a gradient (DESIGN: a float scalar called ``loss`` alone, else every float output)."""
    grads = {i for i, t in enumerate(tensors) if t.requires_grad}
    if call.differentiable is None:
        losses = {
            i for i in grads if paths[i] and paths[i][0][1] == "loss" and len(paths[i]) == 1 and tensors[i].numel() == 1
        }
        return losses or grads
    chosen: set[int] = set()
    for want in call.differentiable:
        found = {want} if isinstance(want, int) else {i for i, p in enumerate(paths) if p and p[0][1] == want}
        found &= set(range(len(tensors)))
        if not found:
            raise ConfigError(
                f"differentiable={want!r} names no output; the outputs are {', '.join(names) or '(none)'}"
            )
        chosen |= found
    return chosen & grads


def _path_name(path: Path) -> str:
    return "".join(f".{k}" if isinstance(k, str) else f"[{k!r}]" for _, k in path).removeprefix(".") or "result"


def _dynamo(wrapper: _Wrapper, leaves: list[torch.Tensor]) -> fx.GraphModule:
    try:
        return compat.dynamo_capture(wrapper, tuple(leaves))
    except compat.dynamo_errors() as error:
        places = re.findall(r'File "([^"]+)", line (\d+)', str(error))
        where = ":".join(places[-1]) if places else f"{type(wrapper.model).__name__}.forward"
        raise CaptureError(
            f"the model cannot be captured as one graph: {first_line(error)} (at {where}); rewrite that line with tensor "
            "operators, or keep that part of the model outside of what is compiled"
        ) from error


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


class _Converter:
    """AOTAutograd's joint graph with descriptors -> our joint Graph with origins and roles."""

    def __init__(
        self, joint: Any, canonical: Mapping[str, str], params: Mapping[str, ParamType], leaves: list[torch.Tensor]
    ) -> None:
        self.joint = joint
        self.module: fx.GraphModule = joint.graph_module
        self.canonical = canonical
        self.params = params
        self.leaves = leaves
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
        for node in graph.inputs:
            if not node.users and not isinstance(meta.origin(node), Tangent):
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
        return new

    def _aliases(self, input_origins: list[Origin]) -> dict[int, InputAlias]:
        found = {}
        for index, info in enumerate(compat.aot_metadata(self.joint).output_info):
            kind = compat.output_kind(info)
            base = None if kind == "fresh" else input_origins[info.base_idx]
            if not isinstance(base, Input):
                continue
            if kind == "is_input":
                found[index] = InputAlias(base.index)
            else:
                found[index] = InputAlias(base.index, *self._view(index, base.index))
        return found

    def _view(self, output_index: int, input_index: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        out = self.module.graph.find_nodes(op="output")[0]
        for value, desc in zip(out.args[0], out.meta["desc"], strict=True):
            if isinstance(desc, self.types.PlainAOTOutput) and desc.idx == output_index:
                fake, base = value.meta["val"], self.leaves[input_index]
                return tuple(fake.shape), tuple(fake.stride()), fake.storage_offset() - base.storage_offset()
        raise AssertionError(f"output {output_index} is not among the captured outputs")

    def _outputs(self, aliases: Mapping[int, InputAlias]) -> list[tuple[fx.Node, Role]]:
        out = self.module.graph.find_nodes(op="output")[0]
        forward: list[tuple[fx.Node, Role]] = []
        backward: list[tuple[fx.Node, Role]] = []
        for value, desc in zip(out.args[0], out.meta["desc"], strict=True):
            if value is None or desc is None:
                continue
            role = self._role(desc)
            if isinstance(role, Output) and role.index in aliases:
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
            raise CaptureError(
                f"forward writes to parameter '{getattr(origin, 'name', origin)}' in place; write to a buffer instead"
            )
        if isinstance(desc, t.GradAOTOutput):
            origin = self._origin(desc.grad_of)
            return Grad(origin.name) if isinstance(origin, Param) else InputGrad(origin.index)  # type: ignore[union-attr]
        raise CaptureError(
            f"the captured graph has an output that zcompile does not know: {desc}; please report the model"
        )
