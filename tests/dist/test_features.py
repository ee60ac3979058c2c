"""Everything in the table of features works, or is refused, as the table says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.feature_cases import FEATURES
from tests.dist.features import FILE, GROUPS, STAGES, check, rows_of
from tests.dist.pool import Pools

pytestmark = pytest.mark.dist


def combinations() -> list[Any]:
    """(feature, stage, world): each feature at stage 3, every eighth at another stage too; all with ``--wide``."""
    found = []
    for number, (name, feature) in enumerate(FEATURES.items()):
        for stage in STAGES:
            default = not feature.wide and (stage == 3 or number % 24 == 8 * stage)
            marks = () if default else (pytest.mark.wide,)
            found.append(pytest.param(name, stage, feature.world, marks=marks, id=f"{name}-stage{stage}"))
    return found


@pytest.mark.parametrize(("name", "stage", "world"), combinations())
def test_feature(ranks: Pools, name: str, stage: int, world: int) -> None:
    ranks(world, check, name=name, stage=stage, limit=120.0)


def test_the_table_is_current() -> None:
    """It lists these features in this order, with these notes; what it says about them is what ``test_feature`` runs."""
    expected = [(name, f) for group in GROUPS for name, f in FEATURES.items() if f.group == group]
    rows = rows_of(FILE.read_text())
    assert [name for name, _, _ in rows] == [name for name, _ in expected], "run python -m tests.dist.features --write"
    for (name, cells, note), (_, feature) in zip(rows, expected, strict=True):
        assert cells == [("yes" if feature.refused is None else "refused")] * len(STAGES), name
        assert note == feature.note, name
