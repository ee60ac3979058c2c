"""The copies between ranks' memories on one GPU that all ranks share."""

import pytest
import torch

from tests.runtime.peer_checks import *  # noqa: F403

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
