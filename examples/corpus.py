"""Bytes to train on: the standard library's own documentation and sources, or the user's files."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "__pycache__"}


def standard_library_files() -> list[Path]:
    """Documentation first, then sources, in the order of their names: the same list for one Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        path.relative_to(root)
        for path in root.rglob("*")
        if path.suffix in (".py", ".txt", ".rst") and not SKIPPED_FOLDERS & set(path.relative_to(root).parts)
    ]
    is_source = {path: path.suffix == ".py" and path.parts[0] != "pydoc_data" for path in found}
    return [root / path for path in sorted(found, key=lambda path: (is_source[path], path.as_posix()))]


def user_files(path: Path) -> list[Path]:
    """The file itself, or every file below a folder except hidden ones, in the order of their names."""
    if path.is_file():
        return [path]
    hidden = {file for file in path.rglob("*") if any(part.startswith(".") for part in file.relative_to(path).parts)}
    return sorted(file for file in path.rglob("*") if file.is_file() and file not in hidden)


def read_bytes(data: str | None, max_bytes: int) -> Tensor:
    """Concatenate text files (no NUL byte) until ``max_bytes``; a uint8 tensor [num_bytes]."""
    files = standard_library_files() if data is None else user_files(Path(data).expanduser())
    text = bytearray()
    for file in files:
        content = file.read_bytes()
        if b"\0" not in content:
            text += content + b"\n"
        if len(text) >= max_bytes:
            break
    if not text:
        raise SystemExit(f"no text found in {data or 'the standard library'}; pass --data with a file or a folder")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """Random windows of a text; a batch depends on (seed, step, rank) only, so any process can make any rank's."""

    text: Tensor
    batch: int
    seq: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.text) < self.seq + 2:
            raise SystemExit(f"the data has {len(self.text)} bytes, fewer than --seq {self.seq} + 2")

    def get(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one rank's micro-batch, each int64 [batch, seq]."""
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank)) % 2**63)
        starts = torch.randint(len(self.text) - self.seq, (self.batch, 1), generator=generator)
        windows = self.text[starts + torch.arange(self.seq + 1)].long()
        return windows[:, :-1], windows[:, 1:]
