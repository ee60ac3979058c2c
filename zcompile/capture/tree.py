"""Nested arguments and results: taken apart into tensors and a structure, and put together again in the user's own types."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch

from zcompile import compat
from zcompile.errors import CaptureError

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
    enum.Enum,
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
        """A hashable description of the structure.

        Raises:
            CaptureError: the value can change without being another one, so a captured graph could be wrong about it.
        """
        value = self.value
        if isinstance(value, slice):
            return ("slice", *(Constant(v).key() for v in (value.start, value.stop, value.step)))
        if isinstance(value, (set, frozenset)):
            return (type(value), frozenset(Constant(v).key() for v in value))
        if isinstance(value, torch.Tensor) or not _is_hashable(value) or type(value).__module__ == "numpy":
            raise CaptureError(
                f"an argument holds a {type(value).__name__}, whose value a captured graph cannot follow; pass a tensor (such as "
                "torch.from_numpy gives), a plain Python value, or a list, tuple or dict of those"
            )
        return ("constant", type(value), repr(value) if isinstance(value, (float, complex)) else value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Container:
    """A container of the user's type, with its members by access.

    Attributes:
        like: the container that was taken apart; a template for the new one.
        members: each member with the access that leads to it.
        attributes: the names in its ``__dict__``.
    """

    like: Any
    members: tuple[tuple[Access, Structure], ...]
    attributes: tuple[str, ...] = ()

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
        walked = tuple((access, walk(member, (*path, access))) for access, member in members)
        result = Container(v, walked, tuple(getattr(v, "__dict__", ())))
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
    if type(like) is collections.defaultdict:
        return collections.defaultdict(like.default_factory, {key: v for (_, key), v in values.items()})
    if values and next(iter(values))[0] == "pytree":
        return compat.unflatten_node(like, list(values.values()))
    return _rebuild_object(structure, values)


def difference(old: Structure, new: Structure, path: Path = ()) -> Path | None:
    """The path to the first place where two structures differ, tensors included; None for equal ones."""
    if old.key() == new.key():
        return None
    if isinstance(old, Container) and isinstance(new, Container) and len(old.members) == len(new.members):
        for (access, a), (other, b) in zip(old.members, new.members, strict=True):
            if access == other and (found := difference(a, b, (*path, access))) is not None:
                return found
    return path


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
    if isinstance(v, tuple) and hasattr(v, "_fields"):
        return [(("attr", name), item) for name, item in zip(v._fields, v, strict=True)]  # type: ignore[attr-defined]
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


def _rebuild_object(structure: Container, values: dict[Access, Any]) -> Any:
    """A dataclass, mapping or plain object like the one that was taken apart, with new members."""
    new = compat.copy_of(structure.like, structure.attributes)
    for (kind, key), v in values.items():
        if kind == "attr":
            object.__setattr__(new, key, v)
        else:
            new[key] = v
    return new
