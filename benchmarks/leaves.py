"""What autograd's engine takes for the leaves of a graph that it has nothing to add to: an undefined gradient for each.

python benchmarks/leaves.py                 on the CPU
python benchmarks/leaves.py --device cuda   on a GPU, where the engine has a thread of its own

There are three rows for each number of leaves then: all in that thread; the node there, and its leaves handed to the calling thread, as
steps of zcompile do; all in the calling thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Nothing(torch.autograd.Function):
    """Leads to many leaves and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, hands_over: bool, *leaves: Tensor) -> Tensor:
        ctx.hands_over, ctx.none = hands_over, (None,) * (1 + len(leaves))
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        if ctx.hands_over:
            torch.autograd.set_multithreading_enabled(False)
        return ctx.none


def median_us(call: Callable[[], Any], finish: Callable[[], Any], times: int = 300) -> float:
    seconds = []
    for _ in range(times):
        finish()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    finish = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    print(f"{'leaves':>8}{'engine':>16}{'apply us':>10}{'backward us':>13}")
    kinds = {"own thread": (True, False), "node only": (True, True)} if device.startswith("cuda") else {}
    for name, (threads, hands_over) in {**kinds, "calling thread": (False, False)}.items():
        torch.autograd.set_multithreading_enabled(threads)
        for count in (1, 30, 111, 300):
            leaves = [torch.zeros(3, device=device, requires_grad=True) for _ in range(count)]
            make = partial(Nothing.apply, hands_over, *leaves)
            run = partial(torch.autograd.backward, make(), torch.ones((), device=device), retain_graph=True)
            print(f"{count:>8}{name:>16}{median_us(make, finish):>10.0f}{median_us(run, finish):>13.0f}")


if __name__ == "__main__":
    main()
