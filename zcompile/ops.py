"""The ``zc`` operators: the one vocabulary that the compiler and the runtime share.

Each operator has a schema and a fake kernel here; its real work is done by the runtime's executor, or by the lockstep interpreter in tests.
Operators take lists of tensors (one bucket), an axis name and the axis size; never a rank, pointer or process-group handle.

==================  ==========================================================================================================
``zc.unshard``      the full parameter of one shard, not yet scheduled: written by ``shard``, turned into gathers by ``unshard``
``zc.cast``         shards in the dtype that they are gathered in, as fresh memory; one call for a unit
``zc.all_gather``   start: shards ``[s0, ...]`` -> pending ``[size * s0, ...]`` (concatenated along dim 0, one coalesced call)
``zc.reduce_scatter`` start: ``[size * s0, ...]`` -> pending ``[s0, ...]``, averaged over the axis in ``dtype``
``zc.all_reduce``   start: full tensors -> pending tensors of the same shape, averaged over the axis in ``dtype``
``zc.offload``      start: device values -> pending copies in the host's memory; at its wait their device memory is given up
``zc.reload``       start: values on the host -> pending copies on the device
``zc.wait``         the values of a pending bucket
``zc.release``      give gathered buffers back; their values are undefined afterwards
==================  ==========================================================================================================

A value on the host has the type that it had on the device; only ``zc.reload`` reads it, or the step returns it as ``offloaded``.
Three operators are computation, and run inside regions. They take one device's whole tensors:

``zc.linear_cross_entropy``           the losses and log-sum-exps [T] of ``softmax(hidden @ weight.T + bias)`` at ``labels``, from hidden
                                      [T, H], weight [V, H], bias [V] or none, labels [T] in range: in ``dtype``, ``rows`` of them at a time
``zc.linear_cross_entropy_backward``  from the gradients [T] of the losses, those of hidden, weight and bias which are ``wanted``, in
                                      their dtypes: logits are computed again, ``columns`` of them at a time
``zc.linear_cross_entropy_with_grads`` the losses [T] as above, then of ``sum(row_weights * losses)`` the gradients of hidden, weight and
                                      bias which are ``wanted``, in their dtypes, that of weight added up over pieces in ``total``;
                                      row_weights [T] in ``dtype``. It runs once, in forward: the split saves its results

A reduction's ``dtype`` is at least as wide as what it reads, which is widened before it is summed; None: the tensors' own.

``region_call`` is not a torch operator: it calls one of the graph's regions by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zcompile import cross_entropy

_LIB = torch.library.Library("zc", "DEF")

_LIB.define("unshard(Tensor shard, str axis, int size, int dim, int[] shape, ScalarType? dtype=None) -> Tensor")
_LIB.define("cast(Tensor[] shards, ScalarType dtype) -> Tensor[]")
_LIB.define("all_gather(Tensor[] shards, str axis, int size) -> Tensor[]")
_LIB.define("reduce_scatter(Tensor[] tensors, str axis, int size, ScalarType? dtype=None) -> Tensor[]")
_LIB.define("all_reduce(Tensor[] tensors, str axis, int size, ScalarType? dtype=None) -> Tensor[]")
_LIB.define("offload(Tensor[] tensors) -> Tensor[]")
_LIB.define("reload(Tensor[] tensors) -> Tensor[]")
_LIB.define("wait(Tensor[] pending) -> Tensor[]")
_LIB.define("release(Tensor[] tensors) -> ()")
_LIB.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, *, ScalarType dtype, int rows) -> (Tensor, Tensor)"
)
_LIB.define(
    "linear_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor lse, Tensor grad, *, "
    "int columns, bool[3] wanted) -> Tensor[]"
)
_LIB.define(
    "linear_cross_entropy_with_grads(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor row_weights, *, "
    "ScalarType dtype, int rows, ScalarType total, bool[3] wanted) -> Tensor[]"
)
_LIB.impl("linear_cross_entropy", cross_entropy.forward, "CompositeExplicitAutograd")
_LIB.impl("linear_cross_entropy_backward", cross_entropy.backward, "CompositeExplicitAutograd")
_LIB.impl("linear_cross_entropy_with_grads", cross_entropy.forward_with_grads, "CompositeExplicitAutograd")


def _unshard_fake(
    shard: Tensor, axis: str, size: int, dim: int, shape: list[int], dtype: torch.dtype | None = None
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype or shard.dtype)


def _cast_fake(shards: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [s.new_empty(s.shape, dtype=dtype) for s in shards]


def _all_gather_fake(shards: list[Tensor], axis: str, size: int) -> list[Tensor]:
    return [s.new_empty((size * s.shape[0], *s.shape[1:])) for s in shards]


def _reduce_scatter_fake(tensors: list[Tensor], axis: str, size: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.new_empty((t.shape[0] // size, *t.shape[1:]), dtype=dtype or t.dtype) for t in tensors]


def _all_reduce_fake(tensors: list[Tensor], axis: str, size: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.new_empty(t.shape, dtype=dtype or t.dtype) for t in tensors]


def _copy_fake(tensors: list[Tensor]) -> list[Tensor]:
    return [t.new_empty_strided(t.shape, t.stride()) for t in tensors]


def _wait_fake(pending: list[Tensor]) -> list[Tensor]:
    return [p.new_empty_strided(p.shape, p.stride()) for p in pending]


def _release_fake(tensors: list[Tensor]) -> None:
    return None


def _linear_cross_entropy_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, dtype: torch.dtype, rows: int
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape[0], dtype=dtype), hidden.new_empty(hidden.shape[0], dtype=dtype)


def _linear_cross_entropy_backward_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    grad: Tensor,
    *,
    columns: int,
    wanted: list[bool],
) -> list[Tensor]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return [hidden.new_empty(shape) for shape, is_wanted in zip(shapes, wanted, strict=True) if is_wanted]


def _linear_cross_entropy_with_grads_fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_weights: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    total: torch.dtype,
    wanted: list[bool],
) -> list[Tensor]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    grads = [hidden.new_empty(shape) for shape, is_wanted in zip(shapes, wanted, strict=True) if is_wanted]
    return [hidden.new_empty(hidden.shape[0], dtype=dtype), *grads]


for _name, _fake in {
    "unshard": _unshard_fake,
    "cast": _cast_fake,
    "all_gather": _all_gather_fake,
    "reduce_scatter": _reduce_scatter_fake,
    "all_reduce": _all_reduce_fake,
    "offload": _copy_fake,
    "reload": _copy_fake,
    "wait": _wait_fake,
    "release": _release_fake,
    "linear_cross_entropy": _linear_cross_entropy_fake,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward_fake,
    "linear_cross_entropy_with_grads": _linear_cross_entropy_with_grads_fake,
}.items():
    torch.library.register_fake(f"zc::{_name}", _fake, lib=_LIB)


unshard: Any = torch.ops.zc.unshard.default
cast: Any = torch.ops.zc.cast.default
all_gather: Any = torch.ops.zc.all_gather.default
reduce_scatter: Any = torch.ops.zc.reduce_scatter.default
all_reduce: Any = torch.ops.zc.all_reduce.default
offload: Any = torch.ops.zc.offload.default
reload: Any = torch.ops.zc.reload.default
wait: Any = torch.ops.zc.wait.default
release: Any = torch.ops.zc.release.default
linear_cross_entropy: Any = torch.ops.zc.linear_cross_entropy.default
linear_cross_entropy_backward: Any = torch.ops.zc.linear_cross_entropy_backward.default
linear_cross_entropy_with_grads: Any = torch.ops.zc.linear_cross_entropy_with_grads.default

#: The operators that start a collective; each result must be waited for exactly once.
COLLECTIVES: frozenset[Any] = frozenset({all_gather, reduce_scatter, all_reduce})
#: The operators that start a copy between the device and the host; each result must be waited for exactly once.
TRANSFERS: frozenset[Any] = frozenset({offload, reload})
#: The operators that make gradients in forward: what backward takes of them is saved, and never computed again.
RUN_ONCE: frozenset[Any] = frozenset({linear_cross_entropy_with_grads})
#: Every operator that the runtime gives its meaning; the others are computation.
ALL: frozenset[Any] = COLLECTIVES | TRANSFERS | {unshard, cast, wait, release}


def region_call(name: str, args: list[Any]) -> Any:
    """Marks a call of region ``name`` in a graph; only executors and interpreters give it meaning."""
    raise RuntimeError(f"region '{name}' was called outside an executor")


def is_collective(target: Callable[..., Any] | str) -> bool:
    """Whether ``target`` starts a collective."""
    return target in COLLECTIVES


def is_transfer(target: Callable[..., Any] | str) -> bool:
    """Whether ``target`` starts a copy between the device and the host."""
    return target in TRANSFERS


def is_start(target: Callable[..., Any] | str) -> bool:
    """Whether what ``target`` gives is pending until it is waited for."""
    return target in COLLECTIVES or target in TRANSFERS


def is_zc(target: Callable[..., Any] | str) -> bool:
    """Whether ``target`` is one of the ``zc`` operators that the runtime gives their meaning."""
    return target in ALL
