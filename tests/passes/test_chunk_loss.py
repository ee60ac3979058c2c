"""Losses in pieces beside plain PyTorch: equal numbers for every form of loss that the pass takes, and no tensor as large as logits."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.dist.models import CASES
from tests.planner.test_region_memory import Live
from zcompile import cross_entropy, ops
from zcompile.analysis.flops import node_flops
from zcompile.analysis.memory import RegionMemory
from zcompile.analysis.pieces import workspace_bytes
from zcompile.errors import ConfigError
from zcompile.ir.graph import Graph, Region, Saved
from zcompile.ir.types import dtype_name
from zcompile.planner.trace import trace

ROWS, SEQ, HIDDEN, VOCAB = 3, 7, 6, 29
#: 5 rows or 7 columns of logits in float32: neither divides what there is; rows are 32 apart
PIECE = f"{5 * 32 * 4 / 1024}KiB"


@dataclass
class Form:
    """A loss on hidden states [batch, seq, hidden], a weight [vocab, hidden] and labels [batch, seq]."""

    loss: Callable[[Tensor, nn.Linear, Tensor], Tensor]
    dtype: torch.dtype = torch.float32
    bias: bool = False
    #: why backward computes logits again; empty: gradients are made in forward
    again: str = ""


def flat(hidden: Tensor, head: nn.Linear, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), **options)


def shifted(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Older Hugging Face models: logits without the last position, labels without the first."""
    logits = head(hidden).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, VOCAB), labels[..., 1:].contiguous().view(-1))


