"""Graphs as bytes for another process: unlike their text, with source lines, tags of the split and memory that values share."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from zcompile import compat
from zcompile.ir.operators import find_operator, operator_name
from zcompile.store import Store

log = logging.getLogger("zcompile")


def dumps(value: Any) -> bytes:
    """Pickle a value that holds graphs.

    Raises:
        Exception: it holds what cannot be pickled.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def loads(data: bytes, fake_mode: Any) -> Any:
    """What ``dumps`` was given; fake tensors belong to ``fake_mode``.

    Raises:
        Exception: it was not written by these classes.
    """
    return _Unpickler(io.BytesIO(data), fake_mode).load()


def keep(store: Store | None, key: str, value: Callable[[], Any]) -> None:
    """Keep a value that holds graphs for other processes, if there is a key and all of it can be pickled."""
    if store is None or not key:
        return
    try:
        data = dumps(value())
    except Exception as error:  # whatever is in there
        log.debug("%s is not kept: %s: %s", key, type(error).__name__, error)
        return
    store.put(key, data)


def find(store: Store | None, key: str, fake_mode: Any) -> Any:
    """A value that was kept under a key; None without one."""
    data = store.get(key) if store is not None and key else None
    if store is None or data is None:
        return None
    try:
        return loads(data, fake_mode)
    except Exception as error:  # whatever wrote it
        store.drop(key, f"{type(error).__name__}: {error}")
        return None


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # so that an address stands for one storage
        self._texts: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        if compat.is_fake(obj):
            storage = self._storages.setdefault(compat.storage_id(obj), len(self._storages))
            self._alive.append(obj)
            return _fake_tensor, (storage, *compat.describe_fake(obj))
        if isinstance(obj, fx.Graph):
            return _graph, (self._nodes(obj),)
        if isinstance(obj, fx.Node):
            raise pickle.PicklingError(f"node '{obj.name}' is referred to from outside of its graph")
        if compat.is_overload(obj) or compat.is_higher_order(obj):
            return _operator, (operator_name(obj),)
        return NotImplemented

    def _nodes(self, graph: fx.Graph) -> list[tuple[Any, ...]]:
        """Of each node its kind, target, name, arguments and metadata; arguments refer to nodes by number."""
        refs: dict[fx.Node, Any] = {}
        nodes = []
        for node in graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), refs.__getitem__)
            meta = {key: self._same(value) for key, value in node.meta.items()}
            nodes.append((node.op, node.target, node.name, args, kwargs, meta))
            refs[node] = _Ref(len(refs))
        return nodes

    def _same(self, value: Any) -> Any:
        """Equal texts as one object: source lines repeat, and pickle knows an object again, not a value."""
        return self._texts.setdefault(value, value) if type(value) is str else value


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, fake_mode: Any) -> None:
        super().__init__(stream)
        self._fake_mode = fake_mode
        self._storages: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _fake_tensor.__name__:
            return self._tensor
        return super().find_class(module, name)

    def _tensor(self, storage: int, *description: Any) -> torch.Tensor:
        tensor = compat.make_fake(self._fake_mode, self._storages.get(storage), *description)
        self._storages.setdefault(storage, tensor)
        return tensor


@dataclass(frozen=True)
class _Ref:
    """A node as an argument of a later one."""

    index: int


def _fake_tensor(*_: Any) -> Any:
    raise AssertionError("stands for the unpickler's own method")


def _graph(nodes: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    made: list[Any] = []
    for op, target, name, args, kwargs, meta in nodes:
        args, kwargs = map_aggregate((args, kwargs), lambda a: made[a.index] if type(a) is _Ref else a)
        node = graph.create_node(op, target, args, kwargs, name)
        if node.name != name:
            node.name = name
        node.meta = meta
        made.append(node)
    return graph


def _operator(name: str) -> Callable[..., Any]:
    found = find_operator(name)
    if found is None:
        raise pickle.UnpicklingError(f"there is no operator {name}")
    return found
