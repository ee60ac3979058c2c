"""What a capture and the passes after it leave as it was, and what they switch off for the time being."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def rng_untouched(device: torch.device) -> Iterator[None]:
    """Whatever a capture draws, the user's random streams go on as if it had not happened."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles: graphs are kept, and walking all of them again and again frees next to nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