def middle(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Without the first rows and the ends of the others."""
    logits = head(hidden)[1:, 2:-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB), labels[1:, 2:-1].reshape(-1), reduction="sum")


def by_items(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Hugging Face's ``num_items_in_batch``."""
    return flat(hidden, head, labels, reduction="sum") / (labels != -100).sum()


def policy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Log-probabilities of actions, weighted."""
    chosen = F.log_softmax(head(hidden).float(), dim=-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(chosen * torch.linspace(-1, 1, SEQ)).sum(-1).mean()


def weighted(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A weighted mean, of which some rows weigh nothing, in two steps and with constants."""
    losses = flat(hidden, head, labels, reduction="none").view(ROWS, SEQ)
    weights = torch.linspace(-1, 1, SEQ).clamp(min=0) * labels.ne(3)
    return 3 * (losses * weights).sum(1).div(weights.sum() + 1).mean() / 7 - 1


def two_heads(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """One weight for two losses of different weights, as where several tokens are predicted."""
    return flat(hidden, head, labels) + 0.3 * flat(hidden.roll(1, 1), head, labels.roll(-1, 1), reduction="sum")


def masked(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Rows are chosen by an index, and put together with others, before the mean."""
    losses = flat(hidden, head, labels, reduction="none")
    kept = torch.arange(0, ROWS * SEQ, 2)
    return (
        torch.cat([losses[kept], losses.new_zeros(3), losses.index_select(0, kept)])
        .masked_fill(torch.arange(2 * len(kept) + 3) == 1, 0.0)
        .mean()
    )


def by_own_losses(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Weights that depend on the losses, as focal losses have."""
    losses = flat(hidden, head, labels, reduction="none")
    return (losses * losses.detach().sigmoid()).mean()


def noisy(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Rows that chance chooses, after the losses."""
    return (flat(hidden, head, labels, reduction="none") * torch.bernoulli(torch.ones(ROWS * SEQ))).sum()


def hooked(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """What is done with the gradient of the losses is not linear."""
    losses = flat(hidden, head, labels, reduction="none")
    losses.register_hook(lambda grad: grad.clamp(max=0.01))
    return losses.mean()


def by_matmul(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """The weight in the other orientation."""
    return F.cross_entropy((hidden @ head.weight.view(HIDDEN, VOCAB)).flatten(0, 1), labels.flatten())


FORMS: dict[str, Form] = {
    "mean": Form(flat),
    "bias": Form(flat, bias=True),
    "sum": Form(lambda h, w, y: flat(h, w, y, reduction="sum")),
    "weighted": Form(weighted, bias=True),
    "two heads": Form(two_heads),
    "masked": Form(masked),
    "squares": Form(lambda h, w, y: flat(h, w, y, reduction="none").square().sum(), again="depend on the losses"),
    "own losses": Form(by_own_losses, bias=True, again="depend on the losses"),
    "a loss each": Form(lambda h, w, y: flat(h, w, y, reduction="none"), again="an output that is no scalar"),
    "noise": Form(noisy, again="depend on aten.rand, which runs later"),
    "hook": Form(hooked, again="go through aten.clamp"),
    "a class ignored": Form(lambda h, w, y: flat(h, w, y.clamp(min=3), ignore_index=3)),
    "shifted": Form(shifted, bias=True),
    "middle": Form(middle),
    "items": Form(by_items),
    "policy": Form(policy),
    "other orientation": Form(by_matmul),
    "double": Form(flat, torch.float64, bias=True),
    "half": Form(lambda h, w, y: F.cross_entropy(w(h).float().flatten(0, 1), y.flatten()), torch.bfloat16, bias=True),
    "half, shifted": Form(shifted, torch.bfloat16),
    "half, rounded": Form(flat, torch.bfloat16),
    "half, again": Form(by_own_losses, torch.bfloat16, again="depend on the losses"),
    "float16": Form(shifted, torch.float16, again="gradients in f16 may underflow"),
}


class Model(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=form.bias)
        self.to(form.dtype)

    def forward(self, labels: Tensor) -> Tensor:
        return self.form.loss(self.embed(labels.clamp(min=0)).tanh(), self.head, labels)


def labels(seed: int = 0) -> Tensor:
    result = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(seed))
    result[0, 1] = result[2, 3:] = -100
    return result


def pair(model: nn.Module, **options: Any) -> tuple[Any, nn.Module]:
    """The model compiled with losses in pieces, and as it is."""
    options = {"backend": "eager", "loss_chunk": PIECE, **options}
    return zcompile.compile(copy.deepcopy(model), **options), model


def stats(model: Any) -> dict[str, int]:
    return dict(model.history["chunk-loss"].stats)


def assert_in_pieces(model: Any, losses: int = 1, again: str = "") -> None:
    found = stats(model)
    assert found.get("losses in pieces") == losses and found["pieces of rows"] > 2 * losses, found
    if model.graphs.backward is not None:
        assert found.get("gradients made in forward", 0) == (0 if again else losses), found
        reasons = [key for key in found if key.startswith("logits computed again: ")]
        assert len(reasons) == bool(again) and again in "".join(reasons), found


def close(have: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    slack = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    scale = float(want.detach().abs().nan_to_num(0, 0, 0).max()) or 1.0
    torch.testing.assert_close(have, want, rtol=slack, atol=slack * scale, equal_nan=True)


def finite(tensor: Tensor) -> Tensor:
    """With NaN for what is not: infinity minus infinity depends on the order of operators."""
    return torch.where(tensor.isfinite(), tensor, math.nan)


def same_gradients(model: nn.Module, plain: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(finite(p.grad), finite(q.grad), dtype)


@pytest.mark.parametrize("name", FORMS)
def test_losses_and_gradients_are_those_of_plain_pytorch(name: str) -> None:
    form = FORMS[name]
    torch.manual_seed(0)
    piece = PIECE if form.dtype.itemsize > 2 else f"{5 * 32 * 2 / 1024}KiB"
    model, plain = pair(Model(form), loss_chunk=piece)
    for call in range(2):
        have, want = model(labels(call)), plain(labels(call))
        assert have.dtype == want.dtype
        close(have, want, form.dtype)
        (have * 0.5).sum().backward()
        (want * 0.5).sum().backward()
        same_gradients(model, plain, form.dtype)
    assert_in_pieces(model, losses=2 if name == "two heads" else 1, again=form.again)


@pytest.mark.parametrize("scale", [3.0, -0.125, 0.0, math.inf, math.nan])
def test_any_tangent_scales_the_gradients(scale: float) -> None:
    """Rows that do not count have gradients of 0 even where the tangent is infinite."""
    torch.manual_seed(0)
    model, plain = pair(Sliced())
    have = torch.randn(ROWS, SEQ, HIDDEN).requires_grad_()
    want = have.detach().clone().requires_grad_()
    (model(have, labels()) * scale).backward()
    (plain(want, labels()) * scale).backward()
    close(finite(have.grad), finite(want.grad), torch.float32)
    same_gradients(model, plain)
    assert not bool(have.grad[labels() == -100].any()) and not bool(have.grad[:, 0].any())
    assert_in_pieces(model)


def test_backward_twice_takes_the_same_gradients_twice() -> None:
    torch.manual_seed(0)
    model, plain = pair(Model(FORMS["bias"]))
    for network in (model, plain):
        loss = network(labels())
        loss.backward(retain_graph=True)
        (loss * 3).backward(retain_graph=True)
        (loss / 4).backward()
    same_gradients(model, plain)
    with pytest.raises(RuntimeError, match="second time"):
        loss = model(labels())
        loss.backward()
        loss.backward()


@pytest.mark.parametrize("divided", ["inside", "outside"])
def test_nothing_to_predict_is_nan_with_gradients_of_zero(divided: str) -> None:
    """Divided by the number of labels outside of the model, the tangent is infinite."""
    model, plain = pair(Model(FORMS["mean" if divided == "inside" else "sum"]))
    nothing = torch.full((ROWS, SEQ), -100)
    count = 1 if divided == "inside" else (nothing != -100).sum()
    have, want = model(nothing) / count, plain(nothing) / count
    assert bool(have.isnan()) and bool(want.isnan())
    have.backward()
    want.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad) and not bool(p.grad.any())
    assert_in_pieces(model)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("label", ["counts", "ignored", "is another"])
def test_logits_that_are_not_finite_are_as_in_plain_pytorch(value: float, label: str) -> None:
    """One class of all rows, by the bias: of a row that counts and has it as its label, or not; or of none that counts."""
    torch.manual_seed(0)
    network = Model(FORMS["bias"])
    with torch.no_grad():
        network.head.bias[5] = value
    model, plain = pair(network)
    given = {"counts": labels() * 0 + 5, "ignored": labels() * 0 - 100, "is another": labels() * 0 + 6}[label]
    have, want = model(given), plain(given)
    close(have, want, torch.float32)
    have.backward()
    want.backward()
    same_gradients(model, plain)
    assert_in_pieces(model)


class Sliced(nn.Module):
    """A head alone, on hidden states that get gradients, without the first of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden)[:, 1:].flatten(0, 1), labels[:, 1:].flatten())


def test_gradients_are_made_in_forward_alone() -> None:
    """Backward reads neither the weight nor hidden states."""
    model, _ = pair(Sliced(), recompute="full")
    model(torch.randn(ROWS, SEQ, HIDDEN), labels()).backward()
    assert len(list(node_of(model.graphs.forward, ops.linear_cross_entropy_with_grads))) == 1
    backward = str(model.graphs.backward)
    assert "linear_cross_entropy" not in backward and "aten.mm" not in backward and "param '" not in backward
    assert model.graphs.backward.find(Saved("weight_grad")) is not None


class Blocks(nn.Module):
    """Blocks with a loss each, as models have that predict several tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Sliced() for _ in range(3))
        self.last = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, labels: Tensor) -> Tensor:
        hidden, total = self.embed(labels.clamp(min=0)), torch.zeros(())
        for block in self.blocks:
            hidden = hidden + torch.tanh(hidden @ block.head.weight[:HIDDEN])
            total = total + block(hidden, labels)
        return total + self.last(hidden).square().mean()


@pytest.mark.parametrize("recompute", ["full", "selective", None])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_never_made_again(recompute: str | None, checkpointed: bool) -> None:
    """Not where blocks with losses are computed again, by the option or by the user."""
    torch.manual_seed(0)
    network = Blocks()
    if checkpointed:
        for block in network.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    model, plain = pair(network, recompute=recompute)
    model(labels()).backward()
    plain(labels()).backward()
    same_gradients(model, plain)
    assert_in_pieces(model, losses=3)
    assert not list(node_of(model.graphs.backward, ops.linear_cross_entropy_with_grads))


@pytest.mark.parametrize("frozen", ["head", "embed"])
def test_gradients_that_nobody_wants_are_not_computed(frozen: str) -> None:
    torch.manual_seed(0)
    plain = Model(FORMS["bias"])
    plain.get_submodule(frozen).requires_grad_(False)
    model, plain = pair(plain)
    model(labels()).backward()
    plain(labels()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            close(p.grad, q.grad, torch.float32)
    wanted = "wanted=[True, False, False]" if frozen == "head" else "wanted=[False, True, True]"
    assert wanted in str(model.graphs.joint)


def test_without_gradients_only_the_loss_is_computed() -> None:
    model, plain = pair(Model(FORMS["shifted"]))
    with torch.no_grad():
        close(model(labels()), plain(labels()), torch.float32)
    assert_in_pieces(model)
    assert model.graphs.backward is None and not list(
        node_of(model.graphs.forward, ops.linear_cross_entropy_with_grads)
    )


@pytest.mark.parametrize("name", ["hf_llama", "gpt2"])
def test_language_models_do_without_logits_in_training_only(name: str) -> None:
    case = CASES[name]
    model, plain = pair(case.build(), loss_chunk="0.4KiB")
    data = case.data(0, 0)
    have, want = model(**data), plain(**data)
    assert type(have) is type(want) and have["logits"] is None and want["logits"] is not None
    close(have["loss"], want["loss"], torch.float32)
    have["loss"].backward()
    want["loss"].backward()
    scale = max(float(q.grad.abs().max()) for q in plain.parameters() if q.grad is not None)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6 * scale)
    assert_in_pieces(model)
    assert stats(model)["outputs dropped"] == 1
    with torch.no_grad():
        torch.testing.assert_close(model(**data)["logits"], plain(**data)["logits"])


@pytest.mark.slow
def test_compiled_regions_call_the_operators() -> None:
    torch.manual_seed(0)
    model, plain = pair(Model(FORMS["shifted"]), backend="inductor")
    have, want = model(labels()), plain(labels())
    close(have, want, torch.float32)
    have.backward()
    want.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, torch.float32)
    assert_in_pieces(model)


# What is left alone. --------------------------------------------------------------------------------------------------


def with_two_losses(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    logits = head(hidden).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()


def with_a_hook(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    logits = head(hidden).flatten(0, 1)
    logits.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(logits, labels.flatten())


def capped(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(head(hidden) / 30).flatten(0, 1), labels.flatten())


LEFT_ALONE: dict[str, tuple[Form, str | None]] = {
    "two losses": (Form(with_two_losses), "the gradient of the logits goes through aten.add.Tensor"),
    "hook": (Form(with_a_hook), "the gradient of the logits goes through aten.mul.Tensor"),
    "smoothing": (Form(lambda h, w, y: flat(h, w, y, label_smoothing=0.1)), "beside those of the labels"),
    "part of the classes": (
        Form(lambda h, w, y: F.cross_entropy(w(h).flatten(0, 1)[:, :20], y.flatten().clamp(max=19))),
        "part of the columns",
    ),
    "every second row": (
        Form(lambda h, w, y: F.cross_entropy(w(h)[:, ::2].flatten(0, 1), y[:, ::2].flatten())),
        "neighbouring rows",
    ),
    "class weights": (Form(lambda h, w, y: flat(h, w, y, weight=torch.linspace(0, 1, VOCAB))), None),
    "capped": (Form(capped), None),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_uses_of_logits_are_left_alone(name: str, caplog: pytest.LogCaptureFixture) -> None:
    form, reason = LEFT_ALONE[name]
    torch.manual_seed(0)
    model, plain = pair(Model(form))
    have, want = model(labels()), plain(labels())
    have.backward()
    want.backward()
    close(have, want, torch.float32)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, torch.float32)
    assert "losses in pieces" not in stats(model)
    why = [key for key in stats(model) if key.startswith("losses computed whole: ")]
    assert len(why) == (reason is not None) and (reason is None or reason in why[0]), stats(model)
    (warning,) = [record.getMessage() for record in caplog.records if "loss_chunk" in record.getMessage()]
    assert (reason or "there is no cross-entropy of a linear layer") in warning


class Pair(nn.Module):
    """Loss and logits, which both may get gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, y), logits


class Two(Pair):
    """A mean and a sum, which both may get gradients."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = F.cross_entropy(self.head(x), y, reduction="none")
        return losses.mean(), losses.sum()


def test_a_loss_with_two_tangents_computes_logits_again() -> None:
    model, plain = pair(Two())
    x, y = torch.randn(21, HIDDEN), torch.arange(21)
    for network in (model, plain):
        mean, total = network(x, y)
        (mean + 0.1 * total).backward()
    same_gradients(model, plain)
    assert_in_pieces(model, again="come from 2 outputs")


def test_logits_that_may_get_a_gradient_are_returned() -> None:
    model, plain = pair(Pair())
    x, y = torch.randn(9, HIDDEN), torch.arange(9)
    loss, logits = model(x, y)
    (loss + logits.square().mean()).backward()
    want, want_logits = plain(x, y)
    (want + want_logits.square().mean()).backward()
    close(model.head.weight.grad, plain.head.weight.grad, torch.float32)
    assert "losses in pieces" not in stats(model)


def test_by_itself_it_leaves_small_vocabularies_alone() -> None:
    torch.manual_seed(0)
    for option, names in (("auto", {"losses computed whole: fewer than 32000 columns": 1}), ("none", None)):
        model, plain = pair(Model(FORMS["mean"]), loss_chunk=option)
        close(model(labels()), plain(labels()), torch.float32)
        assert {entry.name: dict(entry.stats) for entry in model.history}.get("chunk-loss") == names


def test_by_itself_it_takes_large_vocabularies() -> None:
    logits = 8192 * 32000 * 4
    assert logits < taken(Large(), 8192, "none")["backward"]
    by_itself = taken(Large(), 8192, "auto")
    assert by_itself == taken(Large(), 8192, "256MiB") and max(by_itself.values()) < logits / 3


def test_by_default_it_takes_what_gpus_compute() -> None:
    """A plan for a GPU has it, one for processors, where pieces take longer, has it not."""
    for hardware, option in (("h200", "auto"), ("cpu-2core", "none")):
        assert taken(Large(), 8192, None, hardware=hardware) == taken(Large(), 8192, option, hardware=hardware)


class Head(nn.Module):
    def __init__(self, hidden: int, vocab: int, again: bool = False) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocab, bias=False, device="meta", dtype=torch.bfloat16)
        self.again = again

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(hidden).float(), labels, reduction="none")
        return losses.square().mean() if self.again else losses.mean()


@pytest.mark.parametrize(
    ("sizes", "again", "what"),
    [
        ((8192, 768, 50304), False, (2048, "f32")),
        ((16384, 2048, 32000), False, (4096, "f32")),
        ((4096, 4096, 128256), False, "losses computed whole: pieces save no more than 256 MiB"),
        ((8192, 4096, 128256), False, (4096, "bf16")),
        ((65536, 4096, 128256), False, (4096, "f32")),
        (
            (16384, 2048, 32000),
            True,
            "losses computed whole: their gradients depend on the losses, so that logits would be",
        ),
    ],
)
def test_by_itself_it_takes_what_saves_memory_and_costs_no_product(sizes: Any, again: bool, what: Any) -> None:
    """Gradients of a large weight take as much as logits; sums in 16 bits, of few pieces, only where those in 32 take much more."""
    rows, hidden, vocab = sizes
    inputs = (
        torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta"),
        torch.empty(rows, dtype=torch.int64, device="meta"),
    )
    traced = trace(Head(hidden, vocab, again), inputs, world_size=1, loss_chunk="auto")
    (entry,) = [entry for entry in traced.history if entry.name == "chunk-loss"]
    if isinstance(what, str):
        assert [key for key in entry.stats if key.startswith(what)], dict(entry.stats)
    else:
        assert entry.stats["gradients made in forward"] == 1, dict(entry.stats)
        (node,) = node_of(traced.step.forward, ops.linear_cross_entropy_with_grads)
        assert (node.kwargs["rows"], dtype_name(node.kwargs["total"])) == what


def test_three_products() -> None:
    """Forward and backward together do as many as the loss that is computed whole: one fewer than where logits are computed again."""
    flops = {}
    for again in (False, True):
        for option in ("none", "48KiB"):
            model, _ = pair(Tall(again), loss_chunk=option)
            model(torch.arange(512)).backward()
            regions = [
                region for graph in (model.graphs.forward, model.graphs.backward) for region in graph.regions.values()
            ]
            flops[again, option] = sum(node_flops(node) for region in regions for node in region.fx.nodes)
    product = 2 * 512 * 600 * 4
    assert flops == {
        (False, "none"): 3 * product,
        (False, "48KiB"): 3 * product,
        (True, "none"): 3 * product,
        (True, "48KiB"): 4 * product,
    }


@pytest.mark.parametrize("wrong", ["always", "0MiB", "-1GiB", "3", 3, True])
def test_sizes_without_a_meaning_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss_chunk is .*; it must be one of auto, none, or the size"):
        zcompile.compile(Model(FORMS["mean"]), loss_chunk=wrong)


# Memory. --------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that comes out of an operator, within operators in pieces also."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inner = {
            ops.linear_cross_entropy: cross_entropy.forward,
            ops.linear_cross_entropy_backward: cross_entropy.backward,
            ops.linear_cross_entropy_with_grads: cross_entropy.forward_with_grads,
        }
        if func in inner:
            with self:
                return inner[func](*args, **kwargs)
        out = func(*args, **kwargs)
        tensors = [t for t in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(t, Tensor)]
        self.num_bytes = max([self.num_bytes, *(t.untyped_storage().nbytes() for t in tensors)])
        return out


class Tall(nn.Module):
    """Many rows and classes of few numbers."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 4)
        self.head = nn.Linear(4, 600, bias=False)
        self.again = again

    def forward(self, tokens: Tensor) -> Tensor:
        losses = F.cross_entropy(self.head(self.embed(tokens)), tokens, reduction="none")
        return losses.square().mean() if self.again else losses.mean()


@pytest.mark.parametrize("again", [False, True])
def test_no_tensor_is_as_large_as_the_logits(again: bool) -> None:
    num_bytes = {}
    for option in ("none", "64KiB"):
        model, _ = pair(Tall(again), loss_chunk=option)
        tokens = torch.arange(512)
        model(tokens)  # captured here
        with Largest() as largest:
            model(tokens).backward()
        num_bytes[option] = largest.num_bytes
    assert num_bytes["none"] == 512 * 600 * 4
    assert 56 * 1024 < num_bytes["64KiB"] <= 64 * 1024


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32000, 8, device="meta")
        self.head = nn.Linear(8, 32000, device="meta")

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)), tokens)


