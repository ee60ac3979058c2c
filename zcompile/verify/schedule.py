"""The schedule: units and regions, buckets of whole units, gathers in flight, random operators that run once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from zcompile import compat, ops
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Direction, Region, is_compute
from zcompile.ir.operators import is_random, operator_name
from zcompile.verify.structure import called_nodes
from zcompile.verify.subject import Collective, Subject

MIB = 1 << 20


def check_units_planned(subject: Subject) -> None:
    """Check ``units-planned``: parameters have units, compute nodes regions; each region is one run that no collective cuts."""
    for node, param in subject.graph.params():
        if not param.unit:
            subject.refuse(node, f"is parameter '{param.name}' without a unit")
    finished: set[int] = set()
    current: int | None = None
    cut: fx.Node | None = None
    for node in subject.nodes:
        if node.target is ops.wait or ops.is_collective(node.target):
            cut = node
        if not is_compute(node) or edit.is_getitem(node):
            continue
        region = meta.region(node)
        if region is None:
            subject.refuse(node, "belongs to no region")
        if region != current:
            if region in finished:
                subject.refuse(
                    node, f"belongs to region {region}, which ended before region {current}; regions are consecutive"
                )
            if current is not None:
                finished.add(current)
            current = region
        elif cut is not None:
            subject.refuse(
                cut, f"cuts region {region}: %{node.name} of it comes later; collectives lie between regions"
            )
        cut = None


def check_outlined(subject: Subject) -> None:
    """Check ``outlined``: the top level holds ``zc`` operators, region calls and the picking of results only; every region is called."""
    called: set[Any] = set()
    for node in subject.nodes:
        if node.op != "call_function" or ops.is_zc(node.target) or node.target is operator.getitem:
            continue
        if node.target is not ops.region_call:
            subject.refuse(node, f"calls {operator_name(node.target)} at the top level; compute belongs into regions")
        called.add(node.args[0])
    for name in subject.graph.regions:
        if name not in called:
            subject.refuse(subject.graph.output, f"ends a graph whose region '{name}' is never called")


def check_bucketed(subject: Subject, options: Mapping[str, Any]) -> None:
    """Check ``bucketed``: a unit's parameters of one dtype travel in one collective; gathers start in the order of need.

    Args:
        subject: the graph.
        options: of the pass that grouped: a bucket of several units holds at most ``mib`` MiB of full parameters.
    """
    limit = options.get("mib")
    for collectives, params_of in ((subject.gathers, _gathered_params), (subject.reductions, _reduced_params)):
        home: dict[Any, Collective] = {}
        for collective in collectives:
            units: set[str] = set()
            keys: set[Any] = set()
            for name, dtype in params_of(subject, collective):
                unit = subject.params[name][0].unit or name
                units.add(unit)
                keys.add((unit, dtype, collective.start.target, name))
            for key in {k[:3] for k in keys}:
                if key in home and not _same_members(subject, params_of, home[key], collective, key):
                    other = home[key].start.name
                    subject.refuse(
                        collective.start, f"carries a part of unit '{key[0]}', and %{other} another; units travel whole"
                    )
                home.setdefault(key, collective)
            size = max(
                meta.num_bytes(meta.value(collective.start)),
                sum(meta.num_bytes(meta.value(t)) for t in collective.tensors),
            )
            if limit is not None and len(units) > 1 and size > limit * MIB:
                subject.refuse(
                    collective.start, f"carries {len(units)} units of {size} bytes; a bucket holds {limit} MiB"
                )
    _check_gather_order(subject)


def _same_members(
    subject: Subject,
    params_of: Callable[[Subject, Collective], Iterator[tuple[str, torch.dtype]]],
    one: Collective,
    other: Collective,
    key: Any,
) -> bool:
    """Whether two collectives carry the same parameters of a unit: it is then gathered twice, not split."""

    def members(collective: Collective) -> set[tuple[str, torch.dtype]]:
        carried = params_of(subject, collective)
        return {(n, d) for n, d in carried if (subject.params[n][0].unit or n, d) == (key[0], key[1])}

    return members(one) == members(other)


def _gathered_params(subject: Subject, gather: Collective) -> Iterator[tuple[str, torch.dtype]]:
    for result, tensor in zip(gather.results, gather.tensors, strict=True):
        param = subject.gathered[result]
        if param is not None:
            yield param.name, meta.tensor(tensor).dtype


def _reduced_params(subject: Subject, reduction: Collective) -> Iterator[tuple[str, torch.dtype]]:
    for result, tensor in zip(reduction.results, reduction.tensors, strict=True):
        if result in subject.reduced:
            yield subject.reduced[result], meta.tensor(tensor).dtype


def _check_gather_order(subject: Subject) -> None:
    latest, before = -1, None
    for gather in subject.gathers:
        needed = _first_need(subject, gather)
        if before is not None and needed < latest:
            subject.refuse(
                gather.start,
                f"starts after %{before.start.name} but is needed before it; gathers start in the order of need",
            )
        if needed >= latest:
            latest, before = needed, gather


def _first_need(subject: Subject, gather: Collective) -> int:
    readers = [r for item in gather.wait.users for r in item.users if r.target is not ops.release]
    return min((subject.position[r] for r in readers), default=len(subject.nodes))


def check_prefetch_bounded(subject: Subject, options: Mapping[str, Any]) -> None:
    """Check ``prefetch-bounded``: gathers started and not yet waited for.

    Args:
        subject: the graph.
        options: of the policy: at most ``lookahead`` + 1 gathers, and (when there are two or more) at most ``limit_mib``
            MiB of full parameters.
    """
    lookahead, limit = options.get("lookahead"), options.get("limit_mib")
    in_flight: dict[fx.Node, int] = {}
    for node in subject.nodes:
        if node.target is ops.all_gather:
            in_flight[node] = meta.num_bytes(meta.value(node))
            total = sum(in_flight.values())
            if lookahead is not None and len(in_flight) > lookahead + 1:
                subject.refuse(
                    node, f"is gather {len(in_flight)} in flight; lookahead {lookahead} allows {lookahead + 1}"
                )
            if limit is not None and len(in_flight) > 1 and total > limit * MIB:
                subject.refuse(node, f"brings the gathers in flight to {total} bytes; the limit is {limit} MiB")
        elif node.target is ops.wait:
            in_flight.pop(calls.source(node), None)


def check_offload_bounded(subject: Subject, options: Mapping[str, Any]) -> None:
    """Check ``offload-bounded``: at most ``lookahead`` copies each way (one, if that is 0) are in flight while a region runs.

    Args:
        subject: the graph.
        options: of the pass that moved values: ``lookahead``.
    """
    in_flight: list[fx.Node] = []
    limit = max(options.get("lookahead", 1), 1)
    for node in subject.nodes:
        if ops.is_transfer(node.target):
            in_flight.append(node)
        elif node.target is ops.wait and calls.source(node) in in_flight:
            in_flight.remove(calls.source(node))
        elif node.target is ops.region_call:
            for kind in ops.TRANSFERS:
                started = [n for n in in_flight if n.target is kind]
                if len(started) > limit:
                    subject.refuse(
                        started[-1], f"is copy {len(started)} in flight at %{node.name}; lookahead allows {limit}"
                    )


def check_recompute_safe(subjects: list[Subject]) -> None:
    """Check ``recompute-safe``: backward draws no random numbers again that forward drew, and makes no gradients that forward makes.

    A random operator may appear in both graphs only where forward runs it under ``run_and_save_rng_state`` and backward
    under ``run_with_rng_state``.
    """
    drawn: set[Any] = set()
    for subject in subjects:
        for node, region in called_nodes(subject):
            if subject.graph.direction is Direction.FORWARD:
                drawn.update(_random_operators(node))
            elif subject.graph.direction is Direction.BACKWARD:
                _check_drawn_once(subject, node, region, drawn)


def _check_drawn_once(subject: Subject, node: fx.Node, region: Region | None, drawn: set[Any]) -> None:
    if compat.is_overload(node.target) and is_random(node) and node.target in drawn:
        subject.refuse(
            node,
            f"draws new random numbers with {operator_name(node.target)}, which forward ran already; "
            "save what it drew, or its random state with run_and_save_rng_state",
            region,
        )
    if node.target in ops.RUN_ONCE:
        subject.refuse(
            node, f"runs {operator_name(node.target)}, which makes gradients in forward; save what it made", region
        )
    if node.target is compat.higher_order_operator("run_and_save_rng_state"):
        subject.refuse(node, "saves random state in backward; forward saves, backward replays", region)


def _random_operators(node: fx.Node) -> Iterator[Any]:
    if is_random(node):
        yield node.target
    elif compat.is_higher_order(node.target):
        yield from (arg for arg in node.args if compat.is_overload(arg))
