"""Ranks for tests: a pool of worker processes, and the order of tests that keeps one pool alive as long as possible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.pool import Pools

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks(world_size, job, **arguments)`` runs a job of the test's module on every rank; returns the results."""
    pools = Pools()
    yield pools
    pools.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within this folder: all tests of one world size, then those of the next; others keep their places."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ordered = sorted((items[place] for place in places), key=_world)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _world(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    return 2 if callspec is None else callspec.params.get("world", 2)
