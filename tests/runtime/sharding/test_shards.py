"""Sharded storage and gradients, one process at a time: a mesh of several ranks without a process group."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.runtime.models import Odd, full_gradients, plan, reduced, shard
from zcompile.errors import ShardingError
from zcompile.placement import ParamSpec
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.sharding import full as full_tensors
from zcompile.runtime.sharding.shards import ParameterShards, Slot

CPU = torch.device("cpu")


def alone(rank: int, world_size: int) -> Mesh:
    """The mesh of one rank among others that are not there: no communication."""
    return Mesh("dp", world_size, rank, CPU, 5.0)


def every_rank(model: nn.Module, world_size: int, stage: int = 3) -> list[ParameterShards]:
    ranks = [ParameterShards(plan(model, world_size, stage), alone(rank, world_size)) for rank in range(world_size)]
    for shards in ranks:
        for name, parameter in model.named_parameters():
            shards.fill(name, parameter)
    return ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stage", [0, 3])
def test_shards_put_together_are_the_parameters(world_size: int, stage: int) -> None:
    model = Odd()
    ranks = every_rank(model, world_size, stage)
    for name, parameter in model.named_parameters():
        spec = ranks[0].specs[name]
        locals_ = [shards.local(name) for shards in ranks]
        assert {tuple(local.shape) for local in locals_} == {spec.padded_local_shape}
        assert all(local.is_contiguous() and local.data_ptr() % 256 == 0 for local in locals_ if local.numel())
        gathered = torch.cat(locals_) if spec.is_sharded else locals_[0]
        assert gathered.shape == spec.padded_full_shape
        full = full_tensors.assemble(spec, gathered)
        assert torch.equal(full, parameter.detach()) and full.is_contiguous()
        assert not spec.is_sharded or full.untyped_storage().nbytes() == full.nbytes
        for rank, shards in enumerate(ranks):
            seen = shards.parameter(name)
            assert tuple(seen.shape) == spec.local_shape(rank) and seen.is_contiguous()
            assert torch.equal(full_tensors.pad(spec, seen.detach(), rank), locals_[rank])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension_can_be_put_together(world_size: int, dim: int) -> None:
    """Also where choose_shard_dim would not go: a plan may come from elsewhere."""
    spec = ParamSpec("w", (), (5, 7, 10), torch.float32, True, dim, world_size)
    value = torch.randn(spec.shape)
    ranks = [ParameterShards([spec], alone(rank, world_size)) for rank in range(world_size)]
    for rank, shards in enumerate(ranks):
        shards.fill("w", value)
        assert tuple(shards.parameter("w").shape) == spec.local_shape(rank)
    assert torch.equal(full_tensors.assemble(spec, torch.cat([shards.local("w") for shards in ranks])), value)


def test_padding_and_gaps_of_parameters_are_zero() -> None:
    for shards in every_rank(Odd(), 4):
        for key, arena in shards.arenas().items():
            inside = sum(int(torch.count_nonzero(p.detach())) for p in shards.parameters if p.dtype is key.dtype)
            assert torch.count_nonzero(arena) <= inside
        spec = shards.specs["up.weight"]  # 13 rows on 4 ranks: 4, 4, 4, 1
        start, stop = spec.rows(shards.mesh.rank)
        assert not shards.local("up.weight")[stop - start :].any()


def test_names_aliases_and_unknown_names() -> None:
    shards = every_rank(Odd(), 2)[0]
    assert shards.parameter("head.weight") is shards.parameter("embed.weight")
    assert "head.weight" in shards and "nope" not in shards
    assert shards.name_of(shards.parameter("head.weight")) == "embed.weight"
    assert shards.name_of(torch.ones(1)) is None and shards.name_of(nn.Parameter(torch.ones(1))) is None
    with pytest.raises(ShardingError, match="parameter 'nope' is not in the model; its parameters are "):
        shards.local("nope")
    with pytest.raises(ShardingError, match=r"has shape \[13\] and the value has \[12\]"):
        shards.fill("up.bias", torch.ones(12))
    with pytest.raises(ShardingError, match="planned for 2 ranks and the mesh has 3"):
        ParameterShards(plan(Odd(), 2), alone(0, 3))
    with pytest.raises(ShardingError, match="'scale' occurs twice"):
        ParameterShards(plan(Odd(), 2) * 2, alone(0, 2))


def test_unfilled_parameters_are_known_by_name() -> None:
    shards = ParameterShards(plan(nn.Linear(3, 4), 2), alone(0, 2))
    assert shards.unfilled() == ["weight", "bias"]
    shards.fill("bias", torch.ones(4))
    assert shards.unfilled() == ["weight"]
    shards.mark_filled("weight")
    assert shards.unfilled() == []
    shards.mark_unfilled("bias")
    assert shards.unfilled() == ["bias"]


def test_the_way_back_from_a_parameter_is_weak_and_stays_with_the_object() -> None:
    shards = every_rank(nn.Linear(3, 4), 2)[0]
    parameter = shards.parameter("weight")
    assert Slot.of(parameter) == (shards, 0)
    assert Slot.of(copy.deepcopy(parameter)) is None
    gone = weakref.ref(shards)
    del shards
    gc.collect()
    assert gone() is None and Slot.of(parameter) is None
    assert parameter.sum().isfinite()


# Gradients. -----------------------------------------------------------------------------------------------------------


def grad(shards: ParameterShards, name: str) -> Tensor:
    value = shards.parameter(name).grad
    assert value is not None
    return value


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_gradients_accumulate_in_one_flat_arena(world_size: int) -> None:
    model = Odd()
    for shards in every_rank(model, world_size):
        first, second = full_gradients(model, 0), full_gradients(model, 1)
        shards.accumulate_many(*reduced(shards, first))
        before = {name: grad(shards, name) for name in first}
        shards.accumulate_many(*reduced(shards, second))
        for name in first:
            expected = full_tensors.cut(shards.specs[name], first[name] + second[name], shards.mesh.rank)
            assert grad(shards, name) is before[name] and torch.equal(grad(shards, name), expected)
            assert torch.equal(
                full_tensors.pad(shards.specs[name], expected, shards.mesh.rank), shards.grad_local(name)
            )
        assert shards.parameter("frozen").grad is None and len(shards.gradient_arenas()) == 1
        for key in shards.gradient_arenas():
            assert all(not hole.any() for hole in shards.holes(key))


def test_a_gradient_that_is_there_already_is_not_copied() -> None:
    model = nn.Linear(4, 6)
    shards = every_rank(model, 2)[0]
    shards.grad_local("weight").fill_(2.0)
    shards.accumulate("weight", shards.grad_local("weight"))
    assert (grad(shards, "weight") == 2.0).all() and shards.parameter("bias").grad is None
    with pytest.raises(AssertionError, match="overwritten"):
        shards.accumulate("weight", shards.grad_local("weight"))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = Odd()
    shards = every_rank(model, 4)[3]
    optimizer = torch.optim.SGD([p for p in shards.parameters if p.requires_grad], lr=0.1)
    for seed in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        gradients = full_gradients(model, seed)
        shards.accumulate_many(*reduced(shards, gradients))
        for name, value in gradients.items():
            assert torch.equal(grad(shards, name), full_tensors.cut(shards.specs[name], value, 3))


def test_low_precision_shards_are_added_in_the_gradients_dtype() -> None:
    shards = every_rank(nn.Linear(4, 6), 2)[0]
    shard16 = torch.full((3, 4), 0.1, dtype=torch.bfloat16)
    shards.accumulate("weight", shard16)
    shards.accumulate("weight", shard16)
    assert torch.equal(grad(shards, "weight"), shard16.float() * 2)


def test_a_parameter_that_is_thawed_later_gets_gradient_memory_of_its_own() -> None:
    model = Odd()
    shards = every_rank(model, 2)[0]
    shards.parameter("frozen").requires_grad_()
    value = torch.randn(shards.specs["frozen"].padded_local_shape)
    shards.accumulate("frozen", value)
    assert torch.equal(grad(shards, "frozen"), value[: len(grad(shards, "frozen"))])
    assert (
        not shards.gradients.is_flat(shards.index("frozen"), grad(shards, "frozen")) and shards.gradient_arenas() == {}
    )


def test_a_gradient_that_the_user_assigned_is_added_to() -> None:
    model = nn.Linear(4, 5)
    shards = every_rank(model, 2)[1]  # two rows and one of padding
    own = torch.ones(2, 4)
    shards.parameter("weight").grad = own
    shards.accumulate("weight", torch.full((3, 4), 2.0))
    assert grad(shards, "weight") is own and (own == 3.0).all()
    shards.parameter("weight").grad = torch.ones(2, 4).to_sparse()
    with pytest.raises(ShardingError, match=r"parameter 'weight' has a torch.sparse_coo gradient"):
        shards.accumulate("weight", torch.ones(3, 4))


# DTensors, on a process group of one rank. ----------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_parameters_are_dtensors_with_storage_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    shards = shard(model, Mesh.create(device="cpu"))
    assert isinstance(model.up.weight, DTensor) and isinstance(model.up.weight, nn.Parameter)
    assert model.head.weight is model.embed.weight
    assert model.up.weight.placements == (Shard(0),) and model.scale.placements == (Replicate(),)
    for parameter in model.parameters():
        local = parameter.to_local()
        assert local.storage_offset() == 0 and local.untyped_storage().nbytes() == local.nbytes

    def same(state: dict[str, Tensor]) -> None:
        for name, value in values.items():
            found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
            assert torch.equal(found, value), name

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    same(torch.load(file, weights_only=True))
    same(pickle.loads(pickle.dumps(model)).state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.up.weight.zero_()
    assert Slot.of(copied.up.weight) is None and copied.head.weight is copied.embed.weight
    same(model.state_dict())
    file = io.BytesIO()
    torch.save(list(model.parameters()), file)  # the Parameters themselves, with their attributes
    file.seek(0)
    assert len(torch.load(file, weights_only=True)) == len(shards.parameters)

    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = model.state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    model.load_state_dict(loaded)
    same(model.state_dict())
    same(dict(shards.iter_full()) | {"head.weight": values["head.weight"], "count": values["count"]})


@pytest.mark.usefixtures("one_rank")
def test_wrongly_placed_gradients_are_refused() -> None:
    model = nn.Linear(4, 5)
    mesh = Mesh.create(device="cpu")
    shards = shard(model, mesh)
    model.bias.grad = torch.ones(5)  # torch accepts it
    with pytest.raises(ShardingError, match=r"parameter 'bias' is a DTensor and its .grad is a plain tensor of shape"):
        shards.accumulate("bias", torch.ones(5))
    model.bias.grad = DTensor.from_local(torch.ones(5), mesh.device_mesh, [Replicate()])
    with pytest.raises(
        ShardingError, match=r"'bias' is placed \(Shard\(dim=0\),\) .* and its .grad \(Replicate\(\),\)"
    ):
        shards.accumulate("bias", torch.ones(5))
    model.bias.grad = DTensor.from_local(torch.ones(5), mesh.device_mesh, [Shard(0)])
    shards.accumulate("bias", torch.ones(5))
    assert (model.bias.grad.to_local() == 2).all()


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_torch_optimizers_write_through_to_the_arena(make) -> None:  # type: ignore[no-untyped-def]
    model = Odd()
    plain = copy.deepcopy(model)
    shards = shard(model, Mesh.create(device="cpu"))
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    reference = make([p for p in plain.parameters() if p.requires_grad])
    for seed in range(3):
        gradients = full_gradients(plain, seed)
        shards.accumulate_many(*reduced(shards, gradients))
        for name, value in gradients.items():
            plain.get_parameter(name).grad = value
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(shards.local(name), value.detach(), rtol=1e-6, atol=1e-7)
