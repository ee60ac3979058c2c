"""Checkpoints on disk: a resumed run is the run that never stopped, and other world sizes and stages load the same values."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zcompile
from tests.dist.checkpoints import Every, Run, assert_same, draws, every, padding_is_zero, scramble
from tests.dist.pool import Pools
from tests.dist.training import this_rank, world_size
from zcompile.errors import CheckpointError, ConfigError, StateError
from zcompile.runtime.checkpoint.folder import MANIFEST, open_checkpoint
from zcompile.runtime.checkpoint.storage import pack

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True


# Resuming. ------------------------------------------------------------------------------------------------------------


def resume(path: str, stage: int, kind: str, asynchronous: bool = False) -> None:
    scramble()
    run = Run(stage, kind, start=10 * this_rank())
    for _ in range(3):
        run.step()
    saving = zcompile.save_checkpoint(
        path, **run.parts(), step=3, extra={"name": [1, 2.5, None, torch.ones(2)]}, asynchronous=asynchronous
    )
    losses = [run.step() for _ in range(3)]
    expected, numbers = run.everything(), draws()
    if saving is not None:
        saving.result(30)
    assert len(set(expected["buffers"]["norm.running_mean"].tolist())) > 1, "buffers have moved"

    scramble()
    draws()
    torch.manual_seed(77)
    again = Run(stage, kind, model=Every())
    if stage in (1, 3):
        again.step()  # state that is there already is overwritten
    loaded = zcompile.load_checkpoint(path, **again.parts())
    assert loaded.step == 3
    assert_same(loaded.extra, {"name": [1, 2.5, None, torch.ones(2)]})
    assert again.data.at == 3 + 10 * this_rank()
    assert [again.step() for _ in range(3)] == losses
    assert_same(again.everything(), expected)
    assert draws() == numbers
    assert padding_is_zero(again.model)


@pytest.mark.parametrize(
    ("stage", "kind", "asynchronous"),
    [
        (3, "ours", False),
        (3, "torch", True),
        (2, "ours", True),
        (1, "torch", False),
        (0, "ours", False),
        (3, "momentum", False),
    ],
)
def test_a_resumed_run_is_the_run_that_never_stopped(
    ranks: Pools, tmp_path: Path, stage: int, kind: str, asynchronous: bool
) -> None:
    ranks(2, resume, path=str(tmp_path / "c"), stage=stage, kind=kind, asynchronous=asynchronous)


@pytest.mark.parametrize("world", [0, 1])
def test_resume_in_one_process(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world, resume, path=str(tmp_path / "c"), stage=3, kind="ours")


# Other world sizes and stages. ----------------------------------------------------------------------------------------


def part_of_trip(path: str, stage: int, kind: str, first: bool, step: bool, meta: bool) -> bytes:
    """Load, unless this is the first part; then maybe a step, and a save. Returns, packed, the values after load and at the save."""
    torch.manual_seed(31)
    if meta:
        with torch.device("meta"):
            model = Every()
    run = Run(stage, kind, model=model if meta else Every())
    loaded: dict[str, Any] = {}
    if not first:
        at = zcompile.load_checkpoint(path, **run.parts()).step
        loaded = run.everything()
        assert at == loaded["data"] and padding_is_zero(run.model)
    if step:
        run.step()
    zcompile.save_checkpoint(path, **run.parts(), step=run.data.at)
    return pack({"loaded": loaded, "saved": run.everything()})


def test_a_checkpoint_travels_over_world_sizes_and_stages(ranks: Pools, tmp_path: Path) -> None:
    """0 is one process without a process group."""
    saved: list[Any] = []
    trip = [(2, 3), (3, 1), (2, 3), (4, 0), (4, 3), (1, 3), (0, 3), (2, 0)]
    steps = (0, 4, 6)
    for number, (world, stage) in enumerate(trip):
        kind = "ours" if number % 3 else "torch"
        packed = ranks(
            world,
            part_of_trip,
            path=str(tmp_path / "c"),
            stage=stage,
            kind=kind,
            first=number == 0,
            step=number in steps,
            meta=number in (1, 5, 6),
        )
        out = [torch.load(io.BytesIO(each)) for each in packed]
        for each in out if saved else ():
            expected = saved[0]
            assert_same(each["loaded"]["parameters"], expected["parameters"], "parameters")
            assert_same(each["loaded"]["optimizer"], expected["optimizer"], "optimizer")
            assert_same([strip(g) for g in each["loaded"]["groups"]], [strip(g) for g in expected["groups"]], "groups")
            for key in ("scheduler", "scaler", "data"):
                assert_same(each["loaded"][key], expected[key], key)
            if len(out) != len(saved):  # at another world size: rank 0's
                assert_same(each["loaded"]["buffers"], expected["buffers"], "buffers")
                assert each["loaded"]["seen"] == expected["seen"]
        saved = [each["saved"] for each in out]


def strip(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options and names."""
    return {key: value for key, value in group.items() if key != "decoupled_weight_decay"}


