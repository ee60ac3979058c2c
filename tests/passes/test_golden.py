"""Golden files: graph text before and after passes, the exact refusal, and what the passes counted.

A file ``tests/golden/<pass>/<case>.txt``::

    # the idea, in a line or more
    run: prefetch{lookahead=1}
    given: params-gathered{stage=3}        (optional: facts that are verified after every pass)
    --- before
    graph ...
    --- after                              (or --- refused, with the exact error)
    graph ...
    --- stats
    gathers moved: 1

``pytest --update-golden`` rewrites everything below ``--- before``, and ``before`` itself as the printer writes it.
"""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.passes.numbers import assert_same_numbers
from zcompile.errors import ZCompileError
from zcompile.passes import KNOWN, parse
from zcompile.passes.replay import opt, parse_target, replay
from zcompile.pipeline import Stats

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FILES = sorted(GOLDEN.rglob("*.txt"))
_SECTION = re.compile(r"^--- (\w+)\n", re.MULTILINE)

cases = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(GOLDEN).with_suffix("").as_posix())


@dataclass
class Case:
    """One golden file."""

    comment: str
    run: str
    given: str
    sections: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> "Case":
        head, *parts = _SECTION.split(text)
        sections = {name: body.rstrip("\n") for name, body in zip(parts[::2], parts[1::2], strict=True)}
        lines = head.strip().split("\n")
        options = dict(line.split(": ", 1) for line in lines if not line.startswith("#"))
        comment = "\n".join(line for line in lines if line.startswith("#"))
        assert comment and lines[0].startswith("#"), "the first line is a comment that says the idea"
        assert options.keys() <= {"run", "given"} and "run" in options, f"unknown lines before '--- before': {options}"
        return Case(comment, options["run"], options.get("given", ""), sections)

    def __str__(self) -> str:
        given = f"given: {self.given}\n" if self.given else ""
        sections = "".join(f"--- {name}\n{body}\n" if body else f"--- {name}\n" for name, body in self.sections.items())
        return f"{self.comment}\nrun: {self.run}\n{given}{sections}"

    def replayed(self) -> "Case":
        """The same case with what the passes do now."""
        before = parse_target(self.sections["before"])
        sections = {"before": str(before)}
        try:
            history = replay(before, parse(self.run), self.given)
        except ZCompileError as error:
            sections["refused"] = str(error)
        else:
            sections["after"] = str(before)
            total = Stats()
            for entry in history:
                total.update(entry.stats)
            sections["stats"] = str(total)
        return Case(self.comment, self.run, self.given, sections)


@cases
def test_golden(path: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a refusal writes the graph before it there
    case = Case.read(path.read_text())
    now = case.replayed()
    if request.config.getoption("--update-golden"):
        path.write_text(str(now))
        return
    assert str(now) == path.read_text()
    if "after" in now.sections:
        assert opt(case.sections["before"], case.run, case.given) == now.sections["after"]


@cases
def test_a_second_run_changes_nothing(path: Path) -> None:
    case = Case.read(path.read_text())
    if "refused" in case.sections:
        pytest.skip("refused")
    target = parse_target(case.sections["before"])
    for p in parse(case.run).passes:
        p.run(target, Stats())
        once = str(target)
        p.run(target, Stats())
        assert str(target) == once


@cases
def test_exact_passes_keep_the_numbers(path: Path) -> None:
    case = Case.read(path.read_text())
    if "refused" in case.sections:
        pytest.skip("refused")
    if not all(p.exact for p in parse(case.run).passes):
        pytest.skip("not exact")
    assert_same_numbers(parse_target(case.sections["before"]), parse_target(case.sections["after"]))


@cases
def test_files_lie_with_their_pass(path: Path) -> None:
    folder = path.parent.name
    assert folder in KNOWN or folder == "pipeline", f"no pass is called {folder}"
    run = Case.read(path.read_text()).run
    assert folder == "pipeline" or re.fullmatch(rf"{folder}(\{{.*\}})?", run), f"{path.name} runs {run}"
