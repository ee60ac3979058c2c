"""Capture: the model and one call become one pure joint graph with full-size parameters."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from zcompile import compat
from zcompile.capture.causal import recognise_causal_masks
from zcompile.capture.convert import Converter, ParamType
from zcompile.capture.exported import Joint
from zcompile.capture.fakes import eager_run, fake_inputs, fake_state, first_line, still_changed
from zcompile.capture.key import NoKey, program_key
from zcompile.capture.tree import Path, Structure, build, difference, fetch, flatten
from zcompile.errors import CaptureError, ConfigError
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Graph, Mutation
from zcompile.store import Store

log = logging.getLogger("zcompile")


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


@dataclass
class Captured:
    """The result of a capture.

    Attributes:
        joint: what autograd made of the program.
        structure: rebuilds the user's output from the output leaves.
        num_outputs: number of output leaves.
        output_names: a readable name for each output leaf.
        detached: indices of float output leaves that have no tangent although their value depends on parameters.
        fake_mode: the mode of the graph's values.
        num_causal: attentions whose explicit mask was found to be the causal one.
        key: equal ones stand for equal captures, also in other processes; empty where nothing can stand for it.
    """

    joint: Joint
    structure: Structure
    num_outputs: int
    output_names: list[str]
    detached: list[int]
    fake_mode: Any = None
    num_causal: int = 0
    key: str = ""

    @cached_property
    def graph(self) -> Graph:
        """The joint graph."""
        return self.joint.load()


@dataclass(frozen=True)
class _OutputPlan:
    paths: tuple[Path, ...]
    detach: tuple[bool, ...]
    clone: tuple[bool, ...]
    empty: bool


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
        # a program that computes nothing is no graph: it gets an output that is left out afterwards
        return (*results, torch.zeros(())) if self.plan.empty else tuple(results)


def cast_inputs(leaves: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Floating leaves in ``dtype``, others as they are."""
    return list(leaves) if dtype is None else [t.to(dtype) if t.is_floating_point() else t for t in leaves]


def capture(
    model: nn.Module,
    call: Call,
    params: Mapping[int, ParamType],
    device: torch.device,
    name: str = "model",
    store: Store | None = None,
) -> Captured:
    """Capture ``model`` for one call.

    Args:
        model: the user's module; it is only touched while this function runs.
        call: the arguments and the modes of the call.
        params: what to know of each parameter, by ``id`` of the Parameter object.
        device: where the computation runs.
        name: name of the graph.
        store: where an earlier process may have left what autograd makes of the program. Dynamo always runs, and with it user code.

    Raises:
        CaptureError: the model cannot be captured; says where, why and what to do.
    """
    check_capturable(model)
    buffers = dict(model.named_buffers())
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
        traced = _dynamo(wrapper, leaves, mode)
        num_causal = recognise_causal_masks(traced)
        facts = (name, call.training, len(plan.paths), tuple(canonical.items()), tuple(map(astuple, params.values())))
        key = _key(traced, leaves, buffers, facts, name) if store is not None else ""
        joint = Joint.find(store, key, mode)
        found = joint is not None
        if joint is None:
            exported = _aot_joint(stack, traced, leaves)
            by_name = {p.name: p for p in params.values()}
            joint = Joint.of(*Converter(exported, canonical, by_name, len(plan.paths)).run(name))
        del out, traced
    if found:
        log.debug("the capture of %s was kept by an earlier process: %s", name, key)
    else:
        _check_buffers(buffers, joint.load())
        joint.keep(store, key)
    detached = [i for i, d in enumerate(plan.detach) if d]
    return Captured(joint, structure, len(plan.paths), names, detached, mode, num_causal, key)


