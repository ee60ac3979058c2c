"""Replayed steps: the same bits as issued ones, whatever a loop does, on a recorder that does again what it recorded.

It stands for CUDA graphs: results lie at fixed addresses, and what a forward left is overwritten once its backward has run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import net, rows
from tests.dist.pool import Pools
from tests.dist.training import LR, full_gradients, this_rank
from zcompile.runtime.tapes import WARM_STEPS, Tapes

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

STEPS = 6
REPLAYED = STEPS - WARM_STEPS


class Again:
    """A recorder for the CPU: a replay runs the program on the same tensors and writes over the same results.

    All recordings have one memory, so a replay destroys what nobody may read any more: once a backward has run, what its forward
    left, and when a forward runs, what earlier ones returned. Gradients in their chunks and full parameters in their places stay.
    """

    def __init__(self, executor: Any, spoils: bool) -> None:
        self.executor = executor
        self.spoils = spoils
        self.forwards: list[list[Tensor]] = []
        self.returned: list[Tensor] = []

    def record(self, body: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
        assert isinstance(body, partial)
        run, runnable, slots = body.func, body.args[0], list(body.args[1])
        results = list(body())
        ends = [port.slot for port in runnable.program.outputs]
        given = {t.data_ptr() for t in slots if t is not None}
        stays = {results[port.slot].data_ptr() for port in runnable.program.outputs if port.kind == "kept"}
        is_backward = any(port.kind == "tangent" for port in runnable.program.inputs)
        if is_backward:
            left = self.forwards[-1]
            left[:] = [t for t in left if t.is_floating_point() and t.data_ptr() not in stays]
            stays |= {gradient.address for gradient in self.executor.shards.gradients.prepared if gradient is not None}
            self.returned += [results[i] for i in ends if results[i].data_ptr() not in stays]
        else:
            left = [results[i] for i in ends if results[i].data_ptr() not in given]
            self.forwards.append(left)

        def replay() -> None:
            if not is_backward and self.spoils:
                for tensor in self.returned:
                    tensor.fill_(float("nan"))
            with self.executor.recording():
                fresh = run(runnable, list(slots))
            for i in dict.fromkeys(ends):
                if fresh[i] is not results[i] and fresh[i].data_ptr() != results[i].data_ptr():
                    results[i].copy_(fresh[i])
            if is_backward and self.spoils:
                for tensor in left:
                    tensor.fill_(float("nan"))

        recording = type("Recording", (), {"replay": staticmethod(replay)})()
        return recording, list(results)

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor

    def hidden_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for tensor in (t for left in self.forwards for t in left):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # the memory is somebody else's then
        self.forwards = []


def compiled(model: nn.Module, stage: int, said: list[str] | None, **options: Any) -> Any:
    """Compiled, and with ``said`` replayed; the reasons why a step is not go there."""
    model = zcompile.compile(model, stage=stage, backend="eager", verify="off", **options)
    if said is not None:
        runner = model._session.runner
        runner.tapes = Tapes(runner.executor, partial(Again, runner.executor, True), said.append)
    return model


class Counting(nn.Module):
    """A model with a buffer that each forward changes, and one that users replace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.inner(self.norm(x) * self.scale)


def twins(stage: int, make: Callable[[], nn.Module] = net, **options: Any) -> tuple[list[Any], list[Any], list[str]]:
    """One model that is replayed and one that is not, with their optimizers and what the first says."""
    said: list[str] = []
    torch.manual_seed(5)
    first = make()
    torch.manual_seed(5)
    models = [compiled(first, stage, said, **options), compiled(make(), stage, None, **options)]
    return models, [zcompile.optim.AdamW(m.parameters(), lr=LR) for m in models], said


def mine(step: int, count: int = 3) -> Tensor:
    return rows(step, this_rank(), count)


def same(a: Any, b: Any, what: str) -> None:
    assert (a is None) == (b is None), what
    assert a is None or torch.equal(a, b), f"{what}: {a} and {b}"


def same_everywhere(models: list[Any], what: str) -> None:
    grads = [full_gradients(m) for m in models]
    states = [m.full_state_dict() for m in models]
    for name in grads[0]:
        same(grads[0][name], grads[1][name], f"gradient of {name} {what}")
    for name in states[0]:
        same(states[0][name], states[1][name], f"{name} {what}")


