"""What the pools of workers say of a job that does not end."""

from __future__ import annotations

import time

import pytest

from tests.dist.pool import Pools
from tests.dist.training import this_rank

pytestmark = pytest.mark.dist


def one_rank_hangs() -> None:
    if this_rank() == 1:
        time.sleep(100.0)


def test_a_rank_that_hangs_shows_where(ranks: Pools) -> None:
    first, second = ranks.outcomes(2, one_rank_hangs, limit=12.0)
    assert first.kind == "returned"
    assert second.kind == "late" and "in one_rank_hangs" in second.text, second.text
