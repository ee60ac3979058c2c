"""Full state dicts: saved at one world size and stage, loaded at another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.runtime.conftest import Launch
from tests.runtime.models import Odd, full_gradients, reduced, set_gradients, shard
from zcompile.errors import ShardingError, StateError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.sharding.shards import ParameterShards
from zcompile.runtime.sharding.state import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ours": lambda p: AdamW(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]


def train(model: nn.Module, shards: ParameterShards | None, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """A few steps of a sharded or a plain model; one parameter never has a gradient."""
    shapes = Odd()
    for seed in seeds:
        gradients = full_gradients(shapes, seed, skip=("up.bias", "nothing"))
        if shards is None:
            set_gradients(model, gradients)
        else:
            shards.accumulate_many(*reduced(shards, gradients))
        optimizer.step()
        optimizer.zero_grad()


def expected(make: Callable[[Any], torch.optim.Optimizer], steps: int) -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Odd()
    optimizer = make(grouped(model))
    train(model, None, optimizer, range(steps))
    return model, optimizer


def save_then_load(rank: int, world_size: int, folder: Path, first: bool, stage: int) -> dict[str, Any]:
    """Train 2 steps and save, or load and train 2 more; returns the full state of model and optimizers."""
    mesh = Mesh.create(device="cpu", timeout=20)
    out: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0 if first else 99)
        model = Odd()
        shards = shard(model, mesh, stage=stage)
        optimizer = make(grouped(model))
        if not first:
            saved = torch.load(folder / f"{name}.pt", weights_only=True)
            load_full_state(shards, saved["model"])
            load_full_optimizer_state_dict(shards, optimizer, saved["optimizer"])
        train(model, shards, optimizer, range(0, 2) if first else range(2, 4))
        out[name] = {
            "model": full_state_dict(shards, dict(model.named_buffers())),
            "optimizer": full_optimizer_state_dict(shards, optimizer, device="cpu"),
        }
        if first and rank == 0:
            torch.save(out[name], folder / f"{name}.pt")
    dist.barrier()
    return out


def check(out: dict[str, Any], steps: int) -> None:
    for name, make in OPTIMIZERS.items():
        plain, optimizer = expected(make, steps)
        state = out[name]["model"]
        assert list(state) != [] and state.keys() == plain.state_dict().keys()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")
        assert state["head.weight"] is state["embed.weight"]
        names = {p: n for n, p in plain.named_parameters()}
        assert [g["params"] for g in out[name]["optimizer"]["param_groups"]] == [
            [names[p] for p in g["params"]] for g in optimizer.param_groups
        ]
        assert out[name]["optimizer"]["param_groups"][0]["weight_decay"] == 0.3
        entries = out[name]["optimizer"]["state"]
        assert entries.keys() == {names[p] for p, entry in optimizer.state.items() if entry}
        for parameter, entry in optimizer.state.items():
            found = entries[names[parameter]] if entry else {}
            assert found.keys() == entry.keys()
            for key, value in entry.items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(found[key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")
                    assert type(found[key]) is Tensor and found[key].untyped_storage().nbytes() == found[key].nbytes
                else:
                    assert found[key] == value


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_at", "loaded_at"), [((3, 3), (2, 0)), ((2, 0), (3, 1))], ids=["3 to 2 ranks", "stage 0 to 1"]
)
def test_saved_at_one_world_size_and_stage_and_loaded_at_another(
    launch: Launch, tmp_path: Path, saved_at: tuple[int, int], loaded_at: tuple[int, int]
) -> None:
    for out in launch(saved_at[0], save_then_load, tmp_path, True, saved_at[1]):
        check(out, 2)
    for out in launch(loaded_at[0], save_then_load, tmp_path, False, loaded_at[1]):
        check(out, 4)


@pytest.mark.parametrize("distributed", [False, True])
def test_on_one_rank(distributed: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if distributed:
        request.getfixturevalue("one_rank")
    else:
        request.getfixturevalue("monkeypatch").setattr(dist, "barrier", lambda: None)
    check(save_then_load(0, 1, tmp_path, True, 3), 2)
    check(save_then_load(0, 1, tmp_path, False, 3), 4)


def test_full_state_is_a_copy() -> None:
    model = nn.Linear(3, 4)
    shards = shard(model, Mesh.create(device="cpu"))
    before = model.weight.detach().clone()
    full_state_dict(shards)["weight"].zero_()
    assert torch.equal(model.weight, before)


def test_model_states_that_do_not_fit() -> None:
    model = Odd()
    shards = shard(model, Mesh.create(device="cpu"))
    state = full_state_dict(shards)
    tied = {k: v for k, v in state.items() if k != "embed.weight"} | {"extra": torch.ones(1)}
    assert load_full_state(shards, tied) == ([], ["extra"])
    del tied["up.bias"]
    assert load_full_state(shards, tied, strict=False) == (["up.bias"], ["extra"])
    with pytest.raises(StateError, match=r"state dict has no value for \['up.bias'\]"):
        load_full_state(shards, tied)
    with pytest.raises(StateError, match=r"'up.bias' has shape \[13\] and the state dict has \[12\]"):
        load_full_state(shards, state | {"up.bias": torch.ones(12)})


def test_optimizer_states_that_do_not_fit() -> None:
    model = nn.Linear(3, 4)
    shards = shard(model, Mesh.create(device="cpu"))
    optimizer = AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    shards.accumulate_many(["weight", "bias"], [torch.ones(4, 3), torch.ones(4)])
    optimizer.step()
    state = full_optimizer_state_dict(shards, optimizer)

    with pytest.raises(StateError, match="'weight' and 'bias' was saved as two groups with different options"):
        load_full_optimizer_state_dict(shards, AdamW(model.parameters()), state)
    with pytest.raises(StateError, match=r"saved for other parameters: missing \[\], not in the optimizer \['bias'\]"):
        load_full_optimizer_state_dict(shards, AdamW([model.weight]), state)
    stranger = AdamW([model.weight, nn.Parameter(torch.ones(1))])
    with pytest.raises(StateError, match="holds 1 parameters that are not this model's, beside 1 that are"):
        full_optimizer_state_dict(shards, stranger)
    wrong = copy.deepcopy(state)
    wrong["state"]["weight"]["exp_avg"] = torch.ones(2, 3)
    with pytest.raises(StateError, match=r"state 'exp_avg' of parameter 'weight' has shape \[2, 3\]"):
        load_full_optimizer_state_dict(shards, optimizer, wrong)
    wrong["state"]["nope"] = wrong["state"].pop("weight")
    with pytest.raises(StateError, match="has the parameter 'nope', which the model does not have"):
        load_full_optimizer_state_dict(shards, optimizer, wrong)
    optimizer.state[model.weight]["exp_avg"] = torch.ones(7)
    with pytest.raises(StateError, match=r"'exp_avg' of parameter 'weight' has shape \[7\] and is not placed like"):
        full_optimizer_state_dict(shards, optimizer)


def test_groups_may_be_merged_when_their_options_agree() -> None:
    model = nn.Linear(3, 4)
    shards = shard(model, Mesh.create(device="cpu"))
    optimizer = AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.25)
    shards.accumulate_many(["weight", "bias"], [torch.ones(4, 3), torch.ones(4)])
    optimizer.step()
    merged = AdamW(model.parameters(), lr=0.5)
    load_full_optimizer_state_dict(shards, merged, full_optimizer_state_dict(shards, optimizer))
    assert merged.param_groups[0]["lr"] == 0.25 and merged.state[model.bias]["step"] == 1


def save_with_dcp(rank: int, world_size: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    shards = shard(model, Mesh.create(device="cpu", timeout=20))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, shards, optimizer, range(2))
    state = {"model": model.state_dict(), "moments": {n: optimizer.state[p] for n, p in with_state(model, optimizer)}}
    dcp.save(state, checkpoint_id=folder)


def load_with_dcp(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Odd()
    shards = shard(model, Mesh.create(device="cpu", timeout=20))
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, shards, optimizer, range(1))
    state = {"model": model.state_dict(), "moments": {n: optimizer.state[p] for n, p in with_state(model, optimizer)}}
    dcp.load(state, checkpoint_id=folder)  # in place: DTensors over our memory
    train(model, shards, optimizer, range(2, 4))
    return full_state_dict(shards)


def with_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p in optimizer.state]


@pytest.mark.dist
def test_torch_distributed_checkpoint(launch: Launch, tmp_path: Path) -> None:
    launch(3, save_with_dcp, tmp_path / "checkpoint")
    plain, _ = expected(lambda p: torch.optim.AdamW([q for g in p for q in g["params"]], lr=0.1), 4)
    for state in launch(2, load_with_dcp, tmp_path / "checkpoint"):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), msg=lambda m, n=name: f"{n}: {m}")


def test_loading_names_unknown_to_the_shards() -> None:
    shards = shard(nn.Linear(3, 4), Mesh.create(device="cpu"))
    with pytest.raises(ShardingError, match="parameter 'nope' is not in the model"):
        shards.gather_full("nope")
