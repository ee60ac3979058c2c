"""Which thread runs the leaves of a backward on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zcompile
from tests.runtime.test_leaves import Net
from zcompile import compat

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [False, True])
def test_leaves_without_hooks_run_in_the_calling_thread_and_others_in_that_of_the_engine(graphs: bool) -> None:
    model: Any = zcompile.compile(Net().cuda(), backend="eager", cuda_graphs=graphs)
    x, threads = torch.ones(5, 4, device="cuda"), list[int]()
    nodes = [compat.grad_accumulator(parameter) for parameter in model.parameters()]
    for node in nodes:  # nobody sees hooks of nodes, so that they change nothing
        node.register_hook(lambda *_: threads.append(threading.get_ident()))

    def ran() -> set[int]:
        threads.clear()
        model(x).backward()
        assert len(threads) == 4
        model.zero_grad()
        return set(threads)

    here = threading.get_ident()
    for _ in range(5):
        assert ran() == {here}
    assert torch.autograd.is_multithreading_enabled()
    seen: list[torch.Tensor] = []
    for register in ("register_post_accumulate_grad_hook", "register_hook"):
        handle = getattr(model.a.weight, register)(seen.append)
        assert here not in ran()
        handle.remove()
        assert ran() == {here}
    assert len(seen) == 2
    threads.clear()
    torch.autograd.grad(model(x), list(model.parameters()))
    assert not threads  # nothing is accumulated
