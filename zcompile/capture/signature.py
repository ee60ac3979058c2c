"""What a capture depends on: two calls with equal signatures run the same graphs."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zcompile import compat
from zcompile.capture.attributes import Attributes, Watcher
from zcompile.capture.tree import Structure
from zcompile.errors import CaptureError

_training = operator.attrgetter("training")


@dataclass(frozen=True)
class Signature:
    """The key of one capture.

    Attributes:
        tensors: shape, strides, dtype, device and requires_grad of each tensor leaf.
        structure: key of the structure of the arguments, with the values of what is not a tensor.
        training: whether gradients are recorded.
        modes: the train/eval flag of every module.
        trainable: the requires_grad flag of every parameter.
        autocast: dtype of the ambient autocast, None when off.
        attributes: the values of the modules' plain attributes.
        hooks: the forward hooks of submodules.
    """

    tensors: tuple[Any, ...]
    structure: Any
    training: bool
    modes: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: torch.dtype | None
    attributes: Attributes
    hooks: tuple[Any, ...]

    def difference(self, other: Signature) -> str:
        """In words, what ``self`` has that ``other`` has not: why a call needs a capture of its own."""
        for index, (new, old) in enumerate(zip(self.tensors, other.tensors, strict=False)):
            for what, a, b in zip(("shape", "strides", "dtype", "device", "requires_grad"), new, old, strict=True):
                if a != b:
                    return f"{what} of tensor argument {index} is {_show(a)} instead of {_show(b)}"
        if self.structure != other.structure or len(self.tensors) != len(other.tensors):
            return "the arguments have another structure, or other values that are not tensors"
        if self.training != other.training:
            return "gradients are recorded" if self.training else "gradients are not recorded"
        if self.modes != other.modes:
            return "modules changed between train() and eval()"
        if self.trainable != other.trainable:
            return "requires_grad of parameters changed"
        if self.autocast != other.autocast:
            return f"autocast is {self.autocast} instead of {other.autocast}"
        if self.hooks != other.hooks:
            return "forward hooks of submodules changed"
        return f"attribute '{self.attributes.difference(other.attributes)}' has another value"


class Fingerprint:
    """The state of a model that a capture bakes in: train/eval flags, requires_grad flags, plain attributes.

    Reading it costs some tens of microseconds for a model of a hundred modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._attributes = Watcher(model)
        self._forbidden = list(compat.global_module_hooks().values())
        self._hooks: list[dict[Any, Any]] = []
        for module in self._modules[1:]:
            self._forbidden += compat.backward_hooks(module).values()
            self._hooks += compat.forward_hooks(module)

    def has_forbidden_hooks(self) -> bool:
        """Whether a submodule has a backward hook, or there are hooks for all modules."""
        return any(self._forbidden)

    def hooks(self) -> tuple[Any, ...]:
        """The forward hooks of submodules, which graphs contain."""
        return tuple((i, *table.values()) for i, table in enumerate(self._hooks) if table) if any(self._hooks) else ()

    def modes(self) -> tuple[bool, ...]:
        """The train/eval flag of every module."""
        return tuple(map(_training, self._modules))

    def trainable(self) -> tuple[bool, ...]:
        """The requires_grad flag of every parameter."""
        return compat.requires_grad(self._parameters)

    def attributes(self) -> Attributes:
        """The present values of all plain attributes."""
        return self._attributes.now()


def tensor_key(t: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor argument a capture depends on.

    Raises:
        CaptureError: a tensor without strides, which graphs cannot take.
    """
    if t.layout is not torch.strided:
        name = str(t.layout).removeprefix("torch.")
        raise CaptureError(f"a tensor argument of shape {list(t.shape)} has layout {name}; pass x.to_dense() of it")
    return (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)


def make_signature(
    tensors: list[torch.Tensor],
    structure: Structure,
    training: bool,
    autocast: torch.dtype | None,
    fingerprint: Fingerprint,
) -> Signature:
    """The signature of a call."""
    return Signature(
        tuple([tensor_key(t) for t in tensors]),
        structure.key(),
        training,
        fingerprint.modes(),
        fingerprint.trainable(),
        autocast,
        fingerprint.attributes(),
        fingerprint.hooks(),
    )


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
