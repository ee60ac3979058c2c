"""Aligned products: equal numbers to plain PyTorch's for every size and orientation, eager's strides for users, nothing more saved."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcompile
from zcompile.analysis.chains import param_chains
from zcompile.config import Config
from zcompile.ir import meta
from zcompile.ir.graph import Saved
from zcompile.ir.text import parse_graph
from zcompile.lower.interpret import interpret
from zcompile.passes import default_pipeline, parse
from zcompile.passes.align import _PRODUCTS, Align, _missing
from zcompile.passes.replay import replay

FORCED = Align(device="cpu", intensity=0)
DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


def forced(**options: Any) -> str:
    """The default pipeline, which aligns every product on the CPU."""
    pipeline = str(default_pipeline(Config(**options), size=1))
    assert str(Align()) in pipeline
    return pipeline.replace(str(Align()), str(FORCED))


# One product. ---------------------------------------------------------------------------------------------------------


def matrix(name: str, rows: int, columns: int, dtype: str, *, batch: int, is_flipped: bool) -> tuple[str, Tensor]:
    """A line of text that declares a matrix, and its value."""
    shape, strides = [rows, columns], ([1, rows] if is_flipped else [columns, 1])
    if batch:
        shape, strides = [batch, *shape], [rows * columns, *strides]
    layout = f"{{{', '.join(map(str, strides))}}}" if is_flipped else ""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    value = torch.empty_strided(shape, strides, dtype=DTYPES[dtype])
    return f"%{name}: {dtype}{shape}{layout} = input ", value.copy_(torch.randn(shape, generator=generator))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm"])
def test_every_size_and_orientation(op: str, dtype: str) -> None:
    """Each of the three sizes odd or not, each factor as it is or turned around."""
    batch = 2 if "b" in op.removesuffix("bmm") or op == "bmm" else 0
    for rows, inner, columns, flip_a, flip_b in itertools.product((16, 13), (8, 11), (24, 19), (0, 1), (0, 1)):
        a = matrix("a", rows, inner, dtype, batch=batch, is_flipped=bool(flip_a))
        b = matrix("b", inner, columns, dtype, batch=batch, is_flipped=bool(flip_b))
        c = matrix("c", rows, columns, dtype, batch=batch, is_flipped=False)
        shape = f"{dtype}{list(c[1].shape)}"
        given = [c, a, b] if "add" in op else [a, b]
        inputs = "\n    ".join(f"{line}{index}" for index, (line, _) in enumerate(given))
        names = ", ".join(line.split(":")[0] for line, _ in given)
        extra = ", beta=0.5, alpha=2" if "add" in op else ""
        graph = parse_graph(
            f"graph m.joint\n  inputs:\n    {inputs}\n  body:\n    %p: {shape} = aten.{op}({names}{extra})\n"
            f"    %y: {shape} = aten.neg(%p)\n  return output 0 %y"
        )
        values = [value for _, value in given]
        (want,) = interpret(graph.fx, list(values))
        replay(graph, parse(str(FORCED)))
        (have,) = interpret(graph.fx, list(values))
        slack = {"f32": 1e-5, "f64": 1e-12, "bf16": 2e-2}[dtype]
        torch.testing.assert_close(have, want, rtol=slack, atol=slack)
        product = next(n for n in graph.body if n.target in _PRODUCTS)
        assert _missing(product) == (0, 0, 0)
        multiple = 16 // DTYPES[dtype].itemsize
        odd = (rows % multiple and flip_a, inner % multiple and (flip_b or not flip_a), columns % multiple)
        assert ("_aligned" in product.name) == any(odd), f"{op} {rows} {inner} {columns} {flip_a} {flip_b}: {graph}"
        kept = [n for n in graph.body if n.target is torch.ops.aten.clone.default]
        assert not kept, f"what only computation reads is copied: {graph}"


# Models. --------------------------------------------------------------------------------------------------------------

VOCAB, HIDDEN, SEQ, ROWS = 29, 7, 5, 3


class Conv1D(nn.Module):
    """GPT-2's linear layer: an addmm whose weight is not turned around."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Conv1D(HIDDEN, 11), Conv1D(11, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.mix(x) @ x.transpose(1, 2)
        return x + scores.softmax(-1) @ x + self.down(F.gelu(self.up(x), approximate="tanh"))


class Model(nn.Module):
    """Odd in every size, with a head that has the weight of the embedding."""

    def __init__(self, *, returns: bool = False, bias: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=bias)
        self.head.weight = self.embed.weight
        self.returns, self.checkpoints = returns, checkpoints

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits} if self.returns else {"loss": loss}


