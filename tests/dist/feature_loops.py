"""Features of training loops: hooks, moving averages, clipping, accumulation, schedulers, and other wrappers."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zcompile
from tests.dist.feature_programs import both, close, close_state, compiled, everyone, mine, ordinary_step
from tests.dist.models import net
from tests.dist.training import adamw, assert_close_gradients, full, full_gradients


def gradient_hooks(stage: int) -> None:
    """A hook that halves a gradient sees it reduced and changes what the optimizer gets."""
    both(stage, ordinary_step, lambda m: m.get_parameter("middle.weight").register_hook(lambda g: g * 0.5))


def post_accumulate_hooks(stage: int) -> None:
    """A hook that clips each gradient where it was accumulated."""

    def clamp(p: Tensor) -> None:
        p.grad.clamp_(-1e-3, 1e-3)  # type: ignore[union-attr]

    def prepare(model: nn.Module) -> None:
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(clamp)

    both(stage, ordinary_step, prepare)


def forward_hooks(stage: int) -> None:
    """A hook that changes a layer's output is part of the graph."""
    both(stage, ordinary_step, lambda m: m.get_submodule("middle").register_forward_hook(lambda _, i, out: out * 0.7))


def backward_hooks(stage: int) -> None:
    model = net()
    model.middle.register_full_backward_hook(lambda module, grads, outs: None)
    compiled(stage, model)(mine(0))


def average_by_hand(stage: int) -> None:
    """A moving average over ``named_parameters()``, and an evaluation with it in the model's place."""
    averages: list[dict[str, Tensor]] = []

    def prepare(model: nn.Module) -> None:
        averages.append({n: p.detach().clone() for n, p in model.named_parameters()})

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        ordinary_step(model, optimizer, x)
        average = averages[0 if len(averages) == 2 and x.shape[0] == 3 else 1]
        with torch.no_grad():
            for n, p in model.named_parameters():
                average[n].lerp_(p.detach(), 0.25)

    both(stage, step, prepare)
    mine_average, want = averages
    for name, value in want.items():
        close(mine_average[name], value, f"average of {name}")
    model, reference = compiled(stage), net()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(mine_average[name])
        for name, p in reference.named_parameters():
            p.copy_(want[name])
        close(model(mine(9))["out"], reference(mine(9))["out"], "output with the average")


def averaged_model(stage: int) -> None:
    """torch's own wrapper, compiled beside the model, follows it and can be called."""
    decay = get_ema_multi_avg_fn(0.75)
    model, reference = compiled(stage), net()
    average = compiled(stage, AveragedModel(net(), multi_avg_fn=decay))
    want = AveragedModel(net(), multi_avg_fn=decay)
    optimizers = adamw(model), adamw(reference)
    for step in range(4):
        ordinary_step(model, optimizers[0], mine(step))
        ordinary_step(reference, optimizers[1], everyone(step))
        average.update_parameters(model)
        want.update_parameters(reference)
    close_state(average, want)
    with torch.no_grad():
        close(average(mine(9))["out"], want(mine(9))["out"], "output of the average")


def copies(stage: int) -> None:
    copy.deepcopy(compiled(stage))


def clips(stage: int) -> None:
    """torch's clipping and ours give the norm of the whole and the same weights."""
    for ours in (False, True):
        norms: list[float] = []

        def step(
            model: Any, optimizer: torch.optim.Optimizer, x: Tensor, ours: bool = ours, norms: list[float] = norms
        ) -> None:
            model(x)["loss"].backward()
            if ours and isinstance(model, zcompile.CompiledModule):
                norm = model.clip_grad_norm_(0.05)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            norms.append(float(full(norm)))
            optimizer.step()
            optimizer.zero_grad()

        both(stage, step)
        torch.testing.assert_close(norms[::2], norms[1::2], rtol=1e-5, atol=0)


def accumulates(stage: int) -> None:
    """Two backwards a step, the first inside ``no_sync`` on every other step."""
    model, reference = compiled(stage), net()
    optimizers = adamw(model), adamw(reference)
    for step in range(4):
        if step % 2:
            with model.no_sync():
                model(mine(10 * step))["loss"].backward()
        else:
            model(mine(10 * step))["loss"].backward()
        model(mine(10 * step + 1))["loss"].backward()
        for number in (10 * step, 10 * step + 1):
            reference(everyone(number))["loss"].backward()
        assert_close_gradients(full_gradients(model), reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close_state(model, reference)


def schedules(stage: int) -> None:
    """A stock scheduler changes the rate of a stock optimizer; its state and the optimizer's go through torch.save."""
    model, reference = compiled(stage), net()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in optimizers]
    for step in range(4):
        for each, x, optimizer, scheduler in zip(
            (model, reference), (mine(step), everyone(step)), optimizers, schedulers, strict=True
        ):
            ordinary_step(each, optimizer, x)
            scheduler.step()
        saved = io.BytesIO()
        torch.save(schedulers[0].state_dict(), saved)
        saved.seek(0)
        schedulers[0].load_state_dict(torch.load(saved, weights_only=False))
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    close_state(model, reference)


def double_backward(stage: int) -> None:
    model = compiled(stage, differentiable=["out"])
    x = mine(0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x)["out"].sum(), x, create_graph=True)
    grad.square().sum().backward()


def wrapped_in_ddp(stage: int) -> None:
    compiled(stage, nn.parallel.DistributedDataParallel(net(), find_unused_parameters=True))


def wrapped_in_dp(stage: int) -> None:
    compiled(stage, nn.DataParallel(net()))


def wrapped_in_fsdp(stage: int) -> None:
    from torch.distributed.fsdp import fully_shard

    compiled(stage, fully_shard(net()))
