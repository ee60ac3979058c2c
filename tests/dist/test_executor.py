"""What the executor keeps alive while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from tests.dist.pool import Pools

pytestmark = pytest.mark.dist


def results_of_regions(stage: int) -> None:
    """When the next region begins, what the last one returned is in the slot table or nowhere: gradients have been reduced."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
    model = zcompile.compile(nn.Sequential(*blocks), stage=stage, policy="bucket{mib=0}", backend="eager")
    executor = model._session.runner.executor
    plain, gone = executor.run, 0

    def run(program: Any, bodies: Mapping[str, Callable[..., Any]], slots: list[Any]) -> list[Any]:
        last: list[weakref.ref[Tensor]] = []

        def watched(body: Callable[..., Any], arguments: list[Any]) -> Any:
            nonlocal gone
            for tensor in (result() for result in last):
                gone += tensor is None
                kept = tensor is None or any(tensor is value for value in (*slots, *arguments))
                assert kept, f"a result {list(tensor.shape)} outlives its last use"
            tensor = None
            results = body(arguments)
            last[:] = [weakref.ref(value) for value in results if isinstance(value, Tensor)]
            return results

        return plain(program, {name: lambda a, body=body: watched(body, a) for name, body in bodies.items()}, slots)

    executor.run = run
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    assert gone >= 2 * 3, "gradients of three regions in each of two backwards"
    model.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_results_of_a_region_go_when_nobody_needs_them(ranks: Pools, stage: int) -> None:
    ranks(2, results_of_regions, stage=stage)
