"""Links between ranks are measured where there are ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import Pools
from zcompile.planner import calibrate

pytestmark = pytest.mark.dist


def links() -> tuple[float, float, str]:
    calibrate._SIDES = {"cpu": (16, 64)}
    calibrate._COPIES = {"cpu": (1 << 12, 1 << 16)}
    calibrate._SECONDS = 0.005
    calibrate._SUSTAINED = {"cpu": 0.005}
    found = calibrate.calibrate(torch.device("cpu"), "pair")
    assert dist.get_world_size() == found.devices_per_node == 2
    return found.node.bytes_per_s, found.collective_us, found.sources


def test_every_rank_measures_the_same_links(ranks: Pools) -> None:
    results: list[Any] = ranks(2, links)
    assert results[0][:2] == results[1][:2]
    bandwidth, latency_us, sources = results[0]
    assert 1e6 < bandwidth < 1e12 and 1 < latency_us < 1e6
    assert "All-gathers over 2 ranks (gloo)" in sources
