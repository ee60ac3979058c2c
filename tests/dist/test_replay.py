"""Replayed steps: the same bits as issued ones, whatever a loop does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zcompile
from tests.dist.models import net
from tests.dist.pool import Pools
from tests.dist.replays import Again, Counting, mine, replayed, same, same_everywhere, twins
from zcompile.errors import BackwardError
from zcompile.runtime.replay.tapes import IN_USE, OTHER_SUMS, WARM_STEPS

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

STEPS = 6
REPLAYED = STEPS - WARM_STEPS


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


def three_batches(model: Any, optimizer: Any, step: int) -> Tensor:
    """What is warm first is a micro-batch that adds to gradients."""
    losses = []
    for micro in range(3):
        losses.append(model(mine(10 * step + micro))["loss"])
        losses[-1].backward()
    model.clip_grad_norm_(0.1)
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
    "with_eval": (with_eval, REPLAYED),
    "three_batches": (three_batches, 3 * STEPS - WARM_STEPS),
    "local_batch": (local_batch, 2 * STEPS - 2 * WARM_STEPS),
    "two_forwards": (two_forwards, STEPS - 1),
    "twice_through": (twice_through, STEPS - 1),
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
        model._session.runner.shards.gradients.stay = False  # as a large model's gradients, they come and go
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
    model, optimizer = models[0], optimizers[0]
    model._session.runner.shards.gradients.stay = False
    kept: list[tuple[Any, Any]] = []
    for step in range(STEPS):
        x = mine(step)
        out = model(x)
        if step in (WARM_STEPS, WARM_STEPS + 1):
            x.zero_()
        (2 * out["loss"]).backward()
        if step == WARM_STEPS + 1:
            grad = model.get_parameter("middle.weight").grad
            kept.append((grad, grad.to_local().clone()))
        kept.append((out["out"].detach(), out["out"].detach().clone()))
        optimizer.step()
        optimizer.zero_grad()
    for now, then in kept:
        same(now.to_local() if hasattr(now, "to_local") else now, then, "what was kept")
    assert model.report().replays == REPLAYED and not said, said


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


def writes_a_buffer(stage: int) -> None:
    """Between a forward and its backward, which needs it as it was."""
    models, optimizers, _ = twins(stage, Counting)
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(mine(step))["loss"]
            if step % 2:
                model.scale.mul_(0.5)
                with pytest.raises(BackwardError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        same_everywhere(models, f"after step {step}")
    assert models[0].report().replays == STEPS - WARM_STEPS - 1


def test_a_buffer_is_written_between_a_forward_and_its_backward(ranks: Pools) -> None:
    ranks(2, writes_a_buffer, stage=3)


def sums_of_others(stage: int) -> None:
    """The local gradients of a window are now of more and now of fewer parameters than when its end was recorded."""
    models, optimizers, said = twins(stage, gradient_accumulation_steps=2, policy="hold{units=0 first=0},prefetch")
    for step in range(3 * STEPS):
        for model in models:
            for micro in range(2):
                model(mine(2 * step + micro), extra=micro == 1 or step % 4 == 3)["loss"].backward()
        same_everywhere(models, f"before the update of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert said == [OTHER_SUMS], said


def test_local_gradients_of_other_parameters(ranks: Pools) -> None:
    ranks(2, sums_of_others, stage=1)


def takes_more(stage: int) -> None:
    """The middle of a window is warm where more stays than any recorded backward left."""
    models, _, said = twins(stage, gradient_accumulation_steps=2, policy="keep{units=99},prefetch")
    for step in range(2 * STEPS):
        extra = step > WARM_STEPS
        for model in models:
            early = (
                model(mine(90), extra=False)["loss"] if extra else None
            )  # it has the memory, so that the first is issued
            model(mine(2 * step), extra=extra)["loss"].backward()
            del early
            model(mine(2 * step + 1), extra=extra)["loss"].backward()
        same_everywhere(models, f"after step {step}")
        for model in models:
            model.zero_grad()
    assert said == [IN_USE] and models[0].report().replays == 2 + 2 * STEPS - WARM_STEPS - 1, said


def test_the_middle_of_a_window_takes_what_no_recording_left(ranks: Pools) -> None:
    ranks(2, takes_more, stage=3)


def cannot_record(stage: int, fails_at: int) -> None:
    models, optimizers, _ = twins(stage)
    said = replayed(models[0], partial(Again, fails_at=fails_at))
    for step in range(STEPS):
        same(*(plain(m, o, step) for m, o in zip(models, optimizers, strict=True)), f"losses of step {step}")
    assert models[0].report().replays == 0
    assert said == ["the device cannot record it: operation not permitted when stream is capturing"], said
    executor = models[0]._session.runner.executor
    assert executor.buffers.live_bytes == 0 and executor.collectives._unfinished == 0


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_device_that_cannot_record(ranks: Pools, fails_at: int) -> None:
    """In the middle of the forward, or of the backward."""
    ranks(2, cannot_record, stage=3, fails_at=fails_at)


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
        model._session.runner.shards.gradients.stay = False
    for step in range(STEPS):
        losses = [windows(m, o, step) for m, o in zip(models, optimizers, strict=True)]
        same(*losses, f"losses of step {step}")
        same_everywhere(models, f"after step {step}")
    assert all(m._session.runner.executor.buffers.live_bytes == 0 for m in models)
    reports = [m.report() for m in models]
    # one replays into places of its own; in `.grad` are none of both
    kept = sum(t.nbytes for t in models[0]._session.runner.executor.accumulation.places.values())
    assert reports[0].gradient_bytes == reports[1].gradient_bytes + kept and (kept > 0) == (stage < 2)
    return reports[0].replays, said


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
