"""Collectives and transfers: each one started once, waited for once, on an axis that exists; nothing reads what is still pending."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zcompile import ops
from zcompile.ir import edit, meta
from zcompile.ir.operators import operator_name
from zcompile.ir.types import dtype_name, literal
from zcompile.verify.subject import Subject


def check_collectives(subject: Subject) -> None:
    """Check every collective and every wait. Program order alone decides the order of collectives: fx has no branches."""
    for node in subject.nodes:
        if ops.is_collective(node.target):
            _check_start(subject, node)
            _check_pending(subject, node)
        elif ops.is_transfer(node.target):
            _list_of_tensors(subject, node)
            _check_pending(subject, node)
        elif node.target is ops.wait:
            _check_wait(subject, node)
        elif node.target is ops.unshard:
            _check_axis(subject, node)
        elif node.target is ops.release and node.users:
            subject.refuse(next(iter(node.users)), f"reads %{node.name}, which gives nothing")


def _check_start(subject: Subject, node: fx.Node) -> None:
    tensors = _list_of_tensors(subject, node)
    _check_axis(subject, node)
    size: Any = node.args[2]
    dtypes = {meta.tensor(t).dtype for t in tensors}
    if len(dtypes) > 1:
        subject.refuse(node, f"sends tensors of {len(dtypes)} dtypes in one call; one call has one dtype")
    _check_reduce_dtype(subject, node, meta.tensor(tensors[0]).dtype)
    for tensor in tensors:
        shape = meta.tensor(tensor).shape
        if node.target is not ops.all_reduce and len(shape) == 0:
            subject.refuse(node, f"sends %{tensor.name}, which has no dimension to divide or join")
        if node.target is ops.reduce_scatter and shape[0] % size != 0:
            subject.refuse(node, f"scatters %{tensor.name} with {shape[0]} rows over {size} ranks; pad it first")


def _list_of_tensors(subject: Subject, node: fx.Node) -> list[fx.Node]:
    tensors: Any = node.args[0]
    if not isinstance(tensors, (list, tuple)) or not tensors or not all(isinstance(t, fx.Node) for t in tensors):
        subject.refuse(node, "sends something other than a list of at least one tensor")
    return list(tensors)


def _check_reduce_dtype(subject: Subject, node: fx.Node, sent: torch.dtype) -> None:
    """A reduction may widen what it reads, never round it."""
    dtype: Any = node.args[3] if len(node.args) > 3 else None
    if dtype in (None, sent):
        return
    if not (sent.is_floating_point and dtype.is_floating_point and torch.promote_types(sent, dtype) == dtype):
        subject.refuse(node, f"reduces {dtype_name(sent)} in {dtype_name(dtype)}; cast before it, not in it")


def _check_axis(subject: Subject, node: fx.Node) -> None:
    axis: Any = node.args[1]
    size = node.args[2]
    axes = subject.graph.axes
    if axis not in axes:
        subject.refuse(
            node, f"runs over axis '{axis}', which the graph does not have; it has {', '.join(axes) or 'none'}"
        )
    if axes[axis] != size:
        subject.refuse(node, f"runs over {size} ranks of axis '{axis}', which has {axes[axis]}")


def _check_pending(subject: Subject, node: fx.Node) -> None:
    waits = [user for user in node.users if user.target is ops.wait]
    for user in node.users:
        if user.op == "output":
            subject.refuse(node, "is returned while it is pending; wait for it first")
        if user.target is not ops.wait:
            subject.refuse(user, f"reads %{node.name} while it is pending; only zc.wait may")
    if not waits:
        subject.refuse(node, "is started but never waited for")
    if len(waits) > 1:
        subject.refuse(max(waits, key=subject.position.__getitem__), f"waits for %{node.name} a second time")


def _check_wait(subject: Subject, node: fx.Node) -> None:
    pending: Any = node.args[0]
    if not isinstance(pending, fx.Node) or not ops.is_start(pending.target):
        what = (
            f"%{pending.name}, which is {operator_name(pending.target)}"
            if isinstance(pending, fx.Node)
            else literal(pending)
        )
        subject.refuse(node, f"waits for {what}; only what was started is pending")
    readers = []
    for user in node.users:
        if not edit.is_getitem(user):
            subject.refuse(user, f"reads all of %{node.name} at once; pick one result")
        readers.extend(reader for reader in user.users if reader.target is not ops.release)
    if not readers:
        kind, rest = ("collective", " and release") if ops.is_collective(pending.target) else ("copy", "")
        subject.refuse(pending, f"is a {kind} whose results nobody reads; remove it with its wait{rest}")
