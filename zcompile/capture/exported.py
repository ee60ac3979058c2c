"""What autograd makes of a traced program, and how an earlier process hands it on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zcompile.capture.convert import InputAlias
from zcompile.ir import meta, pickled
from zcompile.ir.graph import Grad, Graph, Tangent
from zcompile.store import Store


@dataclass(frozen=True)
class Joint:
    """A joint graph and what is known of it without looking.

    Attributes:
        load: gives the graph.
        tangents: the output leaves that have a tangent, with its strides.
        trains: whether a parameter gets a gradient.
        aliases: output leaves that are inputs or buffers, or views of them.
        constants: tensors that the program created from Python values, by buffer name in the graph.
    """

    load: Callable[[], Graph]
    tangents: dict[int, tuple[int, ...]]
    trains: bool
    aliases: dict[int, InputAlias]
    constants: dict[str, torch.Tensor]

    @staticmethod
    def of(graph: Graph, aliases: Mapping[int, InputAlias], constants: Mapping[str, torch.Tensor]) -> Joint:
        """What was just made."""
        origins = [(node, meta.origin(node)) for node in graph.inputs]
        tangents = {origin.index: meta.tensor(n).stride() for n, origin in origins if isinstance(origin, Tangent)}
        trains = any(isinstance(role, Grad) for _, role in graph.outputs)
        return Joint(lambda: graph, tangents, trains, dict(aliases), dict(constants))

    @staticmethod
    def find(store: Store | None, key: str, fake_mode: Any) -> Joint | None:
        """What an earlier process kept under this key; its graph is read when it is asked for."""
        found = pickled.find(store, key, fake_mode)
        if found is None:
            return None
        graph, *rest = found
        return Joint(lambda: pickled.loads(graph, fake_mode), *rest)

    def keep(self, store: Store | None, key: str) -> None:
        """Keep this for later processes, where there is a key."""

        def kept() -> tuple[Any, ...]:
            return pickled.dumps(self.load()), self.tangents, self.trains, self.aliases, self.constants

        pickled.keep(store, key, kept)
