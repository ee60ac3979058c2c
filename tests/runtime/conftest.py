"""Real ranks for tests: gloo processes over a file store."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.runtime.models import cut_into_chunks

#: workers are forked from one clean process that has everything imported
WORKERS = multiprocessing.get_context("forkserver")
WORKERS.set_forkserver_preload(["zcompile", "torch.distributed.checkpoint", "pytest"])

Launch = Callable[..., list[Any]]


def work(body: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    """What one process does; leaves its result or its traceback in ``folder``."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=30)
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        torch.save(body(rank, world_size, *args), folder / f"result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        raise


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """``launch(world_size, body, *args)`` runs ``body(rank, world_size, *args)`` in processes; returns their results."""
    number = 0

    def run(world_size: int, body: Callable[..., Any], *args: Any, within: float = 60.0) -> list[Any]:
        nonlocal number
        number += 1
        folder = tmp_path / f"launch{number}"
        folder.mkdir()
        processes = [
            WORKERS.Process(target=work, args=(body, rank, world_size, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + within
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in late:
            processes[rank].kill()
        errors = sorted(folder.glob("error*"))
        assert not errors, "\n".join(f"{path.name}: {path.read_text()}" for path in errors)
        assert not late, f"ranks {late} did not end in {within} s"
        return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world_size)]

    return run


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are cut as large ones are: into chunks, whose gradients do not stay."""
    cut_into_chunks(monkeypatch)


@pytest.fixture(params=[False, True], ids=["whole", "chunks"])
def both_sizes(request: pytest.FixtureRequest) -> None:
    """Models as they are, and as large ones."""
    if request.param:
        request.getfixturevalue("large")


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank in this process, over a store in memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
