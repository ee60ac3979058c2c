"""The nursery, a process that has everything imported and forks workers; and the workers, which run jobs.

``python -m tests.dist.worker ADDRESS KEY``: started by ``tests.dist.pool``, ends when that one closes its connection.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

#: seconds that a collective of the workers' default group may take
GROUP_TIMEOUT = 60.0

#: makes a worker print where each of its threads is
SHOWS_STACKS = signal.SIGUSR1

#: imported once, in the nursery
HEAVY = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo.functional_export",
    "torch._inductor.compile_fx",
    "zcompile",
    "zcompile.lower.inductor",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
)


def nursery(address: str, key: bytes) -> None:
    """Fork the workers of every (world_size, folder) that arrives; answer with their process ids."""
    for name in HEAVY:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the workers' collections need not walk over what was imported, nor copy its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    parent = Client(address, authkey=key)
    pids: list[int] = []
    try:
        while True:
            world_size, folder = parent.recv()
            pids = [
                fork(address, key, rank, world_size, Path(folder), parent.close) for rank in range(max(1, world_size))
            ]
            parent.send(pids)
    except EOFError:
        pass
    finally:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def fork(address: str, key: bytes, rank: int, world_size: int, folder: Path, leave: Callable[[], None]) -> int:
    """A new process that works as one rank."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        leave()
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        faulthandler.register(SHOWS_STACKS)
        work(address, key, rank, world_size, folder)
        code = 0
    except EOFError:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def work(address: str, key: bytes, rank: int, world_size: int, folder: Path) -> None:
    """Run jobs (module, function, arguments) until the connection closes; world size 0 is one process without a group.

    Jobs of a module that sets ``SHARES_CAPTURES`` test what comes after a capture, and share captures of equal models.
    """
    import torch
    import torch.distributed as dist

    from tests.captures import shared_captures

    torch.set_num_threads(1)
    if world_size:
        store = open_store(rank, world_size, folder)
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    parent = Client(address, authkey=key)
    parent.send(rank)
    while True:
        module, name, arguments = parent.recv()
        try:
            gc.collect()
            gc.freeze()  # what earlier jobs left in caches; their models are gone
            if world_size:
                dist.barrier()
            job = importlib.import_module(module)
            with shared_captures() if getattr(job, "SHARES_CAPTURES", False) else contextlib.nullcontext():
                result = getattr(job, name)(**arguments)
            reply = ("returned", result)
        except Exception as error:
            reply = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
        parent.send(reply)


def open_store(rank: int, world_size: int, folder: Path) -> Any:
    """A TCP store on a free port of rank 0."""
    import torch.distributed as dist

    path = folder / "port"
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, timeout, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(path)
        return store
    deadline = time.monotonic() + GROUP_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not opened its store after {GROUP_TIMEOUT} s")
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), world_size, False, timeout, wait_for_workers=False)


if __name__ == "__main__":
    nursery(sys.argv[1], bytes.fromhex(sys.argv[2]))