def node_of(graph: Graph | None, target: Any) -> Iterator[Any]:
    assert graph is not None
    for region in graph.regions.values():
        yield from (node for node in region.fx.nodes if node.target is target)


def taken(model: nn.Module, rows: int, loss_chunk: str | None, **options: Any) -> dict[str, int]:
    """The most that regions take beside parameters and gradients, as planned, by phase."""
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")
    plan = zcompile.plan(model, (tokens,), world_size=2, loss_chunk=loss_chunk, advise=False, **options)
    most = {"forward": 0, "backward": 0}
    for moment in plan.memory.moments:
        if moment.phase in most:
            now = sum(moment.during.get(part, 0) for part in ("region workspace", "saved for backward"))
            most[moment.phase] = max(most[moment.phase], now)
    return most


def test_planning_sees_pieces_and_not_logits() -> None:
    logits = 512 * 600 * 2
    assert min(taken(Tall(), 512, "none", precision="bf16").values()) > logits
    assert max(taken(Tall(), 512, "48KiB", precision="bf16").values()) < logits / 4


def test_the_workspace_is_what_is_allocated() -> None:
    model, _ = pair(Tall(again=True), loss_chunk="48KiB", precision="bf16")
    model(torch.arange(512))
    (forward,) = node_of(model.graphs.forward, ops.linear_cross_entropy)
    (backward,) = node_of(model.graphs.backward, ops.linear_cross_entropy_backward)
    assert workspace_bytes(forward) == forward.kwargs["rows"] * 608 * 2 <= 48 * 1024
    columns = cross_entropy.row_stride(backward.kwargs["columns"])
    assert workspace_bytes(backward) == 512 * columns * 2 + 512 * 4 * 4 <= 48 * 1024 + 512 * 4 * 4


