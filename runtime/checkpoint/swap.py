"""A folder in the place of another at one moment."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from zcompile.runtime.checkpoint.folder import sync_folder

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def put_in_place(new: Path, path: Path) -> None:
    """Make ``new``, a sibling, the folder at ``path``, and remove what was there.

    On Linux the two change places at one moment. Where the system or the file system (NFS) cannot do that, there is a moment
    without a folder at ``path``; ``recover`` puts the old one back if the process ends then.
    """
    if not path.exists():
        os.rename(new, path)
    elif _exchange(new, path):
        shutil.rmtree(new, ignore_errors=True)
    else:
        old = _old(path)
        os.rename(path, old)
        os.rename(new, path)
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(path.parent)


def recover(path: Path) -> None:
    """Put back the folder that ``put_in_place`` had moved away when its process ended; remove new ones that were not finished."""
    old = _old(path)
    if old.exists() and not path.exists():
        os.rename(old, path)
    shutil.rmtree(old, ignore_errors=True)
    for leftover in path.parent.glob(f".{path.name}.*.new"):
        shutil.rmtree(leftover, ignore_errors=True)


def take_over(source: Path, target: Path, is_ours: Callable[[str], bool]) -> None:
    """Have in ``target`` what other programs put in ``source``: links to its files, of those that ``is_ours`` does not claim."""
    for entry in source.iterdir() if source.is_dir() else ():
        if is_ours(entry.name) or (target / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(target / entry.name))


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _exchange(a: Path, b: Path) -> bool:
    """Let two names change places; False where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
