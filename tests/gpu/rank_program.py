"""What the ranks of the GPU tests run: ``rank_program.py DEVICE BACKEND JOB...``. Rank 0 prints a line of JSON for each job.

Jobs: ``plain``; ``fsdp2:PRECISION``; ``stage:STAGE:PRECISION``; ``fp16:STAGE``, with loss scaling; ``memory:STAGE``;
``offload:STAGE:WHAT`` and ``memory:STAGE:WHAT``, with that on the host; ``raises``; ``killed``; ``asking``, a model that cannot be
replayed; ``closed``, models that were; ``profile``; ``budget``, three memory budgets. ``stage``, ``raises``, ``killed`` and
``profile`` take ``:peers``, for buckets of every size by the copy engines, ``:graphs``, for steps that are replayed, or
``:peers+graphs``.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from examples.llama import Llama, LlamaConfig
from zcompile.profiling.measured import MeasuredStep
from zcompile.runtime import collectives

#: odd sizes, so that rows are padded at two ranks
SMALL = LlamaConfig(vocab_size=509, hidden=256, layers=4, heads=4, kv_heads=2, ffn=515, max_seq=64)
LARGE = LlamaConfig(vocab_size=4096, hidden=1024, layers=8, heads=8, kv_heads=8, ffn=4096, max_seq=64)
MIDDLE = LlamaConfig(vocab_size=2048, hidden=512, layers=4, heads=8, kv_heads=8, ffn=2048, max_seq=64)
MANY = 16  # rows of a rank, where activations are to count
STEPS, ROWS, LR, MAX_NORM = 10, 4, 1e-3, 1.0
PAUSE = 0.2  # seconds
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def data(config: LlamaConfig, step: int, ranks: range, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels of some ranks in a step: something that can be learned."""
    rows = [
        torch.randint(config.vocab_size, (ROWS, config.max_seq), generator=torch.Generator().manual_seed(97 * step + r))
        for r in ranks
    ]
    tokens = torch.cat(rows).to(device)
    return tokens, (7 * tokens + 3) % config.vocab_size


def build(config: LlamaConfig, device: torch.device) -> Llama:
    torch.manual_seed(0)
    return Llama(config).to(device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Any,
    config: LlamaConfig,
    ranks: range,
    device: torch.device,
    steps: int = STEPS,
) -> list[float]:
    """The loss of each step, as this rank sees it."""
    losses = []
    for step in range(steps):
        loss = model(*data(config, step, ranks, device))["loss"]
        loss.backward()
        clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def mean(values: list[float], device: torch.device) -> list[float]:
    """Over ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if WORLD_SIZE > 1:
        dist.all_reduce(tensor)
    return (tensor / WORLD_SIZE).tolist()


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
        range(RANK, RANK + 1),
        device,
    )
    return {"losses": mean(losses, device)}


def compiled(
    config: LlamaConfig, device: torch.device, backend: str, stage: int, precision: str | None, **options: Any
) -> tuple[zcompile.CompiledModule, Any]:
    model = zcompile.compile(
        build(config, device), stage=stage, precision=precision, backend=backend, timeout=20.0, **options
    )
    return model, zcompile.optim.AdamW(model.parameters(), lr=LR)


def stage(device: torch.device, backend: str, number: str, precision: str, way: str = "") -> dict[str, Any]:
    """This project; the flat kernels clip and update."""
    limit = collectives.MIN_BYTES
    collectives.MIN_BYTES = 0 if "peers" in way else limit
    model, optimizer = compiled(
        SMALL, device, backend, int(number), None if precision == "fp32" else precision, cuda_graphs="graphs" in way
    )
    losses = train(model, optimizer, model.clip_grad_norm_, SMALL, range(RANK, RANK + 1), device)
    report = model.report()
    zcompile.unwrap(model)
    collectives.MIN_BYTES = limit
    return {
        "losses": mean(losses, device),
        "gathered_live_bytes": report.gathered_live_bytes,
        "peer_bytes": report.peer_bytes,
        "replays": report.replays,
    }


def offload(device: torch.device, backend: str, number: str, what: str) -> dict[str, Any]:
    """The same training with something on the host."""
    model, optimizer = compiled(SMALL, device, backend, int(number), None, offload=what)
    losses = train(model, optimizer, model.clip_grad_norm_, SMALL, range(RANK, RANK + 1), device)
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fp16(device: torch.device, backend: str, number: str) -> dict[str, Any]:
    """The order of the AMP tutorial, until so many steps were made; the last rank alone overflows in its third try."""
    model, optimizer = compiled(SMALL, device, backend, int(number), "fp16")
    scaler = zcompile.GradScaler(hysteresis=1, growth_interval=4)
    losses: list[float] = []
    scales, changed, tries = [scaler.get_scale()], 0, 0
    while len(losses) < STEPS:
        loss = model(*data(SMALL, len(losses), range(RANK, RANK + 1), device))["loss"]
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


def memory(device: torch.device, backend: str, number: str, what: str | None = None) -> dict[str, Any]:
    """What a larger model holds and takes at most, after two steps; interpreted, to be quick."""
    gc.collect()  # models of other jobs are parts of cycles
    model, optimizer = compiled(LARGE, device, "eager", int(number), None, offload=what, cuda_graphs=False)
    train(model, optimizer, model.clip_grad_norm_, LARGE, range(RANK, RANK + 1), device, steps=2)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    train(model, optimizer, model.clip_grad_norm_, LARGE, range(RANK, RANK + 1), device, steps=2)
    if on_gpu:
        torch.cuda.synchronize()
    result = {
        **model.report(optimizer).to_dict(),
        "allocated_before": before,
        "allocated_after": torch.cuda.memory_allocated() if on_gpu else 0,
        "allocated_peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }
    zcompile.unwrap(model)
    return result


def closed(device: torch.device, backend: str) -> dict[str, Any]:
    """What models that were replayed leave, one after the other."""
    left, replays = [], 0
    for _ in range(3):
        model, optimizer = compiled(SMALL, device, backend, 3, None, cuda_graphs=True)
        train(model, optimizer, model.clip_grad_norm_, SMALL, range(RANK, RANK + 1), device, steps=5)
        replays += model.report().replays
        model.close()
        del model, optimizer
        gc.collect()
        left.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    return {"left": left, "replays": replays}


def budgets(device: torch.device, backend: str) -> dict[str, Any]:
    """The same training under a roomy memory budget, a hopeless one, the least one and one between: what was chosen and allocated."""

    def run(budget: int) -> tuple[Any, list[float], int]:
        gc.collect()
        model, optimizer = compiled(MIDDLE, device, backend, 3, None, memory_budget=budget)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        losses = []
        for step in range(4):
            tokens, labels = (t.repeat(MANY // ROWS, 1) for t in data(MIDDLE, step, range(RANK, RANK + 1), device))
            loss = model(tokens, labels)["loss"]
            loss.backward()
            model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        decision = model.report().decision
        model.close()
        return decision, losses, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

    run(4 << 30)  # libraries have their memory from now on, which counts as beside the model
    roomy = run(4 << 30)[0].chosen.peak_bytes
    try:
        run(1)
        least = 0
    except zcompile.errors.BudgetError as error:
        least = error.least_bytes
    rows = []
    for part in (1.0, 0.4, 0.02):
        budget = int(least + part * (roomy - least))
        decision, losses, allocated = run(budget)
        rows.append(
            {
                "budget": budget,
                "predicted": decision.chosen.peak_bytes,
                "beside": decision.beside_bytes,
                "allocated": allocated,
                "choice": str(decision.chosen.choice),
                "losses": mean(losses, device),
            }
        )
    return {"rows": rows, "roomy": roomy, "least": least}


@torch.library.custom_op("zcompile_tests::asking", mutates_args=())
def asking(x: Tensor) -> Tensor:
    """Doubles what a number on the host, asked of the device, says: no graph can hold that."""
    return x * (2.0 if x.abs().max().item() >= 0 else 1.0)


asking.register_fake(torch.empty_like)
asking.register_autograd(lambda ctx, grad: 2 * grad)


class Asking(nn.Module):
    """A model whose forward waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.last(asking(self.first(x))).square().mean()}


