"""Kernels on one GPU.

python benchmarks/kernels.py             bandwidth of the flat kernels beside that of a copy, and beside torch's own
python benchmarks/kernels.py --tune      also with other block sizes and numbers of warps
python benchmarks/kernels.py --products  gradients of weights in fp32: rounded and cast up, or as the product adds them up
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.llama import SIZES  # noqa: E402
from zcompile.runtime.kernels.adamw import BLOCK_ELEMENTS, NUM_WARPS, Launch  # noqa: E402
from zcompile.runtime.kernels.sumsq import sum_of_squares  # noqa: E402
from zcompile.runtime.optim.adamw_update import AdamWOptions, Scaling, Segment, Segments  # noqa: E402

OPTIONS = AdamWOptions(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10.0, maximize=False)


def median_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Of single calls on a busy device, so that the host's part does not count."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def show_products() -> None:
    """The matrices of a block and the head, for the rows of one micro-batch."""
    print(f"{'gradient of':28}{'product ms':>12}{'cast':>9}{'fp32 product':>14}{'of both':>9}")
    for name, size in SIZES.items():
        rows, h, kv = size.micro_batch * size.seq, size.hidden, size.hidden * size.kv_heads // size.heads
        for out, inner in ((h, h), (kv, h), (size.ffn, h), (h, size.ffn), (size.vocab, h)):
            of_y = torch.randn(rows, out, device="cuda", dtype=torch.bfloat16)
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            low, wide = (torch.empty(out, inner, device="cuda", dtype=d) for d in (torch.bfloat16, torch.float32))
            product = median_ms(lambda y=of_y, x=x, low=low: torch.mm(y.t(), x, out=low))
            cast = median_ms(lambda low=low, wide=wide: wide.copy_(low))
            both = median_ms(lambda y=of_y, x=x, wide=wide: torch.mm(y.t(), x, out_dtype=wide.dtype, out=wide))
            title = f"{name} [{out}, {inner}]"
            print(f"{title:28}{product:>12.3f}{cast:>9.3f}{both:>14.3f}{both / (product + cast):>9.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 29, help="parameters")
    parser.add_argument("--tune", action="store_true", help="other block sizes and numbers of warps, too")
    parser.add_argument("--products", action="store_true", help="of matrices, and nothing else")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the kernels are timed on a GPU, and torch sees none")
    if args.products:
        show_products()
        return
    numel = args.numel
    param, grad, first = (torch.randn(numel, device="cuda") for _ in range(3))
    second, low = torch.rand(numel, device="cuda"), torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    copy = 8 * numel / median_ms(lambda: param.copy_(grad)) / 1e6
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {numel} parameters")
    print(f"{'':44}{'ms':>9}{'GB/s':>9}{'of copy':>9}")
    print(f"{'copy':44}{8 * numel / copy / 1e6:>9.3f}{copy:>9.0f}{1:>9.1%}")

    def show(name: str, call: Callable[[], object], num_bytes: float) -> None:
        ms = median_ms(call)
        rate = num_bytes / ms / 1e6
        print(f"{name:44}{ms:>9.3f}{rate:>9.0f}{rate / copy:>9.1%}", flush=True)

    segments = Segments(param, grad, first, second, None, (Segment(0, 0, numel),))
    factor = torch.ones(1, device="cuda")
    sizes = [(b, w) for b in (512, 1024, 2048, 4096) for w in (4, 8)] if args.tune else [(BLOCK_ELEMENTS, NUM_WARPS)]
    for block, warps in sizes:
        launch = Launch(segments, block, warps)
        name = f"AdamW, block {block}, {warps} warps"
        show(name, lambda launch=launch: launch.run(OPTIONS, Scaling()), 28 * numel)
        show(f"{name}, bf16 copy-out", lambda launch=launch: launch.run(OPTIONS, Scaling(), low), 30 * numel)
    scaled = Launch(segments)
    show("AdamW, clip factor and scale", lambda scaled=scaled: scaled.run(OPTIONS, Scaling(factor, factor)), 28 * numel)
    show("sum of squares, float32", lambda: sum_of_squares([grad]), 4 * numel)
    show("sum of squares, bfloat16", lambda: sum_of_squares([low]), 2 * numel)
    leaf = torch.nn.Parameter(param)
    leaf.grad = grad
    show("torch.linalg.vector_norm, float32", lambda: torch.linalg.vector_norm(grad), 4 * numel)
    del segments, launch, scaled, first, second
    optimizer = torch.optim.AdamW([leaf], fused=True)
    show("torch.optim.AdamW(fused=True), one tensor", optimizer.step, 28 * numel)


if __name__ == "__main__":
    main()
