"""Chooses which forward values are saved for backward, and which are computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from zcompile.analysis.blocks import Block, forward_blocks, forward_nodes
from zcompile.analysis.saving import Saving, handed_on, save_expensive, savings, structure, within
from zcompile.analysis.units import MIB
from zcompile.errors import PassError
from zcompile.ir import calls, edit, meta
from zcompile.ir.graph import Graph
from zcompile.ir.operators import runs_once
from zcompile.pipeline import JointPass, Stats

MODES = ("full", "selective", "budget")


@dataclass(frozen=True)
class Recompute(JointPass):
    """Compute values of repeated blocks again in backward instead of saving them.

    Before and after, where ``%y`` is read by the next block::

        %h: f32[8, 32] = aten.mm(%x, %w1)
        %a: f32[8, 32] = aten.relu(%h)
        %y: f32[8, 8] = aten.mm(%a, %w2)

        %h: f32[8, 32] = aten.mm(%x, %w1) !recompute
        %a: f32[8, 32] = aten.relu(%h) !recompute
        %y: f32[8, 8] = aten.mm(%a, %w2) !save

    What one block hands to the next is saved, where one tensor does if there is such a place. What drew random numbers is saved,
    too: it is never drawn again; so are gradients that forward makes. A block with a user's own checkpoints is left as it is. Exact:
    the same operators run again. Costs their time in backward.

    Attributes:
        mode: ``full`` saves what blocks hand on, and nothing else; ``selective`` also results of matmuls, attention and convolutions;
            ``budget`` what fits into ``mib``, at the least time.
        mib: what the values saved in all blocks may take, for ``budget``.
    """

    name: ClassVar[str] = "recompute"
    mode: str = "full"
    mib: float = 0

    def run(self, target: Graph, stats: Stats) -> None:
        if self.mode not in MODES:
            raise PassError(f"mode is '{self.mode}'; it must be one of {', '.join(MODES)}")
        if self.mib < 0 or (self.mib > 0) != (self.mode == "budget"):
            raise PassError(f"mib is {self.mib} in mode {self.mode}; budget takes a positive number, other modes none")
        forward = forward_nodes(target)
        blocks = [b for b in forward_blocks(target) if not any(meta.is_tagged(node) for node in b.nodes)]
        ladders = _ladders(blocks, forward)
        choices = self._choose(blocks, forward, ladders)
        for block, saving in zip(blocks, choices, strict=True):
            _tag(block, {block.nodes[i] for i in saving.saved} | handed_on(block, forward))
        stats["blocks"] += len(blocks)
        stats["bytes at the least time"] += sum(ladder[-1].num_bytes for ladder in ladders)
        stats["bytes"] += sum(saving.num_bytes for saving in choices)
        stats["flops computed again"] += round(sum(saving.flops for saving in choices))

    def _choose(self, blocks: list[Block], forward: set[fx.Node], ladders: list[list[Saving]]) -> list[Saving]:
        if self.mode == "budget":
            return within(ladders, self.mib * MIB)
        if self.mode == "full":
            return [ladder[0] for ladder in ladders]
        return [save_expensive(block, forward) for block in blocks]


def _ladders(blocks: list[Block], forward: set[fx.Node]) -> list[list[Saving]]:
    """The choices for each block; those of blocks alike are found once."""
    known: dict[Any, list[Saving]] = {}
    ladders = []
    for block in blocks:
        key = structure(block, forward)
        if key not in known:
            known[key] = savings(block, forward)
        ladders.append(known[key])
    return ladders


def _tag(block: Block, saved: set[fx.Node]) -> None:
    """Tell the split. A result of an operator with several is saved by tagging the operator."""
    saved = {calls.source(node) if edit.is_getitem(node) else node for node in saved}
    saved |= {node for node in block.nodes if runs_once(node)}
    for node in block.nodes:
        if node in saved:
            meta.set_saved(node)
        elif not edit.is_getitem(node) or calls.source(node) not in saved:
            meta.set_recompute(node)