class Policy(nn.Module):
    """Reads logits in many ways: through views that take their strides, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(HIDDEN, 9), nn.Linear(9, VOCAB)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x).tanh())
        flat = logits.view(-1).square().sum()
        first, second = logits.split([10, 19], -1)
        return {"loss": flat + first.transpose(0, 1).sin().sum() + (second[1:] * second[:-1]).logsumexp(-1).sum()}


@dataclass
class Form:
    """A model and what it reads."""

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]] = lambda: {"ids": torch.randint(VOCAB, (ROWS, SEQ))}


FORMS = {
    "tied": Form(Model),
    "returned": Form(lambda: Model(returns=True)),
    "bias": Form(lambda: Model(bias=True)),
    "checkpoints": Form(lambda: Model(checkpoints=True)),
    "views": Form(Policy, lambda: {"x": torch.randn(ROWS, SEQ, HIDDEN)}),
}


def run(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and gradients."""
    out = model(**{k: v.to(next(model.parameters()).dtype) if v.is_floating_point() else v for k, v in batch.items()})
    out["loss"].backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_and_strides_are_those_of_plain_pytorch(form: str, dtype: torch.dtype) -> None:
    plain = FORMS[form].model().to(dtype)
    model = zcompile.compile(copy.deepcopy(plain), backend="eager", pipeline=forced())
    batch = FORMS[form].batch()
    (want, want_grads), (have, grads) = run(plain, batch), run(model, batch)
    slack = 1e-5 if dtype is torch.float32 else 1e-11
    for key, value in want.items():
        torch.testing.assert_close(have[key], value, rtol=slack, atol=slack)
        assert have[key].stride() == value.stride()
    assert grads.keys() == want_grads.keys()
    for key, value in want_grads.items():
        torch.testing.assert_close(grads[key], value, rtol=slack, atol=slack, msg=lambda m, k=key: f"{k}: {m}")
        assert grads[key].stride() == value.stride(), key
    assert model.history["align"].stats["products aligned"] > 3


class Head(nn.Module):
    """Odd in the number of classes alone, in bfloat16."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        self.returns = returns
        self.bfloat16()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        return {"loss": loss, "logits": logits} if self.returns else {"loss": loss}


def saved(model: nn.Module, spec: str | None) -> tuple[list[tuple[int, ...]], Any]:
    """Shapes of what forward saves for backward, and the compiled model."""
    compiled = zcompile.compile(model, backend="eager", pipeline=spec)
    run(compiled, FORMS["tied"].batch())
    outputs = compiled.graphs.forward.outputs
    return [tuple(meta.tensor(n).shape) for n, role in outputs if isinstance(role, Saved)], compiled


def test_logits_stay_parts_of_padded_ones() -> None:
    """In backward, too: nothing is copied, and only the weight and the gradient of the logits are padded."""
    usual, _ = saved(Head(False), None)
    mine, model = saved(Head(False), forced())
    assert mine == [(ROWS * SEQ, 32) if shape == (ROWS * SEQ, VOCAB) else shape for shape in usual] != usual
    assert model.history["align"].stats == {"products aligned": 3, "matrices padded": 2}


def test_returned_logits_are_saved_as_the_user_gets_them() -> None:
    usual, _ = saved(Head(True), None)
    mine, model = saved(Head(True), forced())
    assert sorted(map(math.prod, mine)) == sorted(map(math.prod, usual))
    assert model.history["align"].stats["results copied"] == 1


@pytest.mark.parametrize("recompute", [None, "selective", "full"])
def test_nothing_more_is_saved(recompute: str | None) -> None:
    """Padded factors and weights are padded again in backward; products are saved as large as they are."""
    options = {} if recompute is None else {"recompute": recompute}
    usual, _ = saved(Model(), str(default_pipeline(Config(**options), size=1)))
    mine, model = saved(Model(), forced(**options))
    room = sorted((math.prod(-(-size // 4) * 4 for size in shape) for shape in usual), reverse=True)
    assert len(mine) <= len(usual)
    assert all(a <= b for a, b in zip(sorted(map(math.prod, mine), reverse=True), room, strict=False))
    joint = model.graphs.joint
    weights = [n for n in param_chains(joint.fx) if n.target is torch.ops.aten.constant_pad_nd.default]
    assert len(weights) == 13 and all(meta.recompute(n) for n in weights)


def test_the_default_changes_nothing_on_the_cpu() -> None:
    model = zcompile.compile(Model(), backend="eager")
    run(model, FORMS["tied"].batch())
    assert not model.history["align"].stats and not model.history["align"].diff()


def test_losses_in_pieces_are_left_alone() -> None:
    """Their operators take any size. The other products of the model are aligned."""
    plain = Model()
    spec = f"chunk-loss{{mib=0.0005 columns=0 drop=true}},{forced()}"
    model = zcompile.compile(copy.deepcopy(plain), backend="eager", pipeline=spec)
    batch = FORMS["tied"].batch()
    (_, want), (_, grads) = run(plain, batch), run(model, batch)
    assert model.history["chunk-loss"].stats["losses in pieces"] == 1
    assert model.history["align"].stats["products aligned"] == 30
    for key, value in want.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-5, atol=1e-5)


def test_plans_for_gpus_see_aligned_products() -> None:
    """And those for CPUs do not, nor do small products anywhere."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1001, bias=False, dtype=torch.bfloat16))
        x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    sizes = {}
    for hardware in ("h100", "cpu-2core"):
        plan = zcompile.plan(model, (x,), world_size=2, hardware=hardware, advise=False)
        sizes[hardware] = plan.traced.history["align"].stats["products aligned"]
    assert sizes == {"h100": 2, "cpu-2core": 0}
    small = zcompile.plan(model, (x[:256],), world_size=2, hardware="h100", advise=False)
    assert not small.traced.history["align"].stats
