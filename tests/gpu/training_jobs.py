"""Jobs of the GPU tests that train: plain PyTorch, a peer, and zcompile in its ways; and ranks that fail meanwhile."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.gpu.trainees import (
    HERE,
    LR,
    MAX_NORM,
    RANK,
    SMALL,
    STEPS,
    WORLD_SIZE,
    build,
    compiled,
    data,
    local,
    mean,
    train,
)
from zcompile.runtime.communication import collectives

#: of a window
MICRO_BATCHES = 4


def plain(device: torch.device, backend: str) -> dict[str, Any]:
    """One process, the batches of all ranks, PyTorch alone."""
    model = build(SMALL, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = train(
        model, optimizer, lambda m: nn.utils.clip_grad_norm_(model.parameters(), m), SMALL, range(WORLD_SIZE), device
    )
    return {"losses": losses}


def fsdp2(device: torch.device, backend: str, precision: str) -> dict[str, Any]:
    """The peer on the same run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(SMALL, device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (WORLD_SIZE,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = train(
        model,
        optimizer,
        lambda m: nn.utils.clip_grad_norm_(model.parameters(), m),
        SMALL,
        HERE,
        device,
    )
    return {"losses": mean(losses, device)}


def stage(device: torch.device, backend: str, number: str, precision: str, way: str = "") -> dict[str, Any]:
    """This project; the flat kernels clip and update."""
    limit = collectives.MIN_BYTES
    collectives.MIN_BYTES = 0 if "peers" in way else limit
    model, optimizer = compiled(
        SMALL, device, backend, int(number), None if precision == "fp32" else precision, cuda_graphs="graphs" in way
    )
    losses = train(model, optimizer, model.clip_grad_norm_, SMALL, HERE, device)
    report = model.report()
    zcompile.unwrap(model)
    collectives.MIN_BYTES = limit
    return {
        "losses": mean(losses, device),
        "gathered_live_bytes": report.gathered_live_bytes,
        "peer_bytes": report.peer_bytes,
        "replays": report.replays,
    }


def window(device: torch.device, backend: str, number: str, way: str = "") -> dict[str, Any]:
    """The same training in windows of micro-batches: declared ones, over which weights stay gathered, or such of ``no_sync``."""
    steps = 1 if "local" in way else MICRO_BATCHES
    model, optimizer = compiled(
        SMALL, device, backend, int(number), None, gradient_accumulation_steps=steps, cuda_graphs="graphs" in way
    )
    losses = []
    for step in range(STEPS):
        tokens, labels = data(SMALL, step, HERE, device)
        parts = []
        for part in zip(tokens.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            stays = "local" in way and len(parts) < MICRO_BATCHES - 1
            with model.no_sync() if stays else contextlib.nullcontext():
                loss = model(*part)["loss"] / MICRO_BATCHES
                loss.backward()
            parts.append(loss.detach())
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts))
    report = model.report()
    zcompile.unwrap(model)
    return {
        "losses": mean(torch.stack(losses).tolist(), device),
        "gathered_live_bytes": report.gathered_live_bytes,
        "replays": report.replays,
    }


def offload(device: torch.device, backend: str, number: str, what: str) -> dict[str, Any]:
    """The same training with something on the host."""
    model, optimizer = compiled(SMALL, device, backend, int(number), None, offload=what)
    losses = train(model, optimizer, model.clip_grad_norm_, SMALL, HERE, device)
    report = model.report(optimizer)
    assert report.predicted is not None
    states = [t for entry in optimizer.state.values() for key, t in entry.items() if key != "step"]
    zcompile.unwrap(model)
    return {
        "losses": mean(losses, device),
        "gathered_live_bytes": report.gathered_live_bytes,
        "host_bytes": report.host_bytes,
        "predicted_host_bytes": report.predicted.host_bytes,
        "states_on": sorted({local(t).device.type for t in states}),
    }


def fp16(device: torch.device, backend: str, number: str) -> dict[str, Any]:
    """The order of the AMP tutorial, until so many steps were made; the last rank alone overflows in its third try."""
    model, optimizer = compiled(SMALL, device, backend, int(number), "fp16")
    scaler = zcompile.GradScaler(hysteresis=1, growth_interval=4)
    losses: list[float] = []
    scales, changed, tries = [scaler.get_scale()], 0, 0
    while len(losses) < STEPS:
        loss = model(*data(SMALL, len(losses), HERE, device))["loss"]
        scaler.scale(loss).backward()
        shards = [local(p.detach()) for p in model.parameters()]
        if tries == 2 and (number == "0" or RANK == WORLD_SIZE - 1):
            grads = [local(p.grad) for p in model.parameters()]
            next(grad for grad in grads if grad.numel()).view(-1)[-1] = math.inf
        before = [t.clone() for t in shards]
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.step_was_skipped:
            changed += not all(map(torch.equal, before, shards))
        else:
            losses.append(loss.item())
        scales.append(scaler.get_scale())
        tries += 1
    zcompile.unwrap(model)
    everyone: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, scales)
    return {
        "losses": mean(losses, device),
        "scales": scales,
        "same_scales": all(each == scales for each in everyone),
        "changed_by_skipped_steps": changed,
    }


def fails(device: torch.device, backend: str, way: str = "", *, how: str) -> dict[str, Any]:
    """The last rank raises or dies in the middle of training."""
    collectives.MIN_BYTES = 0 if "peers" in way else collectives.MIN_BYTES
    model, optimizer = compiled(SMALL, device, backend, 3, None, cuda_graphs="graphs" in way)
    for step in range(1000):
        if step == 4 and RANK == WORLD_SIZE - 1:
            print("failing", flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad batch")
        train(model, optimizer, model.clip_grad_norm_, SMALL, HERE, device, steps=1)
    return {}
