"""Values on the host: read by reloads only; what moved there is read on the device no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from zcompile import ops
from zcompile.analysis.flow import Result
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Offloaded
from zcompile.ir.printer import describe
from zcompile.verify.subject import Subject, picked_result


def check_hosted(subject: Subject) -> None:
    """Check every value that is moved between the device and the host.

    A value on the host is what ``zc.offload`` gave, or what forward returned as ``offloaded``. Only ``zc.reload`` reads it, or
    forward returns it as that. What is offloaded owns its memory, which nobody reads after the wait of the copy, through
    whatever view: it is given up there.
    """
    moved: dict[Result, fx.Node] = {}  # memory on the device, with the copy that moves it
    gone: set[fx.Node] = set()  # copies that have been waited for
    for node in subject.nodes:
        if node.op == "output":
            _check_returned(subject, node)
        if node.op == "output" or (node.target is not ops.wait and not edit.is_getitem(node)):
            _check_reads(subject, node, moved, gone)
        if node.target is ops.offload:
            for tensor in calls.tensors(node):
                for storage in _own_memory(subject, node, tensor):
                    if moved.get(storage, node) is not node:
                        subject.refuse(node, f"offloads %{tensor.name}, which %{moved[storage].name} does already")
                    moved[storage] = node
        elif node.target is ops.wait:
            gone.add(calls.source(node))


def is_hosted(node: fx.Node) -> bool:
    """Whether a value is on the host."""
    if node.op == "placeholder":
        return isinstance(meta.origin(node), Offloaded)
    picked = picked_result(node)
    return picked is not None and calls.source(picked.node).target is ops.offload


def _check_reads(subject: Subject, node: fx.Node, moved: Mapping[Result, fx.Node], gone: set[fx.Node]) -> None:
    for source in node.all_input_nodes:
        if is_hosted(source):
            if node.target is not ops.reload and node.op != "output":
                subject.refuse(node, f"reads %{source.name}, which is on the host; reload it first")
            continue
        if node.target is ops.reload:
            subject.refuse(node, f"reloads %{source.name}, which was never offloaded")
        for storage in subject.aliases.of(source):
            if moved.get(storage) in gone:
                subject.refuse(node, f"reads memory of %{source.name}, which %{moved[storage].name} moved to the host")


def _check_returned(subject: Subject, output: fx.Node) -> None:
    for node, role in subject.graph.outputs:
        if is_hosted(node) and not isinstance(role, Offloaded):
            subject.refuse(node, f"is returned as {describe(role)} but is on the host; reload it first")
        if isinstance(role, Offloaded) and not is_hosted(node):
            subject.refuse(node, f"is returned as {describe(role)} but is on the device; offload it first")


def _own_memory(subject: Subject, offload: fx.Node, tensor: fx.Node) -> Any:
    """The memory of an offloaded value: made by computation, neither an input's nor a collective's."""
    storages = subject.aliases.of(tensor)
    for storage in storages:
        if storage.node.op == "placeholder":
            subject.refuse(
                offload, f"offloads %{tensor.name}, memory of input %{storage.node.name}, which stays on the device"
            )
        if storage.node.target is ops.wait and ops.is_collective(calls.source(storage.node).target):
            subject.refuse(offload, f"offloads %{tensor.name}, the result of a collective; release it instead")
    return storages
