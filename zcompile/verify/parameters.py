"""Parameters: how shards are stored, and that full values live from their wait to their release and nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.flow import Result
from zcompile.analysis.units import MIB
from zcompile.ir import edit, meta
from zcompile.ir.graph import Direction, Kept, Param, Region, Saved
from zcompile.ir.handover import kept_parameter, kept_value
from zcompile.ir.printer import describe
from zcompile.verify.subject import Subject, picked_result

_aten = torch.ops.aten

#: operators that move elements without computing with them; padding rows may go through
_MOVES: frozenset[Any] = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.t.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.alias.default,
        _aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def check_params_sharded(subject: Subject, options: Mapping[str, Any]) -> None:
    """Check ``params-sharded``: every parameter input is the padded local shard of its parameter, or replicated."""
    for node, param in subject.graph.params():
        if param.placement not in ("shard", "replicate"):
            subject.refuse(
                node, f"is parameter '{param.name}' with placement {param.placement}; it must be shard or replicate"
            )
        if param.placement == "replicate":
            continue
        if options.get("stage") == 0:
            subject.refuse(node, f"is a shard of parameter '{param.name}'; stage 0 replicates every parameter")
        if not 0 <= param.shard_dim < len(param.shape):
            subject.refuse(node, f"is sharded on dimension {param.shard_dim} of {list(param.shape)}")
        spec, value = subject.spec(param), meta.tensor(node)
        if tuple(value.shape) != spec.padded_local_shape:
            subject.refuse(
                node,
                f"is a shard of parameter '{param.name}' of shape {list(value.shape)}; "
                f"{list(param.shape)} over {spec.world_size} ranks on dimension {param.shard_dim} gives {list(spec.padded_local_shape)}",
            )
        if not value.is_contiguous():
            subject.refuse(node, f"is a shard of parameter '{param.name}' that is not contiguous")


def check_params_gathered(
    subject: Subject, options: Mapping[str, Any], keep: Mapping[str, Any] | None, needed: Collection[Kept]
) -> None:
    """Check ``params-gathered``.

    No ``zc.unshard`` is left. Shards are read by gathers only (or by a cast on the way to one). A gathered value, and
    whatever shares its memory, is read before its release only; it is released exactly once or returned as ``kept``.
    Padding rows are cut off before anything computes with them.

    Args:
        subject: the graph.
        options: of the pass that scheduled the gathers: ``stage``.
        keep: options of the pass that lets stage 3 keep parameters, at most so many ``units`` and ``mib``; None: none did.
        needed: the kept values that backward computes with; the bound is theirs.
    """
    for node in subject.nodes:
        if node.target is ops.unshard:
            subject.refuse(node, "is a zc.unshard that no gather replaced")
    for gather in subject.gathers:
        for result, tensor in zip(gather.results, gather.tensors, strict=True):
            param = subject.gathered[result]
            if param is None:
                subject.refuse(gather.start, f"gathers %{tensor.name}, which is not the shard of one parameter")
            local = subject.spec(param).padded_local_shape
            if tuple(meta.tensor(tensor).shape) != local:
                subject.refuse(
                    gather.start,
                    f"gathers %{tensor.name}, which is not the whole shard {list(local)} of '{param.name}'",
                )
    _check_gathered_once(subject)
    _check_shards_stay_local(subject)
    released = _check_releases(subject)
    _check_returned(subject, released)
    if options.get("stage") == 3:
        _check_keep_bounded(subject, keep, needed)
    _check_padding(subject)


def needed_in_backward(subjects: Sequence[Subject]) -> set[Kept]:
    """The kept values that backward computes with; a window hands others round beside them."""
    found: set[Kept] = set()
    for subject in subjects:
        for node in subject.graph.inputs if subject.graph.direction is Direction.BACKWARD else ():
            origin = meta.origin(node)
            if isinstance(origin, Kept) and any(u.op != "output" and u.target is not ops.release for u in node.users):
                found.add(origin)
    return found


def _check_gathered_once(subject: Subject) -> None:
    """What a graph takes as ``kept`` is there: it is not gathered beside it."""
    taken = {origin: node for node in subject.graph.inputs if isinstance(origin := meta.origin(node), Kept)}
    for gather in subject.gathers if taken else ():
        for result, tensor in zip(gather.results, gather.tensors, strict=True):
            param = subject.gathered[result]
            there = None if param is None else taken.get(kept_value(param.name, meta.tensor(tensor).dtype))
            if there is not None and param is not None:
                subject.refuse(gather.start, f"gathers parameter '{param.name}', which is there as %{there.name}")


def _check_shards_stay_local(subject: Subject) -> None:
    """No value mixes a local shard with anything else, and none is returned."""
    reads = subject.reads
    shards = 0
    for node, param in subject.graph.params():
        if param.placement == "shard":
            shards |= reads.of(node)
    for node in subject.nodes:
        if node.op == "output" or node.target is ops.release:
            continue
        for mask in reads.results(node):
            local = mask & shards
            if local and (local != mask or local & (local - 1)):
                leaf = reads.leaves_in(local)[0]
                subject.refuse(node, f"reads the local shard %{leaf.node.name} without gathering it")
    for node, role in subject.graph.outputs:
        if reads.of(node) & shards:
            subject.refuse(node, f"is returned as {describe(role)} but is a local shard")


def _check_releases(subject: Subject) -> dict[Result, fx.Node]:
    """Walk the graph: nothing reads memory that was given back. Returns the release of each gathered value."""
    aliases, gathered = subject.aliases, subject.gathered
    released: dict[Result, fx.Node] = {}
    for node in subject.nodes:
        if node.target is not ops.release:
            for source in node.all_input_nodes:
                for storage in aliases.of(source):
                    if storage in released and node.op != "output" and not edit.is_getitem(node):
                        name = _name(subject, storage)
                        what = (
                            f"gathered %{name}"
                            if source.name == name
                            else f"%{source.name}, memory of gathered %{name},"
                        )
                        subject.refuse(node, f"reads {what} after %{released[storage].name} gave it back")
            continue
        buffers: Any = node.args[0]
        for buffer in buffers:
            result = picked_result(buffer) or Result(buffer, 0)
            if result not in gathered:
                subject.refuse(node, f"releases %{buffer.name}, which is not a gathered value")
            if result in released:
                subject.refuse(node, f"releases %{buffer.name}, which %{released[result].name} gave back already")
            released[result] = node
    return released


def _check_returned(subject: Subject, released: Mapping[Result, fx.Node]) -> None:
    aliases, gathered, copies = subject.aliases, subject.gathered, subject.copies
    kept: set[Result] = set()
    for node, role in subject.graph.outputs:
        if isinstance(role, Kept):
            kept.add(_check_kept(subject, node, role, released))
            continue
        shared = next((s for s in aliases.of(node) if s in gathered), None)
        if shared is not None:
            subject.refuse(node, f"is returned as {describe(role)} but is memory of gathered %{_name(subject, shared)}")
        repeated = copies.of(node) if isinstance(role, Saved) else None
        param = None if repeated is None else gathered.get(repeated)
        if param is not None and repeated is not None:
            subject.refuse(
                node,
                f"is returned as {describe(role)} but repeats gathered %{_name(subject, repeated)}; compute it again in backward",
            )
    for result in gathered:
        if result not in released and result not in kept:
            picked = next((n for n in result.node.users if picked_result(n) == result), result.node)
            subject.refuse(picked, "is a gathered value that is never released")


def _check_kept(subject: Subject, node: fx.Node, role: Kept, released: Mapping[Result, fx.Node]) -> Result:
    result = Result(node, 0) if meta.origin(node) == role else picked_result(node)
    param = None if result is None else subject.gathered.get(result)
    if result is None or param is None or param.name != kept_parameter(role):
        subject.refuse(
            node, f"is returned as {describe(role)} but is not what a gather of '{kept_parameter(role)}' gave"
        )
    if result in released:
        subject.refuse(node, f"is returned as {describe(role)} after %{released[result].name} gave it back")
    return result


def _check_keep_bounded(subject: Subject, keep: Mapping[str, Any] | None, needed: Collection[Kept]) -> None:
    """Check ``keep-bounded``: what stage 3 hands on to backward stays within the policy's options."""
    units: set[str] = set()
    num_bytes = 0
    for node, role in subject.graph.outputs:
        if not isinstance(role, Kept):
            continue
        if keep is None:
            subject.refuse(node, f"is returned as {describe(role)}; stage 3 keeps no gathered parameter")
        if role not in needed:
            continue
        name = kept_parameter(role)
        units.add(subject.params[name][0].unit or name)
        num_bytes += meta.num_bytes(meta.value(node))
        if len(units) > keep.get("units", len(units)):
            subject.refuse(
                node,
                f"is returned as {describe(role)}, which makes {len(units)} kept units; keep allows {keep['units']}",
            )
        if keep.get("mib") is not None and num_bytes > keep["mib"] * MIB:
            subject.refuse(
                node,
                f"is returned as {describe(role)} and brings what is kept to {num_bytes} bytes; keep allows {keep['mib']} MiB",
            )


