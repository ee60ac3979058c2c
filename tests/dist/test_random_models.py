"""Random small models, trained in random ways under zcompile and in plain PyTorch: equal losses, gradients and weights.

The examples are the same in every run. ``--wide`` runs 2,000.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, note, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.capture.compare import tensors_of
from tests.dist.pool import Pools
from tests.dist.random_models import SEQ, TOKENS, WIDTH, Example, examples
from tests.dist.training import average_gradients, copies, full_gradients, seed, this_rank, world_size

pytestmark = pytest.mark.dist

#: examples for each world size
COUNT = {1: 32, 2: 120, 3: 48}
#: relative and absolute distance from plain PyTorch, by dtype
CLOSE = {torch.float64: (1e-8, 1e-11), torch.float32: (1e-3, 1e-5)}


class Cube(torch.autograd.Function):
    """A rule of the user's own, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh() ** 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * x.cos()  # another function's, on purpose: this rule counts


class Buffer(nn.Module):
    """A running mean that the model updates by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))


def build(example: Example) -> nn.Module:
    names = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "Cube": Cube, "Buffer": Buffer}
    exec(compile(example.source, "<random model>", "exec"), names)
    torch.manual_seed(0)
    kind: Any = names["Model"]
    return kind().to(getattr(torch, example.dtype))


def data(example: Example, draw: int, rank: int) -> tuple[Tensor, Tensor]:
    """What a rank sees in one call."""
    g = torch.Generator().manual_seed(1000 * draw + rank)
    rows = 2 + (rank + draw) % 2 if example.ragged else 2
    x = torch.randn(rows, SEQ, WIDTH, generator=g, dtype=getattr(torch, example.dtype))
    return x, torch.randint(TOKENS, (rows, SEQ), generator=g)


def loss_of(example: Example, out: Any) -> Tensor:
    """The loss in an output, or the squares of what the model returns."""
    if isinstance(out, dict) and not example.outputs_train:
        return out["loss"]
    terms = [t.square().mean() * (i + 1) for i, t in enumerate(tensors_of(out)) if t.requires_grad]
    return torch.stack(terms).sum() if terms else tensors_of(out)[0].square().mean()


def compiled(example: Example) -> Any:
    options: dict[str, Any] = {"gradient_accumulation_steps": example.declared}
    model = build(example)
    if example.outputs_train and "'loss':" in example.source:
        with torch.no_grad():
            out = copies(model, 1)[0](*data(example, 0, 0))
        options["differentiable"] = [name for name, value in out.items() if tensors_of(value)]
    return zcompile.compile(
        model, stage=example.stage, policy=example.policy, ignore=example.ignore, backend="eager", **options
    )


def invert_first(model: nn.Module) -> None:
    """Freeze what trains in the first module, and the other way round."""
    first = next((m for m in model.children() if list(m.parameters())), model)
    for p in first.parameters():
        p.requires_grad_(not p.requires_grad)


def check(example: Example) -> None:
    """Train one example on this rank, and replicas of it in plain PyTorch."""
    world, rank = world_size(), this_rank()
    model, plains = compiled(example), copies(build(example), world)
    model._session.runner.executor.buffers.poison = True
    everyone = [model, *plains]
    rtol, atol = CLOSE[getattr(torch, example.dtype)]

    def close(have: Tensor | None, want: Tensor | None, what: str) -> None:
        assert (have is None) == (want is None), f"{what}: {have}, plain PyTorch {want}"
        if have is not None and want is not None:
            torch.testing.assert_close(
                have, want, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text: f"{what}: {text}"
            )

    def compare(what: str) -> None:
        state = model.full_state_dict()
        for name, value in plains[0].state_dict().items():
            close(state[name], value, f"{name} {what}")

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in everyone]
    for step, window in enumerate(example.windows):
        for micro, kind in enumerate(window):
            draw = 10 * step + micro
            seed(draw, rank)
            with model.no_sync() if kind == "n" else contextlib.nullcontext():
                loss = loss_of(example, model(*data(example, draw, rank)))
                if loss.requires_grad:
                    loss.backward()
            for r, plain in enumerate(plains):
                seed(draw, r)
                want = loss_of(example, plain(*data(example, draw, r)))
                assert want.requires_grad == loss.requires_grad
                if want.requires_grad:
                    want.backward()
                if r == rank:
                    close(loss.detach(), want.detach(), f"loss of step {step}, micro-batch {micro}")
        if model._session.runner.executor.accumulation.position:
            model.sync_gradients()
        average_gradients(plains)
        gradients = full_gradients(model)
        for name, p in plains[0].named_parameters():
            close(gradients[name], p.grad, f"gradient of {name} in step {step}")
        if example.clip is not None and any(g is not None for g in gradients.values()):
            norm = model.clip_grad_norm_(example.clip)
            wants = [torch.nn.utils.clip_grad_norm_(p.parameters(), example.clip) for p in plains]
            close(norm.to(wants[0].dtype), wants[0], f"norm of the gradients in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not example.keep_gradients)
        if step + 1 == example.eval_after:
            for m in everyone:
                m.eval()
            with torch.no_grad():
                outs = [plain(*data(example, 99, r)) for r, plain in enumerate(plains)]  # each writes its own buffers
                out = model(*data(example, 99, rank))
            for have, want in zip(tensors_of(out), tensors_of(outs[rank]), strict=True):
                close(have, want, f"evaluation after step {step}")
            for m in everyone:
                m.train()
        if step + 1 == example.freeze_after:
            for m in everyone:
                invert_first(m)
    compare("in the end")
    assert model._session.runner.executor.buffers.live_bytes == 0


def run_examples(ranks: Pools, world: int, count: int) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(examples())
    def run(example: Example) -> None:
        note(str(example))
        outcomes = ranks.outcomes(world, check, example=example, limit=300.0, grace=20.0)
        assert all(o.kind == "returned" for o in outcomes), "\n".join(map(str, outcomes))

    run()


@pytest.mark.parametrize("world", COUNT)
def test_random_models(ranks: Pools, world: int, request: pytest.FixtureRequest) -> None:
    run_examples(ranks, world, COUNT[world] * (10 if request.config.getoption("--wide") else 1))
