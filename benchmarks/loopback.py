"""One of several ranks on one GPU, which exchanges weights and gradients with itself: what a step costs without a second GPU.

python benchmarks/loopback.py                                   1.1B and 8B: the limit, zcompile alone, and as one of two ranks
python benchmarks/loopback.py --sizes 8B --profile              and where the time of a step goes
python benchmarks/loopback.py --device cpu --sizes tiny --backend eager --steps 2

A rank of two holds half of the states and does all that it would do, but what it fetches from the other it has put there itself, and
what it sends comes back. So the bytes that its memory moves are those of two GPUs. Left out are the link's speed (copies run at that
of the memory), waits for a rank that is later, and collectives that are too small for the copy engines, which do nothing. Copies
within a device disturb computation a little more than those between two. Gradients and losses are not those of training on two batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zcompile.api
from benchmarks.measure import Clock, Here, attempt, one_step
from benchmarks.rows import Row
from benchmarks.systems import SYSTEMS, Options, Trainee, batch
from benchmarks.train_step import compare, table
from zcompile.runtime.communication.direct import DirectCollectives
from zcompile.runtime.communication.mesh import DEFAULT_AXIS, Mesh
from zcompile.runtime.communication.peers import PeerCopies


class Echo:
    """Memory of a rank that stands for that of all: who fetches from another finds what it has put there itself."""

    def __init__(self, num_bytes: int, device: torch.device, num_ranks: int, spin: int) -> None:
        self._spin = spin
        self.slabs = [torch.zeros(num_bytes, dtype=torch.uint8, device=device)] * num_ranks

    def barrier(self) -> None:
        """Everybody is here, after so many of the device's cycles."""
        if self._spin:
            torch.cuda._sleep(self._spin)

    def unblock(self) -> None:
        """Nobody waits."""


class Alone(Here):
    """This process, without others to meet."""

    @classmethod
    def start(cls, kind: str, num_ranks: int = 2) -> Alone:
        """Make a process group of so many ranks, whose collectives end at once and do nothing."""
        import torch.testing._internal.distributed.fake_pg

        device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=num_ranks)
        return cls(0, num_ranks, device, None)

    def meet(self, text: str = "") -> list[str]:
        return [text]


@contextlib.contextmanager
def echoing(num_ranks: int, spin: int = 0) -> Iterator[None]:
    """Inside, models are compiled for the first of so many ranks, of which the others do not exist. Barriers spin for cycles."""

    def create(_: Any = None, *, device: torch.device, timeout: float) -> Mesh:
        if num_ranks == 1:
            return Mesh(DEFAULT_AXIS, 1, 0, device, timeout)
        ranks = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=(DEFAULT_AXIS,))
        group = dist.new_group(backend="fake")
        return Mesh(DEFAULT_AXIS, num_ranks, 0, device, timeout, ranks, group, None, DirectCollectives(group))

    def connect(mesh: Mesh, _: Any) -> PeerCopies | None:
        if mesh.device.type != "cuda":
            return None
        return PeerCopies(mesh.rank, mesh.size, mesh.device, lambda size: Echo(size, mesh.device, mesh.size, spin))

    with mock.patch.object(Mesh, "create", create), mock.patch.object(zcompile.api, "connect", connect):
        yield


def profiled(options: Options, *, system: str) -> Trainee:
    """A system whose steps are profiled too, after they were measured."""
    trainee = SYSTEMS[system](options)
    facts = trainee.facts

    def with_profile() -> dict[str, Any]:
        with trainee.model.profile(steps=3) as profile:  # type: ignore[operator]
            for _ in range(5):
                one_step(trainee, *batch(options, 0), options.clip, Clock(options.device))
        return facts() | {"profile": str(profile)}

    trainee.facts = with_profile
    return trainee


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1.1B,8B")
    parser.add_argument("--systems", default="single,single-zc,zc3", help="single and single-zc are of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument(
        "--spin", type=int, default=0, help="cycles for which a kernel spins at every barrier; 0: no kernel"
    )
    parser.add_argument("--policy", help="zcompile's policy; default: its own")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--profile", action="store_true", help="print a profile of three steps of zcompile's systems")
    parser.add_argument("--json", type=Path, help="write all results here")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    here = Alone.start(args.device, args.ranks)
    everything = []
    for size in args.sizes.split(","):
        rows = []
        for system in args.systems.split(","):
            num_ranks = 1 if system.startswith("single") else args.ranks
            name = system
            if args.profile and system != "single":
                SYSTEMS[name := f"{system}-profiled"] = partial(profiled, system=system)
            row = Row(name, size, backend=args.backend, steps=args.steps, policy=args.policy)
            before = here.give_back()
            with echoing(num_ranks, args.spin):
                result = attempt(row, replace(here, world_size=num_ranks), before)
            if system == "single" and "error" not in result:
                result["copy_bytes_per_s"] = here.copy_bandwidth()
            rows.append({"size": size, "system": system, **result})
            print(f"{size} {system}: {result.get('error') or result['step_ms']}", file=sys.stderr, flush=True)
        compare(rows, args.ranks)
        print(f"\n{size}, one of {args.ranks} ranks\n\n{table(rows)}\n", flush=True)
        for row in rows:
            if "profile" in row:
                print(row["profile"], flush=True)
        everything += rows
    if args.json is not None:
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
