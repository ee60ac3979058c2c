"""Joint graphs of small real models, for tests of what handles any graph."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zcompile import compat
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Direction, Grad, Graph, Input, InputMutation, Mutation, Output, Param, Tangent


class Tower(nn.Module):
    """Embedding, dropout, BatchNorm, a tied head, a frozen layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(17, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.emb.weight
        self.drop = nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.emb(ids).mean(1)))
        return self.head(h + self.frozen(h)).logsumexp(-1).mean()


class Conv(nn.Module):
    """Convolution in channels-last, GroupNorm, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        return functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).sum((2, 3)).std()


class Attention(nn.Module):
    """LayerNorm, attention with dropout and a mask, splits, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y + functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2)).float().square().mean()


def _inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(shape, dtype=dtype)


#: model and input by case name
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "plain": (lambda: Tower(0.0), _inputs(4, 5, dtype=torch.int64)),
    "dropout": (lambda: Tower(0.3), _inputs(4, 5, dtype=torch.int64)),
    "conv": (Conv, _inputs(2, 3, 8, 8)),
    "attention": (lambda: Attention().bfloat16(), _inputs(2, 6, 16, dtype=torch.bfloat16)),
}


def joint_graph(case: str) -> Graph:
    """The joint graph of one of ``MODELS``."""
    make_model, make_input = MODELS[case]
    model = make_model()
    with compat.new_fake_mode() as mode:
        memo: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = memo.setdefault(id(tensor), mode.from_tensor(tensor))
        fake_input = make_input()
    exported = compat.dynamo_capture(model, (fake_input,))
    with contextlib.ExitStack() as stack:
        joint = compat.aot_joint(stack, exported, (fake_input,)).graph_module.graph
    graph = Graph(f"{case}.joint", Direction.JOINT, joint)
    for node in graph.inputs:
        meta.set_origin(node, _origin(node.meta["desc"], meta.tensor(node)))
    outputs = [
        (node, _role(desc)) for node, desc in zip(graph.output.args[0], graph.output.meta["desc"], strict=True) if node
    ]
    graph.set_outputs(outputs)
    return graph


def _origin(desc: Any, val: torch.Tensor) -> Any:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return Param(desc.target, tuple(val.shape))
    if kind == "BufferAOTInput":
        return Buffer(desc.target)
    return Input(desc.idx) if kind == "PlainAOTInput" else Tangent(desc.output.idx)


def _role(desc: Any) -> Any:
    kind = type(desc).__name__
    if kind == "GradAOTOutput":
        return Grad(desc.grad_of.target)
    if kind == "InputMutationAOTOutput":
        source = desc.mutated_input
        return Mutation(source.target) if hasattr(source, "target") else InputMutation(source.idx)
    return Output(desc.idx)
