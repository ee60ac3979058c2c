"""What nodes call, by name and kind: ``aten.mm``, ``operator.getitem``, ``higher_order.run_and_save_rng_state``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from zcompile import compat, ops


@cache
def operator_name(target: Any) -> str:
    """The text of a node's target; the overload is left out when it is ``default``."""
    if compat.is_overload(target):
        return target.name().replace("::", ".")
    if compat.is_higher_order(target):
        return f"higher_order.{target.name()}"
    if isinstance(target, str):
        return target
    module = "operator" if target.__module__ == "_operator" else target.__module__
    return f"{module}.{target.__qualname__}"


@cache
def find_operator(name: str) -> Callable[..., Any] | None:
    """The operator with this text; None when there is none."""
    namespace, _, rest = name.partition(".")
    if namespace == "operator":
        return getattr(operator, rest, None)
    if namespace == "higher_order":
        return compat.higher_order_operator(rest)
    op, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def returns_list(target: Callable[..., Any] | str) -> bool:
    """Whether an operator returns a list of tensors, of a length that its schema does not tell."""
    returns = _returns(target)
    return returns is not None and len(returns) == 1 and returns[0].startswith("List")


def returns_many(target: Callable[..., Any] | str) -> bool:
    """Whether an operator's schema has more than one result."""
    returns = _returns(target)
    return returns is not None and len(returns) > 1


def returns_nothing(target: Callable[..., Any] | str) -> bool:
    """Whether an operator's schema has no result, like ``zc.release``."""
    return _returns(target) == []


@cache
def _returns(target: Any) -> list[str] | None:
    return compat.schema_returns(target)


#: arguments that switch an operator's randomness off, with the values that do
_OFF: dict[str, Any] = {"dropout_p": 0.0, "p": 0.0, "dropout": 0.0, "train": False, "training": False}


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: its operator does, and its arguments do not switch that off."""
    target: Any = node.target
    if not compat.is_overload(target) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = compat.argument_names(target)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        given.setdefault("dropout_p", 0.0)  # the schema's default
    return not any(name in given and given[name] == off for name, off in _OFF.items())


def runs_once(node: fx.Node) -> bool:
    """Whether a node must never run again for backward: it draws random numbers, or it makes gradients in forward."""
    return node.target in ops.RUN_ONCE or is_random(node)
