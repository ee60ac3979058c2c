"""Weights from safetensors files: each rank reads its own rows into shards, from a model on meta."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zcompile
from tests.dist.pool import Pools
from tests.dist.training import this_rank
from zcompile.errors import StateError, UnfilledError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.mix(self.embed(tokens))))).logsumexp(-1).mean()


def stored(folder: Path) -> Tied:
    """A model and its weights in two files with an index; the tied weight is under one name."""
    torch.manual_seed(3)
    model = Tied()
    model.norm.running_mean.normal_()
    state = {n: v for n, v in model.state_dict().items() if n != "embed.weight"}
    parts = [dict(list(state.items())[:2]), dict(list(state.items())[2:])]
    weight_map = {}
    for number, part in enumerate(parts):
        save_file({n: v.contiguous() for n, v in part.items()}, folder / f"part-{number}.safetensors")
        weight_map.update(dict.fromkeys(part, f"part-{number}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def load(folder: str, stage: int) -> None:
    torch.manual_seed(3)
    plain = Tied()
    plain.norm.running_mean.normal_()
    with torch.device("meta"):
        empty = Tied()
    model = zcompile.compile(empty, stage=stage, backend="eager")
    tokens = torch.arange(5) + this_rank() % 2
    with pytest.raises(UnfilledError, match="has no value yet"):
        model(tokens)
    assert zcompile.load_safetensors(model, folder) == []
    for name, value in plain.state_dict().items():
        assert torch.equal(model.full_state_dict()[name], value), name
    assert torch.allclose(model(tokens), plain(tokens), rtol=1e-6)


def refuse(folder: str) -> None:
    model = zcompile.compile(nn.Sequential(nn.Linear(6, 5)), backend="eager")
    with pytest.raises(StateError, match=r"parameter '0\.weight' is not in"):
        zcompile.load_safetensors(model, folder)
    assert "mix.weight" in zcompile.load_safetensors(model, folder, strict=False)
    with pytest.raises(StateError, match="has no safetensors"):
        zcompile.load_safetensors(model, folder + "/absent")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [2, 3])
def test_a_meta_model_reads_its_own_rows(ranks: Pools, tmp_path: Path, world: int, stage: int) -> None:
    stored(tmp_path)
    ranks(world, load, folder=str(tmp_path), stage=stage)


def test_what_does_not_fit_is_refused(ranks: Pools, tmp_path: Path) -> None:
    stored(tmp_path)
    ranks(2, refuse, folder=str(tmp_path))


# A function that initialises one module. ------------------------------------------------------------------------------


def reset(module: nn.Module) -> None:
    module.reset_parameters()  # type: ignore[operator]


def initialises(stage: int) -> None:
    with torch.device("meta"):
        empty = Tied()
    torch.manual_seed(11 + 5 * this_rank())  # rank 0's draws count
    before = torch.get_rng_state()
    model = zcompile.compile(empty, stage=stage, backend="eager", init=reset)
    assert torch.equal(torch.get_rng_state(), before), "compile leaves the random state alone"
    plain = Tied()
    torch.manual_seed(11)
    plain.apply(lambda m: reset(m) if hasattr(m, "reset_parameters") else None)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.full_state_dict()[name], value), name
    model(torch.arange(5)).backward()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_function_fills_a_meta_model_as_it_fills_a_plain_one(ranks: Pools, stage: int, world_size: int) -> None:
    ranks(world_size, initialises, stage=stage)


def forgets() -> None:
    with torch.device("meta"):
        empty = Tied()
    model = zcompile.compile(empty, backend="eager", init=lambda m: reset(m) if not isinstance(m, nn.Linear) else None)
    with pytest.raises(UnfilledError, match=r"parameter 'mix.weight' has no value yet \(2 in all\)"):
        model(torch.arange(5))


def test_what_the_function_does_not_write_has_no_value(ranks: Pools) -> None:
    ranks(2, forgets)
