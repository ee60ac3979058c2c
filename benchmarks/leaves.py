"""What autograd's engine takes for the leaves of a graph that it has nothing to add to: an undefined gradient for each.

python benchmarks/leaves.py                 on the CPU
python benchmarks/leaves.py --device cuda   on a GPU, where the engine has a thread of its own, and without that thread
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Nothing(torch.autograd.Function):
    """Leads to many leaves and gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.none = (None,) * len(leaves)
        return leaves[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
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
    for threads in (True, False) if device.startswith("cuda") else (False,):
        torch.autograd.set_multithreading_enabled(threads)
        for count in (1, 30, 111, 300):
            leaves = [torch.zeros(3, device=device, requires_grad=True) for _ in range(count)]
            end, one = Nothing.apply(*leaves), torch.ones((), device=device)
            apply = median_us(lambda leaves=leaves: Nothing.apply(*leaves), finish)
            run = median_us(lambda end=end, one=one: torch.autograd.backward(end, one, retain_graph=True), finish)
            print(f"{count:>8}{'own thread' if threads else 'calling thread':>16}{apply:>10.0f}{run:>13.0f}")


if __name__ == "__main__":
    main()
