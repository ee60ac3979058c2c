"""Kills a rank at a random point of a short training run, again and again, and goes on from the latest checkpoint.

python benchmarks/faults.py                       30 kills on two and three CPU ranks; a table, and an error if anything is wrong
python benchmarks/faults.py --kills 3 --seed 7

Each run trains with dropout, AdamW and a schedule, and saves after every step. One rank is killed (SIGKILL) at a random moment of
a forward, a backward, an optimizer step or a save. Then: the others must end by themselves with an error that says so, within
the timeout and 10 s; no process may be left; the checkpoint must load; and training from it must end with the very bits of a run
that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo.functional_export  # imported once, before ranks are forked, as are the next three
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.tensor
from torch import nn

import zcompile

PHASES = ("forward", "backward", "step", "save")
STEPS = 8
TIMEOUT = 20.0
#: seconds beyond the timeout in which the last survivor must have ended
GRACE = 10.0
#: seconds after which a run that does not end is killed: machines are busy
PATIENCE = 180.0


@dataclass(frozen=True)
class Kill:
    """Which rank dies, and when: ``moment`` is a share of the time that its phase took in the step before."""

    world_size: int
    rank: int
    step: int
    phase: str
    moment: float
    asynchronous: bool


@dataclass
class Result:
    """What one kill led to."""

    kill: Kill
    seconds: float
    survivors: list[int]
    clear: bool
    orphans: int
    checkpoint_step: int
    loads: bool
    equal: bool
    texts: list[str]

    @property
    def problems(self) -> list[str]:
        found = {
            f"survivors ended {self.seconds:.0f} s later": self.seconds > TIMEOUT + GRACE,
            f"survivors ended with {self.survivors}": any(code != 1 for code in self.survivors),
            "a survivor does not say which rank is gone": not self.clear,
            f"{self.orphans} processes are left": self.orphans > 0,
            "the checkpoint does not load": not self.loads,
            "training from the checkpoint gives other bits": not self.equal,
        }
        return [text for text, is_so in found.items() if is_so]


# What a rank does. ----------------------------------------------------------------------------------------------------


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 45), nn.Tanh(), nn.Dropout(0.2), nn.Linear(45, 45), nn.ReLU(), nn.Linear(45, 16))


class Data:
    """Batches of one rank, and the position in them."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * self.position + self.rank))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Killer:
    """Kills this process some time after a phase has begun."""

    def __init__(self, kill: Kill | None) -> None:
        self.kill = kill
        self.lasted = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        begin = time.monotonic()
        is_last = self.kill is not None and (step, name) == (self.kill.step, self.kill.phase)
        if is_last:
            seconds = self.lasted[name] * self.kill.moment
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        yield
        self.lasted[name] = time.monotonic() - begin
        if is_last:  # it was quicker than the last time; what an asynchronous save does goes on for a while
            time.sleep(0.02 * self.kill.moment if name == "save" else 0.0)
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, world_size: int, port: int, folder: Path, kill: Kill | None, asynchronous: bool) -> None:
    """Train from the checkpoint in ``folder``, if there is one, to the end; rank 0 leaves what came of it there."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0)
    limit = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    model = zcompile.compile(build(), backend="eager", verify="off", timeout=TIMEOUT)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    data, path, first = Data(rank), folder / "checkpoint", 0
    helpers: dict[str, Any] = {"scheduler": scheduler, "data": data}
    torch.manual_seed(rank)
    if path.exists():
        first = zcompile.load_checkpoint(path, model, optimizer, **helpers).step
        (folder / f"loaded{rank}").write_text(str(first))
    killer = Killer(kill)
    for step in range(first, STEPS):
        with killer.phase(step, "forward"):
            x = data.next()
            loss = (model(x) - x).square().mean()
        with killer.phase(step, "backward"):
            loss.backward()
        with killer.phase(step, "step"):
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        with killer.phase(step, "save"):
            zcompile.save_checkpoint(path, model, optimizer, step=step + 1, asynchronous=asynchronous, **helpers)
    state = {**model.full_state_dict(), "lr": torch.tensor(scheduler.get_last_lr())}
    for name, entry in model.full_optimizer_state_dict(optimizer)["state"].items():
        state |= {f"{name}.{key}": value for key, value in entry.items()}
    if rank == 0:
        (folder / "result").write_text(digest(state))
    dist.barrier()


def digest(state: dict[str, Any]) -> str:
    """A hash of every bit."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        data = torch.as_tensor(value).detach().contiguous()
        found.update(f"{name} {data.dtype} {tuple(data.shape)}".encode())
        found.update(data.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# The processes. -------------------------------------------------------------------------------------------------------


def fork(work: Callable[[], None], log: Path) -> int:
    """A child in a session of its own that does ``work`` and ends as a program does."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    torch.set_num_threads(1)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    work()
    sys.exit(0)


def run(world_size: int, folder: Path, kill: Kill | None = None, asynchronous: bool = False) -> list[tuple[int, float]]:
    """Train on all ranks; the exit code of each and when it ended. A rank that does not end counts as -100."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(world_size):
        mine = kill if kill is not None and kill.rank == rank else None
        log = folder / f"rank{rank}.log"
        pids.append(fork(lambda r=rank, k=mine: train(r, world_size, port, folder, k, asynchronous), log))
    ends: dict[int, tuple[int, float]] = {}
    deadline = time.monotonic() + PATIENCE
    while len(ends) < world_size and time.monotonic() < deadline:
        time.sleep(0.01)
        for pid in [p for p in pids if p not in ends]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[pid] = os.waitstatus_to_exitcode(status), time.monotonic()
    for pid in [p for p in pids if p not in ends]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ends[pid] = -100, time.monotonic()
    global orphans
    orphans = end_sessions(pids)
    return [ends[pid] for pid in pids]


#: processes that the latest run left behind
orphans = 0


def end_sessions(sessions: list[int]) -> int:
    """How many processes of these sessions were left; they are killed."""
    left = 0
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                left += 1
    return left


def said(log: Path) -> str:
    """The end of what a rank printed, without what a library says of its own leaks when a fork ends."""
    return log.read_text().partition("nanobind: leaked")[0][-3000:]


def attempt(kill: Kill, folder: Path, reference: str) -> Result:
    """One kill and what follows."""
    ends = run(kill.world_size, folder, kill, kill.asynchronous)
    left = orphans
    survivors = [end for rank, end in enumerate(ends) if rank != kill.rank]
    texts = [said(folder / f"rank{r}.log") for r in range(kill.world_size) if r != kill.rank]
    if ends[kill.rank][0] != -signal.SIGKILL:
        raise RuntimeError(f"{kill} did not die: {ends}\n" + "\n".join(texts))
    seconds = max(end for _, end in survivors) - ends[kill.rank][1]
    again = run(kill.world_size, folder)
    loaded = [folder / f"loaded{rank}" for rank in range(kill.world_size)]
    steps = {int(file.read_text()) for file in loaded if file.exists()}
    result = folder / "result"
    return Result(
        kill,
        seconds,
        [code for code, _ in survivors],
        all(f"rank {kill.rank} is gone" in text or f"rank {kill.rank}, which" in text for text in texts),
        left + orphans,
        checkpoint_step=min(steps, default=-1),
        loads=len(steps) == 1 and all(file.exists() for file in loaded) and all(code == 0 for code, _ in again),
        equal=result.exists() and result.read_text() == reference,
        texts=texts,
    )


def campaign(
    num_kills: int, seed: int, phases: Sequence[str] = PHASES, show: Callable[[str], None] = print
) -> list[Result]:
    """Kill after kill, over all phases and ranks in turn."""
    gc.freeze()  # collections in the ranks need not copy the pages of what was imported
    chance = random.Random(seed)
    references: dict[int, str] = {}
    results = []
    for number in range(num_kills):
        world_size = 2 + number % 2
        phase = phases[number % len(phases)]
        rank = chance.randrange(world_size)
        kill = Kill(world_size, rank, chance.randrange(2, STEPS), phase, chance.random(), chance.random() < 0.5)
        folder = Path(tempfile.mkdtemp(prefix="faults"))
        if world_size not in references:
            ends = run(world_size, folder)
            if any(code for code, _ in ends):
                raise RuntimeError(f"the undisturbed run ended with {ends}: {(folder / 'rank0.log').read_text()}")
            references[world_size] = (folder / "result").read_text()
            shutil.rmtree(folder)
            folder.mkdir()
        result = attempt(kill, folder, references[world_size])
        results.append(result)
        show(
            f"{number + 1}: {kill}: {result.seconds:.1f} s, checkpoint of step {result.checkpoint_step}, {result.problems}"
        )
        if result.problems:
            show("\n".join(result.texts))
        shutil.rmtree(folder)
    gc.unfreeze()
    return results


def table(results: list[Result]) -> str:
    """One row a phase, and all."""
    lines = [
        "| killed in | kills | exit s, median | max | no orphan | loads | equal bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for phase in (*PHASES, "all"):
        rows = [r for r in results if phase in (r.kill.phase, "all")]
        if rows:
            seconds = [r.seconds for r in rows]
            counts = (sum(r.orphans == 0 for r in rows), sum(r.loads for r in rows), sum(r.equal for r in rows))
            shares = " | ".join(f"{count}/{len(rows)}" for count in counts)
            lines.append(
                f"| {phase} | {len(rows)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | {shares} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = campaign(args.kills, args.seed, args.phases.split(","))
    print(table(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) | {"problems": r.problems} for r in results]))
    if any(r.problems for r in results):
        sys.exit("something went wrong; see above")


if __name__ == "__main__":
    main()
