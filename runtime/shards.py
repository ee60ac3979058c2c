"""The parameters of one compiled model: shards in flat arenas, the Parameters that users see, and their gradients."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zcompile import compat
from zcompile.errors import ShardingError
from zcompile.placement import ParamSpec
from zcompile.runtime import full as full_tensors
from zcompile.runtime.arenas import ArenaKey, ArenaLayout, aligned_zeros, allocate, detached_view
from zcompile.runtime.mesh import Mesh


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


@dataclass(frozen=True, eq=False)
class Gradient:
    """The gradient memory of one parameter: the padded shard and the tensor that becomes ``.grad``."""

    padded: Tensor
    tensor: Tensor


class ParameterShards:
    """The parameters of one compiled model.

    Every shard is a padded, contiguous piece of a flat arena (one for each dtype and for trainable or frozen
    parameters). Padding rows and the holes between shards are zero in parameters and gradients alike and stay so: norms
    and optimizers run over flat memory.

    Attributes:
        specs: by canonical name, in the model's order.
        mesh: where the shards live.
        names: canonical names by parameter index.
        parameters: by parameter index. DTensors where there is a process group, else plain tensors; views of the
            arenas.
        layout: where each shard lies in its arena.
    """

    def __init__(self, specs: Iterable[ParamSpec], mesh: Mesh) -> None:
        """Allocate shards of zeros; every parameter starts unfilled.

        Raises:
            ShardingError: a name occurs twice, or a spec is for another world size.
        """
        self.mesh = mesh
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
        self._arenas = allocate(self.layout.sizes, mesh.device)
        self._padded = tuple(self._shard_memory(self._arenas, i) for i in range(len(self._specs)))
        self._gradient_arenas: dict[ArenaKey, Tensor] = {}
        self._gradients: list[Gradient | None] = [None] * len(self._specs)
        self._holes: dict[ArenaKey, list[Tensor]] = {}
        self._unfilled = set(range(len(self._specs)))
        self.parameters = [self._make_parameter(i) for i in range(len(self._specs))]

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

    def iter_full(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full parameter) on every rank, gathered a few ahead. Collective: same names everywhere."""
        names = self.names if names is None else list(names)
        indices = [self.index(name) for name in names]
        items = ((self._specs[i], lambda i=i: self._padded[i]) for i in indices)
        yield from zip(names, full_tensors.gather(self.mesh, items), strict=True)

    def shard_like(self, name: str, full: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of any full tensor of a parameter's shape (optimizer state, say), placed as the parameter
        is.

        Returns:
            A DTensor where there is a process group, else a plain tensor; always fresh memory.
        """
        spec = self.specs[self.names[self.index(name)]]
        local = full_tensors.cut(spec, full, self.mesh.rank).to(self.mesh.device, dtype, copy=True)
        return self.as_seen(spec, local.contiguous())

    # What users see. --------------------------------------------------------------------------------------------------

    def as_seen(self, spec: ParamSpec, local: Tensor) -> Tensor:
        """A logical local tensor as users see it: a DTensor over the same memory where there is a process group."""
        if self.mesh.device_mesh is None:
            return local
        return DTensor.from_local(
            local,
            self.mesh.device_mesh,
            [placement(spec)],
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=_contiguous_stride(spec.shape),
        )

    def replace_parameter(self, index: int, parameter: nn.Parameter) -> None:
        """Let ``parameter``, whose memory is the shard already, be the one that users see."""
        self.parameters[index] = parameter
        setattr(parameter, Slot.NAME, Slot(self, index))

    def view(self, index: int) -> Tensor:
        """The logical local shard with a storage of its own: the memory of the Parameter."""
        return detached_view(full_tensors.logical(self._specs[index], self._padded[index], self.mesh.rank))

    def _make_parameter(self, index: int) -> nn.Parameter:
        spec = self._specs[index]
        parameter = nn.Parameter(self.as_seen(spec, self.view(index)), requires_grad=spec.requires_grad)
        setattr(parameter, Slot.NAME, Slot(self, index))
        return parameter

    def _shard_memory(self, arenas: Mapping[ArenaKey, Tensor], index: int) -> Tensor:
        spec, place = self._specs[index], self.layout.places[index]
        if place is None:
            return torch.empty(spec.padded_local_shape, dtype=spec.dtype, device=self.mesh.device)
        return arenas[place.key][place.start : place.start + place.numel].view(spec.padded_local_shape)

    # Gradients. -------------------------------------------------------------------------------------------------------

    def gradient(self, index: int) -> Gradient:
        """The gradient memory of a parameter, allocated when first asked for.

        Parameters that were trainable at compile time share flat arenas; one that was thawed later has memory of its
        own.
        """
        known = self._gradients[index]
        if known is not None:
            return known
        spec, place = self._specs[index], self.layout.places[index]
        if place is None:
            padded = torch.zeros(spec.padded_local_shape, dtype=spec.dtype, device=self.mesh.device)
        elif place.key.trainable:
            if place.key not in self._gradient_arenas:
                self._gradient_arenas |= allocate({place.key: self.layout.sizes[place.key]}, self.mesh.device)
            padded = self._shard_memory(self._gradient_arenas, index)
        else:
            memory = aligned_zeros(place.numel, spec.dtype, self.mesh.device)
            padded = memory.view(spec.padded_local_shape)
        view = detached_view(full_tensors.logical(spec, padded, self.mesh.rank))
        gradient = Gradient(padded, self.as_seen(spec, view))
        self._gradients[index] = gradient
        return gradient

    def grad_local(self, name: str) -> Tensor:
        """The padded shard of the gradient memory, whether or not ``.grad`` is set."""
        return self.gradient(self.index(name)).padded

    def gradient_arenas(self) -> dict[ArenaKey, Tensor]:
        """The flat gradient memory that exists so far, laid out as the parameters are."""
        return dict(self._gradient_arenas)

    def is_flat(self, index: int, grad: Tensor | None) -> bool:
        """Whether ``grad`` is the prepared gradient of a parameter and lies in a gradient arena."""
        known = self._gradients[index]
        place = self.layout.places[index]
        return known is not None and known.tensor is grad and place is not None and place.key.trainable

    def accumulate(self, name: str, shard: Tensor) -> None:
        """``accumulate_many`` of one."""
        self.accumulate_many([name], [shard])

    @torch.no_grad()
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
        fresh: tuple[list[Tensor], list[Tensor]] = ([], [])
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, shard in zip(names, shards, strict=True):
            index = self._index[name]
            parameter = self.parameters[index]
            gradient = self._gradients[index] or self.gradient(index)
            grad = parameter.grad
            if grad is None:
                if shard.data_ptr() != gradient.padded.data_ptr():
                    fresh[0].append(gradient.padded)
                    fresh[1].append(shard)
                parameter.grad = gradient.tensor
            elif grad is gradient.tensor:
                assert shard.numel() == 0 or shard.data_ptr() != gradient.padded.data_ptr(), "the sum was overwritten"
                added[0].append(gradient.padded)
                added[1].append(shard)
            else:
                added[0].append(local_of(self.checked_grad(index, grad)))
                added[1].append(full_tensors.logical(self._specs[index], shard, self.mesh.rank))
        if fresh[0]:
            compat.foreach_copy(*fresh)
        if added[0]:
            compat.foreach_add(*added)

    def checked_grad(self, index: int, grad: Tensor) -> Tensor:
        """``grad`` if it is placed as its parameter is.

        Raises:
            ShardingError: it is not; torch itself would accept it and step with the wrong rows.
        """
        problem = placement_problem(self.parameters[index], grad)
        if problem:
            raise ShardingError(f"parameter {self.names[index]!r} {problem}")
        return grad

    def holes(self, key: ArenaKey) -> list[Tensor]:
        """Views of what belongs to no gradient in a gradient arena: padding rows and gaps between shards."""
        known = self._holes.get(key)
        if known is not None:
            return known
        arena = self._gradient_arenas[key]
        holes = []
        for index, place in enumerate(self.layout.places):
            if place is None or place.key != key:
                continue
            spec = self._specs[index]
            if place.extent > place.numel:
                holes.append(arena[place.start + place.numel : place.start + place.extent])
            if spec.is_padded and spec.shard_dim is not None:
                num_rows = spec.local_shape(self.mesh.rank)[spec.shard_dim]
                padded = self._shard_memory(self._gradient_arenas, index)
                holes.append(padded.narrow(spec.shard_dim, num_rows, spec.chunk - num_rows))
        self._holes[key] = [hole for hole in holes if hole.numel()]
        return self._holes[key]


def placement(spec: ParamSpec) -> Placement:
    """The DTensor placement of a parameter on the axis."""
    return Replicate() if spec.shard_dim is None else Shard(spec.shard_dim)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placement_problem(parameter: Tensor, grad: Tensor) -> str | None:
    """Why ``grad`` cannot be the gradient of ``parameter``; None if it can."""
    if grad.layout is not torch.strided:
        return f"has a {grad.layout} gradient; dense gradients are supported (Embedding(sparse=False))"
    if not isinstance(parameter, DTensor):
        return None
    if not isinstance(grad, DTensor):
        return (
            f"is a DTensor and its .grad is a plain tensor of shape {list(grad.shape)}; "
            "assign a DTensor with the parameter's device_mesh and placements"
        )
    if grad.placements != parameter.placements or grad.device_mesh != parameter.device_mesh:
        return (
            f"is placed {parameter.placements} on {parameter.device_mesh} and its .grad {grad.placements} on "
            f"{grad.device_mesh}; redistribute the gradient to the parameter's placements"
        )
    return None


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _some(names: Sequence[str]) -> str:
    """Names for a message: the first few."""
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 5 else shown or "none"