def many_positions(path: str, save: bool) -> None:
    run = Run(start=this_rank() if save else 0)
    if save:
        zcompile.save_checkpoint(path, run.model, data=run.data)
        return
    with pytest.raises(StateError, match="data has a position for each of 2 ranks in the checkpoint and there are 3"):
        zcompile.load_checkpoint(path, run.model, data=run.data)
    with captured() as texts:
        zcompile.load_checkpoint(path, run.model)
    assert len(texts) == (2 if this_rank() == 0 else 0), texts
    if texts:
        assert "state of data, which was not given" in texts[0]
        assert "saved by 2 ranks and 3 load it: random number generators stay" in texts[1]


def test_positions_of_another_world_size_are_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, many_positions, path=str(tmp_path), save=True)
    ranks(3, many_positions, path=str(tmp_path), save=False)


class captured:
    """The messages that zcompile logs inside."""

    def __enter__(self) -> list[str]:
        self.texts: list[str] = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.texts.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zcompile").addHandler(self.handler)
        return self.texts

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("zcompile").removeHandler(self.handler)


# What does not fit. ---------------------------------------------------------------------------------------------------


class Other:
    """Models and optimizers that are not those of the checkpoint, and what is said."""

    @staticmethod
    def models() -> list[tuple[Callable[[], nn.Module], str]]:
        def without(name: str) -> Callable[[], nn.Module]:
            def make() -> nn.Module:
                model = every()
                delattr(model, name)
                return model

            return make

        def with_(name: str, value: Any) -> Callable[[], nn.Module]:
            def make() -> nn.Module:
                model = every()
                setattr(model, name, value() if callable(value) else value)
                return model

            return make

        return [
            (without("unused"), r"checkpoint has the parameter 'unused\.weight' \(2 in all\)"),
            (with_("more", lambda: nn.Linear(2, 2)), r"parameter 'more\.weight' is not in the checkpoint"),
            (
                with_("wide", nn.Parameter(torch.ones(2, 6))),
                r"'wide' has shape \[2, 6\] and the checkpoint has \[1, 6\]",
            ),
            (with_("norm", lambda: nn.BatchNorm1d(6, track_running_stats=False)), r"the buffer 'norm\.running_mean'"),
            (with_("mix", lambda: nn.Linear(6, 6)), r"'mix\._extra_state' is not in the model"),
            (lambda: every(tied=False), r"\['embed\.weight', 'head\.weight'\] are one in the checkpoint and several"),
        ]


def refuses(path: str) -> None:
    run = Run()
    run.step()
    zcompile.save_checkpoint(path, run.model, run.optimizer, data=run.data)
    before = run.everything()
    for make, text in Other.models():
        other = zcompile.compile(make(), backend="eager", verify="off")
        untouched = other.full_state_dict()
        with pytest.raises(StateError, match=text):
            zcompile.load_checkpoint(path, other)
        assert_same(other.full_state_dict(), untouched)
    with pytest.raises(StateError, match="scaler is given and the checkpoint has none; pass scaler=None"):
        zcompile.load_checkpoint(path, run.model, run.optimizer, scaler=run.scaler)
    with pytest.raises(StateError, match="optimizer is SGD and the checkpoint has the state of AdamW"):
        zcompile.load_checkpoint(path, run.model, torch.optim.SGD(run.model.parameters(), lr=0.1))
    some = [p for n, p in run.model.named_parameters() if n != "wide" and p.requires_grad]
    with pytest.raises(StateError, match=r"missing \[\], not in the optimizer \['wide'\]"):
        zcompile.load_checkpoint(path, run.model, zcompile.optim.AdamW(some))
    with pytest.raises(StateError, match=r"was saved as two groups with different options"):
        named = [p for p in run.model.parameters() if p.requires_grad]
        zcompile.load_checkpoint(path, run.model, zcompile.optim.AdamW(named))
    with pytest.raises(ConfigError, match="data is a int without state_dict"):
        zcompile.save_checkpoint(path, run.model, data=3)
    with pytest.raises(CheckpointError, match=r"absent does not exist; pass the path"):
        zcompile.load_checkpoint(path + "/absent", run.model)
    assert_same(run.everything(), before)
    zcompile.load_checkpoint(path, run.model, run.optimizer, data=run.data)
    run.step()
    with captured() as texts:
        zcompile.load_checkpoint(path, run.model)
    if this_rank() == 0:
        assert texts == ["the checkpoint has the state of optimizer, data, which was not given: left out"]


