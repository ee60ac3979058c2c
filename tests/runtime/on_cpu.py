"""A pytest plugin that gives kernel_checks.py the CPU."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")
