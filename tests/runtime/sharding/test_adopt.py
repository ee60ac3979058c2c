"""Taking a model over."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.runtime.conftest import Launch
from tests.runtime.models import Odd, full_gradients, plan, reduced, shard
from zcompile.errors import ShardingError
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.sharding.adopt import adopt, install, sync_buffers
from zcompile.runtime.sharding.shards import ParameterShards, Slot
from zcompile.runtime.sharding.state import full_state_dict


def test_without_a_process_group_the_parameter_objects_stay() -> None:
    model = Odd()
    plain = copy.deepcopy(model)
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shards = shard(model, Mesh.create(device="cpu"))
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and torch.equal(parameter, plain.get_parameter(name))
        assert parameter is shards.parameter(name) and Slot.of(parameter) == (shards, shards.index(name))
        assert parameter.numel() == 0 or parameter.data_ptr() == shards.local(name).data_ptr()
    gradients = full_gradients(plain, 0)
    shards.accumulate_many(*reduced(shards, gradients))
    optimizer.step()
    for name, value in gradients.items():
        assert torch.equal(shards.local(name), plain.get_parameter(name) - 0.5 * value)


@pytest.mark.usefixtures("one_rank")
def test_attributes_and_hooks_go_along_and_full_storage_is_released() -> None:
    model = nn.Linear(3, 4)
    old = model.weight
    old.no_weight_decay = True  # type: ignore[attr-defined]
    seen: list[type] = []
    handle = old.register_hook(lambda grad: seen.append(type(grad)))
    old.register_post_accumulate_grad_hook(lambda parameter: seen.append(type(parameter)))
    model.bias.requires_grad_(False)
    mesh = Mesh.create(device="cpu")
    shards = ParameterShards(plan(model, 1), mesh)
    replaced = adopt(shards, dict(model.named_parameters()), sync_init=True)
    install(shards, model)
    assert [(o is old, new is model.weight) for o, new in replaced] == [(True, True), (False, False)]
    assert old.numel() == 0 and old.untyped_storage().nbytes() == 0
    assert model.weight.no_weight_decay and not model.bias.requires_grad
    model.weight.sum().backward()
    assert seen == [DTensor, DTensor]
    handle.remove()
    model.weight.sum().backward()
    assert seen == [DTensor, DTensor, DTensor]


@pytest.mark.usefixtures("one_rank")
def test_what_would_be_lost_or_wrong_is_refused_before_anything_changes() -> None:
    mesh = Mesh.create(device="cpu")

    def refused(model: nn.Module, message: str, specs_of: nn.Module | None = None) -> None:
        shards = ParameterShards(plan(specs_of or model, 1), mesh)
        with pytest.raises(ShardingError, match=message):
            adopt(shards, dict(model.named_parameters()), sync_init=True)
        assert all(p.numel() for n, p in model.named_parameters() if n != "nothing")

    with_gradient = nn.Linear(3, 4)
    with_gradient.bias.grad = torch.ones(4)
    refused(with_gradient, "parameter 'bias' has a gradient that would be lost")
    refused(nn.Linear(3, 5), r"'weight' is torch.float32 of shape \[5, 3\] and was planned as", nn.Linear(3, 4))
    refused(nn.Linear(3, 4, bias=False), "parameter 'bias' was planned and is not in the model", nn.Linear(3, 4))
    sharded = nn.Linear(3, 4)
    shard(sharded, mesh)
    refused(sharded, "parameter 'weight' is a DTensor already")


@pytest.mark.parametrize("distributed", [False, True])
def test_a_meta_model_starts_unfilled(distributed: bool, request: pytest.FixtureRequest) -> None:
    if distributed:
        request.getfixturevalue("one_rank")
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    shards = shard(model, Mesh.create(device="cpu"))
    assert shards.unfilled() == ["weight", "bias"]
    assert model.weight.device.type == "cpu" and model.weight is shards.parameter("weight")
    shards.fill("weight", torch.ones(4, 3))
    shards.fill("bias", torch.zeros(4))
    assert shards.unfilled() == []
    assert full_state_dict(shards)["weight"].sum() == 12


def test_masters_may_have_another_dtype() -> None:
    model = nn.Linear(3, 4, dtype=torch.bfloat16)
    value = model.weight.detach().clone()
    shards = ParameterShards(
        [dataclasses.replace(s, dtype=torch.float32) for s in plan(model, 1)], Mesh.create(device="cpu")
    )
    adopt(shards, dict(model.named_parameters()), sync_init=True)
    assert model.weight.dtype is torch.float32 and torch.equal(model.weight, value.float())


def start_from_rank_0(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model = Odd()
    model.up.weight.data = model.up.weight.data.t().contiguous().t()  # not contiguous
    expected = {name: value.clone() for name, value in model.state_dict().items()} if rank == 0 else {}
    mesh = Mesh.create(device="cpu", timeout=20)
    model.count += rank
    shards = shard(model, mesh)
    sync_buffers(mesh, dict(model.named_buffers()))
    assert model.count == 3
    state = full_state_dict(shards, dict(model.named_buffers()))
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    for parameter in model.parameters():
        full = parameter.full_tensor()  # through DTensor's own collectives
        assert torch.equal(full, state[shards.name_of(parameter) or ""])

    torch.manual_seed(rank)  # now only rank 0 has values
    with torch.device("cpu" if rank == 0 else "meta"):
        model = Odd()
    shards = shard(model, mesh)
    assert shards.unfilled() == []
    from_rank_0 = full_state_dict(shards)

    torch.manual_seed(rank)  # and nobody starts from rank 0: each rank keeps its own rows
    model = nn.Linear(3, 2 * world_size)
    own = model.weight.detach().clone()
    shards = shard(model, mesh, sync_init=False)
    assert torch.equal(model.weight.to_local(), own[2 * rank : 2 * rank + 2])
    return state | {f"again {name}": value for name, value in from_rank_0.items()}


@pytest.mark.dist
def test_every_rank_starts_from_rank_0(launch: Launch) -> None:
    first, *others = launch(3, start_from_rank_0)
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(first["again embed.weight"], first["embed.weight"])
