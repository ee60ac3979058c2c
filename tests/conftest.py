"""Options of the test suite."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests.programs import Programs


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """``programs(script, *arguments, ranks=2)`` runs a script in processes that have everything imported."""
    started = Programs()
    yield started
    started.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files with what the passes do now"
    )
    parser.addoption(
        "--wide",
        action="store_true",
        help="run every combination of model, stage and world size (about 15 minutes more)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["ZCOMPILE_CACHE_DIR"] = (
        ""  # nothing is found that an earlier version left, here and in processes started here
    )
    config.addinivalue_line("markers", "wide: one more of very many combinations; runs only with --wide")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--wide"):
        return
    wide = [item for item in items if item.get_closest_marker("wide")]
    if wide:
        config.hook.pytest_deselected(items=wide)
        items[:] = [item for item in items if not item.get_closest_marker("wide")]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage more rarely, and without torch and the tests: else a seventh of the time is spent in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_unconfigure() -> None:
    """Let the interpreter take everything down as it always does."""
    gc.unfreeze()
