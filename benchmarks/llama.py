"""The model that every system in the benchmarks trains: Llama in plain PyTorch, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A model and what one rank feeds it in a step."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro_batch: int

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        attention = 2 * self.hidden * self.hidden * (self.heads + self.kv_heads) // self.heads
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    def attention_flops(self) -> float:
        """Causal attention of one rank's step, forward and backward."""
        return 6.0 * self.layers * self.hidden * self.seq * self.seq * self.micro_batch


SIZES = {
    "tiny": Size(64, 2, 4, 2, 96, 128, 32, 2),
    "0.19B": Size(768, 12, 12, 12, 2048, 50304, 1024, 8),
    "1.1B": Size(2048, 16, 32, 8, 8192, 32000, 2048, 2),
    "8B": Size(4096, 32, 32, 8, 14336, 128256, 4096, 1),
}


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.hidden // size.heads
        self.q = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(size.hidden, size.kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.gate = nn.Linear(size.hidden, size.ffn, bias=False)
        self.up = nn.Linear(size.hidden, size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """``model(tokens, labels)`` -> the loss alone."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(size.seq, size.hidden // size.heads), persistent=False)
        self.fill()

    def fill(self) -> None:
        """Values for parameters and tables; also after ``to_empty``."""
        for module in self.modules():
            fill(module)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values for a module's own parameters and tables."""
    for p in module.parameters(recurse=False):
        if p.dim() > 1:
            p.normal_(std=0.02)
        else:
            p.fill_(1.0)
    if isinstance(module, Llama):
        cos, sin = module.cos, module.sin
        half = torch.arange(0, cos.shape[1], 2, dtype=torch.float32, device=cos.device)
        positions = torch.arange(cos.shape[0], dtype=torch.float32, device=cos.device)
        angles = torch.outer(positions, 10000.0 ** (-half / cos.shape[1])).repeat(1, 2)
        cos.copy_(angles.cos())
        sin.copy_(angles.sin())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, section 3.4.2) on ``x`` [batch, heads, seq, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
