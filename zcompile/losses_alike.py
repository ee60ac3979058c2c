"""Whether losses make their gradients in forward: the same on all ranks, whose numbers of rows may differ."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from zcompile.capture.joint import Captured
from zcompile.passes.memory.chunk_loss import ChunkLoss
from zcompile.passes.zero.unshard import Unshard
from zcompile.pipeline import Pipeline
from zcompile.runtime.communication.mesh import Mesh

log = logging.getLogger("zcompile")


class LossesAlike:
    """Keeps the collectives of ranks the same where the number of rows decides whether a loss is computed in pieces.

    Backward gathers the weight of a loss in stage 3, but for gradients that forward has made. So all ranks make them in forward, or
    none does: what any of them gains memory by in the first training call, or what the caller asked for with a size. Later
    captures, which other ranks may start beside older ones, keep to it.
    """

    def __init__(self) -> None:
        self._in_forward: bool | None = None

    def pipeline(self, pipeline: Pipeline, captured: Captured, mesh: Mesh, name: str) -> Pipeline:
        """The passes of a training capture. Collective the first time that a model has such a loss.

        Args:
            pipeline: the passes.
            captured: what they are to run on. Its graph is read where such a loss may be there: on devices of the pass.
            mesh: the ranks.
            name: of the model, for the log.
        """
        gathers = any(isinstance(p, Unshard) and p.stage == 3 for p in pipeline.passes)
        found = next((p for p in pipeline.passes if isinstance(p, ChunkLoss)), None)
        if found is None or not gathers or not mesh.is_distributed or found.device not in ("", mesh.device.type):
            return pipeline
        here, anywhere = found.in_forward(captured.graph)
        if not anywhere:
            return pipeline
        if self._in_forward is None:
            self._in_forward = found.always or _on_any(mesh, here)
        if not self._in_forward and not here:
            return pipeline  # the pass leaves all of them whole, and says why
        if not self._in_forward and mesh.rank == 0:
            log.warning(
                "a loss of %s is computed whole though pieces would save memory, because it was whole in the first training call and "
                "ranks must gather alike; make that call with the largest batch, or pass loss_chunk='%gMiB' or 'none'",
                name,
                found.mib,
            )
        changed = (replace(found, alike=True),) if self._in_forward else ()
        return Pipeline(tuple(q for p in pipeline.passes for q in (changed if p is found else (p,))))


def _on_any(mesh: Mesh, here: bool) -> bool:
    """Whether something holds on any rank. Collective."""
    mesh.announce("losses in pieces")
    sent = torch.tensor([float(here)], device=mesh.device)
    everyone = sent.new_empty(mesh.size)
    mesh.collectives.all_gather([everyone], [sent], "all_gather of who computes losses in pieces").wait()
    return any(mesh.to_host(everyone, "who computes losses in pieces"))
