"""Thousands of steps of a tiny model: nothing may pile up. Training, evaluation, ``no_sync``, full states and checkpoints.

python benchmarks/soak.py                                2,000 steps on two CPU ranks; a table, and an error if anything grows
python benchmarks/soak.py --steps 300 --json out.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from benchmarks.processes import logs, ranks

#: steps of one round: everything that a run does happens in each
ROUND = 100
#: rounds before the first sample: every signature has been seen, and every cache has its size
SETTLE = 2
#: how much may be added after that, as a share of the first sample, and in numbers
ALLOWED_SHARE = {"rss_bytes": 0.02}
ALLOWED_NUMBER = {"threads": 0, "files": 0, "store_keys": 4, "objects": 200, "tensors": 4}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 45), nn.Tanh(), nn.Linear(45, 45), nn.Dropout(0.1), nn.Linear(45, 16))


def sample(store: dist.Store) -> dict[str, int]:
    """What could grow. Objects and tensors are those that the collector of cycles knows."""
    gc.collect()
    process, objects = psutil.Process(), gc.get_objects()
    return {
        "rss_bytes": process.memory_info().rss,
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "store_keys": store.num_keys(),
        "objects": len(objects),
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
    }


class Run:
    """One rank's training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        self.model = zcompile.compile(build(), backend="eager", timeout=60.0)
        self.optimizer = zcompile.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(self.rank)

    def loss(self, rows: int = 4) -> torch.Tensor:
        x = torch.randn(rows, 16, generator=self.generator)
        return (self.model(x) - x).square().mean()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss(rows=8)
        self.model.train()

    def step(self, number: int) -> None:
        if number % 10 == 9:
            with self.model.no_sync():
                self.loss().backward()
        self.loss().backward()
        if number % 2:
            self.model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number % 25 == 24:
            self.evaluate()
        if number % 50 == 49:
            self.model.full_state_dict()
            self.model.report(self.optimizer).to_dict()
        if number % ROUND == ROUND - 1:
            with self.model.unsharded():
                pass
            where = self.folder / f"checkpoint{number // ROUND % 2}"
            zcompile.save_checkpoint(where, self.model, self.optimizer, step=number)


def run_rank(steps: int, folder: Path) -> None:
    """What one process does; it leaves its samples in the folder."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    run, samples = Run(folder), []
    for number in range(steps):
        run.step(number)
        if number % ROUND == ROUND - 1 and number + 1 >= SETTLE * ROUND:
            samples.append({"step": number + 1, **sample(store)})
    (folder / f"samples{rank}.json").write_text(json.dumps(samples))
    dist.barrier()
    dist.destroy_process_group()


def growth(samples: list[dict[str, int]]) -> dict[str, tuple[int, int, bool]]:
    """By name: the first value, the most later, and whether that is within what is allowed."""
    first, later = samples[0], samples[1:]
    result = {}
    for name in (*ALLOWED_SHARE, *ALLOWED_NUMBER):
        most = max(s[name] for s in later)
        limit = first[name] * (1 + ALLOWED_SHARE[name]) if name in ALLOWED_SHARE else first[name] + ALLOWED_NUMBER[name]
        result[name] = (first[name], most, most <= limit)
    return result


def soak(steps: int, world_size: int, folder: Path) -> list[list[dict[str, int]]]:
    """The samples of each rank."""
    arguments = ["--rank", "--steps", str(steps), "--folder", str(folder)]
    with ranks(world_size, folder, "benchmarks/soak.py", *arguments) as processes:
        codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}\n{logs(folder, world_size)}")
    return [json.loads((folder / f"samples{rank}.json").read_text()) for rank in range(world_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help=f"a multiple of {ROUND}, more than {SETTLE * ROUND}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.steps, args.folder)
        return
    if args.steps <= SETTLE * ROUND or args.steps % ROUND:
        parser.error(f"steps is {args.steps}; it must be a multiple of {ROUND}, more than {SETTLE * ROUND}")
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(args.steps, args.ranks, Path(folder))
    print(f"| rank | what | step {samples[0][0]['step']} | most until step {args.steps} | |\n|---|---|---|---|---|")
    grew: list[Any] = []
    for rank, own in enumerate(samples):
        for name, (first, most, fine) in growth(own).items():
            print(f"| {rank} | {name} | {first:,} | {most:,} | {'ok' if fine else 'GROWS'} |")
            grew += [] if fine else [(rank, name)]
    if args.json:
        args.json.write_text(json.dumps(samples))
    if grew:
        sys.exit(f"these grow: {grew}")


if __name__ == "__main__":
    main()
