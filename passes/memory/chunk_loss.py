"""Computes the loss of a linear layer piece by piece, so that its logits never exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zcompile import ops
from zcompile.analysis.losses import LinearLoss, linear_losses, replay, replay_backward
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph, Output, Tangent
from zcompile.ir.operators import is_random
from zcompile.pipeline import JointPass, Stats

_aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
#: rows and columns of pieces are multiples of this, where they are so many
_ALIGNMENT = 64
#: what stats of losses that are left alone begin with
WHOLE = "losses computed whole"
#: what such a stat says where ``drop`` could change it
LOGITS_RETURNED = "logits are returned as"


@dataclass(frozen=True)
class ChunkLoss(JointPass):
    """Compute the cross-entropy of a linear layer in pieces of its rows, and its gradients in pieces of its columns.

    Before and after, where nobody else reads ``%logits``, ``%x`` and what lies between::

        %logits: bf16[8192, 32000] = aten.mm(%h, %w_t)
        %x: f32[8192, 32000] = prims.convert_element_type(%logits, f32)
        ... log_softmax of %x ...
        %picked: f32[8192, 1] = aten.gather(%log_probs, 1, %labels)
        ... %of_logits: bf16[8192, 32000] ...
        %of_h: bf16[8192, 4096] = aten.mm(%of_logits, %w)
        %of_w: bf16[32000, 4096] = aten.mm(%of_logits_t, %h)

        %losses: f32[8192], %lse: f32[8192] = zc.linear_cross_entropy(%h, %w, None, %labels, dtype=f32, rows=4096)
        ...
        %of_h: bf16[8192, 4096], %of_w: bf16[32000, 4096] =
            zc.linear_cross_entropy_backward(%h, %w, None, %labels, %lse, %grad, columns=16000, wanted=[True, True, False])

    Which rows count and how they are weighed and added up stays in the graph as it is, in a number a row.

    Exact but for rounding: the gradient of ``%h`` is added up over pieces, in float32 at least, and probabilities are not rounded to
    a low precision where the model computed its softmax in one. Equal inputs give equal bits. Costs the matmul of logits once more
    in backward; saves the logits and their gradients but for one piece.

    Attributes:
        mib: the most that a piece of logits may take, in MiB. Logits that are one piece are left alone.
        columns: linear layers with fewer columns are left alone.
        drop: leave out logits that the model returns beside the loss, where there is a backward; else nothing is done then.
    """

    name: ClassVar[str] = "chunk-loss"
    mib: float = 256
    columns: int = 32000
    drop: bool = False

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
            why = self._obstacle(loss, target)
            if why:
                stats[f"{WHOLE}: {why}"] += 1
            else:
                self._rewrite(loss, target, stats)

    def _obstacle(self, loss: LinearLoss, graph: Graph) -> str:
        """Why a loss is left alone; empty if it is not."""
        if meta.tensor(loss.logits).shape[1] < self.columns:
            return f"fewer than {self.columns} columns"
        if loss.num_bytes <= self.mib * MIB:
            return f"logits take no more than {self.mib:g} MiB"
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

    def _rewrite(self, loss: LinearLoss, graph: Graph, stats: Stats) -> None:
        num_rows, num_columns = meta.tensor(loss.logits).shape
        size = meta.tensor(loss.logits).element_size()
        rows = _piece(num_rows, int(self.mib * MIB) // (num_columns * size))
        columns = _piece(num_columns, int(self.mib * MIB) // (num_rows * size))
        dead = {node for node in graph.body if not node.users}
        dropped = {Output(index) for index in loss.returned}
        graph.set_outputs([(node, role) for node, role in graph.outputs if role not in dropped])
        inputs = _write_forward(loss, graph.fx, rows)
        if loss.gradients is not None:
            _write_backward(loss, graph.fx, inputs, columns)
        edit.erase_dead(graph.fx, keep=lambda node: node in dead or is_random(node))
        stats["losses in pieces"] += 1
        stats["pieces of rows"] += math.ceil(num_rows / rows)
        stats["pieces of columns"] += math.ceil(num_columns / columns)
        stats["bytes of logits"] += loss.num_bytes
        stats["bytes of a piece"] += max(rows * num_columns, columns * num_rows) * size
        stats["outputs dropped"] += len(dropped)


def _piece(total: int, most: int) -> int:
    """The size of equal pieces of ``total``, the last one perhaps smaller, none larger than ``most``, if that is at least 1."""
    most = max(most, 1)
    size = math.ceil(total / math.ceil(total / most))
    aligned = math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    return aligned if aligned <= most else most - most % _ALIGNMENT or size


def _write_forward(loss: LinearLoss, graph: fx.Graph, rows: int) -> tuple[fx.Node | None, ...]:
    """The forward instead of the gather; returns what backward takes of it: hidden, weight, bias, labels, lse."""
    picked, softmax_input = loss.picked, loss.softmax_input
    num_rows = meta.tensor(loss.logits).shape[0]

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return edit.call(graph, op, args, kwargs, like=picked)

    with graph.inserting_before(picked):
        weight, is_rows = loss.weight
        if not is_rows:
            weight = call(_aten.permute.default, weight, [1, 0])
        labels: Any = loss.picked.args[2]
        labels = (
            replay_backward(loss.path, labels, call) if loss.is_sliced else labels
        )  # label 0 where nobody reads the loss
        labels = edit.call(graph, _aten.view.default, (labels, [num_rows]), name="labels", like=picked)
        inputs = (loss.hidden, weight, loss.bias, labels)
        both = edit.call(
            graph,
            ops.linear_cross_entropy,
            inputs,
            {"dtype": softmax_input.dtype, "rows": rows},
            name="loss",
            like=picked,
        )
        losses, lse = edit.unpack(graph, both, ("losses", "lse"))
        result = call(_aten.neg.default, losses)
        if loss.is_sliced:
            result = replay(loss.path, call(_aten.view.default, result, [num_rows, 1]), call)
        else:
            result = call(_aten.view.default, result, list(meta.tensor(picked).shape))
        if meta.tensor(result).dtype != meta.tensor(picked).dtype:
            result = call(_CAST, result, meta.tensor(picked).dtype)
    picked.replace_all_uses_with(result)
    return (*inputs, lse)


def _contiguous(value: Any, call: Any) -> fx.Node:
    """The value for views of it, in a number a row."""
    if meta.tensor(value).is_contiguous():
        return value
    return call(_aten.clone.default, value, memory_format=torch.contiguous_format)


def _write_backward(loss: LinearLoss, graph: fx.Graph, inputs: tuple[fx.Node | None, ...], columns: int) -> None:
    """The backward instead of the products that read the gradient of the logits."""
    gradients = loss.gradients
    assert gradients is not None
    end = gradients.path[-1]
    made: list[fx.Node] = []

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made.append(edit.call(graph, op, args, kwargs, like=end))
        return made[-1]

    wide = loss.softmax_input.dtype
    products = {"hidden": gradients.hidden, "weight": gradients.weight, "bias": gradients.bias}
    found = {name: node for name, node in products.items() if node is not None}
    with graph.inserting_before(end.next):
        grad = _contiguous(gradients.grad, call)
        if meta.tensor(grad).dtype != wide:
            grad = call(_CAST, grad, wide)
        if not gradients.negated:
            grad = call(_aten.neg.default, grad)
        grad = replay(gradients.path, grad, call) if loss.is_sliced else grad
        num_rows = meta.tensor(end).shape[0]
        grad = edit.call(graph, _aten.view.default, (grad, [num_rows]), name="losses_grad", like=end)
        options = {"columns": columns, "wanted": [node is not None for node in products.values()]}
        several = edit.call(
            graph, ops.linear_cross_entropy_backward, (*inputs, grad), options, name="loss_grads", like=end
        )
        results = edit.unpack(graph, several, [f"{name}_grad" for name in found])
        made += [grad, several, *results]
        for (name, product), result in zip(found.items(), results, strict=True):
            if name == "weight" and gradients.transposed:
                result = call(_aten.permute.default, result, [1, 0])
                result = call(_aten.clone.default, result, memory_format=torch.contiguous_format)
            elif name == "bias":
                result = call(_aten.view.default, result, [1, -1])
            product.replace_all_uses_with(result)
    for node in made:
        node.meta["partitioner_tag"] = "is_backward"
