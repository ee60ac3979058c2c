"""The steps that the verifier's tests break: one small model before and after the ZeRO passes.

Three units and a frozen one; ``a.c`` is replicated, ``c.w`` has padding rows, dropout runs in forward.
``kept`` is ``outlined`` with the last unit kept for backward, ``offloaded`` is ``kept`` with activations on the host.
"""

from pathlib import Path
from typing import Any, NamedTuple

from zcompile.ir.graph import Step
from zcompile.ir.text import parse_step
from zcompile.verify.facts import Fact

_FOLDER = Path(__file__).with_suffix("")


def _facts(stage: int) -> dict[Fact, dict[str, Any]]:
    return {
        Fact.PARAMS_SHARDED: {"stage": stage, "size": 2, "axis": "dp"},
        Fact.PARAMS_GATHERED: {"stage": stage},
        Fact.GRADS_REDUCED: {"stage": stage, "dtype": None, "local": False},
        Fact.RECOMPUTE_SAFE: {},
    }


_PLANNED: dict[Fact, dict[str, Any]] = {Fact.UNITS_PLANNED: {}}
_SCHEDULED: dict[Fact, dict[str, Any]] = {
    Fact.OUTLINED: {},
    Fact.BUCKETED: {"mib": 0},
    Fact.PREFETCH_BOUNDED: {"lookahead": 1, "limit_mib": None},
}

#: what is established in each step, by the step's name
FACTS: dict[str, dict[Fact, dict[str, Any]]] = {
    "plain": {},
    "stage0": _facts(0) | _PLANNED,
    "stage2": _facts(2) | _PLANNED,
    "stage3": _facts(3) | _PLANNED,
    "outlined": _facts(3) | _SCHEDULED,
    "kept": _facts(3) | _SCHEDULED | {Fact.KEEP_BOUNDED: {"units": 1, "mib": None}},
    "held": _facts(3) | _SCHEDULED | {Fact.KEEP_BOUNDED: {"units": 1, "mib": None}},
    "offloaded": _facts(3)
    | _SCHEDULED
    | {Fact.KEEP_BOUNDED: {"units": 1, "mib": None}, Fact.OFFLOAD_BOUNDED: {"mib": 0, "lookahead": 1}},
}


def text(name: str) -> str:
    """The text of a step."""
    return (_FOLDER / f"{name}.txt").read_text()


def step(name: str) -> Step:
    """A step, parsed."""
    return parse_step(text(name))


def changed(name: str, hunks: list[tuple[str, list[str], list[str]]]) -> Step:
    """A step whose text was edited: ``(direction, old lines, new lines)``; the old lines stand exactly once in that graph."""
    forward, mark, backward = text(name).partition("graph mlp.backward")
    parts = {"forward": forward, "backward": mark + backward}
    for direction, old_lines, new_lines in hunks:
        old, new = ("".join(f"{line}\n" for line in lines) for lines in (old_lines, new_lines))
        count = parts[direction].count(old)
        assert count == 1, f"these lines stand {count} times in {direction}:\n{old}"
        parts[direction] = parts[direction].replace(old, new)
    return parse_step(parts["forward"] + parts["backward"])


class Mutation(NamedTuple):
    """A way to break a step, and the first line of the error that must refuse it."""

    name: str
    step: str
    error: str
    hunks: list[tuple[str, list[str], list[str]]]

    def apply(self) -> Step:
        """The broken step."""
        return changed(self.step, self.hunks)


def mutations() -> list[Mutation]:
    """Every mutation of ``mutations/*.txt``. In these files::

    ## name of the mutation
    in: name of the step
    refused: first line of the error
    @ forward or backward
     a line before the change, or more
    -a line that goes
    +a line that comes
    """
    found = []
    for path in sorted((_FOLDER.parent / "mutations").glob("*.txt")):
        for block in path.read_text().split("## ")[1:]:
            name, base, error, *rest = block.rstrip("\n").split("\n")
            hunks: list[tuple[str, list[str], list[str]]] = []
            for line in rest:
                if line.startswith("@"):
                    hunks.append((line.removeprefix("@ "), [], []))
                elif line:
                    _, old, new = hunks[-1]
                    if line[0] in " -":
                        old.append(line[1:])
                    if line[0] in " +":
                        new.append(line[1:])
            found.append(Mutation(name, base.removeprefix("in: "), error.removeprefix("refused: "), hunks))
    return found
