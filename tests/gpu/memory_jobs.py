"""Jobs of the GPU tests that look at memory."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch

import zcompile
from tests.gpu.trainees import HERE, LARGE, MAX_NORM, MIDDLE, ROWS, SMALL, compiled, data, mean, train

#: pages of the allocator that are in use in part, bytes: 20 MiB for each stream that has large tensors
PAGES = 60 << 20
MANY = 16  # rows of a rank, where activations are to count


def memory(device: torch.device, backend: str, number: str, what: str | None = None) -> dict[str, Any]:
    """What a larger model holds and takes at most, after two steps; interpreted, to be quick."""
    gc.collect()  # models of other jobs are parts of cycles
    model, optimizer = compiled(LARGE, device, "eager", int(number), None, offload=what, cuda_graphs=False)
    train(model, optimizer, model.clip_grad_norm_, LARGE, HERE, device, steps=2)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    train(model, optimizer, model.clip_grad_norm_, LARGE, HERE, device, steps=2)
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
        train(model, optimizer, model.clip_grad_norm_, SMALL, HERE, device, steps=5)
        replays += model.report().replays
        model.close()
        del model, optimizer
        gc.collect()
        left.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    return {"left": left, "replays": replays}


def budgets(device: torch.device, backend: str) -> dict[str, Any]:
    """The same training under a roomy memory budget, a hopeless one, the least one and one between: what was chosen and allocated.

    From the second step on the device has little more than the budget, so that what is lost between allocations would be missing.
    """

    def limit(num_bytes: float) -> None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)

    def run(budget: int) -> tuple[Any, list[float], int]:
        gc.collect()
        limit(math.inf)
        model, optimizer = compiled(MIDDLE, device, backend, 3, None, memory_budget=budget)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        losses = []
        for step in range(4):
            if step == 1:
                limit(budget + PAGES)
            tokens, labels = (t.repeat(MANY // ROWS, 1) for t in data(MIDDLE, step, HERE, device))
            loss = model(tokens, labels)["loss"]
            loss.backward()
            model.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        decision = model.report().decision
        model.close()
        limit(math.inf)
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
