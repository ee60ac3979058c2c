"""Flat optimizer state: step, first and second moments of parameters that lie in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zcompile.runtime.optim.adamw_update import Segment, Segments
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.arenas import ArenaKey, detached_view
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards

MOMENTS = ("exp_avg", "exp_avg_sq")
MAXIMUM = "max_exp_avg_sq"


class Cell:
    """The state of one parameter in a flat arena, as the user sees it in ``optimizer.state``."""

    __slots__ = ("arena", "position", "seen")

    def __init__(self, arena: MomentArena, position: int, seen: dict[str, Tensor]) -> None:
        self.arena = arena
        self.position = position
        self.seen = seen

    def serves(self, amsgrad: bool) -> bool:
        """Whether there are maxima where they are needed."""
        return not amsgrad or MAXIMUM in self.seen

    def is_in(self, state: dict[str, Any]) -> bool:
        """Whether ``state`` holds our tensors (the user may have loaded or replaced it)."""
        return all(state.get(key) is tensor for key, tensor in self.seen.items())

    def take(self, state: dict[str, Any]) -> None:
        """Copy the values in ``state`` into the arena (zeros where it has none) and put our tensors there."""
        for key, tensor in self.seen.items():
            value = state.get(key)
            if isinstance(value, Tensor):
                local_of(tensor).copy_(local_of(value))
            else:
                tensor.fill_(0 if value is None else value)
            state[key] = tensor


class MomentArena:
    """State for some parameters of one parameter arena, in the same order and with the same gaps.

    So a run of neighbours is one run here as well. The gaps and padding rows stay zero: their gradients are.

    Attributes:
        key: of the parameter arena, and of the gradient arena of the same layout.
        cells: by position, in the order of ``indices``.
        steps: one float32 on the CPU for each position.
        hosted: what updates the states where they are on the host; None: they are on the device.
    """

    def __init__(self, shards: ParameterShards, key: ArenaKey, indices: Sequence[int], *, amsgrad: bool) -> None:
        """Allocate zeros for parameters ``indices`` (rising in the parameter arena, their states all on the host or none)."""
        self.key = key
        self.hosted = shards.hosting.update if shards.hosting.hosts_states(indices[0]) else None
        self._param = shards.arenas()[key]
        self._gradient_arenas = shards.gradients.arenas
        self._places = [place for i in indices if (place := shards.layout.places[i]) is not None]
        self._starts: list[int] = []
        size = 0
        for place in self._places:
            self._starts.append(size)
            size += place.extent
        names = (*MOMENTS, MAXIMUM) if amsgrad else MOMENTS
        is_hosted = self.hosted is not None
        self._flat = {name: shards.hosting.states(size, key.dtype, hosted=is_hosted) for name in names}
        self.steps = torch.zeros(len(indices), dtype=torch.float32)
        self._segments: dict[tuple[int, ...], Segments] = {}
        self._columns: dict[tuple[int, ...], Tensor] = {}
        self.cells = [
            Cell(self, position, self._seen(shards, index, position)) for position, index in enumerate(indices)
        ]

    def _seen(self, shards: ParameterShards, index: int, position: int) -> dict[str, Tensor]:
        spec, place, start = shards.spec(index), self._places[position], self._starts[position]
        seen: dict[str, Tensor] = {"step": detached_view(self.steps[position])}
        for name, flat in self._flat.items():
            padded = flat[start : start + place.numel].view(spec.padded_local_shape)
            view = detached_view(full_tensors.logical(spec, padded, shards.mesh.rank))
            seen[name] = shards.as_seen(spec, view)
        return seen

    @property
    def grad(self) -> Tensor:
        """The gradient arena that exists now."""
        return self._gradient_arenas[self.key]

    def advance(self, positions: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """Count a step for these positions; gives (step, the positions that are there now), usually once."""
        if len(positions) == len(self.cells):
            self.steps += 1
        else:
            column = self._columns.get(positions)
            if column is None:
                column = self._columns[positions] = torch.tensor(positions)
            self.steps[column] += 1
        steps = list(map(self.steps.tolist().__getitem__, positions))
        if steps.count(steps[0]) == len(steps):
            return [(steps[0], positions)]
        by_step: dict[float, list[int]] = {}
        for position, step in zip(positions, steps, strict=True):
            by_step.setdefault(step, []).append(position)
        return [(step, tuple(together)) for step, together in by_step.items()]

    def segments(self, positions: tuple[int, ...], amsgrad: bool) -> Segments:
        """The flat memory of these positions; neighbours are merged."""
        known = self._segments.get(positions)
        if known is None:
            merged: list[Segment] = []
            for position in sorted(positions):
                place, start = self._places[position], self._starts[position]
                last = merged[-1] if merged else None
                if last and last.param_start + last.numel == place.start and last.state_start + last.numel == start:
                    merged[-1] = last._replace(numel=last.numel + place.extent)
                else:
                    merged.append(Segment(place.start, start, place.extent))
            known = Segments(
                self._param,
                None,
                self._flat["exp_avg"],
                self._flat["exp_avg_sq"],
                self._flat.get(MAXIMUM),
                tuple(merged),
            )
            self._segments[positions] = known
        return known if amsgrad else known.without_maxima()
