"""The models that are trained with and without zcompile, small and with sizes that no world size divides evenly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from llama import Llama, LlamaConfig

#: rows that each rank sees in a step
BATCH = 2
SEQ = 6
VOCAB = 37

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model with its data.

    Attributes:
        make: builds the model from the seed that the caller set.
        batch: the inputs of one rank, from a generator.
        loss: the loss in the model's output.
        replicas: the reference is one replica a rank (the result depends on how rows are grouped, or on random numbers).
        loose: parameters whose true gradient is zero, with the reason: rounding noise alone moves them.
        optimizer: of a model; None: AdamW over all parameters.
        reference: what plain PyTorch trains in place of the model, if not the model itself.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any], Tensor] = lambda output: output["loss"]
    replicas: bool = False
    loose: dict[str, str] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    reference: Callable[[nn.Module], nn.Module] = lambda model: model

    def build(self) -> nn.Module:
        """The model in train mode, the same every time."""
        torch.manual_seed(0)
        return self.make().train()

    def data(self, step: int, rank: int) -> Batch:
        """What ``rank`` sees in ``step``."""
        return self.batch(torch.Generator().manual_seed(1000 * step + rank))


def tokens(g: torch.Generator, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, VOCAB, shape or (BATCH, SEQ), generator=g)


def own_llama(tied: bool) -> nn.Module:
    return Llama(LlamaConfig(vocab_size=VOCAB, hidden=20, layers=2, heads=2, kv_heads=1, ffn=45, max_seq=16, tied=tied))


def own_batch(g: torch.Generator) -> Batch:
    return {"tokens": tokens(g), "labels": tokens(g)}


def hf_llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(
        Config(
            vocab_size=VOCAB,
            hidden_size=20,
            intermediate_size=45,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
        )
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=20, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config.loss_type = "ForCausalLM"
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=45,
            max_position_embeddings=16,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def masked(g: torch.Generator) -> Batch:
    """Half of the tokens are to be predicted, the same number on every rank: the loss is a mean over them."""
    ids = tokens(g)
    labels = ids.clone()
    labels[:, ::2] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=20,
            d_kv=10,
            d_ff=45,
            num_layers=2,
            num_heads=2,
            dropout_rate=0,
            decoder_start_token_id=0,
            use_cache=False,  # Dynamo of torch 2.11 does not trace the cache of T5
        )
    )


class Vit(nn.Module):
    """A vision transformer for classes of 1-channel images: patches by a convolution, a class token, post-norm blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 20, kernel_size=3, stride=3)
        self.start = nn.Parameter(torch.randn(1, 1, 20) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 10, 20) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(20, 2, 45, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(20, 11)

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, 0])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Mlp(nn.Module):
    """Batch normalisation and dropout: its result depends on which rows a rank sees and on its random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 13),
            nn.BatchNorm1d(13),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(13, 10, bias=False),
            nn.BatchNorm1d(10),
            nn.Tanh(),
            nn.Dropout(0.3),
        )
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.layers(x)), y)


class Deep(nn.Module):
    """Equal residual blocks: several units, at little cost to capture."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 20)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 45), nn.GELU(), nn.Linear(45, 20)) for _ in range(layers)
        )
        self.head = nn.Linear(20, VOCAB)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


KEY_BIAS = "softmax does not change when the same number is added to every key's score"

CASES: dict[str, Case] = {
    "deep": Case(Deep, own_batch),
    "llama": Case(lambda: own_llama(False), own_batch),
    "llama_tied": Case(lambda: own_llama(True), own_batch),
    "hf_llama": Case(hf_llama, lambda g: dict.fromkeys(("input_ids", "labels"), tokens(g))),
    "gpt2": Case(
        gpt2, lambda g: dict.fromkeys(("input_ids", "labels"), tokens(g)), loose={"*.c_attn.bias[20:40]": KEY_BIAS}
    ),
    "bert": Case(bert, masked, loose={"*.self.key.bias": KEY_BIAS}),
    "t5": Case(t5, lambda g: {"input_ids": tokens(g, low=2), "labels": tokens(g, low=2)}),
    "vit": Case(
        Vit,
        lambda g: {
            "pixels": torch.randn(BATCH, 1, 9, 9, generator=g),
            "labels": torch.randint(11, (BATCH,), generator=g),
        },
        loose={"*.self_attn.in_proj_bias[20:40]": KEY_BIAS},
    ),
    "mlp": Case(
        Mlp,
        lambda g: {"x": torch.randn(5, 7, generator=g), "y": torch.randn(5, 3, generator=g)},
        loss=lambda output: output,
        replicas=True,
        loose={
            "layers.0.bias": "batch normalisation takes the mean away",
            "layers.1.running_mean": "the mean follows the bias before it",
        },
    ),
}


class Net(nn.Module):
    """Uneven rows, one tied weight, a frozen and an unused parameter, and a branch that an argument switches on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.middle = nn.Linear(13, 13)
        self.spare = nn.Linear(13, 13)
        self.unused = nn.Linear(5, 5)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(13)
        self.last = nn.Linear(13, 7, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.again = nn.Linear(7, 13)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor, extra: bool = False) -> dict[str, Tensor]:
        y = torch.tanh(self.first(x))
        y = y + F.gelu(self.middle(y))
        if extra:
            y = y + torch.sin(self.spare(y))
        y = self.norm(self.frozen(y) + self.again(x))
        out = self.last(y)
        return {"loss": out.square().mean(), "out": out}

    def first_alone(self, x: Tensor) -> Tensor:
        """A method beside forward, as ``generate`` is one."""
        return self.first(x)


def net() -> Net:
    """``Net`` from a fixed seed."""
    torch.manual_seed(1)
    return Net()


def rows(step: int, rank: int, count: int = 3) -> Tensor:
    """What a rank gives to ``Net`` in a step."""
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def all_rows(step: int, world: int, count: int = 3) -> Tensor:
    """What all ranks give together."""
    return torch.cat([rows(step, rank, count) for rank in range(world)])
