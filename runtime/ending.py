"""The end of a compiled model's runtime."""

from __future__ import annotations

from zcompile.runtime.communication.collectives import Collectives
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.sharding.shards import Slot
from zcompile.runtime.step import StepRunner


def end(runner: StepRunner) -> None:
    """Let go of parameters, of recorded steps and of other ranks."""
    for parameter in runner.shards.parameters:
        vars(parameter).pop(Slot.NAME, None)  # nobody manages them any more
    runner.holding.drop()
    if runner.tapes is not None:
        runner.tapes.close()
    leave(runner.executor.collectives, runner.agreement, runner.shards.mesh)


def leave(collectives: Collectives, agreement: Agreement, mesh: Mesh) -> None:
    """Give back what joins a model's ranks. Harmless when called twice."""
    collectives.close()
    agreement.close()
    mesh.close()
