"""The ranks that a model runs on."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.runtime.conftest import Launch
from zcompile.errors import MeshError
from zcompile.runtime.communication.mesh import Mesh


def test_without_a_process_group() -> None:
    mesh = Mesh.create(device="cpu")
    assert (mesh.size, mesh.rank, mesh.axis) == (1, 0, "dp")
    assert mesh.group is None and mesh.store is None and mesh.device_mesh is None and not mesh.is_distributed
    mesh.close()
    with pytest.raises(MeshError, match="timeout is 0 seconds"):
        Mesh.create(device="cpu", timeout=0)


@pytest.mark.usefixtures("one_rank")
def test_each_model_has_its_own_group_and_store() -> None:
    first, second = Mesh.create(device="cpu", timeout=5), Mesh.create(device="cpu", timeout=5)
    assert first.group is not second.group and first.group is not dist.group.WORLD
    assert first.device_mesh == second.device_mesh  # DTensors of two models mix
    assert first.store is not None and second.store is not None
    first.store.set("key", "1")
    assert not second.store.check(["key"]) and first.store.check(["key"])
    first.close()
    first.close()
    dist.all_reduce(torch.ones(1), group=second.group)


@pytest.mark.usefixtures("one_rank")
def test_meshes_that_are_refused() -> None:
    two_axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(MeshError, match=r"2 axes \('replicate', 'shard'\); pass a mesh of one axis"):
        Mesh.create(two_axes, device="cpu")
    one_axis = Mesh.create(two_axes["shard"], device="cpu")
    assert one_axis.axis == "shard" and one_axis.device_mesh is not None
    with pytest.raises(MeshError, match="mesh is on 'cpu' and the model on 'cuda'"):
        Mesh.create(init_device_mesh("cpu", (1,)), device="cuda:0")
    with pytest.raises(MeshError, match="no process-group backend"):
        Mesh.create(device="meta")


@pytest.mark.usefixtures("one_rank")
def test_closing_after_the_process_groups_are_gone() -> None:
    mesh = Mesh.create(device="cpu")
    dist.destroy_process_group()
    mesh.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh.create(device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh.close()


def test_a_tcp_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=datetime.timedelta(seconds=10))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = Mesh.create(device="cpu")
        assert mesh.store is not None
        mesh.store.set("key", "value")
        assert mesh.store.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_a_file_store(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert Mesh.create(device="cpu").store is not None
    finally:
        dist.destroy_process_group()


def on_three_ranks(rank: int, world_size: int) -> list[object]:
    everyone = Mesh.create(device="cpu", timeout=20)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=everyone.group)
    seen: list[object] = [everyone.size, everyone.rank, value.item()]
    with pytest.raises(MeshError, match="in the order"):
        Mesh.create(DeviceMesh("cpu", [2, 0, 1]), device="cpu")
    pair = DeviceMesh("cpu", [1, 2], mesh_dim_names=("data",))
    if rank == 0:
        with pytest.raises(MeshError, match=r"rank 0 is not in the mesh of ranks \[1, 2\]"):
            Mesh.create(pair, device="cpu")
    else:  # rank 0 takes no part
        part = Mesh.create(pair, device="cpu", timeout=20)
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=part.group)
        assert part.store is not None and everyone.store is not None
        part.store.add("count", 1)
        seen += [part.axis, part.size, part.rank, value.item(), everyone.store.check(["count"])]
    again = Mesh.create(device="cpu", timeout=20)
    dist.all_reduce(value, group=again.group)
    return seen


@pytest.mark.dist
def test_groups_of_all_and_of_some_ranks(launch: Launch) -> None:
    assert launch(3, on_three_ranks) == [
        [3, 0, 3.0],
        [3, 1, 3.0, "data", 2, 0, 3.0, False],
        [3, 2, 3.0, "data", 2, 1, 3.0, False],
    ]