def asks(device: torch.device, backend: str) -> dict[str, Any]:
    """Losses beside those of plain PyTorch; ``cuda_graphs`` has nothing that it could replay."""
    courses = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model: Any = Asking().to(device)
        if compiles:
            model = zcompile.compile(model, backend=backend, timeout=20.0, cuda_graphs=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 16, device=device)
        losses = []
        for _ in range(6):
            loss = model(x)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        courses.append(losses)
    result = {"losses": courses[1], "plain": courses[0], "replays": model.report().replays}
    zcompile.unwrap(model)
    return result


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
        loss = model(*data(SMALL, step, range(RANK, RANK + 1), device))["loss"]
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


def fails(device: torch.device, backend: str, how: str, way: str = "") -> dict[str, Any]:
    """The last rank raises or dies in the middle of training."""
    collectives.MIN_BYTES = 0 if "peers" in way else collectives.MIN_BYTES
    model, optimizer = compiled(SMALL, device, backend, 3, None, cuda_graphs="graphs" in way)
    for step in range(1000):
        if step == 4 and RANK == WORLD_SIZE - 1:
            print("failing", flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad batch")
        train(model, optimizer, model.clip_grad_norm_, SMALL, range(RANK, RANK + 1), device, steps=1)
    return {}


def run_job(job: str, device: torch.device, backend: str) -> dict[str, Any]:
    name, *options = job.split(":")
    jobs: dict[str, Any] = {
        "plain": plain,
        "fsdp2": fsdp2,
        "stage": stage,
        "fp16": fp16,
        "memory": memory,
        "asking": asks,
        "closed": closed,
        "profile": profiles,
        "offload": offload,
        "budget": budgets,
    }
    if name in ("raises", "killed"):
        return fails(device, backend, name, *options)
    return jobs[name](device, backend, *options)


def main() -> None:
    kind, backend, *jobs = sys.argv[1:]
    device = torch.device("cuda", RANK) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    for job in jobs:
        result = run_job(job, device, backend)
        assert all(math.isfinite(loss) for loss in result.get("losses", ())), f"{job}: {result}"
        if RANK == 0:
            print("RESULT " + json.dumps({"job": job, **result}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