def plain(model: Any, optimizer: Any, step: int) -> Tensor:
    loss = model(mine(step))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def zero_before(model: Any, optimizer: Any, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = model(mine(step))["loss"]
    loss.backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    return loss


def zero_between(model: Any, optimizer: Any, step: int) -> Tensor:
    loss = model(mine(step))["loss"]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def two_batches(model: Any, optimizer: Any, step: int) -> Tensor:
    losses = []
    for micro in range(2):
        losses.append(model(mine(10 * step + micro))["loss"])
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def local_batch(model: Any, optimizer: Any, step: int) -> Tensor:
    losses = []
    for micro in range(2):
        with model.no_sync() if micro == 0 else contextlib.nullcontext():
            losses.append(model(mine(10 * step + micro))["loss"])
            losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def two_forwards(model: Any, optimizer: Any, step: int) -> Tensor:
    losses = [model(mine(10 * step + i))["loss"] for i in range(2)]
    sum(losses[1:], losses[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def twice_through(model: Any, optimizer: Any, step: int) -> Tensor:
    loss = model(mine(step))["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def with_eval(model: Any, optimizer: Any, step: int) -> Tensor:
    loss = model(mine(step))["loss"]
    with torch.no_grad():
        out = model(mine(50 + step))["out"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        out = out + model(mine(70 + step))["out"]
    model.train()
    return torch.cat([out.flatten(), loss.reshape(1)])


def other_sizes(model: Any, optimizer: Any, step: int) -> Tensor:
    loss = model(mine(step, 3 + (step == 4)))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def of_inputs(model: Any, optimizer: Any, step: int) -> Tensor:
    x = mine(step).requires_grad_()
    model(x)["loss"].backward()
    optimizer.held = [*getattr(optimizer, "held", []), x.grad]
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(optimizer.held)


def asked_for(model: Any, optimizer: Any, step: int) -> Tensor:
    """``torch.autograd.grad`` through a replayed forward, then a backward through the next."""
    weight = model.get_parameter("first.weight")
    (grad,) = torch.autograd.grad(model(mine(30 + step))["loss"], [weight])
    whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return torch.cat([plain(model, optimizer, step).reshape(1), whole.flatten()])


def hooked(model: Any, optimizer: Any, step: int) -> Tensor:
    if step == 0:
        optimizer.seen = []
        model.get_parameter("middle.weight").register_hook(lambda g: optimizer.seen.append(g.clone()) or 2 * g)
    return plain(model, optimizer, step)


LOOPS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "plain": (plain, REPLAYED),
    "zero_before": (zero_before, REPLAYED),
    "zero_between": (zero_between, STEPS - WARM_STEPS),
    "two_batches": (two_batches, 2 * STEPS - WARM_STEPS),
    "local_batch": (local_batch, 2 * STEPS - 2 * WARM_STEPS),
    "two_forwards": (two_forwards, STEPS - 1),
    "twice_through": (twice_through, STEPS - 1),
    "with_eval": (with_eval, REPLAYED),
    "other_sizes": (other_sizes, REPLAYED - 1),
    "of_inputs": (of_inputs, REPLAYED),
    "asked_for": (asked_for, 2 * STEPS - WARM_STEPS),
    "hooked": (hooked, REPLAYED),
}


def follows(name: str, stage: int, homeless: bool) -> int:
    """Train twins with a loop; returns how many forwards were replayed."""
    loop, _ = LOOPS[name]
    models, optimizers, _ = twins(stage)
    for model in models if homeless else ():
        model._session.runner.shards.gradients._keeps = False  # as a large model's gradients, they come and go
    for step in range(STEPS):
        results = [loop(m, o, step) for m, o in zip(models, optimizers, strict=True)]
        same(*results, f"losses of step {step}")
        same_everywhere(models, f"after step {step}")
    if loop is hooked:
        for pair in zip(*(o.seen for o in optimizers), strict=True):
            same(*pair, "gradient that a hook saw")
    assert all(m._session.runner.executor.buffers.live_bytes == 0 for m in models)
    return models[0].report().replays


@pytest.mark.parametrize(("name", "homeless"), [(name, i % 2 == 1) for i, name in enumerate(LOOPS)])
def test_replayed_steps_equal_issued_ones(ranks: Pools, name: str, homeless: bool) -> None:
    replays = ranks(2, follows, name=name, stage=3 if homeless else 1, homeless=homeless)
    assert replays == [LOOPS[name][1]] * 2


def outlives(stage: int) -> None:
    """Outputs and gradients that a loop keeps stay as they are, and inputs are its own after the forward."""
    models, optimizers, said = twins(stage)
    replayed, optimizer = models[0], optimizers[0]
    replayed._session.runner.shards.gradients._keeps = False
    kept: list[tuple[Any, Any]] = []
    for step in range(STEPS):
        x = mine(step)
        out = replayed(x)
        if step in (WARM_STEPS, WARM_STEPS + 1):
            x.zero_()
        (2 * out["loss"]).backward()
        if step == WARM_STEPS + 1:
            grad = replayed.get_parameter("middle.weight").grad
            kept.append((grad, grad.to_local().clone()))
        kept.append((out["out"].detach(), out["out"].detach().clone()))
        optimizer.step()
        optimizer.zero_grad()
    for now, then in kept:
        same(now.to_local() if hasattr(now, "to_local") else now, then, "what was kept")
    assert replayed.report().replays == REPLAYED and not said, said


def test_what_a_loop_keeps_is_not_overwritten(ranks: Pools) -> None:
    ranks(2, outlives, stage=3)


def changes_buffers(stage: int) -> None:
    models, optimizers, said = twins(stage, Counting)
    for step in range(2 * STEPS):
        if step in (4, 5, 7, 9):
            for model in models:
                model.scale = torch.full((7,), 1.0 + step)
        same(*(plain(m, o, step) for m, o in zip(models, optimizers, strict=True)), f"losses of step {step}")
        same_everywhere(models, f"after step {step}")
    assert models[0].report().replays == 2 + 1 + 2, said  # recorded three times, then no more
    assert len(said) == 1 and "replaced too often" in said[0], said


def test_buffers_are_written_and_replaced(ranks: Pools) -> None:
    ranks(2, changes_buffers, stage=2)


def replaces_before_backward(stage: int) -> None:
    models, optimizers, _ = twins(stage, Counting)
    for step in range(STEPS):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            first = model(mine(step))["loss"]
            if step == WARM_STEPS:
                model.scale = torch.full((7,), 2.0)
                first = first + model(mine(50))["loss"]
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(first.detach())
        same(*losses, f"losses of step {step}")
        same_everywhere(models, f"after step {step}")


def test_a_buffer_is_replaced_between_a_forward_and_its_backward(ranks: Pools) -> None:
    """The second forward may not give away what the first one left."""
    ranks(2, replaces_before_backward, stage=3)


class Refuses(Again):
    """A device that cannot record the second program."""

    def record(self, body: Any) -> Any:
        if self.forwards:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        return super().record(body)


def cannot_record(stage: int) -> None:
    models, optimizers, said = twins(stage)
    runner = models[0]._session.runner
    runner.tapes = Tapes(runner.executor, partial(Refuses, runner.executor, True), said.append)
    for step in range(STEPS):
        same(*(plain(m, o, step) for m, o in zip(models, optimizers, strict=True)), f"losses of step {step}")
    assert models[0].report().replays == 0
    assert said == ["the device cannot record it: operation not permitted when stream is capturing"], said
    assert runner.executor.buffers.live_bytes == 0


def test_a_device_that_cannot_record(ranks: Pools) -> None:
    ranks(2, cannot_record, stage=3)


def windows(model: Any, optimizer: Any, step: int) -> Tensor:
    """A window of three micro-batches, in the middle of which another runs without gradients."""
    losses = []
    for micro in range(3):
        losses.append(model(mine(10 * step + micro))["loss"])
        if micro == 1:
            with torch.no_grad():
                losses.append(model(mine(90 + step))["loss"])
        losses[-1 - (micro == 1)].backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def within_a_window(stage: int, homeless: bool, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Train twins in windows; returns how many forwards were replayed, and why some were not."""
    models, optimizers, said = twins(stage, gradient_accumulation_steps=3, **options)
    for model in models if homeless else ():
        model._session.runner.shards.gradients._keeps = False
    for step in range(STEPS):
        losses = [windows(m, o, step) for m, o in zip(models, optimizers, strict=True)]
        same(*losses, f"losses of step {step}")
        same_everywhere(models, f"after step {step}")
    assert all(m._session.runner.executor.buffers.live_bytes == 0 for m in models)
    return models[0].report().replays, said


#: options, and how many forwards of the first two windows are replayed: micro-batches of one kind are warm sooner
WINDOWS = [
    (3, False, {}, 0),
    (3, True, {"policy": "keep{units=0},hold{first=99},prefetch"}, 0),
    (3, True, {"policy": "keep{units=99},prefetch", "precision": "bf16"}, 0),
    (3, False, {"policy": "hold{units=0 first=0},prefetch"}, 4),
    (2, True, {"accumulate_dtype": torch.float32, "precision": "bf16"}, 0),
    (1, False, {}, 0),
    (1, True, {"accumulate_dtype": torch.float32, "precision": "bf16"}, 0),
    (0, False, {}, 2),
]


@pytest.mark.parametrize(("stage", "homeless", "options", "early"), WINDOWS)
def test_windows(ranks: Pools, stage: int, homeless: bool, options: dict[str, Any], early: int) -> None:
    for replays, said in ranks(2, within_a_window, stage=stage, homeless=homeless, options=options):
        assert replays == 3 * (STEPS - WARM_STEPS) + early, said
        assert not said


def moves_to_the_host(stage: int) -> None:
    """A step whose activations are offloaded is issued, as when a memory budget finds that out after tapes were made."""
    models, optimizers, said = twins(stage, offload="activations{mib=0}")
    for step in range(STEPS):
        same(*(plain(m, o, step) for m, o in zip(models, optimizers, strict=True)), f"losses of step {step}")
    assert models[0].report().replays == 0 and models[0].report().offloaded_bytes > 0
    assert said == ["activations of it are offloaded"], said


def test_offloaded_activations(ranks: Pools) -> None:
    ranks(2, moves_to_the_host, stage=3)


def says_where(stage: int) -> None:
    with pytest.raises(zcompile.errors.ConfigError, match="debug_nonfinite"):
        zcompile.compile(net(), stage=stage, cuda_graphs=True, debug_nonfinite=True)
    model = zcompile.compile(net(), stage=stage, cuda_graphs=True, backend="eager")
    model(mine(0))["loss"].backward()
    assert model.report().replays == 0 and model._session.runner.tapes is None


def test_options(ranks: Pools) -> None:
    ranks(2, says_where, stage=3)
