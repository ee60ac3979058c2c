"""What moving weights and gradients by copy engines costs the computation beside it, on one GPU.

python benchmarks/exchange.py                  on streams of high priority, as the runtime does
python benchmarks/exchange.py --priority 0     on streams of the computation's priority

The products of one block's forward and backward run on one stream, what one of two ranks does for its collectives on two others: two
gathers of the block's weights (float32 shards, sent in bfloat16) and one reduction of its gradients. What the other rank would read and
write here is read and written by this one, within its memory instead of over NVLink. ``in two passes`` is how it could be done with
torch's operators: shards are cast to where the others fetch them and copied from there to their place, and this rank's part of the
gradients is copied beside what comes from the others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.llama import SIZES, Size
from zcompile import compat
from zcompile.runtime.communication.peers import average, stage

BF16 = torch.bfloat16
Work = Callable[[], None]


def flat(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors one behind the other, as shards and what is exchanged lie."""
    sizes = [a * b for a, b in shapes]
    memory = torch.randn(sum(sizes), device="cuda", dtype=dtype)
    return [part.view(shape) for part, shape in zip(memory.split(sizes), shapes, strict=True)]


def copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """As between ranks: one copy for each tensor."""
    for target, source in zip(targets, sources, strict=True):
        target.view(-1).copy_(source.reshape(-1), non_blocking=True)


class Block:
    """One block's weights, gradients and products."""

    def __init__(self, size: Size) -> None:
        h, kv = size.hidden, size.hidden * size.kv_heads // size.heads
        self.shapes = [(h, h), (kv, h), (kv, h), (h, h), (size.ffn, h), (size.ffn, h), (h, size.ffn)]
        halves = [(a // 2, b) for a, b in self.shapes]
        rows = size.micro_batch * size.seq
        self.weights, self.grads = ([torch.randn(s, device="cuda", dtype=BF16) for s in self.shapes] for _ in range(2))
        self.x = [torch.randn(rows, s[1], device="cuda", dtype=BF16) for s in self.shapes]
        self.y = [torch.randn(rows, s[0], device="cuda", dtype=BF16) for s in self.shapes]
        self.shards, self.reduced = flat(halves, torch.float32), flat(halves, torch.float32)
        self.staged, self.fetched, self.sent, self.got, self.own = (flat(halves, BF16) for _ in range(5))
        gathered = [torch.empty(s, device="cuda", dtype=BF16).view(2, -1).unbind() for s in self.shapes]
        self.mine, self.theirs = [list(halves) for halves in zip(*gathered, strict=True)]
        self.parts = [list(halves) for halves in zip(*(g.view(2, -1).unbind() for g in self.grads), strict=True)]

    def compute(self) -> None:
        for x, w in zip(self.x, self.weights, strict=True):
            x @ w.t()
        for x, y, w in zip(self.x, self.y, self.weights, strict=True):
            _ = y @ w, y.t() @ x

    def gather(self) -> None:
        stage(self.shards, self.staged, self.mine)
        copy(self.theirs, self.fetched)

    def gather_in_two(self) -> None:
        compat.foreach_copy(self.staged, self.shards)
        copy(self.mine, self.staged)
        copy(self.theirs, self.fetched)

    def reduce(self) -> None:
        copy(self.sent, self.parts[1])
        average(self.reduced, self.parts[0], [self.got], 0)

    def reduce_in_two(self) -> None:
        copy(self.own, self.parts[0])
        copy(self.sent, self.parts[1])
        average(self.reduced, self.own, [self.got], 0)


def recorded(compute: Work, beside: Sequence[tuple[Work, int]], blocks: int, priority: int) -> torch.cuda.CUDAGraph:
    """So many blocks with work beside them, each kind so often a block and on a stream of its own."""
    streams = [torch.cuda.Stream(priority=priority) for _ in beside]
    compute()
    for work, _ in beside:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for stream, (work, times) in zip(streams, beside, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(times * blocks):
                    work()
        for _ in range(blocks):
            compute()
        for stream in streams:
            here.wait_stream(stream)
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1.1B,8B")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--priority", type=int, default=-1, help="of the streams beside; less is more urgent")
    args = parser.parse_args()
    print(f"{'ms of a block':28}{'median':>9}{'quartiles':>18}{'costs':>9}")
    for name in args.sizes.split(","):
        block = Block(SIZES[name])
        kinds: dict[str, list[tuple[Work, int]]] = {
            "alone": [],
            "gathers": [(block.gather, 2)],
            "gathers in two passes": [(block.gather_in_two, 2)],
            "reduction": [(block.reduce, 1)],
            "reduction in two passes": [(block.reduce_in_two, 1)],
            "both": [(block.gather, 2), (block.reduce, 1)],
            "both in two passes": [(block.gather_in_two, 2), (block.reduce_in_two, 1)],
        }
        graphs = {kind: recorded(block.compute, beside, args.blocks, args.priority) for kind, beside in kinds.items()}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.repeats):
            for kind, graph in graphs.items():  # in turn, so that all see the same clocks
                times[kind].append(milliseconds(graph) / args.blocks)
        alone = statistics.median(times["alone"])
        for kind, found in times.items():
            low, median, high = statistics.quantiles(found[2:], n=4)
            print(
                f"{name + ' ' + kind:28}{median:>9.3f}{f'{low:.3f}-{high:.3f}':>18}{median - alone:>+9.3f}", flush=True
            )


if __name__ == "__main__":
    main()
