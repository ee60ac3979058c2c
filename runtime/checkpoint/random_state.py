"""The state of this process's random number generators, in types that load safely."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Python's generator, numpy's if it is imported, torch's on the CPU and on ``device`` if that is a GPU."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, key, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, key.tolist(), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Let the generators go on as they were; those that the state does not have are left alone."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