def test_what_does_not_fit_is_refused_by_name(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, refuses, path=str(tmp_path / "c"))


class Custom:
    """A type that loads only from files that are trusted."""

    def __init__(self) -> None:
        self.value = 3


def untrusted(path: str) -> None:
    run = Run()
    with captured() as texts:
        zcompile.save_checkpoint(path, run.model, extra=Custom())
    if this_rank() == 0:
        assert "extra holds tests.dist.test_checkpoint.Custom: it will load only after" in texts[0]
    with pytest.raises(
        StateError, match=r"'extra' in the checkpoint holds tests\.dist\.test_checkpoint\.Custom, which"
    ):
        zcompile.load_checkpoint(path, run.model)
    with torch.serialization.safe_globals([Custom]):
        assert zcompile.load_checkpoint(path, run.model).extra.value == 3
    with pytest.raises(CheckpointError, match=r"failed on rank 0 with \w+Error: .*lambda"):
        zcompile.save_checkpoint(path, run.model, extra=(lambda: 0) if this_rank() == 0 else None)
    assert open_checkpoint(Path(path)).step == 0


def test_types_that_are_not_safe(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, untrusted, path=str(tmp_path / "c"))


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("the code of a checkpoint was run",)


def damaged(path: str) -> None:
    import pickle

    run = Run()
    zcompile.save_checkpoint(path, run.model)
    folder = Path(path)
    data = folder / open_checkpoint(folder).data
    metadata = (data / ".metadata").read_bytes()
    whole = (data / "__1_0.distcp").read_bytes()
    meet()
    if this_rank() == 0:
        (data / "__1_0.distcp").write_bytes(whole[:-100])
    meet()
    with pytest.raises(CheckpointError, match=f"__1_0.distcp has {len(whole) - 100} bytes of {len(whole)}"):
        zcompile.load_checkpoint(path, run.model)
    meet()
    if this_rank() == 0:
        (data / "__1_0.distcp").unlink()
    meet()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        zcompile.load_checkpoint(path, run.model)
    meet()
    if this_rank() == 0:
        (data / "__1_0.distcp").write_bytes(whole)
        (data / ".metadata").write_bytes(pickle.dumps(Bomb()))
        content = json.loads((folder / MANIFEST).read_text())
        content["files"][".metadata"] = len(pickle.dumps(Bomb()))
        (folder / MANIFEST).write_text(json.dumps(content))
    meet()
    with pytest.raises(CheckpointError, match=r"UnpicklingError: DCP metadata holds builtins\.print"):
        zcompile.load_checkpoint(path, run.model)
    meet()
    if this_rank() == 0:
        (folder / MANIFEST).write_text(json.dumps({"format": "zcompile checkpoint", "version": 99}))
        (data / ".metadata").write_bytes(metadata)
    meet()
    with pytest.raises(CheckpointError, match="has version 99 of the format and this zcompile reads version 1"):
        zcompile.load_checkpoint(path, run.model)


def meet() -> None:
    """What a rank did to the files is seen by all."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def test_damaged_checkpoints_are_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, damaged, path=str(tmp_path / "c"))


# The files. -----------------------------------------------------------------------------------------------------------


def shares(path: str, stage: int) -> list[int]:
    run = Run(stage)
    run.step()
    zcompile.save_checkpoint(path, run.model, run.optimizer)
    folder = Path(path)
    manifest = open_checkpoint(folder)
    state = {"model.embed.weight": torch.zeros(13, 6), "optimizer.embed.weight.exp_avg": torch.zeros(13, 6)}
    dcp.load(state, checkpoint_id=folder / manifest.data)  # torch reads it as any of its checkpoints
    assert torch.equal(state["model.embed.weight"], run.model.full_state_dict()["embed.weight"])
    full = run.model.full_optimizer_state_dict(run.optimizer)["state"]
    assert torch.equal(state["optimizer.embed.weight.exp_avg"], full["embed.weight"]["exp_avg"])
    return [manifest.files[f"__{rank}_0.distcp"] for rank in range(world_size())]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_share_the_writing_and_torch_reads_the_files(ranks: Pools, tmp_path: Path, stage: int) -> None:
    for sizes in ranks(2, shares, path=str(tmp_path / "c"), stage=stage):
        assert max(sizes) < 0.7 * sum(sizes), sizes
