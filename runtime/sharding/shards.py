"""The parameters of one compiled model: shards in flat arenas, and the Parameters that users see."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zcompile import compat
from zcompile.errors import OutOfMemoryError, ShardingError
from zcompile.offloading import Offloading
from zcompile.placement import ParamSpec
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.offload.host import HostMemory
from zcompile.runtime.offload.hosting import Hosting
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.arenas import ArenaKey, ArenaLayout, detached_view
from zcompile.runtime.sharding.gradients import Gradients
from zcompile.runtime.sharding.placed import as_seen, local_of


class Slot:
    """The way from a Parameter back to its shards: an attribute of the Parameter.

    It holds the shards weakly. Copying or saving a Parameter leaves it behind: a copy is not managed by anyone.
    """

    NAME = "_zcompile_slot"
    __slots__ = ("_shards", "index")

    def __init__(self, shards: ParameterShards, index: int) -> None:
        self._shards = weakref.ref(shards)
        self.index = index

    @staticmethod
    def of(parameter: Tensor) -> tuple[ParameterShards, int] | None:
        """The shards that manage ``parameter`` and its index there; None if nobody does (any more)."""
        slot = parameter.__dict__.get(Slot.NAME)
        if type(slot) is not Slot:
            return None
        shards = slot._shards()
        if shards is None or shards.parameters[slot.index] is not parameter:
            return None
        return shards, slot.index

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # nothing, in a form that torch.load(weights_only=True) takes


class Contents(NamedTuple):
    """What tells values of parameters from those of another moment.

    Attributes:
        counts: of writes, as torch and zcompile count them.
        sums: of the values' bits, one an arena, where these are; None: not taken.
    """

    counts: tuple[int, ...] = ()
    sums: Tensor | None = None


class ParameterShards:
    """The parameters of one compiled model.

    Every shard is a padded, contiguous piece of a flat arena (one for each dtype and for trainable or frozen
    parameters; several where there is much). Padding rows and the holes between shards are zero in parameters and gradients
    alike and stay so: norms and optimizers run over flat memory.

    Attributes:
        specs: by canonical name, in the model's order.
        mesh: the ranks, and the device that computes.
        hosting: what is in the host's memory.
        names: canonical names by parameter index.
        parameters: by parameter index. DTensors where there is a process group, else plain tensors; views of the
            arenas.
        layout: where each shard lies in its arena.
        gradients: their gradients, laid out alike.
        accumulation: gradients that are not in ``.grad`` yet, of a compiled model.
        num_replaced: how often a Parameter took the place of another.
        updates: steps of optimizers that hold parameters of these.
        when_out_of_memory: makes the error to raise from the device's own and what was done (of a step, nothing).
    """

    when_out_of_memory: Callable[[torch.OutOfMemoryError, str], BaseException] | None = None

    def __init__(self, specs: Iterable[ParamSpec], mesh: Mesh, hosting: Hosting | None = None) -> None:
        """Allocate shards of zeros; every parameter starts unfilled.

        Raises:
            ShardingError: a name occurs twice, or a spec is for another world size.
            HostMemoryError: the host has no room for what is to be kept there.
        """
        self.mesh = mesh
        self.hosting = hosting or Hosting(mesh.device, HostMemory(mesh.device), Offloading())
        self.specs: dict[str, ParamSpec] = {}
        self._index: dict[str, int] = {}
        for index, spec in enumerate(specs):
            if spec.world_size != mesh.size:
                raise ShardingError(
                    f"parameter {spec.name!r} is planned for {spec.world_size} ranks and the mesh has {mesh.size}; plan it again"
                )
            for name in spec.names:
                if name in self._index:
                    raise ShardingError(f"parameter name {name!r} occurs twice; give each parameter its own names")
                self._index[name] = index
            self.specs[spec.name] = spec
        self.names = tuple(self.specs)
        self._specs = tuple(self.specs.values())
        self.layout = ArenaLayout(self._specs)
        self._arenas = self.hosting.allocate(self.layout.sizes)
        self.hosting.promise(self.layout, speaks=mesh.rank == 0)
        self._padded = tuple(self._shard_memory(i) for i in range(len(self._specs)))
        self._unfilled = set(range(len(self._specs)))
        self.parameters = [self._make_parameter(i) for i in range(len(self._specs))]
        self.gradients = Gradients(self._specs, self.layout, mesh, self.parameters, self.hosting)
        self.accumulation: Accumulation | None = None
        self.num_replaced = 0
        self.updates = 0
        self._seen: list[Tensor] = []

    @contextlib.contextmanager
    def explaining_memory(self, what: str = "") -> Iterator[None]:
        """An out-of-memory error of the body's is raised with what takes the memory."""
        try:
            yield
        except OutOfMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            if self.when_out_of_memory is None:
                raise
            raise self.when_out_of_memory(error, what) from error

    # Names and memory. ------------------------------------------------------------------------------------------------

    def index(self, name: str) -> int:
        """The index of a parameter by any of its names."""
        try:
            return self._index[name]
        except KeyError:
            raise ShardingError(
                f"parameter {name!r} is not in the model; its parameters are {_some(self.names)}"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def spec(self, index: int) -> ParamSpec:
        return self._specs[index]

    def local(self, name: str) -> Tensor:
        """The stored shard (``padded_local_shape``, contiguous, 256-byte aligned): the arena's memory."""
        return self._padded[self.index(name)]

    def parameter(self, name: str) -> nn.Parameter:
        """The Parameter that the user sees; the same object for every alias."""
        return self.parameters[self.index(name)]

    def parameters_of(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The Parameters of these canonical names."""
        return [self.parameters[self._index[name]] for name in names]

    def name_of(self, parameter: Tensor) -> str | None:
        """The canonical name of one of our Parameters; None for any other tensor."""
        found = Slot.of(parameter)
        return self.names[found[1]] if found is not None and found[0] is self else None

    def arenas(self) -> dict[ArenaKey, Tensor]:
        """The flat parameter memory."""
        return dict(self._arenas)

    # Values. ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, name: str, full: Tensor) -> None:
        """Write this rank's part of a full tensor, converted to the parameter's dtype and device; no communication.

        Raises:
            ShardingError: ``full`` has another shape.
        """
        index = self.index(name)
        spec = self._specs[index]
        if tuple(full.shape) != spec.shape:
            raise ShardingError(f"parameter {name!r} has shape {list(spec.shape)} and the value has {list(full.shape)}")
        full_tensors.write_shard(spec, self._padded[index], full, self.mesh.rank)
        self._unfilled.discard(index)

    def mark_filled(self, name: str) -> None:
        """Say that somebody else (DCP, a safetensors loader) wrote the shard."""
        self._unfilled.discard(self.index(name))

    def mark_unfilled(self, name: str) -> None:
        """Say that the shard holds no value yet."""
        self._unfilled.add(self.index(name))

    def unfilled(self) -> list[str]:
        """Canonical names of the parameters that have no value yet, in the model's order."""
        return [self.names[i] for i in sorted(self._unfilled)]

    def gather_full(self, name: str) -> Tensor:
        """The full parameter on every rank: fresh memory, logical shape. Collective."""
        return next(value for _, value in self.iter_full([name]))

    def iter_full(
        self, names: Iterable[str] | None = None, batch_bytes: int = full_tensors.BATCH_BYTES
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full parameter) on every rank, gathered a few ahead. Collective: same names everywhere."""
        names = self.names if names is None else list(names)
        indices = [self.index(name) for name in names]
        items = ((self._specs[i], lambda i=i: self._padded[i]) for i in indices)
        yield from zip(names, full_tensors.gather(self.mesh, items, batch_bytes), strict=True)

    def shard_like(self, name: str, full: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of any full tensor of a parameter's shape (optimizer state, say), placed as the parameter
        is.

        Returns:
            A DTensor where there is a process group, else a plain tensor; always fresh memory.
        """
        spec = self.specs[self.names[self.index(name)]]
        local = full_tensors.cut(spec, full, self.mesh.rank).to(self.hosting.home, dtype, copy=True)
        return self.as_seen(spec, local.contiguous())

    def contents(self, *, sums: bool) -> Contents:
        """Differs from what it was before if values were written since: by an optimizer, a loader, or through a parameter.

        Writes through ``.data``, and by ``torch._foreach_*`` on DTensors, show in the ``sums`` alone, which take one read of the
        shards. On the host it is the processors that read, beside what the device still has to do.
        """
        if not self._seen:
            alone = [self._padded[i] for i, place in enumerate(self.layout.places) if place is None]
            with torch.no_grad():  # else what is local would be a new tensor
                self._seen = [*self._arenas.values(), *alone, *self.parameters, *map(local_of, self.parameters)]
        counts = (self.updates, *compat.versions(self._seen))
        found = [arena.view(torch.int64).sum() for arena in self._arenas.values()] if sums else []
        return Contents(counts, torch.stack(found) if found else None)

    # What users see. --------------------------------------------------------------------------------------------------

    def as_seen(self, spec: ParamSpec, local: Tensor) -> Tensor:
        """A logical local tensor as users see it: a DTensor over the same memory where there is a process group."""
        return as_seen(self.mesh, spec, local)

    def replace_parameter(self, index: int, parameter: nn.Parameter) -> None:
        """Let ``parameter``, whose memory is the shard already, be the one that users see."""
        self.parameters[index] = parameter
        self.num_replaced += 1
        self._seen = []
        setattr(parameter, Slot.NAME, Slot(self, index))

    def view(self, index: int) -> Tensor:
        """The logical local shard with a storage of its own: the memory of the Parameter."""
        return detached_view(full_tensors.logical(self._specs[index], self._padded[index], self.mesh.rank))

    def _make_parameter(self, index: int) -> nn.Parameter:
        spec = self._specs[index]
        parameter = nn.Parameter(self.as_seen(spec, self.view(index)), requires_grad=spec.requires_grad)
        setattr(parameter, Slot.NAME, Slot(self, index))
        return parameter

    def _shard_memory(self, index: int) -> Tensor:
        spec, place = self._specs[index], self.layout.places[index]
        if place is None:
            return torch.empty(spec.padded_local_shape, dtype=spec.dtype, device=self.hosting.home)
        return self._arenas[place.key][place.start : place.start + place.numel].view(spec.padded_local_shape)

    # Gradients. -------------------------------------------------------------------------------------------------------

    def grad_local(self, name: str) -> Tensor:
        """The padded shard of the gradient memory: what ``.grad`` is, else memory that may be written, with any contents."""
        return self.gradients.of(self._index[name]).padded

    def gradient_arenas(self) -> dict[ArenaKey, Tensor]:
        """The flat gradient memory that exists now, laid out as the parameters are."""
        return dict(self.gradients.arenas)

    def holes(self, key: ArenaKey) -> list[Tensor]:
        """Views of what belongs to no gradient in a gradient arena: padding rows and gaps between shards."""
        return self.gradients.holes(key)

    def drop_gradients(self) -> None:
        """Let go of gradient memory that no ``.grad`` uses, before a forward fills memory with activations."""
        self.gradients.drop()

    def has_gradients(self, names: Iterable[str]) -> bool:
        """Whether one of these parameters has a ``.grad``."""
        return self.gradients.any_set(map(self._index.__getitem__, names))

    def prepare_gradients(self, names: Iterable[str]) -> None:
        """Let the gradient memory of these parameters exist."""
        self.gradients.prepare([self._index[name] for name in names])

    def accumulate(self, name: str, shard: Tensor) -> None:
        """``accumulate_many`` of one."""
        self.accumulate_many([name], [shard])

    def accumulate_many(self, names: Sequence[str], shards: Sequence[Tensor]) -> None:
        """Add reduced gradients to ``.grad`` in place, as autograd's accumulation does.

        Where ``.grad`` is None it becomes the prepared tensor; a tensor that the user assigned is added to.

        Args:
            names: parameter names.
            shards: padded gradient shards (the stored shape, any floating dtype, padding rows zero). A shard may be the
                gradient memory itself (``grad_local``) where ``.grad`` is None: nothing is copied then.

        Raises:
            ShardingError: the user's ``.grad`` is placed differently from the parameter.
        """
        self.gradients.accumulate([self._index[name] for name in names], shards)


def _some(names: Sequence[str]) -> str:
    """Names for a message: the first few."""
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown or "none"
