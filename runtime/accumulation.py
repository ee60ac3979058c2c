"""Gradients that are added up over backward calls before they reach ``.grad``: inside ``no_sync``, and in a declared window."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zcompile import compat


class Accumulation:
    """What the backward calls of a window have left that is not in ``.grad`` yet, and where in the window the next one is.

    There are two kinds. *Local* gradients are full ones of this rank, in the form in which a reduction reads them: what
    backwards inside ``no_sync`` leave, and all but the last of a window when ``defers``. *Reduced* ones are shards, kept in
    ``dtype`` where a parameter's own is narrower, so that a sum over micro-batches is rounded once.

    Args:
        steps: backward calls in a window.
        defers: all but the last call of a window keep their gradients on this rank.
        dtype: what to add up in where it is wider than the gradients; None: in their own dtype.

    Attributes:
        local: full gradients of this rank, by parameter.
        places: where such sums come to lie, for those who must find them there in every window.
        reduced: gradient shards, by parameter.
        position: how many backward calls of the window are done.
    """

    def __init__(self, steps: int = 1, *, defers: bool = False, dtype: torch.dtype | None = None) -> None:
        self.steps = steps
        self.defers = defers and steps > 1
        self.dtype = dtype
        self.local: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}
        self.reduced: dict[str, Tensor] = {}
        self.position = 0

    # The window. ------------------------------------------------------------------------------------------------------

    @property
    def at_last(self) -> bool:
        """Whether the next backward call is the last one of its window."""
        return self.position == self.steps - 1

    def advance(self, *, reduces: bool) -> None:
        """Count a backward call. A window ends with a call that reduces."""
        if not self.at_last:
            self.position += 1
        elif reduces:
            self.position = 0

    def clear(self) -> None:
        """Forget all gradients that are not in ``.grad`` yet, and begin a window."""
        self.local.clear()
        self.reduced.clear()
        self.position = 0

    # What is added up. ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Parameters with gradients that are not in ``.grad`` yet."""
        return [*self.local, *(name for name in self.reduced if name not in self.local)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are not in ``.grad`` yet, and of the places for them."""
        return sum(t.nbytes for kind in (self.places | self.local, self.reduced) for t in kind.values())

    def add_local(self, values: Mapping[str, Tensor]) -> None:
        """Add full local gradients by parameter; they are not kept."""
        self._add(self.local, values, self.places)

    def take_local(self, name: str, value: Tensor) -> Tensor:
        """``value`` plus the local gradient of a parameter, which is not held any more."""
        held = self.local.pop(name, None)
        return value if held is None else held.add_(value)

    def holds_back(self, param_dtype: torch.dtype) -> bool:
        """Whether reduced gradients of such a parameter stay here until the window ends."""
        return self.dtype is not None and self.steps > 1 and self._wide(param_dtype) != param_dtype

    def add_reduced(self, values: Mapping[str, Tensor]) -> None:
        """Add reduced shards by parameter; they are not kept."""
        self._add(self.reduced, values, {})

    def take_reduced(self, name: str, shard: Tensor) -> Tensor:
        """``shard`` plus the reduced shards of a parameter, which are not held any more."""
        held = self.reduced.pop(name, None)
        return shard if held is None else held.add_(shard)

    def _add(self, sums: dict[str, Tensor], values: Mapping[str, Tensor], places: Mapping[str, Tensor]) -> None:
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, value in values.items():
            known, place = sums.get(name), places.get(name)
            if known is not None:
                later[0].append(known)
                later[1].append(value)
            elif place is not None:
                sums[name] = place
                first[0].append(place)
                first[1].append(value)
            else:
                sums[name] = value.to(self._wide(value.dtype), copy=True)
        if first[0]:
            compat.foreach_copy(*first)
        if later[0]:
            compat.foreach_add(*later)

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None or dtype.is_complex:
            return dtype
        return torch.promote_types(dtype, self.dtype)
