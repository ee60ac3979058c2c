"""Memory budgets on one and two GPUs: what torch allocates at most is less, and training is the same."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.gpu.ranks import NUM_RANKS, parse, run

pytestmark = pytest.mark.gpu

#: of everything here; a name other than cuda is for trying the tests themselves without a GPU
DEVICE, BACKEND = "cuda", "inductor"

LIMIT = 420.0  # seconds: five searches, and compilation of four kinds of steps

WORLDS = [
    pytest.param(
        n,
        marks=[
            *[pytest.mark.dist] * (n > 1),
            pytest.mark.skipif(DEVICE == "cuda" and n > NUM_RANKS, reason=f"needs {n} CUDA devices"),
        ],
    )
    for n in (1, 2)
]


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_is_allocated_keeps_the_budget(tmp_path: Path, world_size: int) -> None:
    """Three budgets that lead to different steps, the last one near the least that there is, on devices with hardly more memory."""
    ends = run(world_size, tmp_path, DEVICE, BACKEND, "budget", limit=LIMIT)
    assert all(end.code == 0 for end in ends), "\n".join(end.output[-3000:] for end in ends)
    found = parse(ends[0])["budget"]
    rows = found["rows"]
    shown = [{name: value for name, value in row.items() if name != "losses"} for row in rows]
    assert found["least"] < 0.8 * found["roomy"], shown
    assert len({row["choice"] for row in rows}) == len(rows), shown
    assert all(a["budget"] > b["budget"] for a, b in itertools.pairwise(rows))
    for row in rows:
        assert row["predicted"] <= row["budget"], shown
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4)
        if DEVICE == "cuda":
            assert row["allocated"] <= row["budget"], shown
            assert row["allocated"] > 0.6 * row["predicted"], shown
