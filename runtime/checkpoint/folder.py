"""A checkpoint's folder: the manifest that makes it one, and how one replaces another at a single moment.

``path/manifest.json`` names the subfolder that holds the data, and is replaced atomically when all of the new data is on the
device. Until then the old manifest with the old data is the checkpoint, so there is no moment without one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcompile.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "zcompile checkpoint"
VERSION = 1
_DATA = "data-"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        data: the subfolder with its files.
        step: of training.
        world_size: ranks that saved it.
        stage: ZeRO stage of the model then.
        versions: of zcompile and torch.
        parameters: by canonical name: ``{"names": [...], "shape": [...], "dtype": "float32"}``.
        buffers: by name: ``{"shape": [...], "dtype": ...}``.
        optimizer: None, or ``{"type": "AdamW", "state": {parameter: {key: dtype}}}`` for state of the parameter's shape.
        helpers: of ``scaler``, ``scheduler`` and ``data``, those that were saved.
        data_differs: whether ranks were at different positions in the data.
        files: bytes of each file in the subfolder.
    """

    data: str
    step: int
    world_size: int
    stage: int
    versions: dict[str, str]
    parameters: dict[str, dict[str, Any]]
    buffers: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None
    helpers: list[str]
    data_differs: bool = False
    files: dict[str, int] = field(default_factory=dict)


def open_checkpoint(path: Path) -> Manifest:
    """The manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, or one that this version cannot read.
    """
    try:
        content = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        problem = "has no complete checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {problem}; pass the path that save_checkpoint was given") from None
    except ValueError as error:
        raise CheckpointError(f"{path / MANIFEST} is not JSON ({error}); load another checkpoint") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} is not a zcompile checkpoint's; pass the path of one")
    if (version := content.pop("version", None)) != VERSION:
        raise CheckpointError(
            f"checkpoint {path} has version {version} of the format and this zcompile reads version {VERSION}; "
            f"use the zcompile that wrote it ({content.get('versions')})"
        )
    try:
        return Manifest(**content)
    except TypeError as error:
        raise CheckpointError(f"{path / MANIFEST} is not complete ({error}); load another checkpoint") from error


def check_files(path: Path, manifest: Manifest, rank: int, size: int) -> None:
    """Check that the files are there with the sizes that they had; ranks share the work.

    Raises:
        CheckpointError: names the first that is not.
    """
    folder = path / manifest.data
    for name, num_bytes in list(manifest.files.items())[rank::size]:
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} is missing; load another checkpoint") from None
        if found != num_bytes:
            raise CheckpointError(f"{folder / name} has {found} bytes of {num_bytes}; load another checkpoint")


def begin(path: Path) -> str:
    """Make the subfolder for a new checkpoint at ``path``, and remove what earlier writers that died have left. Returns its name.

    Raises:
        CheckpointError: ``path`` is a file, or its manifest is somebody else's.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; pass a folder, or a path that does not exist")
    path.mkdir(parents=True, exist_ok=True)
    current = open_checkpoint(path).data if (path / MANIFEST).exists() else None
    _remove_others(path, current)
    name = f"{_DATA}{uuid.uuid4().hex[:12]}"
    (path / name).mkdir()
    sync_folder(path)
    sync_folder(path.parent)
    return name


def commit(path: Path, manifest: Manifest) -> None:
    """Make the data that ``manifest`` names the checkpoint at ``path``, at one moment, and remove the one before."""
    folder = path / manifest.data
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(dataclasses.replace(manifest, files=files))}
    new = path / f".{MANIFEST}.new"
    write_file(new, json.dumps(content).encode())
    os.replace(new, path / MANIFEST)
    sync_folder(path)
    _remove_others(path, manifest.data)


def discard(path: Path, name: str) -> None:
    """Remove the data of a checkpoint that did not come to be; ``path`` too if nothing else is in it."""
    if (path / MANIFEST).exists() and open_checkpoint(path).data == name:
        return  # it did: something failed afterwards
    shutil.rmtree(path / name, ignore_errors=True)
    (path / f".{MANIFEST}.new").unlink(missing_ok=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def write_file(path: Path, data: bytes) -> None:
    """Write a file and have it on the device."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the device."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_others(path: Path, current: str | None) -> None:
    for entry in path.glob(f"{_DATA}*"):
        if entry.name != current and entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
    (path / f".{MANIFEST}.new").unlink(missing_ok=True)
