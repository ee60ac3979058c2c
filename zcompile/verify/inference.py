"""The types of values, and what an operator makes of them: its fake kernel is asked once for each distinct call."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from zcompile import compat
from zcompile.ir import edit, meta
from zcompile.ir.types import type_text


class Type(NamedTuple):
    """The type of one tensor. Device indices differ between ranks and do not belong to it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    def fake(self) -> torch.Tensor:
        """A tensor of this type, of the fake mode in force."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def same_layout(self, other: Type) -> bool:
        """Whether elements lie at the same places; strides of dimensions with one element do not matter."""
        if 0 in self.shape:
            return True
        return all(a == b for a, b, size in zip(self.strides, other.strides, self.shape, strict=True) if size != 1)

    def same_but_layout(self, other: Any) -> bool:
        """Whether shape, dtype and device are equal."""
        return isinstance(other, Type) and self[:2] == other[:2] and self.device == other.device

    def __str__(self) -> str:
        return type_text(self._meta(), "meta") + ("" if self.device == "cpu" else f"@{self.device}")

    def _meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def type_of(value: Any) -> Any:
    """The type of a fake value: a ``Type``, a tuple of types, or a constant as ``(its Python type, itself)``."""
    if isinstance(value, torch.Tensor):
        return Type(value.dtype, tuple(value.shape), tuple(value.stride()), value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(type_of(v) for v in value)
    return (type(value), repr(value))


def type_name(type_: Any) -> str:
    """The text of what ``type_of`` returns."""
    if isinstance(type_, tuple) and not isinstance(type_, Type):
        if len(type_) == 2 and isinstance(type_[0], type):
            return "none" if type_[0] is type(None) else f"{type_[0].__name__}({type_[1]})"
        return f"({', '.join(type_name(t) for t in type_)})"
    return str(type_)


def agree(a: Any, b: Any, *, layout: bool) -> bool:
    """Whether two types are equal; strides count when ``layout``."""
    if isinstance(a, Type):
        return a.same_but_layout(b) and (not layout or a.same_layout(b))
    if isinstance(b, Type) or len(a) != len(b):
        return False
    if len(a) == 2 and isinstance(a[0], type):
        return a == b
    return all(agree(x, y, layout=layout) for x, y in zip(a, b, strict=True))


class Inference:
    """Infers the types of calls from their arguments' types and remembers each distinct call.

    48 equal layers cost one. The memory lives as long as the object: keep one for all verifications of a pipeline.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._mode = compat.new_fake_mode()
        self._save_rng = compat.higher_order_operator("run_and_save_rng_state")
        self._replay_rng = compat.higher_order_operator("run_with_rng_state")

    def knows(self, target: Any) -> bool:
        """Whether ``target`` belongs to the vocabulary of graphs: operators, ``getitem`` and arithmetic on constants."""
        if compat.is_overload(target) or target in (self._save_rng, self._replay_rng):
            return True
        return getattr(target, "__module__", "") in ("_operator", "math")

    def infer(self, node: fx.Node) -> Any:
        """The type that the fake kernel gives a call, from the recorded types of its arguments.

        Raises:
            Exception: whatever the fake kernel raises for arguments that do not fit.
        """
        if edit.is_getitem(node) and isinstance(node.args[0], fx.Node):
            index: Any = node.args[1]
            return type_of(meta.value(node.args[0])[index])  # a long list need not be looked through for each item
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        if key not in self._known:
            with torch.no_grad(), compat.quiet_fake_kernels(), self._mode:
                self._known[key] = self._run(node.target, _thaw(node.args), _thaw(node.kwargs))
        return self._known[key]

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is self._save_rng:
            state = torch.empty(0, dtype=torch.uint8)
            return (type_of(state), self._run(args[0], args[1:], kwargs))
        if target is self._replay_rng:
            return self._run(args[1], args[2:], kwargs)
        return type_of(target(*args, **kwargs))

    def check(self, node: fx.Node) -> str | None:
        """What is wrong with the recorded type of a call; None when it is what the fake kernel gives."""
        recorded = type_of(meta.value(node))
        try:
            inferred = self.infer(node)
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            return f"cannot take these arguments: {first}"
        if node.target is self._save_rng:  # the size of the state is the device's, not the operator's
            recorded, inferred = recorded[1:], inferred[1:]
        layout = (
            any(compat.shared_arguments(node.target))
            if compat.is_overload(node.target)
            else node.target is operator.getitem
        )
        if agree(inferred, recorded, layout=layout):
            return None
        return f"is recorded as {type_name(recorded)} but its operator gives {type_name(inferred)}"


def _freeze(arg: Any) -> Any:
    """A hashable stand-in for an argument that tells types apart (1, 1.0 and True are three arguments)."""
    if isinstance(arg, fx.Node):
        return ("value", type_of(meta.value(arg)))
    if isinstance(arg, (list, tuple)):
        return (list, *map(_freeze, arg))
    if isinstance(arg, dict):
        return (dict, *((name, _freeze(value)) for name, value in arg.items()))
    if isinstance(arg, slice):
        return (slice, _freeze(arg.start), _freeze(arg.stop), _freeze(arg.step))
    return (type(arg), repr(arg) if isinstance(arg, float) else arg)


def _thaw(arg: Any) -> Any:
    """The argument with a fake tensor in the place of every node."""
    if isinstance(arg, fx.Node):
        return _fake_like(meta.value(arg))
    if isinstance(arg, (list, tuple)):
        return type(arg)(_thaw(a) for a in arg) if type(arg) in (list, tuple) else [_thaw(a) for a in arg]
    if isinstance(arg, dict):
        return {name: _thaw(value) for name, value in arg.items()}
    return arg


def _fake_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type_of(value).fake()
    if isinstance(value, (list, tuple)):
        return type(value)(_fake_like(v) for v in value)
    return value
