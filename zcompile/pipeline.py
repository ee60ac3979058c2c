"""Passes, pipelines as values, and how a pipeline runs: order check, verification after every pass, history."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_type_hints

from zcompile.errors import PipelineError, ZCompileError
from zcompile.ir.graph import Graph, Step
from zcompile.verify.facts import Fact
from zcompile.verify.verifier import Interface, Verifier

T = TypeVar("T", Graph, Step)
Facts = dict[Fact, Mapping[str, Any]]
#: graphs before a pass, and after it
Snapshots = tuple[tuple[Graph, ...], tuple[Graph, ...]]


class Stats(Counter[str]):
    """What a pass did, counted: ``stats["gathers moved"] += 1``."""

    def __str__(self) -> str:
        return "\n".join(f"{name}: {count}" for name, count in sorted(self.items()) if count)


@dataclass(frozen=True)
class Pass(ABC, Generic[T]):
    """One rewrite of a graph. Options are fields; ``str(pass)`` is its spec and parses back.

    Attributes:
        name: kebab-case; also the folder of its golden files.
        requires: facts that must hold before.
        establishes: facts that hold afterwards, until a pass breaks them.
        breaks: facts that no longer hold afterwards.
    """

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset()
    establishes: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    @property
    def exact(self) -> bool:
        """Whether results stay bit-identical, with these options."""
        return True

    @property
    def drops_outputs(self) -> bool:
        """Whether outputs of the model may be gone afterwards, with these options; the caller gets None for them."""
        return False

    @abstractmethod
    def run(self, target: T, stats: Stats) -> None:
        """Rewrite ``target`` in place. Nothing to do is a no-op; unable to do what was asked raises ``PassError``."""

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def __str__(self) -> str:
        options = " ".join(f"{name}={_print_option(value)}" for name, value in self.options().items())
        return f"{self.name}{{{options}}}" if options else self.name


@dataclass(frozen=True)
class JointPass(Pass[Graph]):
    """A pass on the joint graph, before the split."""


@dataclass(frozen=True)
class StepPass(Pass[Step]):
    """A pass on the step: forward and backward graph together."""


@dataclass
class Entry:
    """What one pass did: the graphs before and after, and its counts. Graphs and texts are there when asked for."""

    spec: str
    name: str
    stats: Stats
    load: Callable[[], Snapshots]

    @cached_property
    def before(self) -> str:
        """The text of the graphs before the pass."""
        return "\n".join(str(g) for g in self.load()[0])

    @cached_property
    def after(self) -> str:
        """The text of the graphs after the pass."""
        return "\n".join(str(g) for g in self.load()[1])

    def diff(self) -> str:
        """A unified diff of each graph that the pass changed; empty when it changed nothing."""
        parts = []
        for old, new in zip(*self.load(), strict=True):
            lines = unified_diff(
                str(old).splitlines(),
                str(new).splitlines(),
                f"{old.name} before {self.name}",
                f"{new.name} after",
                lineterm="",
                n=2,
            )
            parts.extend(lines)
        return "\n".join(parts)


@dataclass
class History:
    """One entry a pass, in the order they ran; a pass is found by index or name."""

    entries: list[Entry] = field(default_factory=list)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, key: int | str) -> Entry:
        if isinstance(key, int):
            return self.entries[key]
        for entry in self.entries:
            if entry.name == key:
                return entry
        raise KeyError(f"no pass '{key}' ran; these did: {', '.join(e.name for e in self.entries)}")


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order they run: joint passes first, then (after the split) step passes."""

    passes: tuple[Pass[Any], ...]

    @property
    def joint(self) -> tuple[JointPass, ...]:
        """The passes before the split."""
        return tuple(p for p in self.passes if isinstance(p, JointPass))

    @property
    def step(self) -> tuple[StepPass, ...]:
        """The passes after the split."""
        return tuple(p for p in self.passes if isinstance(p, StepPass))

    def __str__(self) -> str:
        return ",".join(str(p) for p in self.passes)

    @staticmethod
    def parse(spec: str, known: Mapping[str, type[Pass[Any]]]) -> Pipeline:
        """Read ``shard{stage=3},unshard{stage=3}`` with the passes in ``known``.

        Raises:
            PipelineError: an unknown pass or option, a value of another type than the option's, or text that is not a spec.
        """
        return Pipeline(tuple(_parse_pass(text, known) for text in _split_spec(spec)))

    def check(self, established: Sequence[Fact] = ()) -> None:
        """Check the order: what each pass requires is established by an earlier one, joint passes come first.

        Args:
            established: facts that hold before the first pass.

        Raises:
            PipelineError: naming the pass and the fact that is missing.
        """
        have = set(established)
        step_seen = ""
        for index, p in enumerate(self.passes):
            if isinstance(p, JointPass) and step_seen:
                raise PipelineError(
                    f"pass {index} '{p.name}' works on the joint graph but comes after '{step_seen}', which works on the "
                    "split step; move it to the front"
                )
            if isinstance(p, StepPass):
                step_seen = p.name
            for fact in sorted(p.requires - have, key=lambda f: f.value):
                raise PipelineError(f"pass {index} '{p.name}' requires {fact.value}, which no earlier pass establishes")
            have = (have - p.breaks) | p.establishes

    def run_joint(
        self, graph: Graph, verifier: Verifier, dump: Dump | None = None, facts: Facts | None = None
    ) -> History:
        """Run the joint passes on ``graph``, in place."""
        return _run(self.joint, graph, [graph], verifier, dump, {} if facts is None else facts)

    def run_step(self, step: Step, verifier: Verifier, dump: Dump | None = None, facts: Facts | None = None) -> History:
        """Run the step passes on ``step``, in place. ``facts`` holds what is established, and is updated."""
        return _run(self.step, step, step.graphs, verifier, dump, {} if facts is None else facts)


