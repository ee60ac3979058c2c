"""Gradients and mutations: each belongs to an input; once ``grads-reduced`` holds, each gradient came through exactly one reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.flow import Result
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Grad, Input, InputGrad, InputMutation, Kept, Mutation, Param
from zcompile.ir.operators import operator_name
from zcompile.ir.printer import describe
from zcompile.ir.types import dtype_name
from zcompile.verify.inference import agree, type_name, type_of
from zcompile.verify.subject import Collective, Subject, picked_result


def check_roles(subjects: list[Subject]) -> None:
    """Check that every gradient and mutation belongs to an input of the step and has its type."""
    inputs = {describe(meta.origin(n)): n for s in subjects for n in s.graph.inputs}
    first: dict[str, fx.Node] = {}
    for subject in subjects:
        for node, role in subject.graph.outputs:
            if isinstance(role, Kept):  # goes round in a window
                continue
            if describe(role) in first and first[describe(role)] not in subject.position:
                subject.refuse(node, f"is returned as {describe(role)}, which forward returns already")
            first[describe(role)] = node
            if isinstance(role, Grad):
                _check_grad(subject, node, role.name)
            elif isinstance(role, (Mutation, InputMutation, InputGrad)):
                _check_input_role(subject, node, role, inputs)


def _check_grad(subject: Subject, node: fx.Node, name: str) -> None:
    param, _ = subject.params.get(name, (None, None))
    if param is None:
        subject.refuse(node, f"is returned as grad '{name}', but the step has no parameter '{name}'")
    if not param.trainable:
        subject.refuse(node, f"is returned as grad '{name}', but parameter '{name}' is frozen")
    shape = tuple(meta.tensor(node).shape)
    spec = subject.spec(param)
    allowed = {param.shape, spec.padded_local_shape, spec.padded_full_shape}
    if shape not in allowed:
        shapes = " or ".join(str(list(s)) for s in sorted(allowed))
        subject.refuse(
            node, f"is returned as grad '{name}' with shape {list(shape)}; the parameter's gradient has {shapes}"
        )


def _check_input_role(
    subject: Subject, node: fx.Node, role: Mutation | InputMutation | InputGrad, inputs: Mapping[str, fx.Node]
) -> None:
    origin = Buffer(role.name) if isinstance(role, Mutation) else Input(role.index)
    target = inputs.get(describe(origin))
    if target is None:
        if isinstance(role, Mutation):
            subject.refuse(node, f"is returned as {describe(role)}, but the step has no {describe(origin)}")
        return  # an input that nothing reads may still be written, and its gradient may be wanted
    have, want = type_of(meta.value(node)), type_of(meta.value(target))
    if not agree(want, have, layout=False):
        subject.refuse(
            node, f"is returned as {describe(role)} of type {type_name(have)}; {describe(origin)} is {type_name(want)}"
        )


def check_grads_reduced(subject: Subject, options: Mapping[str, Any], axes: Mapping[str, str]) -> None:
    """Check ``grads-reduced``.

    Args:
        subject: the graph that returns the gradients.
        options: of the pass that reduced: its ``dtype`` when set; with ``local``, gradients stay full on their rank, in the
            form that a reduction reads.
        axes: the axis that each parameter is sharded over, by name.
    """
    if all(size == 1 for size in subject.graph.axes.values()) and not subject.reductions:
        return
    if options.get("local"):
        _check_local(subject, options)
        return
    results = {result: c for c in subject.reductions for result in c.results}
    reads = subject.reads
    reduced = reads.mask(results)
    _check_reduced_once(subject, reduced)
    returned: dict[Result, str] = {}
    for node, role in subject.graph.outputs:
        read = reads.of(node) & reduced
        if not isinstance(role, Grad):
            if read:
                first = reads.first(read).node.name
                subject.refuse(node, f"is returned as {describe(role)} but reads the reduced gradients of %{first}")
            continue
        picked = picked_result(node)
        if picked is None or picked not in results:
            how = f"computed from %{reads.first(read).node.name} after the reduction" if read else "unreduced"
            subject.refuse(
                node, f"is returned as grad '{role.name}' {how}; a gradient is what its reduction's wait gives"
            )
        if picked in returned:
            subject.refuse(node, f"is returned as grad '{role.name}' and as grad '{returned[picked]}'")
        returned[picked] = role.name
        _check_reduction(subject, node, subject.params[role.name][0], results[picked], picked.slot, options, axes)
    for result, collective in results.items():
        if result not in returned:
            subject.refuse(
                collective.start,
                f"reduces %{collective.tensors[result.slot].name}, which is not returned as a gradient",
            )


def _check_local(subject: Subject, options: Mapping[str, Any]) -> None:
    """Inside ``no_sync``: nothing is reduced, and every gradient has the shape and dtype that a reduction takes."""
    for reduction in subject.reductions:
        subject.refuse(reduction.start, "reduces a gradient; this step accumulates locally")
    for node, role in subject.graph.outputs:
        if isinstance(role, Grad):
            _check_sent(subject, node, node, meta.tensor(node).dtype, subject.params[role.name][0], options)


def _check_reduced_once(subject: Subject, reduced: int) -> None:
    for collective in subject.reductions:
        for tensor in collective.tensors:
            again = subject.reads.of(tensor) & reduced
            if again:
                first = subject.reads.first(again).node.name
                subject.refuse(collective.start, f"reduces %{tensor.name}, which %{first} reduced already")


def _check_reduction(
    subject: Subject,
    node: fx.Node,
    param: Param,
    collective: Collective,
    index: int,
    options: Mapping[str, Any],
    axes: Mapping[str, str],
) -> None:
    """One gradient's reduction: kind, axis, shapes and dtype."""
    wanted = ops.reduce_scatter if param.placement == "shard" else ops.all_reduce
    start = collective.start
    if start.target is not wanted:
        subject.refuse(
            start,
            f"is {operator_name(start.target)} for grad '{param.name}'; "
            f"a parameter with placement {param.placement} takes {operator_name(wanted)}",
        )
    axis = axes.get(param.name, next(iter(subject.graph.axes)))
    if collective.axis != axis:
        subject.refuse(
            start, f"reduces grad '{param.name}' over axis '{collective.axis}'; the parameter lives on '{axis}'"
        )
    spec = subject.spec(param)
    got = meta.tensor(node)
    if tuple(got.shape) != spec.padded_local_shape:
        subject.refuse(
            start,
            f"returns grad '{param.name}' as {list(got.shape)}; the padded shape is {list(spec.padded_local_shape)}",
        )
    _check_sent(subject, start, collective.tensors[index], got.dtype, param, options)


def _check_sent(
    subject: Subject, at: fx.Node, sent: fx.Node, dtype: torch.dtype, param: Param, options: Mapping[str, Any]
) -> None:
    """A gradient as a reduction reads it: padded; and what it is reduced in: the reduce dtype."""
    value, want = meta.tensor(sent), subject.spec(param).padded_full_shape
    if tuple(value.shape) != want:
        subject.refuse(at, f"sends grad '{param.name}' as {list(value.shape)}; the padded shape is {list(want)}")
    wanted = options.get("dtype")
    if wanted and dtype_name(dtype) != wanted:
        subject.refuse(at, f"reduces grad '{param.name}' in {dtype_name(dtype)}; the reduce dtype is {wanted}")
