"""Programs of the processes of test_ranks.py, and the server that forks these processes.

``python rank_programs.py``: imports torch once, reads one request a line, and answers with how its processes ended. Each of
them comes back from ``serve`` and ends as a program of its own does: by its last line, an exception or a signal.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from zcompile.runtime.communication.collectives import Collectives
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.sequence import TextSequence

TRAIN = TextSequence.of("all_gather dp f32 [16, 8] layers.0.weight", "reduce_scatter dp f32 [16, 8] layers.0.weight")
EVAL = TextSequence.of("all_gather dp f32 [16, 8] layers.0.weight")


class Model:
    """Stands for a compiled model: one gather and one reduction a step."""

    def __init__(self, timeout: float) -> None:
        self.mesh = Mesh.create(device="cpu", timeout=timeout)
        self.rank, self.size = self.mesh.rank, self.mesh.size
        self.agreement = Agreement(self.mesh.store, self.rank, self.size, timeout=timeout, name="test")
        self.collectives = Collectives(self.mesh, self.agreement)

    def forward(self, *, train: bool = True, rows: int = 2) -> torch.Tensor:
        self.agreement.event(f"forward ({'train' if train else 'eval'})", TRAIN if train else EVAL)
        full = torch.zeros(self.size * rows, 3)
        shard = torch.full((rows, 3), float(self.rank))
        self.collectives.all_gather([full], [shard], "all_gather of layers.0").wait()
        if train:
            out = torch.zeros(rows, 3)
            self.collectives.reduce_scatter([out], [full], description="reduce_scatter of layers.0").wait()
        return full

    def close(self) -> None:
        self.agreement.close()
        self.collectives.close()
        self.mesh.close()


def steps(model: Model, count: int = 4) -> None:
    for _ in range(count):
        model.forward()


def fine(model: Model) -> None:
    """A slow rank, and sequences that alternate."""
    for step in range(12):
        if step == 5 and model.rank == 1:
            time.sleep(5.0)
        model.forward(train=step % 3 != 2)


def parameters(model: Model) -> None:
    model.agreement.compare("parameters", f"a [4, 2]\nb [{3 + (model.rank == 1)}]")


def absent(model: Model) -> None:
    steps(model)
    if model.rank == 1:
        time.sleep(6.0)
    steps(model)


def deviates(model: Model) -> None:
    steps(model)
    model.forward(train=model.rank != 1)
    steps(model)


def raises(model: Model) -> None:
    steps(model)
    if model.rank == 1:
        raise ValueError("bad batch")
    steps(model)


def caught(model: Model) -> None:
    """An exception in the user's code that the program catches, and then does nothing."""
    steps(model)
    if model.rank == 1:
        model.agreement.raised(ValueError("bad batch"))
        time.sleep(15.0)
    steps(model)


def killed(model: Model) -> None:
    """The last rank dies while the others wait in a collective."""
    steps(model)
    if model.rank == model.size - 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model)


def host_killed(model: Model) -> None:
    """Rank 0, which hosts a TCPStore, dies."""
    steps(model)
    if model.rank == 0:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model)


def killed_before_vote(model: Model) -> None:
    """A rank dies while the others wait for a vote: no connection of a collective breaks."""
    steps(model)
    if model.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model.agreement.compare("state", "a")


def stopped(model: Model) -> None:
    """A rank is stopped, as by a debugger: its connections stay open."""
    steps(model)
    if model.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    steps(model)


def leaves(model: Model) -> None:
    steps(model)
    if model.rank == 1:
        sys.exit(0)
    steps(model)


def host_leaves(model: Model) -> None:
    steps(model)
    if model.rank == 0:
        sys.exit(0)
    steps(model)


def mixed(model: Model) -> None:
    """A rank makes a collective of the runtime that others do not make."""
    for step in range(4):
        model.forward()
        if model.rank == 0 or step < 3:
            model.agreement.event("clip_grad_norm_", TextSequence.of("all_reduce dp f32 [1]"))
            model.collectives.all_reduce([torch.ones(1)], "sum", "all_reduce of the norm").wait()
    model.forward()


