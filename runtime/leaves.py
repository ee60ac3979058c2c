"""The parameters of a step as autograd sees them: one node with an edge to each, made once, to which every step's node leads."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile import compat
from zcompile.runtime.sharding.shards import ParameterShards


class AllLeaves:
    """The leaves of all steps of one model."""

    def __init__(self, shards: ParameterShards) -> None:
        self._shards = shards
        self._moment: tuple[int, Any] = (0, None)
        self._known: dict[tuple[str, ...], Leaves] = {}

    def of(self, names: tuple[str, ...]) -> Leaves:
        """Those of a step with these trainable parameters."""
        device = self._shards.mesh.device
        # the engine runs a node on the stream on which it was made
        moment = (self._shards.num_replaced, torch.cuda.current_stream(device) if device.type == "cuda" else None)
        if moment != self._moment:
            self._moment = moment
            self._known.clear()
        if names not in self._known:
            parameters = self._shards.parameters_of(names)
            self._known[names] = Leaves(dict(zip(names, parameters, strict=True)), device)
        return self._known[names]


class Leaves:
    """Carries gradients from the nodes of steps to parameters.

    Were the edges the step's own, every forward would make them anew. So they belong to a node that stays, whose output ``end`` is an
    input of the steps. The engine runs it once in a backward, after all steps that lead to it. Mostly these have accumulated already
    and there is nothing to carry: the leaves just call their hooks. Else a step hands gradients over.

    Args:
        parameters: by name.
        device: of the steps' nodes: the engine wakes no other thread for this one then.
    """

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self.names = tuple(parameters)
        self._handed: list[weakref.ref[Handed]] = []
        self._probe = torch.zeros((), device=device, requires_grad=True)
        self._probe_node = compat.grad_accumulator(self._probe)
        with torch.enable_grad():
            self.end: Tensor = _Leaves.apply(weakref.ref(self), device, self._probe, *parameters.values())
        compat.run_as_leaf(self.end.grad_fn)

    def all_run(self) -> bool:
        """Inside the backward of a step: whether the engine runs all leaves, as a plain ``backward()`` does.

        The probe is a leaf that nobody asks gradients of: it is skipped exactly by ``autograd.grad`` and ``backward(inputs=...)``.
        """
        return compat.will_run(self._probe_node)

    def hand(self, gradients: Mapping[str, Tensor]) -> Handed | None:
        """Inside the backward of a step: give its gradients to the leaves. The step keeps the result, so that nothing stays behind
        where the backward fails before it comes to the leaves.
        """
        if not gradients or not compat.will_run(self.end.grad_fn):
            return None
        handed = Handed(compat.graph_task(), gradients)
        self._handed = [*(known for known in self._handed if known() is not None), weakref.ref(handed)]
        return handed

    def take(self) -> Mapping[str, Tensor]:
        """Inside the backward of the leaves: what the steps of this backward have handed over, added up."""
        task, sums = compat.graph_task(), dict[str, Tensor]()
        for known in list(self._handed):
            handed = known()
            if handed is None or handed.task != task:
                continue
            self._handed.remove(known)
            for name, gradient in handed.gradients.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
            handed.gradients = {}
        return sums


class Handed:
    """Gradients on their way from a step to the leaves.

    Args:
        task: the engine's number of the backward.
        gradients: by parameter.
    """

    def __init__(self, task: int, gradients: Mapping[str, Tensor]) -> None:
        self.task = task
        self.gradients = gradients


class _Leaves(torch.autograd.Function):
    """The node with the edges."""

    @staticmethod
    def forward(ctx: Any, leaves: weakref.ref[Leaves], device: torch.device, *tensors: Tensor) -> Tensor:
        ctx.leaves = leaves
        ctx.nothing = (None,) * (2 + len(tensors))
        ctx.set_materialize_grads(False)
        return torch.zeros((), device=device)

    @staticmethod
    def backward(ctx: Any, *end: Tensor | None) -> Sequence[Tensor | None]:
        leaves = ctx.leaves()
        assert leaves is not None, "the nodes of steps keep them"
        given = leaves.take() if leaves._handed else None
        return (None, None, None, *map(given.get, leaves.names)) if given else ctx.nothing
