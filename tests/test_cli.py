"""The command line: what it prints and its exit codes."""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from zcompile import compat
from zcompile.__main__ import main
from zcompile.commands.doctor import is_tested

GRAPH = """\
graph m.forward
  inputs:
    %w: f32[4, 4] = param 'w' of [4, 4]
    %x: f32[2, 4] = input 0
  body:
    %y: f32[2, 4] = aten.mm(%x, %w)
  return output 0 %y
"""
SHARDED = """\
graph m.forward  axis dp=2
  inputs:
    %w: f32[2, 4] = param 'w' shard(0) of [4, 4] unit 'w'
    %x: f32[2, 4] = input 0
  body:
    %w_full: f32[4, 4] = zc.unshard(%w, 'dp', 2, 0, [4, 4])
    %y: f32[2, 4] = aten.mm(%x, %w_full) @0
  return output 0 %y
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    return str(path)


def test_without_a_command_it_prints_help() -> None:
    result = subprocess.run([sys.executable, "-m", "zcompile"], capture_output=True, text=True, check=True)
    assert (
        result.stdout.startswith("usage: python -m zcompile") and "doctor" in result.stdout and "opt" in result.stdout
    )


def test_opt_prints_the_result(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["opt", file, "--run", "plan-units,shard{stage=3 size=2}"]) == 0
    assert capsys.readouterr() == (SHARDED, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(GRAPH))
    assert main(["opt", "-", "--run", "plan-units,shard{stage=3 size=2}"]) == 0
    assert capsys.readouterr().out == SHARDED


@pytest.mark.parametrize(
    ("run", "given", "message"),
    [
        ("teleport", "", "unknown pass 'teleport'; the known ones are "),
        ("shard{size=2}", "outlined", "pass 0 'shard' requires units-planned, which no earlier pass establishes\n"),
        ("cleanup", "tidy", "'tidy' starts with no known fact; the known ones are "),
        ("plan-units,shard{stage=4}", "", "stage is 4; it must be 0, 1, 2 or 3\n"),
    ],
)
def test_errors_are_one_line_and_exit_with_1(
    file: str,
    run: str,
    given: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["opt", file, "--run", run, "--given", given]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"error: {message}")
    assert all(line.startswith("  in pass ") for line in printed.err.splitlines()[1:])


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.txt"
    assert main(["opt", str(missing), "--run", "cleanup"]) == 1
    assert capsys.readouterr().err == f"error: cannot read '{missing}': No such file or directory\n"
    missing.write_text("graph m.sideways\n")
    assert main(["opt", str(missing), "--run", "cleanup"]) == 1
    assert capsys.readouterr().err.startswith("error: line 1: graph name ends with 'sideways'; expected .joint")


def test_doctor_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"torch     {torch.__version__}" and lines[4].startswith("devices   cpu (")
    assert lines[-1] == f"all {len(compat.SELF_TESTS)} checks of torch's internals passed"
    assert not any(line.startswith("failed: ") for line in lines)


def test_doctor_says_what_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise AttributeError("module 'torch._C' has no attribute '_gone'")

    monkeypatch.setattr(compat, "SELF_TESTS", {"autograd hooks": fails})
    monkeypatch.setattr(compat, "TESTED", ("1.0",))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[5:] == [
        "compiler  none",
        f"warning: torch {torch.__version__} is not among the tested versions: 1.0",
        "warning: no C++ compiler is found, which backend='inductor' needs; install g++, or pass backend='eager'",
        "failed: autograd hooks: AttributeError: module 'torch._C' has no attribute '_gone'",
        "1 of 1 checks of torch's internals failed; use a torch version that zcompile is tested with: 1.0",
    ]


def test_versions_are_compared_without_patch_and_build() -> None:
    assert is_tested("2.13.0+cpu") and is_tested("2.11.1") and not is_tested("2.1.3") and not is_tested("2.130.0")
