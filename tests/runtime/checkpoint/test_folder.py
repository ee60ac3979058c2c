"""The folder of a checkpoint: one manifest, one subfolder with data, and what is left of others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zcompile.errors import CheckpointError
from zcompile.runtime.checkpoint import folder
from zcompile.runtime.checkpoint.folder import MANIFEST, Manifest, begin, check_files, commit, discard, open_checkpoint


def manifest(data: str, step: int = 0) -> Manifest:
    return Manifest(data, step, 2, 3, {"torch": "2"}, {}, {}, None, ["scaler"])


def save(path: Path, step: int) -> Manifest:
    name = begin(path)
    (path / name / "weights").write_bytes(b"w" * step)
    commit(path, manifest(name, step))
    return open_checkpoint(path)


def test_one_checkpoint_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    first = save(path, 3)
    assert first.files == {"weights": 3} and first.helpers == ["scaler"] and first.optimizer is None
    second = save(path, 5)
    assert (second.step, second.files) == (5, {"weights": 5})
    assert sorted(os.listdir(path)) == sorted([second.data, MANIFEST])


def test_the_old_one_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 3)
    name = begin(tmp_path)
    assert open_checkpoint(tmp_path) == first
    monkeypatch.setattr(folder, "_remove_others", lambda *_: None)

    def replace(source: Path, target: Path) -> None:
        assert open_checkpoint(tmp_path) == first and (tmp_path / first.data / "weights").exists()
        os.rename(source, target)
        assert open_checkpoint(tmp_path).data == name and (tmp_path / first.data / "weights").exists()

    monkeypatch.setattr(folder.os, "replace", replace)
    commit(tmp_path, manifest(name, 4))
    assert open_checkpoint(tmp_path).step == 4


def test_leftovers_go_with_the_next_save_and_nothing_else_does(tmp_path: Path) -> None:
    first = save(tmp_path, 3)
    left = [begin(tmp_path)]
    (tmp_path / f".{MANIFEST}.new").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data-sheet.csv").write_text("mine too: a file")
    assert open_checkpoint(tmp_path) == first
    name = begin(tmp_path)
    assert not (tmp_path / left[0]).exists() and not (tmp_path / f".{MANIFEST}.new").exists()
    assert (tmp_path / first.data).exists() and (tmp_path / name).exists()
    commit(tmp_path, manifest(name))
    assert sorted(os.listdir(tmp_path)) == sorted([name, MANIFEST, "notes.txt", "data-sheet.csv"])


def test_what_is_discarded(tmp_path: Path) -> None:
    path = tmp_path / "run"
    discard(path, begin(path))
    assert not path.exists()
    first = save(path, 3)
    discard(path, begin(path))
    discard(path, first.data)
    assert open_checkpoint(path) == first and (path / first.data).exists(), "the checkpoint itself is never discarded"


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        open_checkpoint(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_checkpoint(tmp_path)
    for content, text in (
        ([], "is not a zcompile checkpoint's"),
        ({"format": "zcompile checkpoint", "version": 2}, "has version 2 of the format"),
        ({"format": "zcompile checkpoint", "version": 1, "data": "data-1"}, "is not complete"),
        ({"format": "zcompile checkpoint", "version": 1, "data": "../other"}, "is not complete"),
    ):
        (tmp_path / MANIFEST).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=text):
            open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not complete"):
        begin(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        begin(tmp_path / "file")


def test_files_that_are_not_what_they_were(tmp_path: Path) -> None:
    first = save(tmp_path, 3)
    check_files(tmp_path, first, 0, 1)
    check_files(tmp_path, first, 1, 2)  # another rank's
    (tmp_path / first.data / "weights").write_bytes(b"w")
    with pytest.raises(CheckpointError, match="weights has 1 bytes of 3"):
        check_files(tmp_path, first, 0, 2)
    (tmp_path / first.data / "weights").unlink()
    with pytest.raises(CheckpointError, match="weights is missing"):
        check_files(tmp_path, first, 0, 2)
