"""Programs of the processes of test_endings.py: training loops in which the last rank fails, dies, leaves or does something else.

``python training_programs.py`` serves requests as ``rank_programs.py`` does.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.functional_export  # imported before the fork, once for all
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn

import zcompile
import zcompile.api
import zcompile.session
from tests.dist.models import rows
from tests.dist.rank_programs import serve
from zcompile.runtime.communication import mesh

FINE = 2  # steps before something happens


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 13), nn.LayerNorm(13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x).tanh()).square().mean()


class Program:
    """One rank's training: ``compile``, then ``steps``."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.is_odd = rank == world_size - 1
        self.step = 0

    def compile(self, **options: Any) -> None:
        options = {"stage": 3, "backend": "eager", "verify": "off", "timeout": self.timeout, **options}
        self.model = zcompile.compile(Net(), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def forward(self) -> torch.Tensor:
        self.step += 1
        return self.model(rows(self.step, self.rank))

    def steps(self, count: int = FINE) -> None:
        for _ in range(count):
            self.forward().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def trained(self, **options: Any) -> None:
        self.compile(**options)
        self.steps()


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


# Before training. -----------------------------------------------------------------------------------------------------


def dies_in_new_group(p: Program) -> None:
    if p.is_odd:
        mesh._own_group = die
    p.compile()


def host_dies_before_compile(p: Program) -> None:
    if p.rank == 0:
        time.sleep(1.0)
        die()
    p.compile()


def dies_in_compile(p: Program) -> None:
    if p.is_odd:
        zcompile.api.adopt = die
    p.compile()


def raises_in_compile(p: Program) -> None:
    if p.is_odd:
        zcompile.api.adopt = lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room"))
    p.compile()


def dies_in_capture(p: Program) -> None:
    p.compile()
    if p.is_odd:
        zcompile.session.capture = die
    p.steps()


def other_device(p: Program) -> None:
    """The model is on another kind of device than the others' models."""
    if p.is_odd:
        mesh.BACKENDS["mps"] = "gloo"
        mesh.Mesh.create(device="mps", timeout=p.timeout)
    p.compile()


def another_pipeline(p: Program) -> None:
    p.compile(pipeline="plan-units,shard{stage=3},unshard,reduce" if p.is_odd else None)


def initialises_alone(p: Program) -> None:
    with torch.device("meta"):
        model = Net()
    zcompile.compile(
        model, backend="eager", timeout=p.timeout, init=(lambda m: m.reset_parameters()) if p.is_odd else None
    )


# In training. ---------------------------------------------------------------------------------------------------------


def dies_in_full_state(p: Program) -> None:
    p.trained()
    if p.is_odd:
        die()
    p.model.full_state_dict()


def dies_in_unsharded(p: Program) -> None:
    p.trained()
    with p.model.unsharded():
        if p.is_odd:
            die()


def dies_in_clip(p: Program) -> None:
    p.trained()
    p.forward().backward()
    if p.is_odd:
        die()
    p.model.clip_grad_norm_(1.0)


def dies_in_torch_clip(p: Program) -> None:
    """In a collective that is not ours: torch's, on the default group."""
    p.trained()
    p.forward().backward()
    if p.is_odd:
        die()
    torch.nn.utils.clip_grad_norm_(p.model.parameters(), 1.0)


def dies_unnoticed(p: Program) -> None:
    """While nobody waits for it."""
    p.trained()
    if p.is_odd:
        die()
    time.sleep(4.0)
    p.steps()


def dies_in_optimizer(p: Program) -> None:
    p.trained()
    if p.is_odd:
        p.optimizer.register_step_pre_hook(die)
    p.steps()


def dies_in_no_sync(p: Program) -> None:
    p.trained()
    with p.model.no_sync():
        p.forward().backward()
        if p.is_odd:
            die()
    p.steps()


def raises_before_backward(p: Program) -> None:
    p.trained()
    loss = p.forward()
    if p.is_odd:
        raise ValueError("a bad label")
    loss.backward()
    p.steps()


def raises_in_a_hook(p: Program) -> None:
    """In user's code that runs in the middle of a backward."""
    p.trained()
    if p.is_odd:
        p.model.norm.bias.register_hook(lambda grad: (_ for _ in ()).throw(ValueError("a bad gradient")))
    p.steps()
    p.steps()


def raises_in_torch_clip(p: Program) -> None:
    """While the others are in a collective of torch's own."""
    p.trained()
    p.forward().backward()
    if p.is_odd:
        time.sleep(1.0)
        raise ValueError("a bad norm")
    torch.nn.utils.clip_grad_norm_(p.model.parameters(), 1.0)


def interrupted(p: Program) -> None:
    """Ctrl-C reaches one rank, which waits for the other."""
    p.trained()
    if p.is_odd:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.alarm(1)
    else:
        time.sleep(2.0)
    p.steps()


def exits(p: Program) -> None:
    p.trained()
    if p.is_odd:
        sys.exit(3)
    p.steps()


def exits_in_forward(p: Program) -> None:
    """``sys.exit`` in the middle of a backward, from a hook."""
    p.trained()
    if p.is_odd:
        p.model.norm.bias.register_hook(lambda grad: sys.exit(3))
    p.steps()
    p.steps()


def stopped_for_a_while(p: Program) -> None:
    """Longer than the timeout; it goes on afterwards, and must not hang."""
    p.trained()
    if p.is_odd:
        if not os.fork():
            parent = os.getppid()
            time.sleep(8.0)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    p.steps()


def data_ends_early(p: Program) -> None:
    p.trained()
    p.steps(1 if p.is_odd else 2)
    p.model.full_state_dict()


def data_ends_early_and_leaves(p: Program) -> None:
    p.trained()
    if p.is_odd:
        dist.destroy_process_group()
        return
    p.steps()


def data_ends_early_at_a_barrier(p: Program) -> None:
    """One rank waits in a collective of its own, the others in one of ours."""
    p.trained()
    if p.is_odd:
        dist.barrier()
    p.steps()


def run(scenario: str, rank: int, world_size: int, init_method: str, timeout: float) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()
    begin = time.monotonic()
    action: Callable[[Program], None] = globals()[scenario]
    try:
        action(Program(rank, world_size, timeout))
    finally:
        print(f"scenario took {time.monotonic() - begin:.1f} s", flush=True)
    print("done")


if __name__ == "__main__":
    process = serve()
    if process is not None:
        request, this = process
        run(request["scenario"], this, request["world_size"], request["init_method"], request["timeout"])
