"""The benchmarks run without a GPU, small, so that they do when there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.growth import off_the_line
from tests.programs import ROOT, Programs

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.dist
@pytest.mark.slow
def test_train_step(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = (
        "--device",
        "cpu",
        "--sizes",
        "tiny",
        "--backend",
        "eager",
        "--steps",
        "2",
        "--dtype",
        "fp32",
        "--clip",
        "1.0",
    )
    text = programs(
        BENCHMARKS / "train_step.py", *options, "--only", "single,single-each,fsdp2-c,zc3", "--json", str(out)
    )
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["single", "single-each", "fsdp2-c", "zc3"] and not any(
        "error" in row for row in rows.values()
    ), rows
    for row in rows.values():
        assert row["step_ms"] > 0 and row["host_ms"] > 0 and row["vs_limit"] > 0
    each = rows["single-each"]
    assert len(each["of_each_ms"]) == 2 and each["forward_backward_ms"] == max(each["of_each_ms"])
    assert rows["zc3"]["distinct_regions"] <= rows["zc3"]["regions"]
    assert "| zc3 " in text


@pytest.mark.slow
def test_loopback(programs: Programs, tmp_path: Path) -> None:
    """One rank of two that stands for both: it holds half of the states, and takes part in what two ranks would."""
    out = tmp_path / "out.json"
    options = ("--device", "cpu", "--sizes", "tiny", "--backend", "eager", "--steps", "2", "--json", str(out))
    text = programs(BENCHMARKS / "loopback.py", *options, "--profile")
    rows = {row["system"]: row for row in json.loads(out.read_text())}
    assert list(rows) == ["single", "single-zc", "zc3"] and not any("error" in row for row in rows.values()), rows
    assert [rows[name]["world_size"] for name in rows] == [1, 1, 2]
    assert "unshard" in rows["zc3"]["passes"] and rows["zc3"]["vs_limit"] > 0
    assert "rank 0 of 2" in text and "all_gather of embed" in text


@pytest.mark.slow
def test_growth(programs: Programs) -> None:
    """Three points on no line: each is shown with what it is off by."""
    options = ("--device", "cpu", "--size", "tiny", "--backend", "eager", "--nproc", "1", "--steps", "2")
    text = programs(BENCHMARKS / "growth.py", *options, "--rows", "1", "--layers", "1,2")
    assert [line.split(" | ")[0] for line in text.splitlines() if line[2:3].isdigit()] == ["| 1", "| 1", "| 2"]
    assert off_the_line([1, 2, 3], [10, 20, 30]) == pytest.approx([0, 0, 0])
    assert off_the_line([1, 2, 3], [10, 26, 30]) == pytest.approx([10 / 12 - 1, 26 / 22 - 1, 30 / 32 - 1])


@pytest.mark.slow
def test_compile_time(programs: Programs) -> None:
    text = programs(BENCHMARKS / "compile_time.py", "--layers", "1,2", "--backends", "eager")
    assert "| 2 | " in text


@pytest.mark.slow
def test_loss(programs: Programs) -> None:
    text = programs(
        BENCHMARKS / "loss.py", "--heads", "tiny", "--device", "cpu", "--backend", "eager", "--sizes", "none,8KiB"
    )
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| tiny")]
    assert [row[1] for row in rows] == ["eager", "zcompile, none", "zcompile, 8KiB"]
    assert all(0 < float(number) < 0.01 for row in rows for number in (row[4], row[5].removesuffix(" |")))


@pytest.mark.slow
def test_loss_in_a_whole_step(programs: Programs) -> None:
    options = ("--train", "tiny", "--micro-batch", "1", "--device", "cpu", "--backend", "eager")
    rows = [line.split(" | ") for line in programs(BENCHMARKS / "loss.py", *options).splitlines()]
    assert [row[1] for row in rows if row[0] == "| tiny"] == ["none", "auto"]


@pytest.mark.slow
def test_later_starts(programs: Programs) -> None:
    """One process starts cold, one finds what it has kept: neither capture nor passes take their time again."""
    text = programs(BENCHMARKS / "compile_time.py", "--layers", "1", "--warm", "1", "--backends", "eager")
    table = [line.split("|") for line in text.splitlines() if line.endswith(" |") and " start |" in line]
    rows = {row[1].strip(): [float(number) for number in row[2:-1]] for row in table}
    first, later = rows["first start"], rows["later start"]
    assert later[1] < first[1] / 2 and sum(later[1:5]) < sum(first[1:5]) / 2, text  # capture, passes, verify, split


@pytest.mark.dist
@pytest.mark.wide
def test_windows(programs: Programs) -> None:
    options = ("--device", "cpu", "--sizes", "tiny", "--backend", "eager")
    assert "zc3, hold all" in programs(BENCHMARKS / "windows.py", *options, ranks=2)


@pytest.mark.dist
@pytest.mark.wide
def test_host_time(programs: Programs) -> None:
    text = programs(BENCHMARKS / "host_time.py", ranks=2)
    assert "ms: forward" in text and "together" in text


@pytest.mark.dist
@pytest.mark.wide
def test_offload(programs: Programs) -> None:
    options = ("--device", "cpu", "--size", "tiny", "--budget", "64MiB", "--backend", "eager", "--steps", "1")
    assert "| zcompile stage 3 | 64MiB | 2 |" in programs(BENCHMARKS / "offload.py", *options, "--only", "zc3")
    largest = programs(BENCHMARKS / "offload.py", *options, "--largest", "zc3:3", "--nproc", "1", "--host", "0.1")
    assert "| zcompile stage 3 | 64MiB | 3 |" in largest


@pytest.mark.dist
@pytest.mark.wide
def test_soak(programs: Programs) -> None:
    """Three rounds with everything that a run does: nothing piles up after the second."""
    text = programs(BENCHMARKS / "soak.py", "--steps", "300")
    assert text.count("| ok |") == 12


@pytest.mark.dist
@pytest.mark.slow
def test_kills(programs: Programs, tmp_path: Path) -> None:
    """A rank is killed in a forward, a backward and a save: the others end, and training goes on from the checkpoint."""
    out = tmp_path / "out.json"
    text = programs(BENCHMARKS / "faults.py", "--kills", "3", "--phases", "forward,backward,save", "--json", str(out))
    results = json.loads(out.read_text())
    assert len(results) == 3 and not any(r["problems"] for r in results), text
    assert all(r["equal"] and r["loads"] and r["orphans"] == 0 for r in results)