def numbers(model: Model) -> None:
    """Values of every collective, in many dtypes, with odd and empty sizes, in flight together."""
    rank, size, c = model.rank, model.size, model.collectives
    model.agreement.event("numbers", EVAL)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32]
    dtypes += [torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]
    shapes = [(3, 2), (0, 4), (7,), (1, 1, 5)]
    shards = [torch.full(s, (rank + 1) % 2 if d is torch.bool else rank + 1).to(d) for d in dtypes for s in shapes]
    fulls = [torch.zeros((size * t.shape[0], *t.shape[1:]), dtype=t.dtype) for t in shards]
    pending = c.all_gather(fulls, shards)
    sent = [torch.full_like(t, 7) for t in shards]
    broadcast = c.broadcast(sent, root=0)
    for op, expected in (("sum", size * (size + 1) / 2), ("avg", (size + 1) / 2), ("max", float(size))):
        floats = [
            t for t in shards if t.is_floating_point() or (op == "sum" and t.dtype in (torch.int64, torch.complex64))
        ]
        reduced = [t.clone() for t in floats]
        inputs = [torch.full((size * t.shape[0], *t.shape[1:]), rank + 1).to(t.dtype) for t in floats]
        outputs = [torch.zeros_like(t) for t in floats]
        works = [c.all_reduce(reduced, op), c.reduce_scatter(outputs, inputs, op)]
        for work in works:
            work.wait()
            work.wait()
        for t in (*reduced, *outputs):
            assert torch.equal(t, torch.full_like(t, expected)), (op, t)
        for t in inputs:
            assert torch.equal(t, torch.full_like(t, rank + 1))
    pending.wait()
    broadcast.wait()
    for t in sent:
        assert torch.equal(t, torch.full_like(t, 7)), t
    for full, shard in zip(fulls, shards, strict=True):
        parts = [torch.full_like(shard, (r + 1) % 2 if shard.dtype is torch.bool else r + 1) for r in range(size)]
        assert torch.equal(full, torch.cat(parts)), full


def same_bits(model: Model) -> None:
    """Reductions repeat bit by bit, equal torch's own, and do not depend on what else is in the bucket."""
    group, size, c = model.mesh.group, model.size, model.collectives
    model.agreement.event("bits", EVAL)
    generator = torch.Generator().manual_seed(model.rank)
    grads = [torch.randn(size * n, 3, generator=generator) for n in (5, 1, 333)]
    runs = []
    for bucket in ([0, 1, 2], [0, 1, 2], [2, 0], [1]):
        outputs = {i: torch.zeros(grads[i].shape[0] // size, 3) for i in bucket}
        c.reduce_scatter([outputs[i] for i in bucket], [grads[i] for i in bucket]).wait()
        runs.append(outputs)
    for i, grad in enumerate(grads):
        own = torch.zeros(grad.shape[0] // size, 3)
        dist.reduce_scatter_tensor(own, grad, op=dist.ReduceOp.AVG, group=group)
        assert all(torch.equal(own, run[i]) for run in runs if i in run)


def two_models(model: Model) -> None:
    other = Model(20.0)
    for _ in range(5):
        model.forward()
        other.forward(train=False)
    other.close()
    steps(model)


def run(scenario: str, rank: int, world_size: int, init_method: str, timeout: float) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=120),
    )
    model = Model(timeout)
    model.agreement.compare("start", scenario)
    begin = time.monotonic()
    try:
        globals()[scenario](model)
    finally:
        print(f"scenario took {time.monotonic() - begin:.1f} s", flush=True)
    model.close()
    dist.destroy_process_group()
    print("done")


def serve() -> tuple[dict[str, Any], int] | None:
    """Fork a process a rank for every request; returns in each of them (the request, its rank), and None at the end of input."""
    gc.freeze()  # collections in the processes need not copy the pages of what was imported
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank in range(request["world_size"]):
            pid = os.fork()
            if not pid:
                redirect(f"{request['folder']}/rank{rank}.log")
                return request, rank
            pids.append(pid)
        print(json.dumps(ends(pids, request["stopped"], request["patience"])), flush=True)
    return None


def redirect(path: str) -> None:
    """Give this process an input without a line and an output of its own."""
    for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(path, os.O_WRONLY | os.O_CREAT))):
        os.dup2(target, number)
    os.dup2(1, 2)


def ends(pids: list[int], stopped: int, patience: float) -> list[int | None]:
    """The exit code of each process, -9 for one that was killed; None of one that had to be, as the stopped one has."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + patience
    waiting = [pid for rank, pid in enumerate(pids) if rank != stopped]
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        for pid in list(waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                waiting.remove(pid)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def main() -> None:
    process = serve()
    if process is not None:
        request, rank = process
        run(request["scenario"], rank, request["world_size"], request["init_method"], request["timeout"])


if __name__ == "__main__":
    main()
