"""What ranks compare before they start collectives: the collectives of a call, as text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol


class Sequence(Protocol):
    """The collectives of one graph in order: op, axis, dtype, sizes, parameter names; the same text on every rank."""

    @property
    def digest(self) -> str: ...
    @property
    def lines(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TextSequence:
    """A sequence given as lines."""

    lines: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, *lines: str) -> TextSequence:
        return cls(lines, digest_of(lines))


def digest_of(lines: tuple[str, ...]) -> str:
    """A short hash of a text that is the same on every machine."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
