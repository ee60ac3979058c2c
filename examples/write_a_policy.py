"""A scheduling policy of one's own, and what it is worth: ``python examples/write_a_policy.py``.

On any model: ``python -m zcompile policies --model llama3-8b --policies 'prefetch,./examples/write_a_policy.py:EarlyGathers'``.
"""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from llama import Llama, LlamaConfig

from zcompile import ops
from zcompile.__main__ import main
from zcompile.analysis.schedule import collectives, is_gather, is_reduction
from zcompile.ir.graph import Step
from zcompile.pipeline import Stats, StepPass


@dataclass(frozen=True)
class EarlyGathers(StepPass):
    """Start every gather ``regions`` regions before the one that needs it, and wait for reductions at the end."""

    name: ClassVar[str] = "early-gathers"
    regions: int = 2

    def run(self, target: Step, stats: Stats) -> None:
        for graph in target.graphs:
            for gather in reversed(collectives(graph, is_gather)):  # the last one first: the order stays
                anchor, passed = gather.start.prev, 0
                while passed < self.regions and anchor.prev.op == "call_function":
                    passed += anchor.target is ops.region_call
                    anchor = anchor.prev
                if passed:
                    gather.move_start(anchor)
                    stats["gathers moved"] += 1
            for reduction in collectives(graph, is_reduction):
                for node in (reduction.wait, *reduction.results):
                    graph.output.prepend(node)


def model(micro_batch: int = 4, seq: int = 2048, layers: int = 2) -> tuple[Llama, tuple[Any, ...]]:
    """The model to plan for, and what one rank feeds it; built on ``meta``."""
    config = LlamaConfig(hidden=2048, heads=16, kv_heads=16, ffn=5632, max_seq=seq, vocab_size=32000, layers=layers)
    tokens = torch.empty(micro_batch, seq, dtype=torch.int64)
    return Llama(config), (tokens, tokens)


if __name__ == "__main__":
    policies = f"none,prefetch,auto,{__file__}:EarlyGathers{{regions=2}}"
    arguments = [
        "--policies",
        policies,
        "--world-size",
        "8,64",
        "--precision",
        "bf16",
        "--micro-batch",
        "4",
        "--optimal",
    ]
    sys.exit(main(["policies", "--model", "write_a_policy:model", "--layers", "2", *arguments, *sys.argv[1:]]))
