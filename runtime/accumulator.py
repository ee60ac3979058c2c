"""Puts what backwards compute where it belongs: into this rank's sums, those of a window, or ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

from torch import Tensor

from zcompile import compat
from zcompile.runtime.executor import Executor
from zcompile.runtime.holding import Holding
from zcompile.runtime.leaves import Leaves
from zcompile.runtime.ranks.agreement import Agreement, TextSequence
from zcompile.runtime.sharding.full import logical


class Accumulator:
    """Takes the gradients of each backward of one compiled model.

    Args:
        executor: reduces what was added up on this rank.
        agreement: is told of every group of collectives.
        holding: ends with its window.

    Attributes:
        local_only: inside ``no_sync``: backwards keep their gradients on this rank.
        leaves: of the step whose backward runs.
    """

    def __init__(self, executor: Executor, agreement: Agreement, holding: Holding) -> None:
        self.local_only = False
        self.leaves: Leaves | None = None
        self._executor = executor
        self._held = executor.accumulation
        self._shards = executor.shards
        self._agreement = agreement
        self._holding = holding

    # Which way the next backward goes. --------------------------------------------------------------------------------

    @property
    def stays_local(self) -> bool:
        """Whether the gradients of the next plain ``backward()`` stay on this rank for now."""
        return self.local_only or (self._held.defers and not self._held.at_last)

    def keeps_local(self) -> bool:
        """Inside a backward: whether its gradients stay on this rank for now."""
        return self.stays_local and self.in_default_mode()

    def in_default_mode(self) -> bool:
        """Inside a backward: whether the engine runs every accumulation, as a plain ``backward()`` does."""
        assert self.leaves is not None
        return self.leaves.all_run()

    # Gradients. -------------------------------------------------------------------------------------------------------

    def accumulate(self, label: str, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put gradients where they belong; returns those that the engine must handle, by parameter.

        Args:
            label: of the step.
            grads: padded shards by parameter, or where ``keeps_local`` full ones as reductions read them; not kept.
        """
        held = self._held
        trains = compat.requires_grad(self._shards.parameters_of(grads))
        if not all(trains):  # frozen since the forward: the engine gives leaves that do not require grad nothing
            grads = dict(compress(grads.items(), trains))
        if self.keeps_local():
            held.add_local(grads)
            held.advance(reduces=False)
            return self._for_hooks(label, list(grads))
        if not self.in_default_mode():
            return {name: self._fresh(name, value) for name, value in grads.items()}
        hooked = set(compress(grads, compat.tensor_hooks(self._shards.parameters_of(grads))))
        if held.local:
            self._agreement.event(f"reduction of local gradients ({label})", TextSequence.of(*held.local))
            for name, value in self._executor.reduce_local(list(held.local), "reduction"):
                grads[name] = grads[name] + value if name in grads else value
        grads = self._through_window(grads)
        returned = {name: self._fresh(name, value) for name, value in grads.items() if name in hooked} if hooked else {}
        self._accumulate({name: value for name, value in grads.items() if name not in hooked} if hooked else grads)
        return returned

    def finish_window(self) -> None:
        """Reduce local gradients now, put all that was added up into ``.grad``, and begin a window. Collective."""
        held = self._held
        self._agreement.event("sync_gradients", TextSequence.of(*held.names()))
        local = self._executor.reduce_local(list(held.local), "sync_gradients")
        self._accumulate({name: held.take_reduced(name, value) for name, value in local} | self._take_reduced())
        self.begin_window()

    def begin_window(self) -> None:
        """Forget what earlier backward calls left: a declared window begins."""
        self._held.clear()
        self._holding.end()

    # Inside. ----------------------------------------------------------------------------------------------------------

    def _accumulate(self, grads: Mapping[str, Tensor]) -> None:
        self._shards.accumulate_many(list(grads), list(grads.values()))

    def _for_hooks(self, label: str, names: list[str]) -> dict[str, Tensor]:
        """Local gradients of the parameters that have hooks, reduced: a hook is called in every backward, with a gradient."""
        parameters = self._shards.parameters_of(names)
        hooks = zip(names, compat.tensor_hooks(parameters), map(compat.accumulation_hooks, parameters), strict=True)
        hooked = [name for name, before, after in hooks if before or after]
        if not hooked:
            return {}
        self._agreement.event(f"reduction of gradients with hooks ({label})", TextSequence.of(*hooked))
        reduced = self._executor.reduce_local(hooked, "reduction")
        return {name: self._fresh(name, value) for name, value in reduced}

    def _through_window(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that are complete: all but those that are added up over the window, and these when it ends."""
        held = self._held
        ends = held.at_last
        held.advance(reduces=True)
        if ends:
            self._holding.end()
        if held.dtype is None:
            return grads
        if ends:
            complete = {name: held.take_reduced(name, value) for name, value in grads.items()}
            return complete | self._take_reduced()
        waits = {name for name in grads if held.holds_back(self._shards.specs[name].dtype)}
        held.add_reduced({name: value for name, value in grads.items() if name in waits})
        return {name: value for name, value in grads.items() if name not in waits}

    def _take_reduced(self) -> dict[str, Tensor]:
        """The gradients that were added up over a window; nothing is held any more."""
        held = self._held
        names = [name for name in self._shards.specs if name in held.reduced]
        return {name: held.reduced.pop(name) for name in names}

    def _fresh(self, name: str, padded: Tensor) -> Any:
        """A gradient of its own memory, placed as its parameter is."""
        spec = self._shards.specs[name]
        own = logical(spec, padded, self._shards.mesh.rank).to(self._shards.hosting.home, copy=True)
        return self._shards.as_seen(spec, own)
