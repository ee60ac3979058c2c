"""Writers of checkpoints that die or fail at any moment: the checkpoint before loads, and no rank waits for ever."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcompile
from tests.dist.checkpoints import Run, assert_same
from tests.dist.pool import ROOT, Pools
from tests.dist.training import this_rank
from zcompile.errors import CheckpointError, RankError
from zcompile.runtime.checkpoint import folder, storage
from zcompile.runtime.checkpoint.folder import MANIFEST, open_checkpoint

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

#: a function of the writers, and whether the end comes before or after it; the new checkpoint is complete after the last
MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "nothing written": (storage, "write", True),
    "a file is half written": (storage._SavePlanner, "resolve_data", True),
    "a part is not listed": (storage, "write_file", True),
    "parts written": (storage, "write", False),
    "no manifest": (folder, "commit", True),
    "new manifest not in place": (os, "replace", True),
    "manifest in place, old data still there": (folder, "_remove_others", True),
}


def value(model: Any) -> float:
    """Of every element of a parameter."""
    return model.full_state_dict()["mix.bias"].unique().item()


def set_value(run: Run, number: float) -> None:
    with torch.no_grad():
        run.model.mix.bias.fill_(number)


def interrupt(owner: Any, name: str, before: bool, act: Callable[[], None]) -> Callable[[], None]:
    """Let ``act`` happen before or after a function of a module; returns what takes it away again."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        if before:
            act()
        result = original(*args, **kwargs)
        if not before:
            act()
        return result

    setattr(owner, name, changed)
    return lambda: setattr(owner, name, original)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Death. ---------------------------------------------------------------------------------------------------------------


def killed_while_saving(path: str, moment: str, asynchronous: bool) -> None:
    """Every rank dies at the moment, or when rank 0 has died."""
    run = Run()
    set_value(run, 1.0)
    zcompile.save_checkpoint(path, **run.parts(), step=1)
    set_value(run, 2.0)
    owner, name, before = MOMENTS[moment]
    calls = iter(range(100))
    if owner is storage._SavePlanner:
        interrupt(owner, name, before, lambda: die() if next(calls) == 6 else None)
    elif owner is folder and name == "_remove_others":  # begin uses it too
        interrupt(folder, "begin", False, lambda: interrupt(owner, name, before, die) and None)
    else:
        interrupt(owner, name, before, die)
    saving = zcompile.save_checkpoint(path, **run.parts(), step=2, asynchronous=asynchronous)
    if saving is not None:
        saving.result(60)


def goes_on(path: str, expected: float) -> list[str]:
    run = Run()
    loaded = zcompile.load_checkpoint(path, **run.parts())
    assert loaded.step == value(run.model) == expected
    set_value(run, 3.0)
    zcompile.save_checkpoint(path, **run.parts(), step=3)
    return sorted(os.listdir(path))


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_checkpoint_before_survives_the_death_of_the_writers(
    ranks: Pools, tmp_path: Path, moment: str, asynchronous: bool
) -> None:
    outcomes = ranks.outcomes(
        2, killed_while_saving, path=str(tmp_path), moment=moment, asynchronous=asynchronous, grace=0.0
    )
    assert "died" in [o.kind for o in outcomes] and "returned" not in [o.kind for o in outcomes], outcomes
    after = moment == "manifest in place, old data still there"
    assert len(list(tmp_path.glob("data-*"))) == 2, "what is left of the one that was not finished"
    expected = 2.0 if after else 1.0
    assert open_checkpoint(tmp_path).step == expected
    for names in ranks(2, goes_on, path=str(tmp_path), expected=expected):
        assert names == [open_checkpoint(tmp_path).data, MANIFEST], "and the next save removed it"


def one_dies(path: str, asynchronous: bool) -> float:
    run = Run()
    set_value(run, 1.0)
    zcompile.save_checkpoint(path, **run.parts(), step=1)
    set_value(run, 2.0)
    if this_rank() == 1:
        interrupt(storage, "write_file", True, die)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 is gone"):
        saving = zcompile.save_checkpoint(path, **run.parts(), step=2, asynchronous=asynchronous)
        while saving is not None:
            run.step()
    if saving_error := saving_of(run):
        with pytest.raises(RankError, match="rank 1 is gone"):
            saving_error.result(30)
    assert open_checkpoint(Path(path)).step == 1
    return time.monotonic() - begin


def saving_of(run: Run) -> Any:
    return run.model._checkpoints.pending


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_the_death_of_one_rank_ends_the_save_of_the_others(ranks: Pools, tmp_path: Path, asynchronous: bool) -> None:
    outcomes = ranks.outcomes(2, one_dies, path=str(tmp_path), asynchronous=asynchronous, grace=60.0)
    assert [o.kind for o in outcomes] == ["returned", "died"], outcomes
    assert outcomes[0].value < 45.0


# Errors. --------------------------------------------------------------------------------------------------------------


