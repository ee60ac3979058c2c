"""The gradient memory of one compiled model: chunks that come when a backward writes to them and go with their gradients."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zcompile import compat
from zcompile.errors import ShardingError
from zcompile.placement import ParamSpec
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.offload.hosting import Hosting
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.arenas import ArenaKey, ArenaLayout, aligned_zeros, detached_view
from zcompile.runtime.sharding.placed import contiguous_stride, local_of, placement_problem

#: a model with no more gradient memory than this keeps it: to prepare its tensors anew in every step would cost the host
#: more (6 us a parameter) than so little memory is worth
KEEP_BYTES = 256 << 20

#: what is forgotten together: a chunk, or one parameter with memory of its own
Home = ArenaKey | int


class Gradient:
    """The gradient memory of one parameter.

    Attributes:
        padded: the shard.
        address: of it.
        tensor: what becomes ``.grad``.
        loan: to see who holds it.
        own: the references that are our own: all that exist at first.
    """

    __slots__ = ("address", "loan", "own", "padded", "tensor")

    def __init__(self, padded: Tensor, loan: compat.Loan) -> None:
        self.padded = padded
        self.address = padded.data_ptr()
        self.tensor = loan.tensor
        self.loan = loan
        self.own = compat.Loan.references([loan]) if loan.address else []

    def is_held(self) -> bool:
        """Whether anyone else holds the tensor or a view of it, also as the ``.grad`` of a parameter."""
        # without elements nothing can be overwritten
        return bool(self.loan.address) and compat.Loan.references([self.loan]) != self.own


class Chunks:
    """Chunks that a recorded backward writes to, while they exist and while they do not.

    Attributes:
        arenas: their flat memory.
        members: by home, the parameters.
        prepared: by parameter index.
        stay: they are the model's own and never go.
    """

    def __init__(
        self,
        arenas: dict[ArenaKey, Tensor],
        members: dict[Home, Sequence[int]],
        prepared: dict[int, Gradient],
        stay: bool,
    ) -> None:
        self.arenas = arenas
        self.members = members
        self.prepared = prepared
        self.stay = stay
        filled = [gradient for gradient in prepared.values() if gradient.loan.address]
        self._loans = [gradient.loan for gradient in filled]
        self._own = [count for kind in zip(*(gradient.own for gradient in filled), strict=True) for count in kind]

    def are_held(self) -> bool:
        """Whether anyone else holds a gradient: ``Gradient.is_held`` of all at once."""
        return compat.Loan.references(self._loans) != self._own


class Gradients:
    """The gradients of one compiled model.

    Parameters that were trainable at compile time have their gradients in flat chunks, laid out as the parameters are. A
    chunk is allocated when one of its gradients is first written. It is forgotten when none of its parameters has a
    ``.grad`` any more and the next forward begins (``drop``); a gradient that the user still holds keeps the memory alive
    and its values. A small model keeps its chunks, but nothing is ever written to a gradient that somebody else holds.

    Memory that belongs to no gradient (padding rows, gaps between shards) is zero. That of a parameter without ``.grad``
    holds anything and may not be read.

    Attributes:
        arenas: the flat memory of the chunks that exist.
        prepared: by parameter index, what was prepared and not forgotten.
        stay: chunks do not go.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        layout: ArenaLayout,
        mesh: Mesh,
        parameters: Sequence[nn.Parameter],
        hosting: Hosting,
    ) -> None:
        self.arenas: dict[ArenaKey, Tensor] = {}
        self.prepared: list[Gradient | None] = [None] * len(specs)
        self._specs = specs
        self._layout = layout
        self._mesh = mesh
        self._hosting = hosting
        self._parameters = parameters
        self._homes: list[Home] = [
            place.key if place is not None and place.key.trainable else index
            for index, place in enumerate(layout.places)
        ]
        self._strides = [contiguous_stride(spec.padded_local_shape) for spec in specs]
        self._alive: dict[Home, Sequence[int]] = {}
        self._holes: dict[ArenaKey, list[Tensor]] = {}
        trainable = sum(size * key.dtype.itemsize for key, size in layout.sizes.items() if key.trainable)
        # to lock pages anew in every step would take longer than the step
        self.stay = trainable <= KEEP_BYTES or hosting.parameters

    # What exists. -----------------------------------------------------------------------------------------------------

    def is_flat(self, index: int, grad: Tensor | None) -> bool:
        """Whether ``grad`` is the prepared gradient of a parameter and lies in a chunk."""
        known = self.prepared[index]
        return known is not None and known.tensor is grad and not isinstance(self._homes[index], int)

    def live_bytes(self) -> int:
        """Bytes of the gradients that exist, with padding: all of a chunk count, and what users put into ``.grad``."""
        num_bytes = sum(self._specs[i].padded_local_bytes for members in self._alive.values() for i in members)
        for parameter, known in zip(self._parameters, self.prepared, strict=True):
            grad = parameter.grad
            if grad is not None and (known is None or known.tensor is not grad):
                num_bytes += local_of(grad).nbytes
        return num_bytes

    def holes(self, key: ArenaKey) -> list[Tensor]:
        """Views of what belongs to no gradient in a chunk that exists: padding rows and gaps between shards."""
        known = self._holes.get(key)
        if known is None:
            arena = self.arenas[key]
            offset = arena.storage_offset()
            known = self._holes[key] = [
                arena.as_strided(shape, stride, offset + start) for shape, stride, start in self._hole_places(key)
            ]
        return known

    # Coming and going. ------------------------------------------------------------------------------------------------

    def of(self, index: int) -> Gradient:
        """The gradient memory of a parameter: what ``.grad`` is, or else memory that nobody else holds."""
        known = self.prepared[index]
        if known is not None and known.tensor is not self._parameters[index].grad and known.is_held():
            self._forget(self._homes[index])
            known = None
        return known or self._prepare(index)

    def drop(self) -> None:
        """Forget the chunks of which no parameter has a ``.grad``; nothing in a model that keeps its gradient memory."""
        if self.stay:
            return
        for home, members in list(self._alive.items()):
            if not self.any_set(members):
                self._forget(home)

    def prepare(self, indices: Sequence[int]) -> None:
        """Let the whole chunks of these parameters exist, as their backward would."""
        for index in indices:
            self.of(index)
        for members in list(self._alive.values()):
            for index in members:
                self.of(index)

    def snapshot(self) -> Chunks:
        """The chunks that exist."""
        return Chunks(
            dict(self.arenas),
            dict(self._alive),
            {i: known for i, known in enumerate(self.prepared) if known is not None},
            self.stay,
        )

    def clear_holes(self) -> None:
        """Let what belongs to no gradient be zero in chunks that go: other recordings may have written there in between."""
        holes = [] if self.stay else [hole for key in self.arenas for hole in self.holes(key)]
        if holes:
            compat.foreach_zero(holes)

    def wake(self, chunks: Chunks) -> bool:
        """Let these chunks be the ones that exist; False, and nothing is done, where one of their gradients is in use.

        Of chunks that do not stay, ``are_held`` was false when their step began, so that only a ``.grad`` can use them.
        """
        if self.any_set(chunks.prepared) or (chunks.stay and chunks.are_held()):
            return False
        for home, members in chunks.members.items():
            now = map(self.prepared.__getitem__, members)
            if all(map(operator.is_, now, map(chunks.prepared.__getitem__, members))):
                continue
            if home in self._alive:
                self._forget(home)
            self._alive[home] = members
            if not isinstance(home, int):
                self.arenas[home] = chunks.arenas[home]
            for index in members:
                self.prepared[index] = chunks.prepared[index]
        return True

    def any_set(self, indices: Iterable[int]) -> bool:
        """Whether one of these parameters has a ``.grad``."""
        found = compat.gradients(map(self._parameters.__getitem__, indices))
        return not all(map(operator.is_, found, itertools.repeat(None)))

    def _forget(self, home: Home) -> None:
        """Let go of a chunk. A ``.grad`` of it that is set goes on as one that the user assigned."""
        for index in self._alive.pop(home):
            self.prepared[index] = None
        if not isinstance(home, int):
            del self.arenas[home]
            self._holes.pop(home, None)

    def _prepare(self, index: int) -> Gradient:
        spec, place, home = self._specs[index], self._layout.places[index], self._homes[index]
        if place is None or isinstance(home, int):
            arena, start = aligned_zeros(spec.padded_local_numel, spec.dtype, self._hosting.home), 0
            self._alive[home] = (index,)
        else:
            arena, start = self.arenas.get(home), place.start
            if arena is None:
                arena = self._allocate(home)
        padded = arena.as_strided(spec.padded_local_shape, self._strides[index], arena.storage_offset() + start)
        logical = full_tensors.logical(spec, padded, self._mesh.rank) if spec.is_padded else padded
        gradient = self.prepared[index] = Gradient(padded, compat.Loan(detached_view(logical), self._parameters[index]))
        return gradient

    def _allocate(self, key: ArenaKey) -> Tensor:
        arena = self.arenas[key] = self._hosting.gradients(self._layout.sizes[key], key.dtype)
        self._alive[key] = self._layout.members[key]
        if holes := self.holes(key):
            compat.foreach_zero(holes)
        return arena

    def _hole_places(self, key: ArenaKey) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Shape, strides and start of each hole of a chunk, in elements."""
        holes = []
        for index in self._layout.members[key]:
            spec, place = self._specs[index], self._layout.places[index]
            assert place is not None
            filled = place.numel
            if spec.is_padded and spec.shard_dim is not None:
                num_rows = spec.local_shape(self._mesh.rank)[spec.shard_dim]
                shape, stride = list(spec.padded_local_shape), self._strides[index]
                if spec.shard_dim == 0:
                    filled = num_rows * stride[0]  # padding and gap are one hole
                else:
                    shape[spec.shard_dim] -= num_rows
                    holes.append((tuple(shape), stride, place.start + num_rows * stride[spec.shard_dim]))
            holes.append(((place.extent - filled,), (1,), place.start + filled))
        return [hole for hole in holes if math.prod(hole[0])]

    # Values. ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def accumulate(self, indices: Sequence[int], shards: Sequence[Tensor]) -> None:
        """Add reduced gradients to ``.grad``; see ``ParameterShards.accumulate_many``."""
        if self._hosting.parameters:
            shards = [shard.to(self._hosting.home) for shard in shards]
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        parameters = [self._parameters[index] for index in indices]
        new: tuple[list[nn.Parameter], list[Tensor]] = ([], [])
        for index, shard, parameter, grad in zip(
            indices, shards, parameters, compat.gradients(parameters), strict=True
        ):
            known = self.prepared[index]
            if grad is None:
                address = shard.data_ptr()
                if known is None or address != known.address:  # else it is what ``of`` just gave
                    known = self.of(index)
                    if address != known.address:
                        fresh[0].append(known.padded)
                        fresh[1].append(shard)
                new[0].append(parameter)
                new[1].append(known.tensor)
            elif known is not None and grad is known.tensor:
                assert shard.numel() == 0 or shard.data_ptr() != known.address, "the sum was overwritten"
                added[0].append(known.padded)
                added[1].append(shard)
            else:
                added[0].append(local_of(self.checked(index, grad)))
                added[1].append(full_tensors.logical(self._specs[index], shard, self._mesh.rank))
        compat.set_gradients(*new)
        if fresh[0]:
            compat.foreach_copy(*fresh)
        if added[0]:
            compat.foreach_add(*added)

    def checked(self, index: int, grad: Tensor) -> Tensor:
        """``grad`` if it is placed as its parameter is.

        Raises:
            ShardingError: it is not; torch itself would accept it and step with the wrong rows.
        """
        problem = placement_problem(self._parameters[index], grad)
        if problem:
            raise ShardingError(f"parameter {self._specs[index].name!r} {problem}")
        return grad
