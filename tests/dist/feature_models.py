"""The models of the features that are plain training."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dist.models import BATCH, CASES, Batch, Case, tokens
from tests.dist.training import LR

ROWS = 4


def rows(g: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 7, generator=g)}


def images(g: torch.Generator) -> Batch:
    return {"x": torch.randn(BATCH, 3, 6, 6, generator=g)}


def sequences(g: torch.Generator) -> Batch:
    return {"x": torch.randn(BATCH, 5, 6, generator=g)}


class Layer(nn.Module):
    """A linear layer, what a rule makes of its result and of some parts, and the mean square of that as the loss.

    Args:
        rule: called with the layer's result and the module.
        parts: parameters, modules and (plain) tensors, which become buffers.
    """

    def __init__(self, rule: Callable[[Tensor, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 6)
        self.rule = rule
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, **more: Any) -> Any:
        out = self.rule(self.layer(x), self, **more)
        return out.square().mean() if isinstance(out, Tensor) else out


def layer(rule: Callable[..., Any], **parts: Callable[[], Any]) -> Case:
    return Case(lambda: Layer(rule, **{n: make() for n, make in parts.items()}), rows, loss=lambda out: out)


def parameter(rule: Callable[[Tensor, Tensor], Tensor], value: Callable[[], Tensor], trainable: bool = True) -> Case:
    """A case with one parameter of a kind beside a layer."""
    return layer(lambda y, m: rule(y, m.p), p=lambda: nn.Parameter(value(), requires_grad=trainable))


class Chain(nn.Sequential):
    """Layers one after the other, with the mean square of the last result as the loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).square().mean()


def chain(batch: Callable[[torch.Generator], Batch], *layers: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(lambda: Chain(*(make() for make in layers)), batch, loss=lambda out: out, **options)


# Parameters. ----------------------------------------------------------------------------------------------------------


class TiedLm(nn.Module):
    """Embedding and head share one weight, as do two layers that are one module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 5)
        self.mix = nn.Linear(5, 5)
        self.again = self.mix
        self.head = nn.Linear(5, 37)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.again(torch.tanh(self.mix(self.embed(x))))
        return F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Towers(nn.Module):
    """A vision and a text tower that meet in one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 6))
        self.text = nn.ModuleDict({"embed": nn.Embedding(37, 6), "norm": nn.LayerNorm(6), "out": nn.Linear(6, 6)})
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        seen = F.normalize(self.vision(x), dim=-1)
        read = F.normalize(self.text["out"](self.text["norm"](self.text["embed"](ids)).mean(1)), dim=-1)
        return -(self.scale * (seen * read).sum(-1)).mean()


class Mixed(nn.Module):
    """A bf16 body and a head that computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6)).to(torch.bfloat16)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.bfloat16()).float()).square().mean()


class Islands(nn.Module):
    """Under bf16 its norm stays in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.up(x).float())
        return self.down(y.to(self.down.weight.dtype)).float().square().mean()


def in_bf16(model: nn.Module) -> nn.Module:
    """Plain PyTorch with fp32 masters: forward on bf16 copies of all parameters but the norm's."""
    inner = copy.copy(model)  # the same parameters, swapped for the time of a call

    def forward(**inputs: Tensor) -> Tensor:
        cast = {n: p if "norm" in n else p.bfloat16() for n, p in model.named_parameters()}
        return torch.func.functional_call(inner, cast, kwargs={k: v.bfloat16() for k, v in inputs.items()})

    model.forward = forward  # type: ignore[method-assign]
    return model


def by_name(model: nn.Module) -> torch.optim.Optimizer:
    """No decay on norms and biases, and another rate."""
    named = dict(model.named_parameters())
    small = {n for n in named if "norm" in n or n.endswith("bias")}
    groups = [
        {"params": [p for n, p in named.items() if n not in small], "weight_decay": 0.3},
        {"params": [p for n, p in named.items() if n in small], "weight_decay": 0.0, "lr": 3 * LR},
    ]
    return torch.optim.AdamW(groups, lr=LR)


def lora() -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


def labelled(g: torch.Generator) -> Batch:
    return dict.fromkeys(("input_ids", "labels"), tokens(g))


LORA = Case(lora, labelled)
CHANNELS_LAST = torch.channels_last


def in_turn(y: Tensor, m: Any, odd: bool) -> Tensor:
    return m.a(y) if odd else m.b(y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def shares_memory() -> nn.Module:
    a, b = nn.Linear(6, 5), nn.Linear(6, 5)
    b.weight.data = a.weight.data
    return nn.Sequential(a, b)


def odd_steps(g: torch.Generator) -> Batch:
    return rows(g) | {"odd": bool(g.initial_seed() // 1000 % 3)}


# Layers. --------------------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x @ weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 3 * x * (g @ weight.t()), (x * x).t() @ g  # the first is not the derivative: the user's rule counts


class Codebook(nn.Module):
    """Vector quantisation with a codebook that follows the batch: no parameter, buffers that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("uses", torch.zeros(5, dtype=torch.int64))

    def forward(self, y: Tensor) -> Tensor:
        nearest = torch.cdist(y, self.codes).argmin(-1)
        chosen = F.one_hot(nearest, 5).to(y.dtype)
        if self.training:
            self.uses += chosen.sum(0).long()
            means = chosen.t() @ y.detach() / chosen.sum(0).clamp(min=1)[:, None]
            self.codes.lerp_(means, 0.1)
        return y + (chosen @ self.codes - y).detach() * 0.5 + (y - chosen @ self.codes).square()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Both(nn.Module):
    """``nn.Transformer``, whose encoder and decoder read the same sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(6, 2, 1, 1, 11, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x[:, 1:]).square().mean()


KEYS = {"*in_proj_bias[6:12]": "softmax does not change when the same number is added to every key's score"}
MEANS = {"0.bias": "batch normalisation takes the mean away", "1.running_mean": "it follows the bias"}


class Cut(nn.Module):
    """The first of several results."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def hf_checkpointed() -> nn.Module:
    model = CASES["hf_llama"].make()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_lstm() -> nn.Module:
    return Cut(nn.LSTM(6, 5, batch_first=True))


# Calls. ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    loss: Tensor
    parts: dict[str, Any]
    nothing: None = None


def no_tensors() -> nn.Module:
    """A model that fits its parameters alone; no batch."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(7, 3))

        def forward(self, scale: float = 2.0) -> Tensor:
            return (self.p * scale).sin().square().mean()

    return Alone()


def no_batch(g: torch.Generator) -> Batch:
    return {"scale": 2.0}


def same(out: Any) -> Any:
    return out
