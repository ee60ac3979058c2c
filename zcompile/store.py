"""Bytes kept on disk from one process to the next, by the hash of everything that they follow from."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zcompile import compat

log = logging.getLogger("zcompile")

#: where entries are; empty or ``0``: nothing is kept
VARIABLE = "ZCOMPILE_CACHE_DIR"
#: all entries together; the ones that were not read for longest go first
LIMIT_BYTES = 1 << 30

_MAGIC = b"zcompile entry 1\n"
_SUFFIX = ".entry"


@dataclass(frozen=True)
class Store:
    """Entries of bytes in a folder, which processes of one user share.

    Entries appear at one moment (they are renamed into place), so ranks may write the same one. What is damaged is ignored, with
    a warning, and written anew. A folder that cannot be read or written is as good as an empty one. Entries are made into objects
    again, which runs what they say: a folder or entry that another user owns or may write is not used.

    Attributes:
        folder: made when first written to, for this user alone.
        limit_bytes: how much all entries may take.
    """

    folder: Path
    limit_bytes: int = LIMIT_BYTES

    @staticmethod
    def from_environment() -> Store | None:
        """The folder in ``ZCOMPILE_CACHE_DIR``, else one inside of Inductor's; None when switched off."""
        given = os.environ.get(VARIABLE)
        if given in ("", "0"):
            return None
        return Store(Path(given) if given else Path(compat.inductor_folder()) / "zcompile")

    def get(self, key: str) -> bytes | None:
        """The entry of a key; None when there is none, or none that can be used."""
        if not self._is_ours():
            return None
        path = self._path(key)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                if not _only_mine(os.fstat(file.fileno())):
                    _warn(f"{path} belongs to another user or can be written by one, and is not read")
                    return None
                content = file.read()
        except OSError:
            return None
        head, data = content[: len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if head != _MAGIC + hashlib.sha256(data).digest():
            self.drop(key, "it is damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # read last
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep an entry, if that is possible."""
        path = self._path(key)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours() or len(data) > self.limit_bytes:
                return
            descriptor, name = tempfile.mkstemp(dir=self.folder)  # for this user alone
            try:
                with open(descriptor, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(data).digest() + data)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
            self._make_room()
        except OSError as error:
            log.debug("%s is not kept in %s: %s", key, self.folder, error)

    def drop(self, key: str, why: str) -> None:
        """Remove an entry that is of no use."""
        path = self._path(key)
        log.warning("%s is ignored and made anew: %s", path, why)
        with contextlib.suppress(OSError):
            path.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _is_ours(self) -> bool:
        try:
            state = os.stat(self.folder)
        except OSError:
            return False
        if _only_mine(state):
            return True
        _warn(
            f"{self.folder} belongs to another user or can be written by one, and is not used; set {VARIABLE} to another folder"
        )
        return False

    def _make_room(self) -> None:
        entries = sorted(self._entries(), reverse=True)
        total = 0
        for _, size, path in entries:
            total += size
            if total > self.limit_bytes:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """When each was last read or written, its size and its path."""
        with os.scandir(self.folder) as found:
            for entry in found:
                with contextlib.suppress(OSError):  # another process removed it
                    state = entry.stat()
                    yield state.st_mtime, state.st_size, entry.path


def _only_mine(state: os.stat_result) -> bool:
    """Whether nobody but this user can change a file or folder."""
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _warn(text: str) -> None:
    """Say something once a process."""
    log.warning("%s", text)
