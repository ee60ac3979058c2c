"""Captures shared by tests of what comes after them: tracing is more than half of the time that a small model takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from zcompile import session
from zcompile.capture.attributes import _Identity
from zcompile.capture.convert import ParamType
from zcompile.capture.joint import Call, Captured, capture
from zcompile.capture.signature import Fingerprint, tensor_key
from zcompile.store import Store

_known: dict[Any, Captured] = {}


@contextlib.contextmanager
def shared_captures(where: ModuleType = session) -> Iterator[None]:
    """Inside, a model is captured once in this process for all of its equals: the same classes, attributes, sizes and call.

    Args:
        where: the module that captures: that of compiled models, or that of plans.
    """
    original = where.capture
    where.capture = _captured  # type: ignore[attr-defined]
    try:
        yield
    finally:
        where.capture = original  # type: ignore[attr-defined]


def _captured(
    model: nn.Module,
    call: Call,
    params: Mapping[int, ParamType],
    device: torch.device,
    name: str = "model",
    store: Store | None = None,
) -> Captured:
    key = (_key(model, call, params), device, name)
    if key not in _known:
        _known[key] = capture(model, call, params, device, name, store)
    return _known[key]


def _key(model: nn.Module, call: Call, params: Mapping[int, ParamType]) -> Any:
    """All that a capture depends on, but for what functions that forward calls have around them."""
    fingerprint = Fingerprint(model)
    modules = [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)]
    parameters = [(name, params[id(p)], p.stride()) for name, p in model.named_parameters(remove_duplicate=False)]
    buffers = [(name, tensor_key(b), id(b)) for name, b in model.named_buffers(remove_duplicate=False)]
    first = {identity: name for name, _, identity in reversed(buffers)}
    return (
        tuple(modules),
        tuple(parameters),
        tuple((name, key, first[identity]) for name, key, identity in buffers),
        (fingerprint.modes(), fingerprint.trainable(), fingerprint.hooks()),
        tuple((name, _equal(value)) for name, value in fingerprint.attributes().values.items()),
        (tuple(map(tensor_key, call.tensors)), call.structure.key(), call.training),
        (call.autocast, call.input_dtype, call.differentiable),
    )


def _equal(value: Any) -> Any:
    """The value of an attribute, where models have objects of their own: a parameter or an object whose members follow."""
    if not isinstance(value, _Identity):
        return value
    owned = value.value
    if isinstance(owned, (type, ModuleType, FunctionType, MethodType)):
        return value
    return (type(owned), len(owned)) if isinstance(owned, tuple) else type(owned)
