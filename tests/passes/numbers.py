"""Numbers of a graph before and after passes: inputs made from full parameters, results made comparable."""

import zlib

import torch
from torch import Tensor

from zcompile.ir import meta
from zcompile.ir.graph import Grad, Graph, Kept, Offloaded, Param, Saved, Step
from zcompile.ir.handover import kept_parameter
from zcompile.ir.text import describe
from zcompile.lower.interpret import average, lockstep_step, unshard
from zcompile.placement import ParamSpec


def assert_same_numbers(before: Graph | Step, after: Graph | Step) -> None:
    """Check that two forms of one program give the same bits on every rank; gradients are compared as full means."""
    old, new = as_step(before), as_step(after)
    world_size = max([1, *(size for step in (old, new) for g in step.graphs for size in g.axes.values())])
    source = _Source(old, new)
    numbers = [source.results(step, world_size) for step in (old, new)]
    for rank, (a, b) in enumerate(zip(*numbers, strict=True)):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert not (value.is_floating_point() and value.isnan().any()), f"{key} is NaN before on rank {rank}"
            assert torch.equal(value, b[key]), f"{key} differs on rank {rank}: {value} before, {b[key]} after"


def as_step(target: Graph | Step) -> Step:
    return target if isinstance(target, Step) else Step(target, None)


class _Source:
    """Values for the inputs of several forms of one program, equal wherever they mean the same."""

    def __init__(self, *steps: Step) -> None:
        self.dtypes: dict[str, set[torch.dtype]] = {}
        for step in steps:
            for graph in step.graphs:
                for node in graph.inputs:
                    self.dtypes.setdefault(self.key(node), set()).add(meta.tensor(node).dtype)

    def key(self, node: torch.fx.Node) -> str:
        return describe(meta.origin(node))

    def results(self, step: Step, world_size: int) -> list[dict[str, Tensor]]:
        """For each rank, what the user sees: outputs, mutations, gradients (full, averaged)."""
        made = {describe(role) for g in step.graphs for _, role in g.outputs}
        inputs: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        params: dict[str, Param] = {p.name: p for graph in step.graphs for _, p in graph.params()}
        for graph in step.graphs:
            for node in graph.inputs:
                for rank in range(world_size):
                    origin = meta.origin(node)
                    if (
                        isinstance(origin, Kept) and graph is step.forward
                    ):  # what an earlier step of the window gathered
                        inputs[rank][self.key(node)] = self.gathered(node, params[kept_parameter(origin)], world_size)
                    elif self.key(node) not in made:
                        inputs[rank][self.key(node)] = self.value(node, rank, world_size)
        results = lockstep_step(step, inputs)
        shown: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        for _, role in (pair for g in step.graphs for pair in g.outputs):
            if isinstance(role, (Saved, Kept, Offloaded)):
                continue
            values = [r[describe(role)] for r in results]
            if isinstance(role, Grad):
                values = [full_gradient(values, params.get(role.name))] * world_size
            for rank in range(world_size):
                shown[rank][describe(role)] = values[rank]
        return shown

    def gathered(self, node: torch.fx.Node, param: Param, world_size: int) -> Tensor:
        dtype = meta.tensor(node).dtype
        full = self.random(describe(param), 0, param.shape)
        return torch.cat([local_part(full, param, dtype, rank, world_size) for rank in range(world_size)])

    def value(self, node: torch.fx.Node, rank: int, world_size: int) -> Tensor:
        origin, like = meta.origin(node), meta.tensor(node)
        key = self.key(node)
        if isinstance(origin, Param):
            return local_part(self.random(key, 0, origin.shape), origin, like.dtype, rank, world_size)
        value = self.random(key, rank, tuple(like.shape))
        strided = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        return strided.copy_(value if like.is_floating_point() else value > 0.5)

    def random(self, key: str, rank: int, shape: tuple[int, ...]) -> Tensor:
        """Numbers between 0 and 1 that every dtype in which the input occurs can hold."""
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + rank)
        value = torch.rand(shape, generator=generator)
        for dtype in sorted((d for d in self.dtypes[key] if d.is_floating_point), key=str):
            value = value.to(dtype).float()
        return value


def local_part(full: Tensor, param: Param, dtype: torch.dtype, rank: int, world_size: int) -> Tensor:
    """What a rank stores of a parameter; padding rows hold NaN, so that a use of them shows."""
    if param.placement != "shard":
        return full.to(dtype)
    spec = ParamSpec(param.name, (), param.shape, dtype, param.trainable, param.shard_dim, world_size)
    start, stop = spec.rows(rank)
    local = torch.full(spec.padded_local_shape, float("nan"), dtype=dtype)
    local.narrow(param.shard_dim, 0, stop - start).copy_(full.narrow(param.shard_dim, start, stop - start))
    return local


def full_gradient(values: list[Tensor], param: Param | None) -> Tensor:
    """The mean gradient of a full parameter from what each rank returns: its shard, the mean, or its own gradient.

    Its own gradient may have the form that a reduce-scatter reads: the padded shards, one behind the other.
    """
    if param is None or param.placement != "shard" or tuple(values[0].shape) == param.shape:
        return average(values)
    spec = ParamSpec(param.name, (), param.shape, values[0].dtype, param.trainable, param.shard_dim, len(values))
    if tuple(values[0].shape) == spec.padded_full_shape:
        values = list(average(values).chunk(len(values)))
    return unshard(values, param.shard_dim, param.shape)
