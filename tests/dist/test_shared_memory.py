"""Ranks that make memory which all can read: who is lost just then is named, and nobody blocks on the store for long."""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from tests.dist.pool import Pools
from zcompile import compat
from zcompile.errors import RankError
from zcompile.runtime.communication import peers
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.ranks.agreement import Agreement

pytestmark = pytest.mark.dist

NUM_BYTES = 4096


class Memory:
    """In place of memory of GPUs: notes what it was made with, or finds that a rank does not come."""

    made: ClassVar[list[tuple[int, float]]] = []
    others_come = True

    def __init__(self, num_bytes: int, device: Any, group: Any, timeout: float) -> None:
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self.made.append((num_bytes, store.timeout.total_seconds()))
        if not self.others_come:
            raise dist.DistStoreError("wait timeout after 4000ms, keys: /symmetric memory/0/1")


def attempt(leaves: str = "") -> tuple[str, list[tuple[int, float]], float, float]:
    """(error, what was made, the store's timeout afterwards, seconds) of a rank; rank 1 may leave."""
    mesh = Mesh.create(device="cpu", timeout=60.0)
    assert mesh.group is not None
    agreement = Agreement(mesh.store, mesh.rank, mesh.size, timeout=60.0, name="test")
    compat.SymmetricMemory, Memory.made, Memory.others_come = Memory, [], leaves != "after"  # type: ignore[misc]
    store: Any = dist.distributed_c10d._get_process_group_store(mesh.group)
    before, begin, error = store.timeout.total_seconds(), time.monotonic(), ""
    try:
        if mesh.rank == 1 and leaves == "before":
            return "", [], 0.0, 0.0
        share = peers.shared_memory(mesh, agreement)
        if mesh.rank == 1 and leaves == "after":
            agreement.compare("memory shared between GPUs", f"{NUM_BYTES} bytes")
            return "", [], 0.0, 0.0
        share(NUM_BYTES)
    except RankError as caught:
        error = str(caught)
    finally:
        agreement.close()
    return error, Memory.made, store.timeout.total_seconds() - before, time.monotonic() - begin


def test_a_rank_that_is_lost_while_memory_is_shared(ranks: Pools) -> None:
    for error, made, change, _ in ranks(2, attempt):
        assert (error, made, change) == ("", [(NUM_BYTES, peers.RENDEZVOUS_SECONDS)], 0.0)
    (error, made, _, seconds), _ = ranks(2, attempt, leaves="before")
    assert made == [] and seconds < 20.0, "nobody blocks on the store before all have come"
    assert re.match(
        r"\[rank 0 of 2\] rank 1 has ended: rank 0 compares memory shared between GPUs; rank 1 has left", error
    )
    (error, made, change, seconds), _ = ranks(2, attempt, leaves="after")
    assert len(made) == 1 and change == 0.0 and seconds < 20.0
    assert re.match(
        r"\[rank 0 of 2\] rank 1 has ended: rank 0 lost a connection in sharing 4096 bytes of memory", error
    )
    ranks.drop()
