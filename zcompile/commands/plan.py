"""``python -m zcompile plan``: memory and time of a step, before anything runs."""

from __future__ import annotations

from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser."""
