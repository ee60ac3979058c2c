"""Computes the loss of a linear layer piece by piece, so that its logits never exist."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.divisions import Division, piece_size, rows_of_pieces, whole_bytes
from zcompile.analysis.losses import Gradients, LinearLoss, linear_losses
from zcompile.analysis.rows import replay, replay_backward
from zcompile.analysis.tangents import Multiple, NoMultipleError, full, multiple_of_tangent
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Output, Tangent
from zcompile.ir.operators import is_random
from zcompile.pipeline import JointPass, Stats

_aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
#: what stats of losses that are left alone begin with
WHOLE = "losses computed whole"
#: what stats of losses begin with whose logits are computed again in backward
AGAIN = "logits computed again"
#: what such a stat says where ``drop`` could change it
LOGITS_RETURNED = "logits are returned as"


@dataclass(frozen=True)
class ChunkLoss(JointPass):
    """Compute the cross-entropy of a linear layer in pieces of its rows, and its gradients with it.

    Before and after, where nobody else reads ``%logits``, ``%x`` and what lies between::

        %logits: bf16[8192, 32000] = aten.mm(%h, %w_t)
        %x: f32[8192, 32000] = prims.convert_element_type(%logits, f32)
        ... log_softmax of %x ...
        %picked: f32[8192, 1] = aten.gather(%log_probs, 1, %labels)
        ... %of_logits: bf16[8192, 32000] ...
        %of_h: bf16[8192, 4096] = aten.mm(%of_logits, %w)
        %of_w: bf16[32000, 4096] = aten.mm(%of_logits_t, %h)

        %losses: f32[8192], %h_grad: bf16[8192, 4096], %w_grad: bf16[32000, 4096] =
            zc.linear_cross_entropy_with_grads(%h, %w, None, %labels, %row_weights,
                                               dtype=f32, rows=4096, total=f32, wanted=[True, True, False])
        ...
        %of_h = ... %h_grad * %tangent ...
        %of_w: bf16[32000, 4096] = aten.mul.Tensor(%w_grad, %tangent)

    Which rows count and how they are weighed and added up stays in the graph as it is, in a number a row. That is linear and
    homogeneous in the tangent of the one scalar that the losses become: ``%row_weights`` are the same operators, on 1 instead of the
    tangent. As many products as without pieces; the gradients are alive from forward on instead of the logits.

    Where that does not hold (a tangent for each row; weights that depend on the losses), or the gradients are float16, in which
    those of a loss that is not scaled yet would underflow, backward computes the logits again, in pieces of columns. That costs a
    fourth product::

        %losses: f32[8192], %lse: f32[8192] = zc.linear_cross_entropy(%h, %w, None, %labels, dtype=f32, rows=4096)
        ...
        %of_h: bf16[8192, 4096], %of_w: bf16[32000, 4096] =
            zc.linear_cross_entropy_backward(%h, %w, None, %labels, %lse, %grad, columns=16000, wanted=[True, True, False])

    Exact but for rounding: sums over pieces are taken in float32 at least, but for three pieces at most where that saves more than a
    piece; probabilities are not rounded to a low precision where the model computed its softmax in one. Equal inputs give equal
    bits.

    Attributes:
        mib: the most that a piece of logits may take, in MiB. Logits that are one piece are left alone.
        columns: linear layers with fewer columns are left alone.
        drop: leave out logits that the model returns beside the loss, where there is a backward; else nothing is done then.
        always: whatever it costs: also with a fourth product, and where less than a piece is saved. Else such losses are left alone,
            and pieces may be larger where that saves memory.
        device: only losses on devices of this type, such as ``cuda``; empty: on any.
        alike: make gradients in forward wherever that can be done, however few rows there are: backward does not read the weight
            then, so that ranks with fewer rows gather what those with more do.
    """

    name: ClassVar[str] = "chunk-loss"
    mib: float = 256
    columns: int = 32000
    drop: bool = False
    always: bool = False
    device: str = ""
    alike: bool = False

    @property
    def exact(self) -> bool:
        return False

    @property
    def drops_outputs(self) -> bool:
        return self.drop

    def run(self, target: Graph, stats: Stats) -> None:
        if self.mib <= 0 or self.columns < 0:
            raise PassError(
                f"mib is {self.mib} and columns is {self.columns}; mib must be positive, columns not negative"
            )
        for loss in linear_losses(target):
            if not self._is_here(loss):
                continue
            multiple = _in_forward(loss)
            why = self._why_whole(loss, multiple, target)
            if why:
                stats[f"{WHOLE}: {why}"] += 1
            else:
                self._rewrite(loss, multiple, target, stats)

    def in_forward(self, target: Graph) -> tuple[bool, bool]:
        """Whether gradients of a loss are made in forward, and whether some would be with other rows, which other ranks may have."""
        losses = [(loss, _in_forward(loss)) for loss in linear_losses(target) if self._is_here(loss)]
        losses = [(loss, multiple) for loss, multiple in losses if isinstance(multiple, Multiple)]
        anywhere = replace(self, alike=True)
        return (
            any(not self._why_whole(*loss, target) for loss in losses),
            any(not anywhere._why_whole(*loss, target) for loss in losses),
        )

    def _is_here(self, loss: LinearLoss) -> bool:
        return self.device in ("", meta.tensor(loss.logits).device.type)

    def _why_whole(self, loss: LinearLoss, multiple: Multiple | str, graph: Graph) -> str:
        """Why a loss is left alone; empty if it is not."""
        if meta.tensor(loss.logits).shape[1] < self.columns:
            return f"fewer than {self.columns} columns"
        is_alike = self.alike and isinstance(multiple, Multiple)
        if loss.num_bytes <= self.mib * MIB and not is_alike:
            return f"logits take no more than {self.mib:g} MiB"
        return self._obstacle(loss, graph) or ("" if is_alike else self._waste(loss, multiple))

    @property
    def _most_bytes(self) -> int:
        return int(self.mib * MIB)

    def _obstacle(self, loss: LinearLoss, graph: Graph) -> str:
        """Why a loss cannot be computed in pieces, of whatever size; empty if it can."""
        if loss.obstacle or not loss.returned:
            return loss.obstacle
        names = ", ".join(f"output {index}" for index in loss.returned)
        if not self.drop:
            return f"{LOGITS_RETURNED} {names}"
        if loss.gradients is None:
            return f"{LOGITS_RETURNED} {names}, and there is no backward"
        if any(graph.find(Tangent(index)) for index in loss.returned):
            return f"{LOGITS_RETURNED} {names}, which may get a gradient"
        return ""

    def _waste(self, loss: LinearLoss, multiple: Multiple | str) -> str:
        """Why pieces of a loss are not worth what they cost; empty if they are."""
        if self.always or loss.gradients is None:
            return ""
        if isinstance(multiple, str):
            return f"{multiple}, so that logits would be computed again"
        saved = whole_bytes(loss) - self._division(loss).num_bytes
        return f"pieces save no more than {self.mib:g} MiB" if saved <= self.mib * MIB else ""

    def _division(self, loss: LinearLoss) -> Division:
        return Division.best(loss, self._most_bytes, may_grow=not self.always)

    def _rewrite(self, loss: LinearLoss, multiple: Multiple | str, graph: Graph, stats: Stats) -> None:
        num_rows, num_columns = meta.tensor(loss.logits).shape
        size = meta.tensor(loss.logits).element_size()
        rows = rows_of_pieces(loss, self._most_bytes)
        piece = rows * num_columns
        dead = {node for node in graph.body if not node.users}
        dropped = {Output(index) for index in loss.returned}
        graph.set_outputs([(node, role) for node, role in graph.outputs if role not in dropped])
        if isinstance(multiple, Multiple):
            division = self._division(loss)
            rows, piece = division.rows, division.rows * num_columns
            _write_with_grads(loss, graph.fx, multiple, division)
            stats["gradients made in forward"] += 1
        elif loss.gradients is not None:
            columns = piece_size(num_columns, self._most_bytes // (num_rows * size))
            piece = max(piece, columns * num_rows)
            _write_backward(loss, loss.gradients, graph.fx, _write_forward(loss, graph.fx, rows), columns)
            stats[f"{AGAIN}: {multiple}"] += 1
            stats["pieces of columns"] += math.ceil(num_columns / columns)
        else:
            _write_forward(loss, graph.fx, rows)
        edit.erase_dead(graph.fx, keep=lambda node: node in dead or is_random(node))
        stats["losses in pieces"] += 1
        stats["pieces of rows"] += math.ceil(num_rows / rows)
        stats["bytes of logits"] += loss.num_bytes
        stats["bytes of a piece"] += piece * size
        stats["outputs dropped"] += len(dropped)


def _in_forward(loss: LinearLoss) -> Multiple | str:
    """The gradient of the losses, where forward can make all gradients but its tangent; else why not."""
    if loss.gradients is None or loss.obstacle:
        return "there is no backward"
    if meta.tensor(loss.logits).dtype is torch.float16:
        return "gradients in f16 may underflow before the loss is scaled"
    try:
        return multiple_of_tangent(loss.gradients.grad, without=loss.picked)
    except NoMultipleError as reason:
        return str(reason)


def _inputs(loss: LinearLoss, graph: fx.Graph) -> tuple[Any, ...]:
    """Hidden states, weight, bias and labels, as the operators take them, written in front of the gather."""
    picked = loss.picked
    call = _caller(graph, picked)
    weight, is_rows = loss.weight
    if not is_rows:
        weight = call(_aten.permute.default, weight, [1, 0])
    labels: Any = picked.args[2]
    if loss.is_sliced:
        labels = replay_backward(loss.path, labels, call)  # label 0 where nobody reads the loss
    labels = call(_aten.view.default, labels, [meta.tensor(loss.logits).shape[0]], name="labels")
    return loss.hidden, weight, loss.bias, labels


def _caller(graph: fx.Graph, like: fx.Node, made: list[fx.Node] | None = None) -> Any:
    """Calls operators at the insertion point; the nodes are added to ``made``."""

    def call(op: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        node = edit.call(graph, op, args, kwargs, name=name, like=like)
        if made is not None:
            made.append(node)
        return node

    return call


def _replace_picked(loss: LinearLoss, losses: fx.Node, call: Any) -> None:
    """Let the readers of the gather read the losses."""
    picked, num_rows = loss.picked, meta.tensor(loss.logits).shape[0]
    result = call(_aten.neg.default, losses)
    if loss.is_sliced:
        result = replay(loss.path, call(_aten.view.default, result, [num_rows, 1]), call)
    else:
        result = call(_aten.view.default, result, list(meta.tensor(picked).shape))
    if meta.tensor(result).dtype != meta.tensor(picked).dtype:
        result = call(_CAST, result, meta.tensor(picked).dtype)
    picked.replace_all_uses_with(result)


def _of_losses(loss: LinearLoss, gradients: Gradients, grad: fx.Node, graph: fx.Graph, call: Any, name: str) -> fx.Node:
    """The gradient of what was picked as that of the losses, [rows], in the dtype that these are computed in."""
    wide = loss.softmax_input.dtype
    grad = _contiguous(grad, call)
    if meta.tensor(grad).dtype != wide:
        grad = call(_CAST, grad, wide)
    if not gradients.negated:
        grad = call(_aten.neg.default, grad)
    if loss.is_sliced:
        grad = replay(gradients.path, grad, call)
    return call(_aten.view.default, grad, [meta.tensor(loss.logits).shape[0]], name=name)


def _write_forward(loss: LinearLoss, graph: fx.Graph, rows: int) -> tuple[Any, ...]:
    """The forward instead of the gather; returns what backward takes of it: hidden, weight, bias, labels, lse."""
    with graph.inserting_before(loss.picked):
        inputs = _inputs(loss, graph)
        options = {"dtype": loss.softmax_input.dtype, "rows": rows}
        both = edit.call(graph, ops.linear_cross_entropy, inputs, options, name="loss", like=loss.picked)
        losses, lse = edit.unpack(graph, both, ("losses", "lse"))
        _replace_picked(loss, losses, _caller(graph, loss.picked))
    return (*inputs, lse)


def _contiguous(value: Any, call: Any) -> fx.Node:
    """The value for views of it, in a number a row."""
    if meta.tensor(value).is_contiguous():
        return value
    return call(_aten.clone.default, value, memory_format=torch.contiguous_format)


def _write_backward(
    loss: LinearLoss, gradients: Gradients, graph: fx.Graph, inputs: tuple[Any, ...], columns: int
) -> None:
    """The backward instead of the products that read the gradient of the logits."""
    end = gradients.path[-1]
    made: list[fx.Node] = []
    found = gradients.products
    with graph.inserting_before(end.next):
        call = _caller(graph, end, made)
        grad = _of_losses(loss, gradients, gradients.grad, graph, call, "losses_grad")
        options = {"columns": columns, "wanted": gradients.wanted}
        several = edit.call(
            graph, ops.linear_cross_entropy_backward, (*inputs, grad), options, name="loss_grads", like=end
        )
        results = edit.unpack(graph, several, [f"{name}_grad" for name in found])
        made += [several, *results]
        _replace_products(gradients, results, call)
    for node in made:
        meta.set_backward(node)


def _replace_products(gradients: Gradients, results: list[fx.Node], call: Any) -> None:
    """Let the readers of the products read the gradients that there are instead."""
    for (name, product), result in zip(gradients.products.items(), results, strict=True):
        if name == "weight" and gradients.transposed:
            result = call(_aten.permute.default, result, [1, 0])
            result = call(_aten.clone.default, result, memory_format=torch.contiguous_format)
        elif name == "bias":
            result = call(_aten.view.default, result, [1, -1])
        product.replace_all_uses_with(result)


def _write_with_grads(loss: LinearLoss, graph: fx.Graph, multiple: Multiple, division: Division) -> None:
    """Losses and gradients instead of the gather; in backward these times the tangent, instead of the products."""
    gradients, picked = loss.gradients, loss.picked
    assert gradients is not None
    found = gradients.products
    with graph.inserting_before(picked):
        call = _caller(graph, picked)
        inputs = _inputs(loss, graph)
        factor = multiple.write_factor(graph, picked, call)
        weights = _of_losses(loss, gradients, factor, graph, call, "row_weights")
        options = {
            "dtype": loss.softmax_input.dtype,
            "rows": division.rows,
            "total": division.total,
            "wanted": gradients.wanted,
        }
        several = edit.call(
            graph, ops.linear_cross_entropy_with_grads, (*inputs, weights), options, name="loss", like=picked
        )
        names = ("losses", *(f"{name}_grad" for name in found))
        losses, *of_unit = edit.unpack(graph, several, names)
        _replace_picked(loss, losses, call)
    end = gradients.path[-1]
    made: list[fx.Node] = []
    with graph.inserting_before(end.next):
        call = _caller(graph, end, made)
        scales = _scales(graph, multiple.tangent, weights, call, made)
        results = [_scaled(node, *scales, name, call) for name, node in zip(found, of_unit, strict=True)]
        _replace_products(gradients, results, call)
    for node in made:
        meta.set_backward(node)


def _scales(
    graph: fx.Graph, tangent: fx.Node, weights: fx.Node, call: Any, made: list[fx.Node]
) -> tuple[fx.Node, fx.Node]:
    """By what gradients of rows, and sums over rows, are multiplied: [rows, 1] and [].

    The tangent; 0 for rows without weight. A loss that is divided by the number of rows that count has an infinite tangent
    where none does, and gradients of 0 all the same.
    """
    tangent = call(_aten.view.default, tangent, []) if meta.tensor(tangent).dim() else tangent
    made.append(zero := full(graph, tangent, 0))
    counts = call(_aten.ne.Scalar, weights, 0)
    of_rows = call(_aten.where.self, call(_aten.unsqueeze.default, counts, 1), tangent, zero)
    return of_rows, call(_aten.where.self, call(_aten.any.default, counts), tangent, zero)


def _scaled(of_unit: fx.Node, of_rows: fx.Node, of_sums: fx.Node, name: str, call: Any) -> fx.Node:
    """A gradient for a tangent of 1 times the tangent."""
    result = call(_aten.mul.Tensor, of_unit, of_rows if name == "hidden" else of_sums)
    dtype = meta.tensor(of_unit).dtype
    return result if meta.tensor(result).dtype == dtype else call(_CAST, result, dtype)