def _key(
    traced: fx.GraphModule,
    leaves: Sequence[torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    facts: tuple[Any, ...],
    name: str,
) -> str:
    try:
        return program_key(traced, leaves, buffers, facts)
    except NoKey as reason:
        log.debug("the capture of %s is not kept for other processes: %s", name, reason)
        return ""


def check_capturable(model: nn.Module) -> None:
    """Refuse, by name, what a capture would drop or get wrong without a word.

    Raises:
        CaptureError: a submodule with hooks, an embedding with sparse gradients, or a batch norm over ranks.
    """
    if kinds := [kind for kind, hooks in compat.global_module_hooks().items() if hooks]:
        raise CaptureError(
            f"a {kinds[0]} is registered for all modules, which a captured graph would drop; remove it for the time of training"
        )
    for path, module in model.named_modules():
        kinds = [kind for kind, hooks in compat.backward_hooks(module).items() if hooks]
        if module is not model and kinds:
            raise CaptureError(
                f"module '{path}' has a {kinds[0]}, which a captured graph would drop; remove the hook, or register it on an "
                "output, a parameter or the whole model"
            )
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise CaptureError(
                f"module '{path}' is a SyncBatchNorm, whose communication a captured graph does not have; use BatchNorm (each rank's "
                "own statistics) or GroupNorm, or put it in eval mode"
            )
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise CaptureError(
                f"module '{path}' is an embedding with sparse=True; sparse gradients cannot be reduced: set sparse=False"
            )


def _check_buffers(buffers: Mapping[str, torch.Tensor], graph: Graph) -> None:
    """Refuse a buffer that forward writes and that shares memory with another one: the graph has them apart."""
    written = {role.name for _, role in graph.outputs if isinstance(role, Mutation)}
    read = {origin.name for n in graph.inputs if isinstance(origin := meta.origin(n), Buffer)}
    owners: dict[int, str] = {}
    for name, buffer in buffers.items():
        if written and name in written | read and buffer.numel():
            other = owners.setdefault(compat.storage_id(buffer), name)
            if other != name and not written.isdisjoint((name, other)):
                raise CaptureError(
                    f"buffers '{other}' and '{name}' share memory and forward writes to it; make one a clone, or take the view in forward"
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
    inputs = cast_inputs(leaves, call.input_dtype)
    args, kwargs = build(call.structure, inputs)
    with torch.autocast(device_type, dtype=call.autocast, enabled=call.autocast is not None):
        out = eager_run(model, mode, args, kwargs)
    _check_arguments(call.structure, inputs, args, kwargs)
    tensors, structure, paths = flatten(out)
    names = [path_name(p) for p in paths]
    for tensor, name in zip(tensors, names, strict=True):
        if param := fake_names.get(compat.storage_id(tensor)):
            raise CaptureError(
                f"output {name} is parameter '{param}' or a view of it, which is sharded after this call; return a clone of it"
            )
    wanted = _differentiable(call, tensors, paths, names)
    detach = tuple(t.requires_grad and i not in wanted for i, t in enumerate(tensors))
    input_types = {compat.storage_id(t): t.dtype for t in leaves}
    seen: set[int] = set()
    clone = []
    for tensor in tensors:
        storage = compat.storage_id(tensor)
        reinterpreted = input_types.get(storage, tensor.dtype) != tensor.dtype or compat.is_lazy(tensor)
        clone.append(reinterpreted or (storage in seen and storage not in input_types))
        seen.add(storage)
    empty = {id(t) for t in tensors} <= {id(t) for t in (*leaves, *model.buffers())}
    return out, _OutputPlan(tuple(paths), detach, tuple(clone), empty), structure, names


def _check_arguments(
    structure: Structure, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a forward that changed a list, dict or object among its arguments: it was given a copy."""
    tensors, after, paths = flatten((args, kwargs))
    path = difference(structure, after)
    if path is None:
        path = next((p for p, now, was in zip(paths, tensors, inputs, strict=True) if now is not was), None)
    if path is None:
        return
    name = path_name(path[1:])
    raise CaptureError(
        f"forward changes argument {name} (a list, dict or object that is not a tensor), which a captured graph would not do again; "
        "change a copy of it, and return what the caller needs"
    )


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
        found |= {i for i, name in enumerate(names) if name == want}
        found &= set(range(len(tensors)))
        if not found:
            raise ConfigError(
                f"differentiable={want!r} names no output; the outputs are {', '.join(names) or '(none)'}"
            )
        chosen |= found
    return chosen & grads


def path_name(path: Path) -> str:
    """A tensor's place in a nested value, as code: ``past[0]``."""
    return "".join(f".{k}" if isinstance(k, str) else f"[{k!r}]" for _, k in path).removeprefix(".") or "result"


def _dynamo(wrapper: _Wrapper, leaves: list[torch.Tensor], mode: Any) -> fx.GraphModule:
    changed: list[str] = []
    try:
        traced = compat.dynamo_capture(wrapper, tuple(leaves), changed)
    except compat.dynamo_errors() as error:
        places = [p for p in re.findall(r'File "([^"]+)", line (\d+)', str(error)) if p[0] != __file__]
        where = ":".join(places[-1]) if places else f"{type(wrapper.model).__name__}.forward"
        raise CaptureError(
            f"the model cannot be captured as one graph: {compat.dynamo_reason(error)} (at {where}); rewrite that line with tensor "
            "operators, or keep that part of the model outside of what is compiled"
        ) from error
    changed = still_changed(changed, lambda: wrapper(*leaves), mode)
    if changed:
        raise CaptureError(
            "forward changes Python objects, which a captured graph would not do again: "
            f"{', '.join(map(compat.dynamo_name, changed[:5]))}; "
            "return the value as an output, or keep it in a registered buffer that is written in place"
        )
    return traced


def _aot_joint(stack: contextlib.ExitStack, traced: fx.GraphModule, leaves: list[torch.Tensor]) -> Any:
    try:
        return compat.aot_joint(stack, traced, tuple(leaves))
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            raise CaptureError(
                f"forward writes in place to a tensor whose old value backward needs, and plain PyTorch refuses that backward, too "
                f"({first_line(error)}); write to a clone, or call the model under torch.no_grad()"
            ) from error
        if "entirely functional graph" in str(error):
            raise CaptureError(
                "forward writes in place to a tensor that is neither an argument nor a registered buffer, such as a global or a plain "
                "attribute; register it with register_buffer"
            ) from error
        raise CaptureError(
            f"autograd cannot trace the model's backward: {type(error).__name__}: {first_line(error)}; the original error is above"
        ) from error
