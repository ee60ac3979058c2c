"""Tags every parameter chain as must-recompute, so that the split saves nothing that is as good as a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zcompile.analysis.chains import param_chains
from zcompile.ir import meta
from zcompile.ir.graph import Graph
from zcompile.pipeline import JointPass, Stats


@dataclass(frozen=True)
class RecomputeParams(JointPass):
    """Tag views and casts of parameters so that backward computes them again.

    Without it a saved ``permute(w)`` or a low-precision copy would keep a gathered parameter alive from forward to backward.

    Before and after::

        %t: f32[8, 32] = aten.permute(%w, [1, 0])
        %t: f32[8, 32] = aten.permute(%w, [1, 0]) !recompute

    Exact. Costs a view or a cast in backward.
    """

    name: ClassVar[str] = "recompute-params"

    def run(self, target: Graph, stats: Stats) -> None:
        for node in param_chains(target.fx):
            if not meta.recompute(node):
                meta.set_recompute(node)
                stats["nodes tagged"] += 1
