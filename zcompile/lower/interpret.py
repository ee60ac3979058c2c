"""The reference: runs compute graphs node by node, and whole schedules on simulated ranks in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from zcompile import ops
from zcompile.errors import ConfigError, MeshError, VerifyError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Step
from zcompile.ir.operators import operator_name
from zcompile.ir.printer import describe
from zcompile.ir.types import type_text

# Compute graphs. ------------------------------------------------------------------------------------------------------


def interpret(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """The results of a compute graph: no collectives, no region calls.

    Args:
        graph: placeholders take ``inputs`` in order.
        inputs: real tensors.
    """
    with torch.no_grad():
        return build(graph)(list(inputs))


def build(graph: fx.Graph, observe: Callable[[fx.Node, Any], None] | None = None) -> Callable[[list[Any]], list[Any]]:
    """A function that runs a compute graph with real tensors, operator by operator in graph order.

    Args:
        graph: no collectives, no region calls.
        observe: is called with each operator's node and result.

    Returns:
        A function of one list, the inputs in order; it empties that list and lets go of every value after its last use.
        Call it under ``no_grad``.
    """
    code = _Code()
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [f"{', '.join(code.name(n) for n in inputs)}, = args"] if inputs else []
    lines.append("args.clear()")
    last_uses = _last_uses(graph)
    lines.extend(code.release(last_uses.get(None, [])))
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return [{', '.join(code.argument(a) for a in node.args[0])}]")
        elif node.op != "placeholder":
            lines.append(f"{code.name(node)} = {code.call(node)}")
            if observe is not None:
                lines.append(f"{code.constant(observe, 'observe')}({code.constant(node)}, {code.name(node)})")
            lines.extend(code.release(last_uses.get(node, [])))
    source = "def run(args):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<zcompile region>", "exec"), code.constants)
    return code.constants["run"]


def _last_uses(graph: fx.Graph) -> dict[fx.Node | None, list[fx.Node]]:
    """For each node, the values that nobody reads after it; under None, inputs that nobody reads."""
    ends: dict[fx.Node | None, list[fx.Node]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "output":
            continue
        last = max(node.users, key=order.__getitem__, default=None if node.op == "placeholder" else node)
        ends.setdefault(last, []).append(node)
    return ends


class _Code:
    """Python source for nodes: locals ``v0, v1, ...`` for values, globals ``k0, k1, ...`` for operators and constants."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[Any, str] = {}
        self.names: dict[fx.Node, str] = {}

    def name(self, node: fx.Node) -> str:
        return self.names.setdefault(node, f"v{len(self.names)}")

    def constant(self, value: Any, key: Any = None) -> str:
        """The global that holds ``value``; values with the same hashable ``key`` share one."""
        if key is not None and key in self.constant_names:
            return self.constant_names[key]
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        if key is not None:
            self.constant_names[key] = name
        return name

    def release(self, nodes: list[fx.Node]) -> list[str]:
        return [f"{' = '.join(self.name(n) for n in nodes)} = None"] if nodes else []

    def call(self, node: fx.Node) -> str:
        target = node.target
        assert node.op == "call_function", f"%{node.name} is a {node.op}; a compute graph only calls operators"
        assert not ops.is_zc(target) and target is not ops.region_call, f"%{node.name} is not computation"
        if edit.is_getitem(node):
            return f"{self.argument(node.args[0])}[{self.argument(node.args[1])}]"
        args = [self.argument(a) for a in node.args] + [f"{k}={self.argument(a)}" for k, a in node.kwargs.items()]
        return f"{self.constant(target, ('operator', target))}({', '.join(args)})"

    def argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.name(value)
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        if isinstance(value, (list, tuple)) and _reads_nodes(value):
            items = "".join(f"{self.argument(v)}, " for v in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        return self.constant(value)


def _reads_nodes(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_reads_nodes(v) for v in value)
    return isinstance(value, fx.Node)


# Schedules on simulated ranks. ----------------------------------------------------------------------------------------


def lockstep(graph: Graph, inputs: Sequence[Mapping[str, Tensor]], seed: int = 0) -> list[list[Any]]:
    """Run a graph on simulated ranks in this process, node by node, with the values of all ranks in hand.

    Collectives are exact: their inputs are read when they are waited for (what the schedule may have overwritten by then
    shows), sums are made in float64. Released buffers are filled with NaN, so that a use after the release shows. Every
    rank has its own random numbers. Values are checked against the types in the graph.

    Args:
        graph: before or after any pass.
        inputs: for each rank, its inputs by placeholder name. They are copied first.
        seed: rank ``r`` draws from a generator seeded with ``seed + r``.

    Returns:
        for each rank, its outputs in order.

    Raises:
        ConfigError: inputs that the graph does not have, or lacks.
        MeshError: a collective over an axis of another size than the number of ranks.
        VerifyError: a value that is not what the graph says, or a pending value that is read before its wait.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return _Lockstep(len(inputs), seed).run(graph, inputs)


def lockstep_step(step: Step, inputs: Sequence[Mapping[str, Tensor]], seed: int = 0) -> list[dict[str, Any]]:
    """Run forward, then backward, as ``lockstep`` does; saved and kept values go from one to the other.

    Args:
        step: before or after any pass.
        inputs: for each rank, its inputs by what they are: ``param 'w'``, ``buffer 'b'``, ``input 0``, ``tangent 0``.
        seed: as in ``lockstep``.

    Returns:
        for each rank, all outputs by what they are: ``output 0``, ``grad 'w'``, ``saved 'x'``.
    """
    results: list[dict[str, Any]] = [{} for _ in inputs]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        run = _Lockstep(len(inputs), seed)
        for graph in step.graphs:
            given: list[dict[str, Tensor]] = [{} for _ in inputs]
            for rank, values in enumerate(inputs):
                for node in graph.inputs:
                    key = describe(meta.origin(node))
                    source = results[rank] if key in results[rank] else values
                    if key in source:
                        given[rank][node.name] = source[key]
            for rank, values in enumerate(run.run(graph, given, copy=graph is step.forward)):
                for value, (_, role) in zip(values, graph.outputs, strict=True):
                    results[rank][describe(role)] = value
    return results


class _Pending:
    """Something that was started; its values exist once it is waited for."""

    def __init__(self, finish: Callable[[], list[list[Tensor]]], rank: int) -> None:
        self.finish = finish
        self.rank = rank


class _Lockstep:
    def __init__(self, num_ranks: int, seed: int) -> None:
        self.num_ranks = num_ranks
        self.random = [torch.Generator().manual_seed(seed + rank).get_state() for rank in range(num_ranks)]

    def run(self, graph: Graph, inputs: Sequence[Mapping[str, Tensor]], *, copy: bool = True) -> list[list[Any]]:
        regions = {name: build(region.fx) for name, region in graph.regions.items()}
        values: dict[fx.Node, list[Any]] = {}
        self._check_inputs(graph, inputs)
        for node in graph.inputs:
            given = [by_name[node.name] for by_name in inputs]
            values[node] = [t.clone() if copy else t for t in given]
            self._check(node, values[node])
        for node in graph.body:
            args = [self._arguments(node, values, rank) for rank in range(self.num_ranks)]
            if ops.is_zc(node.target):
                values[node] = self._zc(node, [a for a, _ in args])
            elif node.target is ops.region_call:
                values[node] = [self._on(rank, regions[a[0]], list(a[1])) for rank, (a, _) in enumerate(args)]
            else:
                values[node] = [self._on(rank, node.target, *a, **k) for rank, (a, k) in enumerate(args)]
            self._check(node, values[node])
        return [[values[node][rank] for node, _ in graph.outputs] for rank in range(self.num_ranks)]

    def _check_inputs(self, graph: Graph, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        names = {node.name for node in graph.inputs}
        for rank, given in enumerate(inputs):
            if given.keys() != names:
                missing, extra = sorted(names - given.keys()), sorted(given.keys() - names)
                problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)}, which is no input"
                raise ConfigError(f"rank {rank} of graph {graph.name} {problem}; pass one tensor for each placeholder")

    def _arguments(self, node: fx.Node, values: dict[fx.Node, list[Any]], rank: int) -> tuple[Any, Any]:
        def value(source: fx.Node) -> Any:
            found = values[source][rank]
            if isinstance(found, _Pending) and node.target is not ops.wait:
                raise VerifyError(f"%{node.name} reads %{source.name} before its wait; read the results of zc.wait")
            return found

        arguments: Any = fx.map_arg((node.args, node.kwargs), value)
        return arguments

    def _on(self, rank: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function with the random numbers of a rank."""
        torch.random.set_rng_state(self.random[rank])
        result = function(*args, **kwargs)
        self.random[rank] = torch.random.get_rng_state()
        return result

    def _zc(self, node: fx.Node, args: list[Any]) -> list[Any]:
        """The result of a ``zc`` operator on every rank."""
        if node.target is ops.wait:
            pending = [a[0] for a in args]
            finished = pending[0].finish()
            return [finished[p.rank] for p in pending]
        if node.target is ops.release:
            for (tensors,) in args:
                for t in tensors:
                    poison(t)
            return [None] * self.num_ranks
        if ops.is_transfer(node.target):
            return self._transfer(node, [a[0] for a in args])
        if node.target is ops.cast:
            return [[t.to(dtype, copy=True) for t in tensors] for tensors, dtype in args]
        axis, size = args[0][1:3]
        if size != self.num_ranks:
            raise MeshError(
                f"%{node.name} runs over axis {axis}={size} but there are {self.num_ranks} ranks; pass inputs for each rank"
            )
        sent = [a[0] for a in args]
        if node.target is ops.unshard:
            dim, shape, *dtype = args[0][3:]
            return [unshard(sent, dim, shape).to(dtype[0] if dtype else sent[0].dtype) for _ in args]
        if dtype := args[0][3:]:
            sent = [[t.to(dtype[0]) for t in tensors] for tensors in sent]
        work = _COLLECTIVES[node.target]
        return [_Pending(lambda: work(sent), rank) for rank in range(self.num_ranks)]

    def _transfer(self, node: fx.Node, sent: list[list[Tensor]]) -> list[Any]:
        """Copies, made at the wait; what was offloaded is filled with NaN then, as its memory is given up."""

        def finish() -> list[list[Tensor]]:
            copies = [[t.clone() for t in tensors] for tensors in sent]
            if node.target is ops.offload:
                for t in (t for tensors in sent for t in tensors):
                    poison(t)
            return copies

        once = cache(finish)
        return [_Pending(once, rank) for rank in range(self.num_ranks)]

    def _check(self, node: fx.Node, values: list[Any]) -> None:
        """Check that shapes and dtypes are those that the graph says."""
        for rank, value in enumerate(values):
            if not isinstance(value, _Pending) and not _same_type(meta.value(node), value):
                what = describe(meta.origin(node)) if node.op == "placeholder" else operator_name(node.target)
                said, found = type_text(meta.value(node), "cpu"), type_text(value, "cpu")
                raise VerifyError(f"%{node.name} ({what}) is {said} in the graph but {found} on rank {rank}")


def _same_type(said: Any, found: Any) -> bool:
    if isinstance(said, Tensor):
        return isinstance(found, Tensor) and said.shape == found.shape and said.dtype == found.dtype
    if isinstance(said, (list, tuple)):
        return isinstance(found, (list, tuple)) and len(said) == len(found) and all(map(_same_type, said, found))
    return type(said) is type(found)


# Collectives. ---------------------------------------------------------------------------------------------------------


def unshard(shards: Sequence[Tensor], dim: int, shape: Sequence[int]) -> Tensor:
    """The logical full parameter from every rank's padded shard, in new memory."""
    return torch.cat(list(shards), dim).narrow(dim, 0, shape[dim]).clone(memory_format=torch.contiguous_format)


def average(tensors: Sequence[Tensor]) -> Tensor:
    """The mean over ranks, summed in double precision and rounded once, in new memory."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([t.to(wide) for t in tensors]).mean(0).to(tensors[0].dtype)


def poison(tensor: Tensor) -> None:
    """Fill a floating tensor with NaN, in place."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)


def _all_gather(sent: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[torch.cat(shards) for shards in zip(*sent, strict=True)] for _ in sent]


def _reduce_scatter(sent: list[list[Tensor]]) -> list[list[Tensor]]:
    means = [average(tensors).chunk(len(sent)) for tensors in zip(*sent, strict=True)]
    return [[mean[rank].clone() for mean in means] for rank in range(len(sent))]


def _all_reduce(sent: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[average(tensors) for tensors in zip(*sent, strict=True)] for _ in sent]


_COLLECTIVES: dict[Any, Callable[[list[list[Tensor]]], list[list[Tensor]]]] = {
    ops.all_gather: _all_gather,
    ops.reduce_scatter: _reduce_scatter,
    ops.all_reduce: _all_reduce,
}
