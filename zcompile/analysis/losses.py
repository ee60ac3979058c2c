"""Finds softmax losses on the result of a linear layer in a joint graph, with the gradients that autograd made of them.

What is looked for, forward and backward, where ``[...]`` may be left out::

    logits = mm(hidden, weight.T)                                         or addmm(bias, ...)
    x = [casts, views and slices of rows](logits)
    log_probs = log_softmax(x)                                            as its decomposition
    picked = gather(log_probs, -1, labels)
    of_log_probs = where(labels == columns, grad, 0)                      or scatter_add of grad into zeros
    of_x = of_log_probs - exp(log_probs) * sum(of_log_probs)
    of_logits = [the transposes of the casts, views and slices](of_x)
    of_hidden, of_weight, of_bias = mm(of_logits, weight), mm(of_logits.T, hidden), sum(of_logits)

Everything between ``logits`` and the gradients is as large as the logits. A match says that nobody else reads any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from zcompile.analysis.matching import (
    arguments,
    calls,
    first_argument,
    is_full_of_zeros,
    is_matrix,
    is_over_last,
    is_zero,
    matrix,
    same_labels,
    same_value,
)
from zcompile.analysis.rows import CLONE, SLICE, SLICE_SCATTER, VIEWS, is_of_rows, replay
from zcompile.ir import meta
from zcompile.ir.graph import Graph, Output, output_node
from zcompile.ir.operators import operator_name

_aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
_IOTA: Any = torch.ops.prims.iota.default
_MM, _ADDMM = _aten.mm.default, _aten.addmm.default
_PERMUTE, _SUM = _aten.permute.default, _aten.sum.dim_IntList


@dataclass
class Gradients:
    """What autograd made of one loss.

    Attributes:
        grad: the gradient of what was picked, [..., 1], or of its negative.
        negated: whether it is that of its negative.
        path: from the gradient of what the softmax reads to that of the logits; the last node is the gradient of the logits, [rows,
            columns].
        hidden: the product that is the gradient of the hidden states; None without one.
        weight: likewise, of the weight.
        bias: the sum that is the gradient of the bias, [1, columns]; None without one.
        transposed: whether the gradient of the weight is [hidden, columns].
    """

    grad: fx.Node
    negated: bool
    path: tuple[fx.Node, ...] = ()
    hidden: fx.Node | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None
    transposed: bool = False

    @property
    def products(self) -> dict[str, fx.Node]:
        """Those that there are, by name, in this order: hidden, weight, bias."""
        several = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        return {name: node for name, node in several.items() if node is not None}

    @property
    def wanted(self) -> list[bool]:
        """Which of the three there are."""
        return [name in self.products for name in ("hidden", "weight", "bias")]


@dataclass
class LinearLoss:
    """One softmax of a linear layer of which one column a row is read.

    Attributes:
        logits: the matmul, [rows, columns].
        path: from there to what the softmax reads, this included; empty when that is the matmul.
        picked: the gather, [..., 1].
        gradients: the backward, if there is one.
        inside: all nodes that are as large as the logits or go with them, when the loss is computed without them.
        returned: the outputs of the model that are the logits, or views of them, by index.
        obstacle: why the loss cannot be computed without the logits; empty if it can.
    """

    logits: fx.Node
    path: tuple[fx.Node, ...]
    picked: fx.Node
    inside: set[fx.Node]
    gradients: Gradients | None = None
    returned: list[int] = field(default_factory=list)
    obstacle: str = ""

    @property
    def softmax_input(self) -> torch.Tensor:
        """The type of what the softmax reads, in the dtype that it is computed in."""
        return meta.tensor((self.logits, *self.path)[-1])

    @property
    def hidden(self) -> Any:
        """[rows, hidden]."""
        return self.logits.args[-2]

    @property
    def weight(self) -> tuple[Any, bool]:
        """The weight, and whether it is [columns, hidden] and not [hidden, columns]."""
        return matrix(self.logits.args[-1])

    @property
    def bias(self) -> Any:
        """[columns], or None."""
        return first_argument(self.logits, _ADDMM)

    @property
    def is_sliced(self) -> bool:
        """Whether the softmax leaves rows of the logits out."""
        return any(node.target is SLICE for node in self.path)

    @property
    def num_bytes(self) -> int:
        """Bytes of the logits."""
        return meta.num_bytes(meta.value(self.logits))


class _Obstacle(Exception):
    """Why a loss is no match."""


def linear_losses(graph: Graph) -> list[LinearLoss]:
    """Every softmax of a linear layer of which columns are picked, in order; those that cannot go without logits say why."""
    found = []
    for node in graph.body:
        loss = _forward(node) if node.target is _aten.gather.default else None
        if loss is not None:
            try:
                _complete(loss, graph)
            except _Obstacle as obstacle:
                loss.obstacle = str(obstacle)
            found.append(loss)
    return found


# Forward. -------------------------------------------------------------------------------------------------------------


def _forward(picked: fx.Node) -> LinearLoss | None:
    """The loss that a gather belongs to; None when it picks from something else than a softmax of a linear layer."""
    log_probs: Any = picked.args[0]
    rounded: Any = log_probs.args[0] if calls(log_probs, _CAST) else log_probs
    shifted, log = arguments(rounded, _aten.sub.Tensor, 2)
    total = first_argument(log, _aten.log.default)
    exp, *how = arguments(total, _SUM, 3)
    x, largest = arguments(shifted, _aten.sub.Tensor, 2)
    maximised, *of = arguments(largest, _aten.amax.default, 3)
    if x is None or exp is None or first_argument(exp, _aten.exp.default) is not shifted or maximised is not x:
        return None
    over_columns = is_over_last(picked, picked.args[1]) and is_over_last(total, how[0]) and is_over_last(largest, of[0])
    if not over_columns or not (how[1] is of[1] is True):
        return None
    path: list[fx.Node] = []
    node = x
    while calls(node, *VIEWS, _CAST, CLONE, SLICE):
        path.insert(0, node)
        node = node.args[0]
    if not calls(node, _MM, _ADDMM) or node.kwargs:
        return None
    return LinearLoss(node, tuple(path), picked, {node, *path, largest, shifted, exp, total, log, rounded, log_probs})


def _complete(loss: LinearLoss, graph: Graph) -> None:
    """Check the path, find the backward and who else reads what is as large as the logits.

    Raises:
        _Obstacle: the loss cannot be computed without them.
    """
    num_rows, num_columns = meta.tensor(loss.logits).shape
    low, wide = meta.tensor(loss.logits).dtype, loss.softmax_input.dtype
    if loss.bias is not None and meta.tensor(loss.bias).shape != (num_columns,):
        raise _Obstacle("what is added to the logits is no bias")
    if not low == meta.tensor(loss.hidden).dtype == meta.tensor(loss.weight[0]).dtype:
        raise _Obstacle("hidden states and weight have different dtypes")
    if wide != torch.promote_types(low, torch.float32) or any(
        meta.tensor(n).dtype not in (low, wide) for n in loss.path
    ):
        raise _Obstacle(f"logits in {low} are cast to {wide} on their way")
    for node in loss.path:
        if meta.tensor(node).shape[-1] != num_columns or (node.target is SLICE and not is_of_rows(node)):
            raise _Obstacle("the softmax is of a part of the columns, or not of neighbouring rows")
    rows = replay(loss.path, torch.arange(num_rows).view(-1, 1), _run)
    if meta.tensor(loss.picked).shape != rows.shape:
        raise _Obstacle("several classes are read of a row")
    exps = _probabilities(loss)
    if len(exps) > 1:
        raise _Obstacle("probabilities are computed several times")
    if exps:
        loss.gradients = _backward(loss, exps[0])
        numbers = torch.arange(1, rows.numel() + 1)
        back = replay(loss.gradients.path, numbers.view(rows.shape), _run).flatten()
        if not torch.equal(back, torch.zeros(num_rows, dtype=torch.int64).index_copy(0, rows.flatten(), numbers)):
            raise _Obstacle("gradients of rows go to other rows")
    _check_readers(loss, graph)


def _probabilities(loss: LinearLoss) -> list[fx.Node]:
    """The nodes that make probabilities of the log-probabilities again, for backward."""
    log_probs: Any = loss.picked.args[0]
    waiting = [log_probs, log_probs.args[0]] if calls(log_probs, _CAST) else [log_probs]
    found = []
    while waiting:
        for user in waiting.pop().users:
            if calls(user, _aten.exp.default):
                found.append(user)
            elif calls(user, *VIEWS, _CAST) and user not in loss.inside:
                loss.inside.add(user)
                waiting.append(user)
    return found


def _check_readers(loss: LinearLoss, graph: Graph) -> None:
    """Refuse readers of what is inside, other than the gather, the gradients and what the model returns of the logits."""
    known = {loss.picked}
    if (g := loss.gradients) is not None:
        known |= {node for node in (g.hidden, g.weight, g.bias) if node is not None}
    output = output_node(graph.fx)
    logits = {loss.logits, *loss.path}
    waiting = list(loss.inside)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in loss.inside or user in known:
                continue
            if user is output:
                roles = [role for value, role in graph.outputs if value is node]
                if node not in logits or not all(isinstance(role, Output) for role in roles):
                    raise _Obstacle("what is computed from the logits is returned")
                loss.returned += [role.index for role in roles if isinstance(role, Output)]
            elif calls(user, *VIEWS) and (node in logits or not user.users):
                loss.inside.add(user)
                logits.add(user)
                waiting.append(user)
            else:
                raise _Obstacle(f"logits or what is computed from them is also read by {operator_name(user.target)}")


# Backward. ------------------------------------------------------------------------------------------------------------


def _backward(loss: LinearLoss, exp: fx.Node) -> Gradients:
    """The gradients that begin with the probabilities ``exp``."""
    product = _only_reader(exp, _aten.mul.Tensor)
    total: Any = next((a for a in product.args if a is not exp), None)
    of_x = _only_reader(product, _aten.sub.Tensor)
    of_log_probs, subtracted = arguments(of_x, _aten.sub.Tensor, 2)
    summed, dim, keeps = arguments(total, _SUM, 3)
    if summed is None or summed is not of_log_probs or subtracted is not product or keeps is not True:
        raise _Obstacle("the backward of the softmax is not known")
    if not is_over_last(total, dim):
        raise _Obstacle("the backward of the softmax is over other columns")
    loss.inside |= {exp, product, of_x, of_log_probs, total}
    gradients = _of_picked(loss, of_log_probs)
    path = [of_x]
    while not any(calls(user, _MM, _PERMUTE, _SUM) for user in path[-1].users):
        if len(path[-1].users) != 1:
            raise _Obstacle("the gradient of the logits is read several times")
        node = next(iter(path[-1].users))
        if not calls(node, *VIEWS, _CAST, CLONE, SLICE_SCATTER):
            raise _Obstacle(f"the gradient of the logits goes through {operator_name(node.target)}")
        if node.target is SLICE_SCATTER and not (is_full_of_zeros(node.args[0]) and is_of_rows(node)):
            raise _Obstacle("the gradient of the logits is not that of a slice of rows")
        path.append(node)
    end, logits = meta.tensor(path[-1]), meta.tensor(loss.logits)
    if end.shape != logits.shape or end.dtype != logits.dtype:
        raise _Obstacle("the gradient of the logits has another type")
    gradients.path = tuple(path)
    loss.inside |= set(path)
    for user in path[-1].users:
        _match_product(loss, gradients, user)
    return gradients


def _of_picked(loss: LinearLoss, of_log_probs: fx.Node) -> Gradients:
    """The gradient of what was picked, from that of the log-probabilities, which is 0 elsewhere."""
    inner: Any = of_log_probs.args[0] if calls(of_log_probs, _CAST) else of_log_probs
    loss.inside.add(inner)
    labels = loss.picked.args[2]
    shape, num_columns = meta.tensor(loss.picked).shape, meta.tensor(loss.logits).shape[1]
    base, dim, index, grad = arguments(inner, _aten.scatter_add.default, 4)
    if base is not None and is_over_last(inner, dim) and is_full_of_zeros(base) and same_labels(index, labels):
        return Gradients(grad, negated=False)
    hit, negative, zero = arguments(inner, _aten.where.self, 3)
    columns, index = arguments(hit, _aten.eq.Tensor, 2)
    grad = first_argument(negative, _aten.neg.default)
    iota = columns.args[0] if calls(columns, *VIEWS) else None
    counts = (
        calls(iota, _IOTA) and iota.args == (num_columns,) and (iota.kwargs["start"], iota.kwargs["step"]) == (0, 1)
    )
    if not (counts and meta.tensor(columns).shape[-1] == num_columns and same_labels(index, labels) and is_zero(zero)):
        raise _Obstacle("log-probabilities have gradients beside those of the labels")
    if meta.tensor(grad).shape != shape:
        raise _Obstacle("classes are weighted")
    loss.inside.add(hit)
    return Gradients(grad, negated=True)


def _match_product(loss: LinearLoss, gradients: Gradients, reader: fx.Node) -> None:
    """What a reader of the gradient of the logits is: one of the gradients of the matmul's inputs."""
    of_logits = gradients.path[-1]
    if calls(reader, _PERMUTE) and reader.args[1] == [1, 0]:
        loss.inside.add(reader)
        for product in reader.users:
            if not (calls(product, _MM) and product.args[0] is reader and same_value(product.args[1], loss.hidden)):
                raise _Obstacle(f"the gradient of the logits is also read by {operator_name(product.target)}")
            _set(gradients, "weight", product)
    elif calls(reader, _MM) and reader.args[0] is of_logits:
        if not is_matrix(reader.args[1], loss.logits.args[-1], transposed=True):
            raise _Obstacle("the gradient of the logits is multiplied with something else than the weight")
        _set(gradients, "hidden", reader)
    elif calls(reader, _MM) and is_matrix(reader.args[0], loss.hidden, transposed=True):
        _set(gradients, "weight", reader)
        gradients.transposed = True
    elif calls(reader, _SUM) and list(reader.args[1:]) == [[0], True] and not reader.kwargs:
        _set(gradients, "bias", reader)
    else:
        raise _Obstacle(f"the gradient of the logits is also read by {operator_name(reader.target)}")


def _set(gradients: Gradients, name: str, node: fx.Node) -> None:
    if getattr(gradients, name) is not None:
        raise _Obstacle(f"the gradient of the {name} is computed twice")
    setattr(gradients, name, node)


def _only_reader(node: fx.Node, target: Any) -> fx.Node:
    reader = next(iter(node.users), None)
    if len(node.users) != 1 or not calls(reader, target):
        raise _Obstacle("the backward of the softmax is not known")
    return reader


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)
