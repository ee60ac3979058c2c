"""Ranks write one checkpoint together: now, or in a thread beside the training."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcompile.errors import CheckpointError, RankError, ZCompileError
from zcompile.runtime.checkpoint import folder, storage
from zcompile.runtime.checkpoint.folder import Manifest
from zcompile.runtime.checkpoint.pieces import Piece
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.exchange import exchange
from zcompile.runtime.ranks.texts import describe


@dataclass(frozen=True)
class Meeting:
    """Where ranks tell each other how far they are; all go on, or none.

    Attributes:
        agreement: of the model.
        what: what they do together, such as ``save_checkpoint('run/last')``.
        topic: of this use alone, the same on every rank.
        aftermath: what a failure leaves behind, as the end of a sentence.
        background: this is not the thread that trains.
    """

    agreement: Agreement
    what: str
    topic: str
    aftermath: str = "nothing was changed"
    background: bool = False

    def step(self, name: str, work: Callable[[], Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """Do ``work`` and hear what it gave on every rank, by rank: anything that is JSON.

        Raises:
            ZCompileError: of ``work`` on this rank, as it is.
            CheckpointError: ``work`` failed with another error, or on another rank; names the rank and the reason.
            RankError: another rank failed, is gone or left.
        """
        failure: Exception | None = None
        said: Mapping[str, Any] = {}
        try:
            said = work() or {}
        except RankError:
            raise
        except Exception as error:
            failure, said = error, {"failure": describe(error)}
        texts = exchange(
            self.agreement, f"{name} of {self.what} ({self.topic})", json.dumps(said), background=self.background
        )
        answers: list[dict[str, Any]] = [json.loads(text) for text in texts]
        failed = [rank for rank, answer in enumerate(answers) if "failure" in answer]
        if failed:
            if isinstance(failure, ZCompileError):
                raise failure
            me, first = self.agreement.rank, failed[0] if failure is None else self.agreement.rank
            raise CheckpointError(
                f"[rank {me} of {len(answers)}] {self.what} failed on rank {first} with {answers[first]['failure']}; "
                f"{self.aftermath}"
            ) from failure
        return answers

    def same(self, answers: Sequence[Mapping[str, Any]], key: str) -> None:
        """Check that all ranks gave the same answer.

        Raises:
            CheckpointError: on every rank, naming the first that differs.
        """
        for rank, answer in enumerate(answers):
            if answer[key] != answers[0][key]:
                raise CheckpointError(
                    f"[rank {self.agreement.rank} of {len(answers)}] {self.what} is {answer[key]!r} on rank {rank} and "
                    f"{answers[0][key]!r} on rank 0; give every rank the same arguments; {self.aftermath}"
                )


class Saving:
    """A checkpoint that is being written in the background.

    The process does not end before it is written, or given up because another rank is lost.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name="zcompile-checkpoint", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete on disk. Every rank should call this, as it calls ``save_checkpoint``.

        Args:
            timeout: seconds; None: as long as it takes, which the model's own timeout bounds.

        Raises:
            TimeoutError: not yet done; call again.
            CheckpointError: it was not written; the one before is still there.
            RankError: another rank failed or is gone.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the checkpoint is not written after {timeout} s; call result() again")
        self._told = True
        if self._error is not None:
            raise self._error

    @property
    def is_told(self) -> bool:
        """Whether ``result`` has said how it ended."""
        return self._told

    def _run(self) -> None:
        work, self._work = self._work, None  # it holds the copies of all values
        assert work is not None
        try:
            work()
        except BaseException as error:
            self._error = error


@dataclass
class Checkpoints:
    """The saves and loads of one model.

    Attributes:
        count: how many there were; the same on every rank.
        pending: the save in the background that may not have ended.
    """

    count: int = 0
    pending: Saving | None = None

    def settle(self) -> None:
        """Wait for the save in the background, and raise what went wrong unless its ``result`` has said so."""
        pending, self.pending = self.pending, None
        if pending is not None and not pending.is_told:
            pending.result()


def write(
    meeting: Meeting,
    path: Path,
    manifest: Manifest,
    pieces: Mapping[str, Piece],
    blobs: Mapping[str, bytes],
) -> None:
    """Write this rank's part and make the checkpoint complete, together with the others.

    Args:
        meeting: of this save.
        path: of the checkpoint; ``manifest.data`` was made in it.
        manifest: complete but for the files; equal on every rank.
        pieces: what this rank writes.
        blobs: what this rank writes.

    Raises:
        CheckpointError: on every rank, if any failed; the data is removed.
    """
    rank, size = meeting.agreement.rank, meeting.agreement.world_size

    def finish() -> None:
        if rank == 0:
            storage.finish(path / manifest.data, size)
            folder.commit(path, manifest)

    def write_part() -> None:
        if not (path / manifest.data).is_dir():
            raise CheckpointError(
                f"{path / manifest.data}, which rank 0 has made, is not there on rank {rank}; pass a path in a file system that "
                "all ranks share"
            )
        storage.write(path / manifest.data, rank, pieces, blobs)

    try:
        meeting.step("writing", write_part)
        meeting.step("completion", finish)
    except CheckpointError:  # all have stopped writing
        if rank == 0:
            folder.discard(path, manifest.data)
        raise
