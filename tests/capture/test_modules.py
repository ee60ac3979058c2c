"""Modules and functions that real models are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zcompile
from tests.capture.compare import agree, assert_same, build, compiled
from tests.capture.test_inputs import net
from zcompile.errors import CaptureError, ShardingError

G = torch.Generator().manual_seed(1)
X = torch.randn(5, 4, generator=G)
SEQUENCE = torch.randn(2, 6, 8, generator=G)
IMAGE = torch.randn(2, 3, 8, 8, generator=G)
TOKENS = torch.randint(0, 11, (2, 6), generator=G)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x * 3  # wrong on purpose: the user's rule counts


class Wraps(nn.Module):
    """A module whose first result counts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Heads(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.attention(x, x, x, **options)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.same = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.same(self.shared(x)))


class LastState(nn.Module):
    """A head on the hidden state, whose shape it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 4, num_layers=2, bidirectional=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, cell) = self.lstm(x)
        layers, batch, size = hidden.shape
        return self.head(hidden.view(layers, batch, size)[-1] + cell[0])


MODELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "twice": (Twice, (X,)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        (IMAGE,),
    ),
    "conv transpose": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (IMAGE,)),
    "conv 1d": (lambda: nn.Conv1d(6, 4, 3, groups=2), (SEQUENCE,)),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
        (IMAGE,),
    ),
    "interpolate": (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear")), (IMAGE,)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 2)), (TOKENS,)),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 4), (TOKENS,)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU()), (SEQUENCE,)),
    "lstm": (lambda: nn.LSTM(8, 4, batch_first=True), (SEQUENCE,)),
    "last state of an lstm": (LastState, (SEQUENCE,)),
    "gru": (lambda: nn.GRU(8, 4, num_layers=2, bidirectional=True), (SEQUENCE,)),
    "rnn": (lambda: nn.RNN(8, 4), (SEQUENCE,)),
    "lstm cell": (lambda: nn.LSTMCell(8, 4), (SEQUENCE[0],)),
    "attention": (Heads, (SEQUENCE,)),
    "attention without bias": (lambda: Heads(bias=False, kdim=8, vdim=8), (SEQUENCE,)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (SEQUENCE,)),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
        ),
        (SEQUENCE,),
    ),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (SEQUENCE, SEQUENCE[:, :3])),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), (X, X)),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.PixelShuffle(2)), (IMAGE,)),
    "losses": (lambda: Wraps(nn.Linear(4, 3)), (X,)),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("train", [True, False])
def test_module(case: str, train: bool) -> None:
    make, args = MODELS[case]
    agree(make, *args, train=train, exact=False)


def einsum(f: Any, x: Tensor) -> Tensor:
    return torch.einsum("bi,bj,ij->b", f(x), x, f.weight)


FUNCTIONS: dict[str, Any] = {
    "einsum": einsum,
    "cross entropy": lambda f, x: F.cross_entropy(f(x), torch.tensor([0, 1, 2, -100, 1])),
    "cross entropy with smoothing": lambda f, x: F.cross_entropy(
        f(x), torch.tensor([0, 1, 2, 0, 1]), weight=torch.tensor([1.0, 2.0, 3.0]), label_smoothing=0.1
    ),
    "binary cross entropy": lambda f, x: F.binary_cross_entropy_with_logits(f(x), torch.ones(5, 3)),
    "kl": lambda f, x: F.kl_div(f(x).log_softmax(-1), torch.full((5, 3), 0.3), reduction="batchmean"),
    "gather": lambda f, x: f(x).gather(1, torch.tensor([[0], [1], [2], [0], [1]])),
    "scatter": lambda f, x: torch.zeros(5, 3).scatter_add(0, torch.zeros(5, 3, dtype=torch.int64), f(x)),
    "index put": lambda f, x: torch.zeros(5, 3).index_put((torch.tensor([1, 1]),), f(x)[:2], accumulate=True),
    "masked fill": lambda f, x: f(x).masked_fill(x[:, :3] > 0, float("-inf")).softmax(-1),
    "cumsum": lambda f, x: f(x).cumsum(0).cumprod(1),
    "sort": lambda f, x: f(x).sort(0),
    "topk": lambda f, x: f(x).topk(2),
    "where": lambda f, x: torch.where(f(x) > 0, f(x), x[:, :3]),
    "in place on a result": lambda f, x: f(x).add_(1).relu_(),
    "in place on a slice": lambda f, x: _slices(f(x)),
    "chunk and cat": lambda f, x: torch.cat([c * i for i, c in enumerate(f(x).chunk(3, -1))], -1),
    "fft": lambda f, x: torch.fft.rfft(f(x)).abs(),
    "matrix inverse": lambda f, x: torch.linalg.inv_ex(f(x).t() @ f(x) + torch.eye(3))[0],
    "svd": lambda f, x: torch.linalg.svdvals(f(x)),
    "norms": lambda f, x: f(x).norm() + torch.linalg.vector_norm(f(x), 3) + f(x).std() + f(x).var(0).sum(),
    "logsumexp": lambda f, x: f(x).logsumexp(-1),
    "autograd function": lambda f, x: Square.apply(f(x)),
    "vmap": lambda f, x: torch.func.vmap(lambda row: f(row).sin())(x),
    "grad inside": lambda f, x: torch.func.grad(lambda y: f(y).sum().sin())(x),
    "jvp inside": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "functional call": lambda f, x: torch.func.functional_call(f, {"weight": f.weight * 2, "bias": f.bias}, (x,)),
    "no_grad inside": lambda f, x: f(x) + _without(f, x),
    "enable_grad inside": lambda f, x: _with(f, x),
    "autocast inside": lambda f, x: _autocast(f, x),
    "double": lambda f, x: f(x).double().exp().float(),
    "loop": lambda f, x: _loop(f, x),
    "shapes": lambda f, x: f(x) * x.shape[0] / x.numel() + x.dim() + len(x) + x.size(-1),
    "assert": lambda f, x: _asserts(f, x),
    "comprehension": lambda f, x: torch.stack([f(row) for row in x]),
    "exceptions caught": lambda f, x: _catches(f, x),
    "string formatting": lambda f, x: f(x) * len(f"{x.shape} {x.dtype}"),
    "checkpoint": lambda f, x: torch.utils.checkpoint.checkpoint(lambda y: f(y).exp(), x, use_reentrant=False),
    "flatten and unflatten": lambda f, x: f(x).flatten().unflatten(0, (3, 5)).movedim(0, 1),
}


def _slices(y: Tensor) -> Tensor:
    y[:, 0] *= 2
    y[1:3] = y[0] + 1
    return y


def _without(f: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return f(x) * 2


def _with(f: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = f(x)
        with torch.enable_grad():
            return f(x) * y


def _autocast(f: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = f(x)
        with torch.autocast("cpu", enabled=False):
            return y.float() + f(x)


def _loop(f: Any, x: Tensor) -> Tensor:
    y, i = f(x), 0
    while i < 3:
        y = y + i if i % 2 else y * 2
        i += 1
    return y


def _asserts(f: Any, x: Tensor) -> Tensor:
    assert x.shape[1] == 4, "wrong width"
    if x.dim() != 2:
        raise ValueError("wrong rank")
    return f(x)


def _catches(f: Any, x: Tensor) -> Tensor:
    try:
        raise KeyError("a")
    except KeyError:
        return f(x)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_function(case: str) -> None:
    agree(net(FUNCTIONS[case]), X, exact=False)


def test_attention_masks_of_multihead_attention() -> None:
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    agree(Heads, SEQUENCE, key_padding_mask=padding, exact=False)
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    agree(Heads, SEQUENCE, attn_mask=causal, is_causal=True, need_weights=False, exact=False)


def test_packed_sequences_are_refused_or_right() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(SEQUENCE, torch.tensor([6, 4]), batch_first=True)
    with pytest.raises(CaptureError):
        compiled(lambda: nn.LSTM(8, 4, batch_first=True))(packed)


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged)
    with pytest.raises(CaptureError, match=r"NestedTensor|jagged|subclass"):
        compiled(lambda: nn.Linear(4, 3))(nested)


def test_sparse_embedding_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"'0' is an embedding with sparse=True.*sparse=False"):
        compiled(lambda: nn.Sequential(nn.Embedding(11, 4, sparse=True)))(TOKENS)
    rule = net(lambda f, x: F.embedding(torch.tensor([1]), f.weight, sparse=True))
    with pytest.raises(CaptureError, match=r"sparse gradients.*test_modules.py:\d+.*sparse=False"):
        compiled(rule)(X)


def test_embedding_with_max_norm_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes to parameter 'weight' in place.*max_norm"):
        compiled(lambda: nn.Embedding(11, 4, max_norm=1.0))(TOKENS)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 drops the check without a word")
def test_operator_with_side_effects_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"side effects.*test_modules.py:\d+.*inv_ex"):
        compiled(net(lambda f, x: torch.linalg.inv(f(x).t() @ f(x) + torch.eye(3))))(X)


def test_submodule_compiled_by_torch() -> None:
    def make() -> nn.Module:
        return nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 3))

    agree(make, X, exact=False)


def test_model_compiled_by_torch_is_refused_or_right() -> None:
    wrapped = torch.compile(build(Twice), backend="eager")
    model = zcompile.compile(wrapped, backend="eager")
    assert_same(model(X), build(Twice)(X))


def test_scripted_module_is_refused() -> None:
    with pytest.warns(DeprecationWarning):
        made = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 3))
    with pytest.raises(ShardingError, match=r"'0' is a torch.jit.ScriptModule"):
        zcompile.compile(made, backend="eager")


# Explicit causal masks. -----------------------------------------------------------------------------------------------


def attention(mask: Any) -> Any:
    def rule(f: Any, x: Tensor) -> Tensor:
        q = x.view(1, 2, 6, 8) * f.weight.sum()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(x))

    return net(rule)


def lower(n: int = 6, diagonal: int = 0) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril(diagonal)


def additive(mask: Tensor, low: float = float("-inf")) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, low)


CAUSAL: dict[str, Any] = {
    "bool": lambda x: lower(),
    "additive": lambda x: additive(lower()),
    "lowest": lambda x: additive(lower(), torch.finfo(torch.float32).min),
    "of a batch": lambda x: lower()[None, None].expand(1, 2, 6, 6),
    "from positions": lambda x: torch.arange(6)[None, :] <= torch.arange(6)[:, None],
}
NOT_CAUSAL: dict[str, Any] = {
    "one diagonal above": lambda x: lower(diagonal=1),
    "one diagonal below": lambda x: lower(diagonal=-1) | torch.eye(6, dtype=torch.bool)[0],
    "upper": lambda x: lower().t(),
    "window": lambda x: lower() & ~lower(diagonal=-3),
    "one head": lambda x: torch.stack([lower(), torch.ones(6, 6, dtype=torch.bool)])[None],
    "one element": lambda x: lower() | (torch.arange(36).view(6, 6) == 5),
    "nothing masked": lambda x: torch.ones(6, 6, dtype=torch.bool),
    "not quite low": lambda x: additive(lower(), -1e4),
    "biased": lambda x: additive(lower()) + 0.1 * torch.arange(6),
    "of the input": lambda x: lower() & (x[0, :6, 0] > -100)[None, :],
    "random": lambda x: lower() | (torch.rand(6, 6) > 2),
}
HEADS = torch.randn(2, 6, 8, generator=G)


class Attends(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x)[None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x))


@pytest.mark.parametrize("case", [*CAUSAL, *NOT_CAUSAL])
def test_explicit_masks(case: str) -> None:
    mask = CAUSAL.get(case) or NOT_CAUSAL[case]
    model, _ = agree(lambda: Attends(mask), HEADS, exact=False)
    assert model._session.latest.captured.num_causal == (case in CAUSAL)


def test_mask_as_argument_is_not_taken_for_causal() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            q = self.layer(x)[None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    plain, model = build(Masked), compiled(Masked)
    for mask in (lower(), lower(diagonal=1)):
        assert_same(model(HEADS, mask), plain(HEADS, mask), exact=False)
    assert model._session.latest.captured.num_causal == 0


def test_mask_in_a_buffer_is_not_taken_for_causal() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mask", lower())

        def forward(self, x: Tensor) -> Tensor:
            q = self.layer(x)[None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)

    plain, model = build(Masked), compiled(Masked)
    for _ in range(2):
        assert_same(model(HEADS), plain(HEADS), exact=False)
        for m in (plain, model):
            m.mask[0, 3] = True


def test_fewer_queries_than_keys_are_not_causal() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q = self.layer(x)[None]
            return F.scaled_dot_product_attention(q[:, :, :3], q, q, attn_mask=lower()[:3])

    agree(Short, HEADS, exact=False)
