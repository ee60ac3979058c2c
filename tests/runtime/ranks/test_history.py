"""The history of calls: it learns every loop, and is the same function on every rank."""

from __future__ import annotations

import time

import pytest

from zcompile.runtime.ranks.history import History


def test_history_learns_any_loop() -> None:
    loop = [("f", "1"), ("b", "1")] * 8 + [("b", "2"), ("clip", "3")]
    history = History()
    misses = []
    for round_index in range(20):
        for call in loop:
            if history.prediction() != call:
                misses.append(round_index)
            if not history.follow(call):
                history.record(call)
    assert max(misses) <= 8  # the first 128 calls
    begin = time.perf_counter()
    for _ in range(100):
        for call in loop:
            assert history.follow(call)
    assert (time.perf_counter() - begin) / (100 * len(loop)) < 20e-6


def test_history_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.runtime.ranks.history.MAX_NODES", 16)
    first, second = History(), History()
    for step in range(500):
        call = (str(step * step % 37), "")
        assert first.prediction() == second.prediction()
        for history in (first, second):
            if not history.follow(call):
                history.record(call)
        assert len(first._nodes) <= 16
