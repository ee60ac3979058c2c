"""Local tensors as users see them: placed on the mesh as their parameter is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from zcompile.placement import ParamSpec
from zcompile.runtime.mesh import Mesh


def placement(spec: ParamSpec) -> Placement:
    """The DTensor placement of a parameter on the axis."""
    return Replicate() if spec.shard_dim is None else Shard(spec.shard_dim)


def as_seen(mesh: Mesh, spec: ParamSpec, local: Tensor) -> Tensor:
    """A logical local tensor as users see it: a DTensor over the same memory where there is a process group."""
    if mesh.device_mesh is None:
        return local
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
