"""Keeps saved activations in the host's memory between their last use in forward and their first in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.aliases import Aliases
from zcompile.analysis.flow import Result
from zcompile.analysis.schedule import first_uses
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Offloaded, Role, Saved, Step
from zcompile.pipeline import Stats, StepPass
from zcompile.verify.facts import Fact


@dataclass(frozen=True)
class Offload(StepPass):
    """Move saved activations to the host after their last use in forward, and back before backward reads them.

    Before and after, forward and then backward, with a lookahead of one::

        %h: f32[8, 32] = call layer_0(%x, %w0)
        %y: f32[8, 32] = call layer_1(%h, %w1)
        return output 0 %y, saved 'h' %h
        ...
        %g1: f32[8, 32] = call layer_1_backward(%t, %w1)
        %g0: f32[8, 32] = call layer_0_backward(%g1, %h, %w0)

        %h: f32[8, 32] = call layer_0(%x, %w0)
        %h_offload: bucket = zc.offload([%h])
        %y: f32[8, 32] = call layer_1(%h, %w1)
        %h_host: f32[8, 32] = zc.wait(%h_offload)
        return output 0 %y, offloaded 'h' %h_host
        ...
        %h_reload: bucket = zc.reload([%h])
        %g1: f32[8, 32] = call layer_1_backward(%t, %w1)
        %h_back: f32[8, 32] = zc.wait(%h_reload)
        %g0: f32[8, 32] = call layer_0_backward(%g1, %h_back, %w0)

    Values that one region uses last leave together, and those that one region uses first come back together. A copy may take
    until ``lookahead`` more groups have been used. What the last region of forward or the first of backward uses stays: it would
    be back before it is gone. So does what owns no memory of its own, such as views of arguments. Exact. Costs the bytes on
    the way to the host and back, and the same bytes of host memory.

    Attributes:
        mib: the least size of a value that moves, in MiB.
        lookahead: how many groups are on their way while a region computes, each way.
    """

    name: ClassVar[str] = "offload"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.OUTLINED})
    establishes: ClassVar[frozenset[Fact]] = frozenset({Fact.OFFLOAD_BOUNDED})
    mib: float = 1
    lookahead: int = 1

    def run(self, target: Step, stats: Stats) -> None:
        if self.mib < 0:
            raise PassError(f"least size to offload is {self.mib} MiB; it must not be negative")
        if self.lookahead < 0:
            raise PassError(f"lookahead is {self.lookahead}; it must not be negative")
        if target.backward is None:
            return
        uses = first_uses(target.backward)
        inputs = {origin: node for node in target.backward.inputs if isinstance(origin := meta.origin(node), Saved)}
        last = _last_uses(target.forward)
        regions = [node for node in target.forward.body if node.target is ops.region_call]
        begin = next((node for node in target.backward.body if node.target is ops.region_call), None)
        moved: dict[Saved, fx.Node] = {}
        leaving: dict[fx.Node, list[fx.Node]] = {}
        for role, node in _movable(target.forward, self.mib * MIB):
            user = uses.get(inputs.get(role, node))
            if user not in (None, begin) and last[node] is not regions[-1]:
                moved[role] = node
                group = leaving.setdefault(last[node], [])
                if node not in group:
                    group.append(node)
        order = {node: number for number, node in enumerate(target.forward.fx.nodes)}
        hosted = self._offload(target.forward, [leaving[r] for r in sorted(leaving, key=order.__getitem__)], last)
        target.forward.set_outputs(
            [
                (hosted[node], Offloaded(role.name)) if isinstance(role, Saved) and role in moved else (node, role)
                for node, role in target.forward.outputs
            ]
        )
        coming: dict[fx.Node, list[fx.Node]] = {}
        for role in moved:
            meta.set_origin(inputs[role], Offloaded(role.name))
            coming.setdefault(uses[inputs[role]], []).append(inputs[role])
        order = {node: number for number, node in enumerate(target.backward.fx.nodes)}
        self._reload(target.backward, [(r, coming[r]) for r in sorted(coming, key=order.__getitem__)])
        stats["values offloaded"] += len(moved)
        aliases = Aliases.of_graph(target.forward)
        memory = {aliases.of(node): meta.num_bytes(meta.value(node)) for node in moved.values()}
        stats["bytes offloaded"] += sum(memory.values())

    def _offload(
        self, graph: Graph, groups: Sequence[Sequence[fx.Node]], last: dict[fx.Node, fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """Start a copy of each group behind its last use; the values on the host by those on the device."""
        starts = []
        for group in groups:
            with graph.fx.inserting_after(_end_of(last[group[0]])):
                starts.append(edit.call(graph.fx, ops.offload, (list(group),), name=f"{group[0].name}_offload"))
        hosted: dict[fx.Node, fx.Node] = {}
        for index, (start, group) in enumerate(zip(starts, groups, strict=True)):
            later = index + self.lookahead
            before = start.next if self.lookahead == 0 else starts[later] if later < len(starts) else graph.output
            hosted.update(zip(group, _wait(graph, start, before, [f"{n.name}_host" for n in group]), strict=True))
        return hosted

    def _reload(self, graph: Graph, groups: Sequence[tuple[fx.Node, Sequence[fx.Node]]]) -> None:
        """Wait for each group before its first use, and start it ``lookahead`` groups earlier."""
        first = graph.body[0] if groups else None
        for index, (user, group) in enumerate(groups):
            earlier = index - self.lookahead
            before = user if self.lookahead == 0 else groups[earlier][0] if earlier >= 0 else first
            assert before is not None, "a group is used by a node of the body"
            with graph.fx.inserting_before(before):
                start = edit.call(graph.fx, ops.reload, (list(group),), name=f"{group[0].name}_reload")
            back = _wait(graph, start, user, [f"{n.name}_back" for n in group])
            for node, copy in zip(group, back, strict=True):
                node.replace_all_uses_with(copy, delete_user_cb=lambda reader, start=start: reader is not start)


def _movable(graph: Graph, min_bytes: float) -> Iterator[tuple[Saved, fx.Node]]:
    """The saved values that own dense memory, which is returned as saved only."""
    aliases = Aliases.of_graph(graph)
    stays = {s for node, role in graph.outputs if not _is_movable(node, role, min_bytes) for s in aliases.of(node)}
    for node, role in graph.outputs:
        storages = aliases.of(node)
        if (
            isinstance(role, Saved)
            and _is_movable(node, role, min_bytes)
            and all(s not in stays and s.node.target is ops.region_call for s in storages)
        ):
            yield role, node


def _is_movable(node: fx.Node, role: Role, min_bytes: float) -> bool:
    big = meta.num_bytes(meta.value(node)) >= max(min_bytes, 1)
    return isinstance(role, Saved) and big and _is_dense(meta.tensor(node))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one run of memory, each place once."""
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(value.stride(), value.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _last_uses(graph: Graph) -> dict[fx.Node, fx.Node]:
    """For each value the last region call that reads its memory, or makes it."""
    aliases = Aliases.of_graph(graph)
    last: dict[Result, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.body:
        if node.target is ops.region_call:
            touched = (s for source in node.all_input_nodes for s in aliases.of(source))
            last.update(dict.fromkeys(touched, node))
            last.update(dict.fromkeys((s for result in aliases.results(node) for s in result), node))
        elif node.op == "call_function" and not edit.is_getitem(node) and node.target is not ops.release:
            for source in node.all_input_nodes:
                last.update(dict.fromkeys((s for s in aliases.of(source) if s in last), node))
    order = {node: number for number, node in enumerate(graph.fx.nodes)}
    for node, _ in graph.outputs:
        readers = [last[s] for s in aliases.of(node) if s in last]
        if readers:
            found[node] = max(readers, key=order.__getitem__)
    return found


def _end_of(node: fx.Node) -> fx.Node:
    """The last of a node and the picks of its results right behind it."""
    while edit.is_getitem(node.next):
        node = node.next
    return node


def _wait(graph: Graph, start: fx.Node, before: fx.Node, names: Sequence[str]) -> list[fx.Node]:
    with graph.fx.inserting_before(before):
        wait = edit.call(graph.fx, ops.wait, (start,), name=f"{start.name}_wait")
        return edit.unpack(graph.fx, wait, names)
