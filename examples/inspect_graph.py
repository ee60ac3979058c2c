"""Print one layer's graph before and after each pass: ``python examples/inspect_graph.py [--diff]``."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from llama import Block, LlamaConfig, rotary_table

import zcompile


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--policy", default="prefetch")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; one rank has no collectives")
    parser.add_argument("--diff", action="store_true", help="only the lines that each pass changed")
    return parser.parse_args()


def show(title: str, text: str) -> None:
    print(f"\n===== {title} =====\n{text}")


def inspect(stage: int, policy: str, only_diff: bool) -> None:
    """Compile one Llama layer, run one step, and print its history on rank 0."""
    config = LlamaConfig(hidden=32, heads=2, kv_heads=1, ffn=64, max_seq=8)
    model = zcompile.compile(Block(config), stage=stage, policy=policy, backend="eager")
    cos, sin = rotary_table(config.hidden // config.heads, config.max_seq)
    model(torch.randn(2, config.max_seq, config.hidden), cos, sin).sum().backward()
    if dist.get_rank() == 0:
        print_history(model, only_diff)
    model.close()  # together: no rank leaves while another one still has its connections


def print_history(model: zcompile.CompiledModule, only_diff: bool) -> None:
    """What each pass did."""
    shown = ""
    for entry in model.history:
        if only_diff:
            show(entry.spec, model.diff(entry.name) or "(no change)")
        else:
            if entry.before != shown:
                show(f"before {entry.spec}", entry.before)
            show(f"after {entry.spec}", entry.after if entry.after != entry.before else "(no change)")
            shown = entry.after
        if entry.stats:
            print(f"\n{entry.stats}")
    print(f"\npipeline: {model.pipeline}")


def main() -> None:
    args = parse()
    if "RANK" not in os.environ:  # start the ranks
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    dist.init_process_group("gloo")
    try:
        inspect(args.stage, args.policy, args.diff)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
