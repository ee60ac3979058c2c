"""Nested arguments and results: taken apart into tensors and a structure, and put together again in the user's own types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from zcompile import compat

#: one step from a container to a member: ``("item", key)``, ``("attr", name)`` or ``("pytree", index)``
Access = tuple[str, Any]
Path = tuple[Access, ...]

_SCALARS = (
    int,
    float,
    bool,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class Leaf:
    """Tensor ``index``."""

    index: int

    def key(self) -> Any:
        """A hashable description of the structure."""
        return ("tensor", self.index)


@dataclass(frozen=True)
class Constant:
    """A value that is not a tensor; part of the signature."""

    value: Any

    def key(self) -> Any:
        """A hashable description of the structure."""
        try:
            hash(self.value)
        except TypeError:
            return ("object", type(self.value), id(self.value))
        return ("constant", type(self.value), repr(self.value) if isinstance(self.value, float) else self.value)


@dataclass(frozen=True)
class Container:
    """A container of the user's type, with its members by access.

    Attributes:
        like: the container that was taken apart; a template for the new one.
        members: each member with the access that leads to it.
    """

    like: Any
    members: tuple[tuple[Access, Structure], ...]

    def key(self) -> Any:
        """A hashable description of the structure."""
        return (type(self.like), tuple((access, member.key()) for access, member in self.members))


Structure = Leaf | Constant | Container


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure, list[Path]]:
    """Take a nested value apart.

    A tensor that occurs twice is one leaf.

    Returns:
        the tensors, the structure that rebuilds the value, and the path to each tensor.
    """
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    seen: dict[int, int] = {}
    active: set[int] = set()

    def walk(v: Any, path: Path) -> Structure:
        if isinstance(v, torch.Tensor):
            if id(v) not in seen:
                seen[id(v)] = len(tensors)
                tensors.append(v)
                paths.append(path)
            return Leaf(seen[id(v)])
        members = None if isinstance(v, _SCALARS) or id(v) in active else _members(v)
        if members is None:
            return Constant(v)
        active.add(id(v))
        result = Container(v, tuple((access, walk(member, (*path, access))) for access, member in members))
        active.discard(id(v))
        return result

    structure = walk(value, ())
    return tensors, structure, paths


def build(structure: Structure, tensors: list[Any]) -> Any:
    """Put a value together from its structure and tensors; containers are new objects of the original types."""
    if isinstance(structure, Leaf):
        return tensors[structure.index]
    if isinstance(structure, Constant):
        return structure.value
    like, values = structure.like, {access: build(member, tensors) for access, member in structure.members}
    if isinstance(like, tuple):
        items = list(values.values())
        return (
            type(like)(*items)
            if hasattr(like, "_fields")
            else tuple(items)
            if type(like) is tuple
            else type(like)(items)
        )
    if type(like) is list:
        return list(values.values())
    if type(like) is dict:
        return {key: v for (_, key), v in values.items()}
    if values and next(iter(values))[0] == "pytree":
        return compat.unflatten_node(like, list(values.values()))
    return _rebuild_object(like, values)


def fetch(value: Any, path: Path) -> Any:
    """Follow a path into a nested value. Also runs inside a capture, so it is plain indexing."""
    for kind, key in path:
        if kind == "item":
            value = value[key]
        elif kind == "attr":
            value = getattr(value, key)
        else:
            children: Any = compat.flatten_node(value)
            value = children[key]
    return value


def _members(v: Any) -> list[tuple[Access, Any]] | None:
    """The members of a container; None for anything that is not one."""
    if dataclasses.is_dataclass(v) and not isinstance(v, type) and not isinstance(v, Mapping):
        return [(("attr", f.name), getattr(v, f.name)) for f in dataclasses.fields(v) if hasattr(v, f.name)]
    if isinstance(v, (tuple, list)):
        return [(("item", i), item) for i, item in enumerate(v)]
    if isinstance(v, Mapping):
        return [(("item", key), item) for key, item in v.items()]
    if (children := compat.flatten_node(v)) is not None:
        return [(("pytree", i), child) for i, child in enumerate(children)]
    if isinstance(v, (type, ModuleType, FunctionType, torch.nn.Module, torch.Generator)) or callable(v):
        return None
    if hasattr(v, "__dict__") and vars(v):
        return [(("attr", name), item) for name, item in vars(v).items()]
    return None


def _rebuild_object(like: Any, values: dict[Access, Any]) -> Any:
    """A dataclass, mapping or plain object like ``like`` with new members."""
    new = copy.copy(like)
    for (kind, key), v in values.items():
        if kind == "attr":
            object.__setattr__(new, key, v)
        else:
            new[key] = v
    return new
