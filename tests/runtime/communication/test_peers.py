"""The copies between ranks' memories on the CPU."""

import pytest
import torch

from tests.runtime.peer_checks import *  # noqa: F403


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")
