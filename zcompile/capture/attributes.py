"""The plain attributes of a model that a capture bakes in, and the cheap question whether they are still the same."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from zcompile.errors import CaptureError

#: containers with more members are followed by identity and length only
MAX_MEMBERS = 256
_MAX_DEPTH = 4
_OWN = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OPAQUE = (torch.Tensor, nn.Module, torch.Generator, type, ModuleType, FunctionType, MethodType)


@dataclass(frozen=True)
class Attributes:
    """The values of all plain attributes at one moment; equal values have equal numbers.

    Attributes:
        number: stands for the values.
        values: what is compared, by name.
    """

    number: int
    values: dict[str, Any] = field(compare=False, repr=False)

    def difference(self, other: Attributes) -> str:
        """The name of an attribute that ``other`` does not have, or has with another value."""
        missing = object()
        for name, value in self.values.items():
            if other.values.get(name, missing) != value:
                return name
        return next((name for name in other.values if name not in self.values), "")


@dataclass(frozen=True)
class _Identity:
    """A value that is only equal to itself, and stays alive so that its address cannot come back."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Watcher:
    """Says which values the plain attributes of a model have now.

    Followed are attributes of modules, and the members of lists, dicts and plain objects among them (such as a ``config``),
    some levels deep; buffers by what a graph depends on (shape, strides, dtype, device). The usual answer, that nothing
    changed, takes one comparison by identity for each value.

    Raises:
        CaptureError: from ``now``, when a parameter or submodule was added, removed or replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[tuple[Any, ...], Attributes] = {}
        self._structure = dict(_structure(model))
        self._watch()

    def now(self) -> Attributes:
        """The present values."""
        if list(map(len, self._tables)) != self._lengths:
            self._watch()
        now = itertools.chain(map(dict.get, self._owners, self._keys), itertools.chain.from_iterable(self._lists))
        if not all(map(operator.is_, now, self._last)):
            self._watch()
        return self._latest

    def _watch(self) -> None:
        changed = dict(_structure(self._model)).items() ^ self._structure.items()
        if changed:
            names = sorted({name for name, _ in changed})
            raise CaptureError(
                f"'{names[0]}' was added, removed or replaced after the model was compiled ({len(names)} parameters and modules in all); "
                "call zcompile.unwrap(model) first, change the plain model, and compile it again"
            )
        found = list(_tables(self._model))
        self._tables = [table for _, table, _ in found]
        self._lengths = list(map(len, self._tables))
        reads = [(table, key) for _, table, keys in found if isinstance(table, dict) for key in keys]
        self._owners, self._keys = [table for table, _ in reads], [key for _, key in reads]
        self._lists = [table for table in self._tables if not isinstance(table, dict)]
        self._last = [*map(dict.get, self._owners, self._keys), *itertools.chain.from_iterable(self._lists)]
        values = {f"{path}{key}": _comparable(table[key]) for path, table, keys in found for key in keys}
        for name, buffer in self._model.named_buffers():
            values[name] = (tuple(buffer.shape), buffer.stride(), buffer.dtype, buffer.device)
        key = tuple(values.items())
        self._latest = self._numbers.setdefault(key, Attributes(len(self._numbers), values))


def _structure(model: nn.Module) -> Iterator[tuple[str, _Identity]]:
    """Every parameter and submodule by name."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield path, _Identity(module)
        for name, parameter in module._parameters.items():
            yield f"{path}.{name}".removeprefix("."), _Identity(parameter)


def _tables(model: nn.Module) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """What to look at: (path, dict or list, keys or indices)."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name in ("_parameters", "_modules", "_buffers"):
            if table := module.__dict__[name]:
                yield prefix, table, tuple(table)
        table = vars(module)
        yield from _follow(prefix, table, tuple(k for k in table if k not in _OWN), seen, 0)


def _follow(path: str, table: Any, keys: Sequence[Any], seen: set[int], depth: int) -> Iterator[tuple[str, Any, Any]]:
    if id(table) in seen:
        return
    seen.add(id(table))
    yield path, table, keys
    for key in keys if depth < _MAX_DEPTH else ():
        value = table[key]
        if isinstance(value, (*_SCALARS, *_OPAQUE)):
            continue
        inner = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", None)
        if isinstance(inner, (dict, list, tuple)) and len(inner) <= MAX_MEMBERS:
            members = tuple(inner) if isinstance(inner, dict) else range(len(inner))
            yield from _follow(f"{path}{key}.", inner, members, seen, depth + 1)


def _comparable(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)
    if isinstance(value, nn.Parameter):
        return _Identity(value)
    if isinstance(value, (dict, list)):
        return (type(value), len(value))
    return _Identity(value)
