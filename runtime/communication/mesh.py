"""The ranks that a compiled model runs on: one mesh axis, a process group and a store of its own."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zcompile import compat
from zcompile.errors import MeshError, RankError, RankTimeoutError
from zcompile.runtime.communication.direct import DirectCollectives, Starter
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.judge import name_ranks
from zcompile.runtime.ranks.sequence import TextSequence

#: the process-group backend of each device type
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

#: seconds by which ranks that could not connect find out at different times
SETTLING = 5.0

#: the name of the axis when the user gave no mesh, or one without names
DEFAULT_AXIS = "dp"


@dataclass(eq=False)
class Mesh:
    """One axis of ranks. Without a process group it has one rank and never touches ``torch.distributed``.

    Attributes:
        axis: the axis name in graphs.
        size: ranks on the axis.
        rank: this process's place on the axis, 0 to ``size - 1``.
        device: where shards and collectives live, with an index for CUDA.
        timeout: seconds that any wait of ours may take.
        device_mesh: the mesh of the DTensors that users see; its group is the user's. None without a process group.
        group: our own process group, made with ``timeout``; every collective of ours uses it. None without a process
            group.
        store: keys of this model alone, the same on all its ranks. None without a process group.
        starter: starts the collectives of state, norms and sync; may be replaced by one that watches its waits.
        agreement: keeps the ranks of a compiled model in step; None outside of one.
    """

    axis: str
    size: int
    rank: int
    device: torch.device
    timeout: float
    device_mesh: DeviceMesh | None = None
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    starter: Starter | None = None
    agreement: Agreement | None = None

    @classmethod
    def create(
        cls, device_mesh: DeviceMesh | None = None, *, device: torch.device | str, timeout: float = 600.0
    ) -> Mesh:
        """Make the process group and store of one compiled model.

        Collective: every rank of the mesh creates its meshes in the same order.

        Args:
            device_mesh: the user's mesh of one axis; None: all ranks, or one process if there is no process group.
            device: device of the model; ``cpu`` runs on gloo and ``cuda`` on NCCL.
            timeout: seconds, for every wait on other ranks.

        Raises:
            MeshError: a mesh of several axes, of another device type or without this rank, or a device without a
                backend.
            RankTimeoutError: a rank did not come within ``timeout``.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if timeout <= 0:
            raise MeshError(f"timeout is {timeout} seconds; pass a positive number")
        if not (dist.is_available() and dist.is_initialized()):
            return cls(DEFAULT_AXIS, 1, 0, device, timeout)
        if device.type not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise MeshError(f"device {device} has no process-group backend here; put the model on one of {known}")
        if device_mesh is None:
            ranks, axis = list(range(dist.get_world_size())), DEFAULT_AXIS
        else:
            ranks, axis = _check_user_mesh(device_mesh, device)
        rank = ranks.index(dist.get_rank())
        store = _own_store(ranks, rank)
        try:
            _wait_for_all(store, rank, len(ranks), timeout, device.type)
        except dist.DistError as error:
            raise RankError(
                f"[rank {rank} of {len(ranks)}] {compat.store_host(store) or 'the store'}, which hosts the store, is gone while "
                f"rank {rank} waits for all ranks to call compile: {_first_line(error)}"
            ) from error
        try:
            group = _own_group(ranks, BACKENDS[device.type], timeout)
        except RuntimeError as error:
            raise _no_group(store, rank, len(ranks), error) from error
        if device_mesh is None:
            device_mesh = _world_mesh(device, group)
        return cls(axis, len(ranks), rank, device, timeout, device_mesh, group, store, DirectCollectives(group))

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group (of one rank or more)."""
        return self.group is not None

    @property
    def collectives(self) -> Starter:
        """``starter``, where there is more than one rank."""
        if self.starter is None:
            raise MeshError(
                "a mesh without a process group, or a closed one, has no collectives; compile the model again"
            )
        return self.starter

    def announce(self, what: str) -> None:
        """Agree with the other ranks on a collective outside of the graphs, before it starts.

        Raises:
            RankMismatchError: they call something else.
        """
        if self.agreement is not None:
            self.agreement.event(what, TextSequence.of(what))

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """What the body raises on this rank alone reaches the others if they wait for it."""
        try:
            yield
        except Exception as error:
            if self.agreement is not None:
                self.agreement.raised(error)
            raise

    def to_host(self, tensor: torch.Tensor, description: str) -> list[float]:
        """The values of a tensor that a collective made. Waits for the device, and ends with the reason if a rank is lost."""
        if self.agreement is None:
            return tensor.tolist()
        with self.agreement.waiting(description):
            return tensor.tolist()

    def close(self) -> None:
        """Give the process group back. Collectives of ours are impossible afterwards; closing twice is harmless."""
        group, self.group, self.store, self.starter = self.group, None, None, None
        if group is None or not dist.is_initialized():
            return
        try:
            dist.destroy_process_group(group)
        except ValueError:  # the user destroyed all groups, and perhaps made new ones, since
            pass


def _check_user_mesh(device_mesh: DeviceMesh, device: torch.device) -> tuple[list[int], str]:
    """The global ranks and the axis name of a mesh that the user gave."""
    if device_mesh.ndim != 1:
        names = device_mesh.mesh_dim_names or device_mesh.shape
        raise MeshError(f"mesh has {device_mesh.ndim} axes {names}; pass a mesh of one axis, such as mesh['dp']")
    if device_mesh.device_type != device.type:
        raise MeshError(
            f"mesh is on {device_mesh.device_type!r} and the model on {device.type!r}; make the mesh for the model's device"
        )
    ranks = [int(rank) for rank in device_mesh.mesh.flatten().tolist()]
    if ranks != sorted(ranks):
        raise MeshError(f"mesh has its ranks in the order {ranks}; pass a mesh in rising order, as its groups have it")
    if dist.get_rank() not in ranks:
        raise MeshError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {ranks}; call compile on the mesh's ranks only"
        )
    names = device_mesh.mesh_dim_names
    return ranks, names[0] if names else DEFAULT_AXIS


def _own_group(ranks: list[int], backend: str, timeout: float) -> dist.ProcessGroup:
    """A new process group of ``ranks``, in that order, with our timeout."""
    everyone = len(ranks) == dist.get_world_size()
    group = dist.new_group(
        ranks,
        timeout=datetime.timedelta(seconds=timeout),
        backend=backend,
        use_local_synchronization=not everyone,  # other ranks need not know that a part of the job compiles a model
        pg_options=compat.urgent_nccl() if backend == "nccl" else None,
        group_desc="zcompile",
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is in the group"
    return group


def _world_mesh(device: torch.device, group: dist.ProcessGroup) -> DeviceMesh:
    """A mesh of all ranks: over the default group where that one works on the device, else over ours."""
    if device.type in dist.get_backend_config():
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(DEFAULT_AXIS,))
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(DEFAULT_AXIS,))


def _own_store(ranks: list[int], rank: int) -> dist.Store:
    """A part of the default store that no other model uses.

    The models of a set of ranks are counted in the store itself, by each rank on its own, so nothing has to be
    remembered in the process and a new process group starts afresh.
    """
    store = compat.default_store()
    members = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    number = store.add(f"zcompile/{members}/meshes/{rank}", 1)
    return dist.PrefixStore(f"zcompile/{members}/{number}", store)


def _wait_for_all(store: dist.Store, rank: int, size: int, timeout: float, device: str) -> None:
    """Wait until every rank is here: making a group without one, or of another kind, would end with an error that names nobody."""
    head = f"[rank {rank} of {size}] rank {rank}"
    store.add(f"on {device}", 1)
    store.set(f"arrived/{rank}", "")
    _wait_for_arrivals(store, head, size, timeout)
    here = store.add(f"on {device}", 0)
    if here != size:
        raise MeshError(
            f"{head} has its model on {device}, as {here} of {size} ranks do; move the model to the same kind of device on every rank"
        )


def _wait_for_arrivals(store: dist.Store, head: str, size: int, timeout: float) -> None:
    if store.add("arrived", 1) == size:
        if store.add("decided", 1) > 1:
            raise RankTimeoutError(f"{head} calls compile after others gave up waiting for it; pass a longer timeout")
        store.set("all arrived", "")
        return
    try:
        store.wait(["all arrived"], datetime.timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        arrived = [r for r in range(size) if store.check([f"arrived/{r}"])]
        missing = [r for r in range(size) if r not in arrived]
        if store.add("decided", 1) > 1 and not missing and store.check(["all arrived"]):
            return
        raise RankTimeoutError(
            f"{head} waits for all ranks to call compile since {timeout:.0f} s: arrived: {name_ranks(arrived)}; "
            f"missing: {name_ranks(missing) if missing else 'none any more'}; find out why, or pass a longer timeout"
        ) from error


def _no_group(store: dist.Store, rank: int, size: int, error: RuntimeError) -> RankError:
    """All ranks were here and yet they could not connect: name those that are silent now."""
    reason = f"ranks could not be connected: {_first_line(error)}"
    try:
        store.set(f"not connected/{rank}", "")
        deadline = time.monotonic() + SETTLING
        silent = [r for r in range(size) if r != rank]
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            silent = [r for r in silent if not store.check([f"not connected/{r}"])]
    except dist.DistError:
        return RankError(f"[rank {rank} of {size}] {compat.store_host(store) or 'the store'} is gone: {reason}")
    who = (
        f"{name_ranks(silent)} ended or cannot be reached"
        if silent
        else "every rank is there and none reaches all others"
    )
    return RankError(
        f"[rank {rank} of {size}] {who}: {reason}; look at the first error of all ranks, and at GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME, which choose the network"
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
