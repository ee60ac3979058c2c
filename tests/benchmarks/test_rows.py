"""Many rows in one set of processes: what fails is a row with its error, and the others are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import Launch, Row, read_rows

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LAUNCH = Launch(device="cpu", timeout=120.0, program="tests/benchmarks/failing_program.py")


def rows(*systems: str) -> list[Row]:
    return [
        Row(system, "tiny", dtype="fp32", backend="eager", steps=2, options={"verify": "off"}) for system in systems
    ]


def outcomes(results: list[dict[str, Any]]) -> dict[str, str]:
    return {result["system"]: result.get("error", "") for result in results}


def test_failures_end_no_other_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where ranks communicate over a group of the model's own, the same processes go on; else new ones do."""
    wanted = rows("zc3", "oom", "raises", "single", "fsdp2-raises", "dies", "zc0")
    results = list(Launch(**{**vars(LAUNCH), "logs": str(tmp_path)}).measure(wanted))
    found = outcomes(results)
    assert list(found) == [row.system for row in wanted]
    assert not (found["zc3"] or found["single"] or found["zc0"]), found
    assert found["oom"] == "out of memory"
    assert found["raises"] == found["fsdp2-raises"] == "ValueError: a bad batch"
    assert "exit code" in found["dies"]
    by_system = {result["system"]: result for result in results}
    assert by_system["zc0"]["loss"] == pytest.approx(by_system["zc3"]["loss"], rel=1e-5), (
        "the same training in new processes"
    )
    assert by_system["zc3"]["warm"] and by_system["single"]["left_over_gib"] < 2**-15, "models that failed are gone"
    assert capfd.readouterr().err.count("s to start") == 3
    assert "a bad batch" in next(tmp_path.glob("tiny_raises*.log")).read_text()


def test_new_processes_after_a_row_that_takes_too_long_or_leaves_much(capfd: pytest.CaptureFixture[str]) -> None:
    launch = Launch(**{**vars(LAUNCH), "timeout": 12.0, "nproc": 1})
    results = list(launch.measure(rows("leaks", "hangs", "single")))
    assert outcomes(results) == {"leaks": "", "hangs": "no result (not done in 12 s)", "single": ""}
    assert results[1]["seconds"] < 20.0 and results[2]["left_over_gib"] < 2**-15
    assert capfd.readouterr().err.count("s to start") == 3


def test_processes_that_do_not_start_are_an_error_of_every_row() -> None:
    launch = Launch(**{**vars(LAUNCH), "program": "benchmarks/no_such_program.py"})
    errors = [result["error"] for result in launch.measure(rows("zc3", "single"))]
    assert len(errors) == 2 and all("No such file" in e or "exit code" in e for e in errors), errors


def test_rows_are_read_from_text_and_files(tmp_path: Path) -> None:
    text = '[{"system": "zc3", "size": "1.1B", "micro_batch": 4}]'
    (tmp_path / "rows.json").write_text(text)
    assert read_rows(text) == read_rows(str(tmp_path / "rows.json")) == [Row("zc3", "1.1B", micro_batch=4)]
