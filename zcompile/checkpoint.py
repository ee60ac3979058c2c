"""Checkpoints on disk: ``save_checkpoint`` and ``load_checkpoint``, at any world size and stage."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from zcompile.contents import Contents, own_contents
from zcompile.errors import CheckpointError, ConfigError
from zcompile.module import CompiledModule
from zcompile.restore import Restore
from zcompile.runtime.checkpoint import folder
from zcompile.runtime.checkpoint.folder import Manifest
from zcompile.runtime.checkpoint.saving import Meeting, Saving, write
from zcompile.runtime.checkpoint.storage import pack, unsafe_types

log = logging.getLogger("zcompile")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside the state of the objects that were given.

    Attributes:
        step: the number that ``save_checkpoint`` was given.
        extra: rank 0's ``extra``, on every rank.
    """

    step: int
    extra: Any


def save_checkpoint(
    path: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
    step: int = 0,
    extra: Any = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Write a checkpoint of a training run, from which it goes on bit for bit at the same world size. Collective.

    Each rank writes the shards that it holds; nothing is gathered. The checkpoint at ``path`` is replaced at one moment, when
    all of the new one is on the device: whatever dies before, the old one is there and loads. What a writer that died has
    left in ``path`` is removed by the next save there. Gradients are not saved: save between steps.

    Args:
        path: a folder, on a file system that all ranks share; made if it is not there.
        model: its parameters (the masters), saved buffers and extra state. Buffers that differ between ranks are saved for each.
        optimizer: over the model's parameters; its state is saved by parameter name, with the options of its groups.
        scaler: anything with ``state_dict`` and ``load_state_dict``; rank 0's is saved.
        scheduler: likewise.
        data: the position in the data, likewise; each rank's is saved where they differ.
        step: a number to find back, such as the count of optimizer steps.
        extra: anything that ``torch.save`` takes; rank 0's is saved. What is more than tensors, numbers, strings and containers
            loads only after ``torch.serialization.add_safe_globals``.
        asynchronous: copy the values to CPU memory, return, and write in a thread while training goes on.

    Returns:
        None; with ``asynchronous``, a handle with ``done()`` and ``result(timeout)``. An error comes from ``result``, or else
        from the next save. The process waits for the thread before it ends.

    Raises:
        CheckpointError: on every rank, when one could not write; the checkpoint that was at ``path`` is still there.
        StateError: an optimizer whose state cannot be divided.
        UnfilledError: a parameter or buffer has no value yet.
        RankError: another rank is gone, or makes another call.
    """
    helpers = {"scaler": scaler, "scheduler": scheduler, "data": data}
    path = Path(path)
    meeting = meeting_of(model, "save_checkpoint", path, "what was there before is still there")
    rank = meeting.agreement.rank
    own: Contents | None = None
    name = ""

    def prepare() -> dict[str, Any]:
        nonlocal own, name
        _check_helpers(helpers)
        own = own_contents(model, optimizer, data, asynchronous)
        if rank == 0:
            own.blobs |= _shared_blobs(scaler, scheduler, extra)
            if left := model._session.runner.executor.accumulation.names():
                log.warning("the gradient of '%s' is not in .grad yet and is not saved; save after a step", left[0])
            name = folder.begin(path)
        return {"call": f"{path} at step {step}", "data": name, "digests": own.digests}

    try:
        answers = meeting.step("preparation", prepare)
        assert own is not None
        meeting.same(answers, "call")
    except CheckpointError:
        if name:
            folder.discard(path, name)
        raise
    differs = {key: [a["digests"][key] for a in answers] for key in own.digests}
    for key, digests in differs.items():
        if digests[rank] != digests[0]:
            own.blobs[f"{key}.{rank}"] = own.packed[key]
    manifest = dataclasses.replace(
        own.manifest,
        data=answers[0]["data"],
        step=step,
        helpers=[key for key, value in helpers.items() if value is not None],
        data_differs=len(set(differs["data"])) > 1,
    )
    meeting = dataclasses.replace(meeting, background=asynchronous)
    pieces, blobs = own.pieces, own.blobs
    if not asynchronous:
        write(meeting, path, manifest, pieces, blobs)
        return None
    model._checkpoints.pending = Saving(lambda: write(meeting, path, manifest, pieces, blobs))
    return model._checkpoints.pending


def load_checkpoint(
    path: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    data: Any = None,
) -> Loaded:
    """Load what ``save_checkpoint`` wrote, at any world size and stage, into a model that may be on ``meta``. Collective.

    Each rank reads the rows that it holds, at most one saved piece at a time beside the state itself. The state of random
    number generators is restored where the world size is the same and left alone otherwise. No code of the files is run:
    tensors and objects are loaded with ``torch.load(weights_only=True)``, the metadata with a list of allowed types.

    Args:
        path: as given to ``save_checkpoint``.
        model: of the same parameters and buffers.
        optimizer: over the same parameters, freshly built or not. None leaves a saved one out.
        scaler: as saved, like the next two; one that was saved and is not given is left out, with a warning.
        scheduler: after the optimizer, as it was built.
        data: ranks that were at different positions need the world size at which they were saved.

    Raises:
        CheckpointError: no complete checkpoint, or one that cannot be read, on every rank.
        StateError: of another model or optimizer, or without something that is given: names the first difference. Nothing was
            changed then.
        RankError: another rank is gone, or makes another call.
    """
    helpers = {"scaler": scaler, "scheduler": scheduler, "data": data}
    path = Path(path)
    meeting = meeting_of(model, "load_checkpoint", path, "nothing was changed")
    manifest: Manifest | None = None
    restore: Restore | None = None

    def check_files() -> dict[str, Any]:
        nonlocal manifest
        _check_helpers(helpers)
        manifest = folder.open_checkpoint(path)
        folder.check_files(path, manifest, meeting.agreement.rank, meeting.agreement.world_size)
        return {"data": manifest.data}

    def check_contents() -> None:
        nonlocal restore
        assert manifest is not None
        restore = Restore(path, manifest, model, optimizer, helpers)

    meeting.same(meeting.step("the check of files", check_files), "data")
    meeting.step("the check of contents", check_contents)
    assert restore is not None
    aftermath = "the model is partly overwritten; load again before training goes on"
    dataclasses.replace(meeting, aftermath=aftermath).step("reading", restore.fill)
    return Loaded(restore.manifest.step, restore.values["extra"])


def meeting_of(model: CompiledModule, call: str, path: Path, aftermath: str) -> Meeting:
    """Where the ranks meet for one save, load or export. Collective."""
    checkpoints = model._checkpoints
    checkpoints.settle()
    model._announce(call)
    checkpoints.count += 1
    return Meeting(model._session.runner.agreement, f"{call}({str(path)!r})", str(checkpoints.count), aftermath)


def _shared_blobs(scaler: Any, scheduler: Any, extra: Any) -> dict[str, bytes]:
    """What rank 0 saves for all."""
    blobs: dict[str, bytes] = {}
    for name, value in {"scaler": scaler, "scheduler": scheduler}.items():
        if value is not None:
            blobs[name] = pack(value.state_dict())
    blobs["extra"] = pack(extra)
    for name, blob in blobs.items():
        if types := unsafe_types(blob):
            log.warning(
                "%s holds %s: it will load only after torch.serialization.add_safe_globals([...])",
                name,
                ", ".join(types),
            )
    return blobs


def _check_helpers(helpers: Mapping[str, Any]) -> None:
    for name, value in helpers.items():
        if value is not None and not isinstance(value, Stateful):
            raise ConfigError(
                f"{name} is a {type(value).__name__} without state_dict and load_state_dict; give it both"
            )
