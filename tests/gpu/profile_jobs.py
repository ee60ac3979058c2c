"""A job of the GPU tests: a profile of steps that are delayed on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import zcompile
from tests.gpu.trainees import HERE, MAX_NORM, RANK, SMALL, STEPS, WORLD_SIZE, compiled, data, mean
from zcompile.profiling.measured import MeasuredStep
from zcompile.runtime.communication import collectives

PAUSE = 0.2  # seconds


def delay(device: torch.device, seconds: float) -> Callable[[], None]:
    """Work that keeps the device busy for so long, and not the host; on the CPU both."""
    if device.type != "cuda":
        return lambda: time.sleep(seconds)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 20_000_000
    for _ in range(2):  # the first raises the clock
        first.record()
        torch.cuda._sleep(cycles)
        last.record()
        last.synchronize()
    cycles = int(cycles * seconds * 1e3 / first.elapsed_time(last))
    return lambda: torch.cuda._sleep(cycles)


def profiles(device: torch.device, backend: str, way: str = "") -> dict[str, Any]:
    """Training of which three steps are profiled: the first as it is, in the second the host pauses, in the third the last rank's
    device has something else to do between forward and backward."""
    limit = collectives.MIN_BYTES
    collectives.MIN_BYTES = 0 if "peers" in way else limit
    model, optimizer = compiled(SMALL, device, backend, 3, None, cuda_graphs="graphs" in way)
    busy = delay(device, PAUSE)
    losses, replays, profile = [], [], None
    for step in range(STEPS):
        if step == 4:
            profile = model.profile(steps=3)  # 4 shows memory, 5 to 7 are timed
        replays.append(model.report().replays)
        loss = model(*data(SMALL, step, HERE, device))["loss"]
        if step == 7 and RANK == WORLD_SIZE - 1:
            busy()
        loss.backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 6:
            if device.type == "cuda":
                torch.cuda.synchronize()
            time.sleep(PAUSE)
    assert profile is not None and profile.done, profile
    program = model._session.latest.program
    instructions = [*program.forward.program.nodes, *program.backward.program.nodes]
    found = {
        "losses": mean(torch.stack(losses).tolist(), device),
        "gathered_live_bytes": model.report().gathered_live_bytes,
        "replays": [*replays, model.report().replays],
        "step_us": [s.step_us for s in profile.steps],
        "shares": [s.shares for s in profile.steps],
        "ranks": [dict(shares) for shares in profile.gather().shares],
        "in_order": all(_in_order(s, instructions) for s in profile.steps),
        "streams": sorted({s.stream for s in profile.steps[0].spans}),
        "collectives": [[s.start_us, s.end_us, s.bytes] for s in profile.steps[0].collectives()],
        "alive_bytes": [num_bytes for _, _, num_bytes in profile.memory],
        "num_times": len(profile.region_times()),
        "text": str(profile),
    }
    zcompile.unwrap(model)
    collectives.MIN_BYTES = limit
    return found


def _in_order(step: MeasuredStep, instructions: list[str]) -> bool:
    """Whether every instruction is there once, in order, and each span begins where the one before ends."""
    spans = [s for s in step.spans if s.stream == "compute"]
    names = [s.name for s in spans if s.phase in ("forward", "backward") and s.kind != "gap"]
    ends = [0.0, *(s.end_us for s in spans)]
    return names == instructions and all(s.start_us == end for s, end in zip(spans, ends, strict=False))
