"""The comparison of predictions with measurements: which rows count, and how schedules are ranked."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks.plan_accuracy import key, measured_before, parse, rank_correlation, rows_of
from benchmarks.rows import Row
from tests.programs import ROOT, Programs


def test_rank_correlation_is_spearmans_over_all_pairs() -> None:
    draw = random.Random(0)
    for count in (3, 8, 11):
        order = draw.sample(range(count), count)
        far = sum((i - rank) ** 2 for i, rank in enumerate(order))
        expected = 1 - 6 * far / (count * (count**2 - 1))  # without ties
        found = rank_correlation(list(range(count)), [7.0 * rank for rank in order], [0.0] * count)
        assert found == pytest.approx(expected)


def test_pairs_within_the_noise_do_not_count() -> None:
    predicted, measured = [1.0, 2.0, 3.0, 4.0], [10.0, 20.2, 20.0, 30.0]
    assert rank_correlation(predicted, measured, [0.0] * 4) == pytest.approx(0.8)
    assert rank_correlation(predicted, measured, [0.0, 0.0, 0.5, 0.0]) == pytest.approx(1.0)
    assert rank_correlation(predicted[::-1], measured, [0.0, 0.0, 0.5, 0.0]) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation(predicted, measured, [100.0] * 4))


def test_the_most_valuable_rows_come_first() -> None:
    rows = rows_of(parse(["--peers"]))
    assert len({key(vars(row)) for row in rows}) == len(rows), "none is measured twice"
    own = [row for row in rows if row.micro_batch is None and row.policy is None]
    assert rows[: len(own) - 1] == own[:-1], "every system of every size, and then other micro-batches and schedules"
    assert [row.size for row in own] == ["1.1B"] * 7 + ["0.19B"] * 7 + ["8B"] * 6
    assert [str(row) for row in rows[-2:]] == ["8B zc0", "8B zc0 micro-batch=2"], "what may not fit comes last"
    assert sum(row.policy is not None for row in rows) >= 8
    part = rows_of(parse(["--rows", "large", "--sizes", "8B", "--steps", "3", "--backend", "eager"]))
    assert part == [Row("zc0", "8B", batch, backend="eager", steps=3) for batch in (None, 2)]


def test_only_rows_that_ran_as_predicted_are_taken(tmp_path: Path) -> None:
    row = {"system": "zc3", "size": "1.1B", "dtype": "bf16", "reduce": "fp32", "world_size": 2, "step_ms": 1.0}
    others = [
        {"clip": 1.0},
        {"options": {"max_captures": 2}},
        {"dtype": "fp32"},
        {"reduce": "bf16"},
        {"recompute": "full"},
        {"world_size": 4},
        {"error": "no result"},
    ]
    rows = [row | {"micro_batch": 8 + i} | change for i, change in enumerate(others)]
    rows += [row, row | {"system": "zc0", "error": "out of memory (exit code 1)"}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    found = measured_before([str(tmp_path / "rows.json")], 2, {})
    assert set(found) == {("1.1B", "zc3", 2, "prefetch"), ("1.1B", "zc0", 2, "prefetch")}
    assert list(measured_before([str(tmp_path / "rows.json")], 2, {"max_captures": 2})) == [
        ("1.1B", "zc3", 9, "prefetch")
    ]
    assert key({"system": "zc3", "size": "1.1B", "micro_batch": 2, "policy": None}) in found


@pytest.mark.dist
@pytest.mark.slow
def test_measure_here_and_compare_elsewhere(programs: Programs, tmp_path: Path) -> None:
    measured, machine, out = (str(tmp_path / name) for name in ("rows.json", "here.json", "out.json"))
    what = ("--sizes", "tiny", "--stages", "3", "--rows", "own", "--peers")
    cheap = ("--device", "cpu", "--backend", "eager", "--steps", "2")
    programs(
        ROOT / "benchmarks" / "plan_accuracy.py", *what, *cheap, "--calibrate", machine, "--measure-only", measured
    )
    assert {row["system"] for row in json.loads(Path(measured).read_text())} == {"zc3", "single", "fsdp2-c", "ddp-c"}
    text = programs(
        ROOT / "benchmarks" / "plan_accuracy.py", *what, "--compare", measured, "--hardware", machine, "--json", out
    )
    row = next(row for row in json.loads(Path(out).read_text()) if row["system"] == "zc3")
    assert row["time_error"] == pytest.approx(row["predicted_ms"] / row["step_ms"] - 1)
    assert "| tiny | 3 | 2 | prefetch |" in text and "1 of 1 as predicted" in text and "| ddp-c " in text
