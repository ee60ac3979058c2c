"""Reads a DeepSpeed configuration and checks it key by key: what was given, under dotted names."""

from __future__ import annotations

import difflib
import json
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcompile.dsconfig.keys import ALIASES, DTYPE_NAMES, DTYPES, KEYS, Key, names_in, sections
from zcompile.errors import ConfigError

#: what Hugging Face's configurations say for "you know it"
AUTO = "auto"

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a dictionary"}


@dataclass(frozen=True)
class Given:
    """The checked values of a configuration.

    Attributes:
        values: by dotted name, those that were given and are not ``auto``.
        auto: dotted names whose value is ``auto``; also those inside of the parameters of optimizer and scheduler.
    """

    values: Mapping[str, Any]
    auto: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """The value, or the key's default."""
        return self.values.get(name, KEYS[name].default)


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> Given:
    """Read a file or a dictionary.

    Raises:
        ConfigError: no such file, no JSON, a key twice; or an unknown key, a wrong type or range, or a feature that is not
            supported, each with its dotted name.
    """
    tree = config if isinstance(config, Mapping) else _load(Path(config))
    values: dict[str, Any] = {}
    auto: set[str] = set()
    known_sections = sections()
    for name, value in _flat(tree, "", known_sections):
        if value == AUTO and isinstance(value, str):
            auto.add(name)
        elif name in values:
            raise ConfigError(f"{name} is given twice, once under an old name; leave one out")
        else:
            values[name] = _checked(name, value, KEYS[name])
    for name in ("optimizer.params", "scheduler.params"):
        params = values.get(name, {})
        auto.update(f"{name}.{key}" for key, value in params.items() if isinstance(value, str) and value == AUTO)
    return Given(values, frozenset(auto))


def unknown(subject: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not among the known ones; says which of them is nearest."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(names))}"
    return ConfigError(f"{subject} {name!r} is not known; {hint}")


def _load(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"config {str(path)!r} is no file; pass the path of a JSON file, or a dictionary")
    try:
        tree = json.loads(path.read_text(), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} holds {type(tree).__name__}; it must hold one object")
    return tree


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"key {key!r} is in the config twice; leave one out")
        found[key] = value
    return found


def _flat(tree: Mapping[str, Any], section: str, known_sections: set[str]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every known key in a tree."""
    for key, value in tree.items():
        name = f"{section}.{key}" if section else str(key)
        name = ALIASES.get(name, name)
        if name in KEYS:
            yield name, value
        elif name in known_sections:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} is {value!r}; it must be a dictionary")
            yield from _flat(value, name, known_sections)
        else:
            where = f"key of {section}" if section else "key"
            raise unknown(where, str(key), names_in(section))


def _checked(name: str, value: Any, key: Key) -> Any:
    """A value in the key's type, inside its range and supported."""
    if (value is None and (key.default is None or key.endless)) or (key.endless and value == math.inf):
        return None
    value = _typed(name, value, key.kind)
    if isinstance(value, str) and key.choices:
        value = DTYPE_NAMES.get(value.lower(), value.lower()) if key.choices == DTYPES else value.lower()
    if key.choices and value not in key.choices:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, key.choices))}")
    for bound, is_broken, words in (
        (key.low, operator.lt, "at least"),
        (key.high, operator.gt, "at most"),
        (key.above, operator.le, "larger than"),
    ):
        if bound is not None and is_broken(value, bound):
            raise ConfigError(f"{name} is {value}; it must be {words} {bound:g}")
    is_refused = value in key.refused if key.refused else value != key.default and not _is_off(value)
    if key.refuse and is_refused:
        raise ConfigError(f"{name} is {value!r}, which is not supported here: {key.refuse}")
    return value


def _is_off(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.get("enabled", bool(value))


def _typed(name: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number and math.isfinite(value):
        return float(value)
    if kind is int and is_number and math.isfinite(value) and value == int(value):  # 5e8 is how files say it
        return int(value)
    if kind in (int, float) or not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be {_WORDS[kind]}")
    return value