@pytest.mark.parametrize(
    ("rows", "wanted"), [(512, [True, True, False]), (256, [True, True, True]), (512, [True, False, False])]
)
def test_what_is_alive_while_gradients_are_made_is_predicted(
    rows: int, wanted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which the matmuls of a CPU take as they are; what kernels do in place is done there in small blocks."""
    monkeypatch.setattr(cross_entropy, "_BLOCK", 1 << 15)

    def call(hidden: Tensor, weight: Tensor, labels: Tensor, row_weights: Tensor) -> Any:
        return ops.linear_cross_entropy_with_grads(
            hidden,
            weight,
            None,
            labels,
            row_weights,
            dtype=torch.float32,
            rows=rows,
            total=torch.float32,
            wanted=wanted,
        )

    inputs = (torch.randn(2048, 512), torch.randn(2047, 512), torch.arange(2047).repeat(2)[:2048], torch.rand(2048))
    region = Region("region", make_fx(call, tracing_mode="fake")(*inputs).graph)
    predicted = RegionMemory(region, fused=True).extra([])
    with Live() as live, torch.no_grad():
        for value in inputs:
            live.watch(value)
        start = live.live
        results = cross_entropy.forward_with_grads(
            *inputs[:2], None, *inputs[2:], dtype=torch.float32, rows=rows, total=torch.float32, wanted=wanted
        )
    assert len(results) == 1 + sum(wanted)
    assert abs(live.peak - start - predicted) <= 0.05 * predicted


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_are_as_exact_as_eager(pieces: int, bias: bool) -> None:
    """Errors beside float64 of what is rounded to bfloat16: in float32 no larger; up to three roundings make it 1.5 of it."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offsets = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((768, 32), (251, 32), (251,))
    )
    labels = torch.randint(251, (768,), generator=generator)
    weights = torch.full((768,), 1 / 768)
    inputs = [hidden, weight * 0.3, *([offsets] if bias else [])]

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs]
        F.cross_entropy(F.linear(*leaves).to(torch.promote_types(dtype, torch.float32)), labels).backward()
        return [leaf.grad.double() for leaf in leaves]

    def errors(found: list[Tensor]) -> list[float]:
        return [float((f.double() - w).norm() / w.norm()) for f, w in zip(found, exact, strict=True)]

    exact = gradients(torch.float64)
    eager = errors(gradients(torch.bfloat16))
    for total in (torch.float32, torch.bfloat16):
        if total is torch.bfloat16 and pieces > 3:
            continue
        rows = -(-768 // pieces)
        _, *found = ops.linear_cross_entropy_with_grads(
            hidden, inputs[1], inputs[2] if bias else None, labels, weights,
            dtype=torch.float32, rows=rows, total=total, wanted=[True, True, bias],
        )  # fmt: skip
        limit = 1.1 if total is torch.float32 else 1.5
        assert all(f.dtype is torch.bfloat16 for f in found)
        assert all(have <= limit * want for have, want in zip(errors(found), eager, strict=True)), (
            total,
            errors(found),
            eager,
        )


def test_no_rows_have_gradients_of_zero() -> None:
    hidden, weight, nothing = torch.empty(0, 4), torch.randn(5, 4), torch.empty(0, dtype=torch.int64)
    losses, *grads = ops.linear_cross_entropy_with_grads(
        hidden,
        weight,
        None,
        nothing,
        torch.empty(0),
        dtype=torch.float32,
        rows=8,
        total=torch.float32,
        wanted=[True, True, True],
    )
    assert losses.shape == (0,) and [g.shape for g in grads] == [(0, 4), (5, 4), (5,)]
    assert not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_where_ranks_are_to_be_alike_few_rows_are_one_piece(rows: int) -> None:
    """Also none."""
    step = "plan-units,shard,unshard,reduce,outline,cleanup"
    model, plain = pair(Sliced(), loss_chunk=None, pipeline=f"chunk-loss{{columns=0 alike=true}},{step}")
    given = torch.randn(rows, SEQ, HIDDEN), labels()[:rows]
    have, want = model(*given), plain(*given)
    close(have, want, torch.float32)
    have.backward()
    want.backward()
    same_gradients(model, plain)
    assert (stats(model)["gradients made in forward"], stats(model)["pieces of rows"]) == (1, min(rows, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_pieces_begin_at_multiples_of_16(dtype: torch.dtype) -> None:
    """An odd number of classes: with kernels that are given strides, and not whole pieces."""
    seen = []

    def noting(function: Callable[..., None]) -> Callable[..., None]:
        def call(logits: Tensor, *args: Any) -> None:
            seen.append(logits.stride())
            function(logits, *args)

        return call

    wide = torch.promote_types(dtype, torch.float32)
    inputs = (torch.randn(9, 4, dtype=dtype), torch.randn(7, 4, dtype=dtype), None, torch.arange(9) % 7)
    options = {"dtype": wide, "rows": 4}
    losses, _ = cross_entropy.forward(*inputs, **options, reduce=noting(cross_entropy.reduce_rows))
    options |= {"total": wide, "wanted": [True, True, False], "make": noting(cross_entropy.gradients_)}
    again, *_ = cross_entropy.forward_with_grads(*inputs, torch.ones(9, dtype=wide), **options)
    assert torch.equal(losses, again)
    assert set(seen) == {(16, 1)}