def _check_padding(subject: Subject) -> None:
    """What reads a padded value only moves it, until a slice cuts it to the parameter's size."""
    for value in subject.nodes:
        result = Result(value, 0) if value.op == "placeholder" else picked_result(value)
        param = None if result is None else subject.gathered.get(result)
        if param is not None and subject.spec(param).is_padded:
            _check_readers(subject, value, param, None)


def _check_readers(subject: Subject, value: fx.Node, param: Param, region: Region | None) -> None:
    for reader in value.users:
        if reader.target is ops.region_call:
            name: Any = reader.args[0]
            args: Any = reader.args[1]
            inner = subject.graph.regions[name]
            for arg, placeholder in zip(args, inner.inputs, strict=True):
                if arg is value:
                    _check_readers(subject, placeholder, param, inner)
        elif reader.target in _MOVES:
            _check_readers(subject, reader, param, region)
        elif reader.op != "output" and reader.target is not ops.release and not _cuts(reader, param):
            subject.refuse(
                reader,
                f"computes with the padding rows of parameter '{param.name}'; slice it to {list(param.shape)} first",
                region,
            )


def _cuts(node: fx.Node, param: Param) -> bool:
    """Whether a node slices a padded value to the parameter's rows."""
    if node.target is not _aten.slice.Tensor or edit.is_getitem(node):
        return False
    args: tuple[Any, ...] = (*node.args[1:4], None, None, None)
    dim, start, stop = args[:3]
    return (dim or 0) == param.shard_dim and start in (0, None) and stop == param.shape[param.shard_dim]


def _name(subject: Subject, result: Result) -> str:
    """The name of the node that picks a gathered value."""
    return next((n.name for n in result.node.users if picked_result(n) == result), result.node.name)
