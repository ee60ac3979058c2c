"""Local tensors as users see them: placed on the mesh as their parameter is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zcompile import compat
from zcompile.errors import ShardingError
from zcompile.placement import ParamSpec
from zcompile.runtime.communication.mesh import Mesh


def placement(spec: ParamSpec) -> Placement:
    """The DTensor placement of a parameter on the axis."""
    return Replicate() if spec.shard_dim is None else Shard(spec.shard_dim)


def as_seen(mesh: Mesh, spec: ParamSpec, local: Tensor) -> Tensor:
    """A logical local tensor as users see it: a DTensor over the same memory where there is a process group."""
    if mesh.device_mesh is None:
        return local
    if local.device.type != mesh.device.type:  # from_local would move it
        return compat.dtensor_of(
            local, mesh.device_mesh, (placement(spec),), torch.Size(spec.shape), contiguous_stride(spec.shape)
        )
    return DTensor.from_local(
        local,
        mesh.device_mesh,
        [placement(spec)],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=contiguous_stride(spec.shape),
    )


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


#: the meshes of compiled models
_meshes: list[weakref.ref[DeviceMesh]] = []


def refuse_numbers_of_parts(mesh: Mesh) -> None:
    """From now on ``item()``, ``float()`` and ``bool()`` of a sum over this mesh's shards raise, until it was added up.

    torch would take this rank's part of the sum without a word. It offers a place to look for the whole process; DTensors
    on other meshes are left alone.
    """
    if mesh.device_mesh is not None and mesh.size > 1:
        _meshes[:] = [*(ref for ref in _meshes if ref() is not None), weakref.ref(mesh.device_mesh)]
        compat.before_item(_refuse_part)


def _refuse_part(tensor: DTensor) -> None:
    if any(p.is_partial() for p in tensor.placements) and any(tensor.device_mesh == ref() for ref in _meshes):
        raise ShardingError(
            f"a number is taken from a DTensor placed {tensor.placements}, which holds this rank's part of it only; "
            "call .full_tensor() on every rank first, and .item() on that"
        )


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


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
