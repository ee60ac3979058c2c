"""What ranks tell each other outside of collectives: each rank is a thread with an agreement of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore

from tests.runtime.ranks.test_agreement import TRAIN, run_ranks
from zcompile.errors import RankError, RankTimeoutError
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.ranks.exchange import exchange


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["hash", "file"])
def test_everybody_hears_everybody(tmp_path: Path, kind: str, background: bool) -> None:
    shared = HashStore()

    def body(agreement: Agreement) -> list[list[str]]:
        if agreement.rank == 1:
            time.sleep(0.4)
        return [exchange(agreement, f"topic {i}", f"{agreement.rank}: {i}", background=background) for i in range(3)]

    store = (lambda _: shared) if kind == "hash" else (lambda _: FileStore(str(tmp_path / "store"), 3))
    expected = [[f"{rank}: {i}" for rank in range(3)] for i in range(3)]
    assert run_ranks(3, body, store=store) == [expected] * 3
    if kind == "hash":  # read texts do not stay
        assert shared.num_keys() < 3 * (3 + 1)


def test_one_rank_talks_to_itself() -> None:
    assert exchange(Agreement(None, 0, 1), "topic", "me") == ["me"]


def test_in_the_background_while_training_goes_on() -> None:
    def body(agreement: Agreement) -> Any:
        heard: list[Any] = []

        def background() -> None:
            time.sleep(0.3 * agreement.rank)
            heard.extend(exchange(agreement, "written", str(agreement.rank), background=True))

        thread = threading.Thread(target=background)
        thread.start()
        while True:  # until both have heard, which both find out in the same turn
            agreement.event("forward", TRAIN)
            agreement.compare("progress", "the same")
            if agreement.rank == 0:
                time.sleep(0.001)
            if exchange(agreement, f"over {agreement._calls}", str(len(heard))) == ["2", "2"]:
                break
        thread.join()
        return heard

    assert run_ranks(2, body) == [["0", "1"]] * 2


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_never_comes(background: bool) -> None:
    gone = threading.Event()

    def body(agreement: Agreement) -> list[str]:
        if agreement.rank == 1:
            gone.wait(10)
            return []
        try:
            return exchange(agreement, "topic", "here", background=background)
        finally:
            gone.set()

    first, _ = run_ranks(2, body, timeout=1.5)
    assert isinstance(first, RankTimeoutError)
    assert "waits for all ranks to come to topic since" in str(first)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_fails_instead(background: bool) -> None:
    def body(agreement: Agreement) -> list[str]:
        if agreement.rank == 1:
            agreement.fail(ValueError("bad batch"))
            return []
        return exchange(agreement, "topic", "here", background=background)

    first, _ = run_ranks(2, body)
    assert isinstance(first, RankError) and "rank 1 failed with ValueError: bad batch" in str(first)


def test_a_rank_that_has_left_stops_waiting() -> None:
    def body(agreement: Agreement) -> Any:
        if agreement.rank == 1:
            time.sleep(1.0)
            return None
        threading.Timer(0.4, agreement.close).start()
        return exchange(agreement, "topic", "here", background=True)

    first, _ = run_ranks(2, body)
    assert isinstance(first, RankError) and "stops waiting for all ranks to come to topic: this rank has left" in str(
        first
    )
