"""Regions under Inductor: numbers, layouts, one compilation for each distinct structure."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.utils import counters

import zcompile
from zcompile import compat
from zcompile.ir import meta
from zcompile.ir.graph import Region
from zcompile.lower import inductor

pytestmark = pytest.mark.slow


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).mean((2, 3))


def test_results_of_regions_keep_their_layout() -> None:
    """Inductor prefers channels last after a convolution; the next region was compiled for what the graph says."""
    torch.manual_seed(0)
    model = Convolutions()
    plain = copy.deepcopy(model)
    compiled = zcompile.compile(model, backend="inductor", policy="none")
    x, y = torch.randn(3, 2, 5, 5), torch.randn(3, 4)
    F.mse_loss(compiled(x), y).backward()
    F.mse_loss(plain(x), y).backward()
    assert len(compiled.graphs.forward.regions) == 2
    for (name, p), q in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, msg=name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    real = inductor._compile
    monkeypatch.setattr(inductor, "_CACHE", {})
    monkeypatch.setattr(inductor, "_compile", lambda region, tag: compiled.append(region.name) or real(region, tag))

    def regions(num_layers: int) -> int:
        compiled.clear()
        model = zcompile.compile(
            nn.Sequential(*(Block() for _ in range(num_layers))), backend="inductor", policy="none"
        )
        model(torch.randn(2, 8)).sum().backward()
        return len(compiled)

    few = regions(4)
    assert 0 < few <= 6
    assert regions(8) == 0  # every structure is known from the shallower model


def test_results_get_their_size_1_dimensions_back() -> None:
    run = inductor._with_shapes(lambda args: (args[0].sum(0), args[0]), {0: (1, 1, 3)})
    first, second = run([torch.ones(2, 3)])
    assert first.shape == (1, 1, 3) and second.shape == (2, 3)


def test_another_process_finds_compiled_regions_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This one, which has forgotten what it compiled. Inductor's own key does not tell the types of results: ours does."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    graph.output([y])
    with compat.new_fake_mode():
        for node in (x, y):
            meta.set_value(node, torch.empty(2, 3))
    argument = torch.arange(6.0).view(2, 3)
    hits = []
    for _ in range(2):
        monkeypatch.setattr(inductor, "_CACHE", {})
        (result,) = inductor.compile_region(Region("doubled", graph))([argument])
        assert torch.equal(result, argument * 2)
        hits.append(counters["inductor"]["fxgraph_cache_hit"])
    inductor._compile(Region("doubled", graph), "the same operators with other types")
    hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert [count - hits[0] for count in hits] == [0, 1, 1]