def full_disk(path: str, asynchronous: bool) -> None:
    """A limit on the size of files makes writing fail as a full disk does: for real, on one rank."""
    run = Run()
    set_value(run, 1.0)
    zcompile.save_checkpoint(path, **run.parts(), step=1)
    set_value(run, 2.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if this_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    saving = None
    with pytest.raises(CheckpointError, match=r"save_checkpoint\(.*\) failed on rank 1 with .*is still there"):
        saving = zcompile.save_checkpoint(path, **run.parts(), step=2, asynchronous=asynchronous)
        run.step()
        run.step()
        if this_rank() == 0 and saving is not None:
            saving.result(60)
        zcompile.save_checkpoint(path, **run.parts(), step=3)  # says so where nobody has asked
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    assert sorted(os.listdir(path)) == [open_checkpoint(Path(path)).data, MANIFEST], "nothing is left over"
    run.step()  # the model is as good as before
    zcompile.load_checkpoint(path, **run.parts())
    assert value(run.model) == 1.0
    set_value(run, 4.0)
    zcompile.save_checkpoint(path, **run.parts(), step=4)
    assert open_checkpoint(Path(path)).step == 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_of_one_rank_is_an_error_on_all(ranks: Pools, tmp_path: Path, asynchronous: bool) -> None:
    ranks(2, full_disk, path=str(tmp_path / "c"), asynchronous=asynchronous)


def fails_at_commit(path: str) -> None:
    run = Run()
    zcompile.save_checkpoint(path, **run.parts(), step=1)

    def no_space() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    undo = interrupt(os, "replace", True, no_space)
    with pytest.raises(
        CheckpointError, match=r"failed on rank 0 with OSError: \[Errno 28\] No space left on device; what"
    ):
        zcompile.save_checkpoint(path, **run.parts(), step=2)
    undo()
    undo = interrupt(folder, "sync_folder", True, no_space)
    with pytest.raises(CheckpointError, match="failed on rank 0 with OSError"):
        zcompile.save_checkpoint(path, **run.parts(), step=2)
    undo()
    assert open_checkpoint(Path(path)).step == 1
    assert zcompile.load_checkpoint(path, **run.parts()).step == 1
    with pytest.raises(CheckpointError, match=r"is '.* at step [34]' on rank 1 and '.* at step 3' on rank 0"):
        zcompile.save_checkpoint(path, **run.parts(), step=3 + this_rank())
    torch.distributed.barrier()
    other = Path(path).with_name("file")
    if this_rank() == 0:
        other.write_text("")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="file is a file; pass a folder"):
        zcompile.save_checkpoint(other, **run.parts())
    torch.distributed.barrier()
    foreign = Path(path).with_name("foreign")
    if this_rank() == 0:
        foreign.mkdir()
        (foreign / MANIFEST).write_text('{"name": "a web application"}')
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a zcompile checkpoint's"):
        zcompile.save_checkpoint(foreign, **run.parts())
    run.step()
    assert sorted(os.listdir(path)) == [open_checkpoint(Path(path)).data, MANIFEST]


def test_errors_of_rank_0_are_errors_on_all(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, fails_at_commit, path=str(tmp_path / "c"))


# In the background. ---------------------------------------------------------------------------------------------------


def values_of_the_moment(path: str) -> None:
    run = Run()
    run.step()
    gate = threading.Event()
    undo = interrupt(storage, "write", True, lambda: gate.wait(60) and None)
    expected = run.everything()
    saving = zcompile.save_checkpoint(path, **run.parts(), step=1, asynchronous=True)
    assert saving is not None
    for _ in range(3):
        run.step()
    with pytest.raises(TimeoutError, match=r"not written after 0\.01 s"):
        saving.result(0.01)
    assert not saving.done() and not (Path(path) / MANIFEST).exists()
    gate.set()
    second = zcompile.save_checkpoint(path + "2", **run.parts(), step=4, asynchronous=True)  # waits for the first
    assert saving.done() and second is not None
    undo()
    zcompile.load_checkpoint(path, **run.parts())  # waits for the second
    assert second.done()
    assert_same(run.everything(), expected)
    last = zcompile.save_checkpoint(path, **run.parts(), step=9, asynchronous=True)
    zcompile.unwrap(run.model)
    assert last is not None and last.done() and open_checkpoint(Path(path)).step == 9


@pytest.mark.parametrize("world", [0, 2])
def test_training_goes_on_while_the_values_of_the_moment_are_saved(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world, values_of_the_moment, path=str(tmp_path / "c"))


EXITS = """
import sys, time, torch, zcompile
from zcompile.runtime.checkpoint import storage
write = storage.write
def slow(*args):
    time.sleep(1.5)
    write(*args)
storage.write = slow
model = zcompile.compile(torch.nn.Linear(3, 3), backend="eager")
zcompile.save_checkpoint(sys.argv[1], model, step=5, asynchronous=True)
print("the program ends")
if sys.argv[2] == "raises":
    raise ValueError("in the program")
"""


@pytest.mark.parametrize("how", ["ends", pytest.param("raises", marks=pytest.mark.wide)])
def test_the_process_ends_when_the_checkpoint_is_written(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", EXITS, str(tmp_path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "the program ends" in done.stdout, done.stderr
    assert done.returncode == (1 if how == "raises" else 0), done.stderr
    assert open_checkpoint(tmp_path).step == 5


ENDS = """
import os, signal, sys, time, torch, torch.distributed as dist, zcompile
from zcompile.runtime.checkpoint import storage
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
model = zcompile.compile(torch.nn.Linear(3, 3), backend="eager")
write = storage.write
def slow(*args):
    time.sleep(1.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
storage.write = slow
zcompile.save_checkpoint(sys.argv[1] + "/c", model, step=5, asynchronous=True)
"""


@pytest.mark.wide
def test_a_process_that_has_ended_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert ranks[1].wait(120) == -signal.SIGKILL
    begin = time.monotonic()
    ranks[0].wait(120)
    assert time.monotonic() - begin < 60, "the model's timeout is 600 s"
    assert not (tmp_path / "c" / MANIFEST).exists()
