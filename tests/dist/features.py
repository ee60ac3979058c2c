"""What a model or a training loop may contain, and what zcompile does with it: trains as plain PyTorch, or refuses by name.

``python -m tests.dist.features`` runs every feature at every stage and prints the table that FEATURES.md holds;
``--stages 3`` and ``--only WORD`` run fewer, ``--write`` writes the file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.models import Case
from tests.dist.pool import ROOT, Outcome, Pools
from tests.dist.training import assert_equal_training, compile_and_train, plain, this_rank, world_size

FILE = ROOT / "FEATURES.md"
STAGES = (0, 1, 2, 3)
GROUPS = ("parameters", "layers", "calls", "training loops")


@dataclass(frozen=True)
class Feature:
    """Something that real training scripts do.

    Attributes:
        group: one of ``GROUPS``.
        run: does it at a stage, on every rank, and checks the result against plain PyTorch.
        world: number of ranks.
        refused: a pattern of the error; None: it works.
        error: the class of that error.
        note: what the user should know or write instead.
        wide: other tests show it already; runs only with ``--wide``, and for the table.
    """

    group: str
    run: Callable[[int], None]
    world: int = 2
    refused: str | None = None
    error: type[Exception] = Exception
    note: str = ""
    wide: bool = False


def trains(case: Case, after: Callable[[Any], None] | None = None, **options: Any) -> Callable[[int], None]:
    """Twenty steps of a case give what plain PyTorch gives on the global batch; ``after`` checks more on the compiled model."""

    def run(stage: int) -> None:
        mine, model, _ = compile_and_train(case, stage=stage, poison=True, **options)
        assert model._session.runner.executor.buffers.live_bytes == 0
        if this_rank() == 0:
            assert_equal_training(mine, plain(case, world_size()), tuple(case.loose))
        if after is not None:
            after(model)

    return run


def check(name: str, stage: int) -> None:
    """Run a feature on this rank."""
    from tests.dist.feature_cases import FEATURES

    feature = FEATURES[name]
    if feature.refused is None:
        feature.run(stage)
        return
    try:
        feature.run(stage)
    except feature.error as error:
        assert re.search(feature.refused, str(error)), f"refused with another error: {error}"
    else:
        raise AssertionError("not refused")


# The table. -----------------------------------------------------------------------------------------------------------

TITLE = """\
# What models and training loops may contain

Each line was run on two or three ranks (gloo, `backend="eager"`) at each ZeRO stage by `python -m tests.dist.features
--write`. **yes**: twenty steps of AdamW on the ranks' batches gave the losses (1e-5 relative), weights, buffers and missing
gradients of plain PyTorch on the global batch, or what the line says was compared with plain PyTorch. **refused**: every rank
raised an error that names the thing and says what to write instead.
"""


def table(results: dict[tuple[str, int], str], stages: Sequence[int]) -> str:
    """The table as Markdown."""
    from tests.dist.feature_cases import FEATURES

    lines = [TITLE]
    for group in GROUPS:
        names = [n for n, f in FEATURES.items() if f.group == group and (n, stages[0]) in results]
        if names:
            lines += [f"## {group.capitalize()}", "", head(stages), "| --- |" + " --- |" * (len(stages) + 1)]
            lines += [row(n, [results[n, stage] for stage in stages], FEATURES[n].note) for n in names]
            lines.append("")
    return "\n".join(lines)


def head(stages: Sequence[int]) -> str:
    return f"| feature | {' | '.join(f'stage {s}' for s in stages)} | note |"


def row(name: str, cells: Sequence[str], note: str) -> str:
    return f"| {name} | {' | '.join(cells)} | {note} |"


def cell(feature: Feature, outcomes: Sequence[Outcome]) -> str:
    """What a run showed."""
    if any(o.kind != "returned" for o in outcomes):
        return "**no**"
    return "yes" if feature.refused is None else "refused"


def rows_of(text: str) -> list[tuple[str, list[str], str]]:
    """The lines of a table: feature, cells, note."""
    found = re.findall(r"^\| (?!feature|---)(.+?) \| (.+) \| (.*) \|$", text, re.MULTILINE)
    return [(name, cells.split(" | "), note) for name, cells, note in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run features and print the table; returns how many failed."""
    from tests.dist.feature_cases import FEATURES

    parser = argparse.ArgumentParser(prog="python -m tests.dist.features", description=__doc__)
    parser.add_argument("--stages", default="0,1,2,3", help="such as 0,3")
    parser.add_argument("--only", default="", help="features whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} instead of printing")
    options = parser.parse_args(arguments)
    stages = [int(s) for s in options.stages.split(",")]
    if options.write and (tuple(stages) != STAGES or options.only):
        parser.error(f"{FILE.name} holds all features and stages; leave --stages and --only out")
    chosen = sorted((n for n in FEATURES if options.only in n), key=lambda n: FEATURES[n].world)
    results: dict[tuple[str, int], str] = {}
    pools = Pools()
    try:
        for name in chosen:
            for stage in stages:
                outcomes = pools.outcomes(FEATURES[name].world, check, name=name, stage=stage, limit=120.0, grace=5.0)
                results[name, stage] = cell(FEATURES[name], outcomes)
                print(
                    f"{results[name, stage]:8} {max(o.seconds for o in outcomes):5.1f} s  stage {stage}  {name}",
                    file=sys.stderr,
                )
                for rank, o in enumerate(outcomes):
                    if o.kind != "returned":
                        print(f"-- rank {rank}: {o}", file=sys.stderr)
    finally:
        pools.close()
    text = table(results, stages)
    if options.write:
        Path(FILE).write_text(text)
    else:
        print(text)
    return sum(r == "**no**" for r in results.values())


if __name__ == "__main__":
    os.chdir(ROOT)
    from tests.dist import features  # the same module that the workers import

    sys.exit(min(1, features.main()))