@dataclass
class Dump:
    """Writes ``03_prefetch.txt`` files: the graphs after each pass (``ZCOMPILE_DUMP=dir``)."""

    folder: Path
    count: int = 0

    @staticmethod
    def from_environment(name: str) -> Dump | None:
        """The dump for a capture called ``name``, if ``ZCOMPILE_DUMP`` is set."""
        root = os.environ.get("ZCOMPILE_DUMP")
        return Dump(Path(root) / name) if root else None

    def write(self, name: str, text: str) -> None:
        """Write one numbered file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.count:02d}_{name}.txt").write_text(text + "\n")
        self.count += 1


def _run(
    passes: Sequence[Pass[Any]], target: Any, graphs: list[Graph], verifier: Verifier, dump: Dump | None, facts: Facts
) -> History:
    history = History()
    interface = Interface.of(target)
    before = tuple(g.copy() for g in graphs)
    for p in passes:
        stats = Stats()
        try:
            p.run(target, stats)
            for fact in p.breaks:
                facts.pop(fact, None)
            facts.update({fact: p.options() for fact in p.establishes})
            if p.drops_outputs:
                interface = interface.without_dropped(target)
            verifier.verify(target, facts, interface)
        except ZCompileError as error:
            _explain(error, p, before, dump)
            raise
        after = tuple(graph.snapshot(earlier) for graph, earlier in zip(graphs, before, strict=True))
        history.entries.append(Entry(str(p), p.name, stats, partial(tuple, (before, after))))
        if dump is not None:
            dump.write(p.name, history[-1].after)
        before = after
    return history


def _explain(error: ZCompileError, p: Pass[Any], before: tuple[Graph, ...], dump: Dump | None) -> None:
    """Write the graph before the failing pass out and say how to replay it."""
    folder = dump.folder if dump is not None else Path(tempfile.mkdtemp(prefix="zcompile-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"failed_{p.name}_before.txt"
    path.write_text("\n".join(str(g) for g in before) + "\n")
    error.add_note(
        f"in pass '{p}'; the graph before it is in {path}; replay: python -m zcompile opt {path} --run '{p}'"
    )


# Specs. ---------------------------------------------------------------------------------------------------------------

#: what values of options are called
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}

_PASS = re.compile(r"\s*([a-z][a-z0-9-]*)\s*(?:\{([^{}]*)\})?\s*")


def _split_spec(spec: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in spec:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    if current.strip():
        parts.append(current)
    return parts


def _parse_pass(text: str, known: Mapping[str, type[Pass[Any]]]) -> Pass[Any]:
    match = _PASS.fullmatch(text)
    if match is None:
        raise PipelineError(f"'{text.strip()}' is not a pass spec; write name or name{{option=value other=value}}")
    name, body = match.group(1), match.group(2) or ""
    if name not in known:
        raise PipelineError(f"unknown pass '{name}'; the known ones are {', '.join(sorted(known))}")
    cls = known[name]
    kinds = _option_kinds(cls)
    options: dict[str, Any] = {}
    for item in re.sub(r"\s+=\s*", "=", body.replace(",", " ")).split():  # "a= b=1": an empty word
        key, sep, value = item.partition("=")
        if not sep or key not in kinds:
            raise PipelineError(f"pass '{name}' has no option '{key}'; its options are {', '.join(kinds) or '(none)'}")
        options[key] = _read_option(name, key, value, kinds[key])
    return cls(**options)


def _option_kinds(cls: type[Pass[Any]]) -> dict[str, tuple[Any, ...]]:
    """The types that each option may have; () where a spec cannot tell."""
    hints = get_type_hints(cls)
    kinds = {f.name: get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(cls)}
    return {name: of if all(kind in _KINDS for kind in of) else () for name, of in kinds.items()}


def _read_option(name: str, key: str, text: str, kinds: tuple[Any, ...]) -> Any:
    value = parse_option(text)
    is_told = type(value) in kinds or (type(value) is int and float in kinds)
    if not kinds or (is_told and value == value):  # nan is no number
        return value
    if str in kinds:
        return text
    wanted = " or ".join(_KINDS[kind] for kind in kinds)
    raise PipelineError(f"pass '{name}' has {key}={text}; {key} is {wanted}")


def _print_option(value: Any) -> str:
    return (
        {None: "none", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def parse_option(text: str) -> Any:
    """The value of an option in a spec: none, true, false, a number, or the text itself."""
    if text in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
