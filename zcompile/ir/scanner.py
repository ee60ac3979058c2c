"""One line of graph text as tokens, with a cursor and errors that show the line; reads literals and types."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import fx

from zcompile.errors import TextError
from zcompile.ir.operators import find_operator
from zcompile.ir.types import find_device, find_dtype, find_word

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
  | (?P<number>-?(?:\d+\.\d*(?:e[+-]?\d+)?|\d+e[+-]?\d+|\d+)|-inf\b)
  | (?P<ref>%\w+)
  | (?P<word>[A-Za-z_]\w*(?:\.\w+)*)
  | (?P<mark>[\[\](){},:=@!])
  )""",
    re.VERBOSE,
)
_SCALARS = ("int", "float", "bool", "str", "complex")


class Bucket:
    """The type of a pending value in graph text; what is in it follows from the collective."""


class Scanner:
    """The tokens of one line.

    Args:
        number: line number, from 1.
        line: the line, without indentation.
        values: nodes by name, for references.
    """

    def __init__(self, number: int, line: str, values: Mapping[str, fx.Node] | None = None) -> None:
        self.number = number
        self.line = line
        self.values = values or {}
        self.position = 0
        self.tokens: list[tuple[str, str]] = []
        at, end = 0, len(line)
        while at < end:
            match = _TOKEN.match(line, at)
            if match is None:
                self.fail(f"unexpected {line[at:].strip()[:20]!r}", "a value, name, number or string")
            self.tokens.append((match.lastgroup or "", match[match.lastgroup or 0]))
            at = match.end()

    def fail(self, problem: str, expected: str) -> NoReturn:
        """Raise the error for this line."""
        raise TextError(f"line {self.number}: {problem}; expected {expected}\n    {self.line}")

    def peek(self, ahead: int = 0) -> str:
        """The text of a coming token; empty at the end of the line."""
        at = self.position + ahead
        return self.tokens[at][1] if at < len(self.tokens) else ""

    def accept(self, *texts: str) -> bool:
        """Move over these tokens if they come next."""
        if all(self.peek(i) == t for i, t in enumerate(texts)) and self.kind() != "string":
            self.position += len(texts)
            return True
        return False

    def expect(self, text: str) -> None:
        """Move over a token that must come next."""
        if not self.accept(text):
            self.unexpected(f"'{text}'")

    def unexpected(self, expected: str) -> NoReturn:
        """Raise the error that the next token is not what was expected."""
        self.fail(f"found {self.peek()!r}" if self.peek() else "the line ends too early", expected)

    def kind(self) -> str:
        """The kind of the next token: string, number, ref, word or mark; empty at the end of the line."""
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def take(self, kind: str, expected: str) -> str:
        """The next token, which must be of this kind."""
        if self.kind() != kind:
            self.unexpected(expected)
        self.position += 1
        return self.tokens[self.position - 1][1]

    def end(self) -> None:
        """Check that nothing is left."""
        if self.kind():
            self.unexpected("the end of the line")

    # Parts of a line. -------------------------------------------------------------------------------------------------

    def name(self) -> str:
        """A value's name, without its ``%``."""
        return self.take("ref", "a value's name such as %x")[1:]

    def string(self) -> str:
        """A quoted string."""
        return ast.literal_eval(self.take("string", "a quoted name"))

    def integer(self) -> int:
        """A whole number."""
        text = self.take("number", "a whole number")
        if not text.lstrip("-").isdigit():
            self.fail(f"found {text!r}", "a whole number")
        return int(text)

    def list_of(self, item: Callable[[], Any], close: str) -> list[Any]:
        """Items separated by commas up to ``close``, which is moved over; the opening bracket was read before."""
        items: list[Any] = []
        while not self.accept(close):
            items.append(item())
            if not self.accept(",") and self.peek() != close:
                self.unexpected(f"',' or '{close}'")
        return items

    def sequence_of(self, item: Callable[[], Any]) -> Any:
        """A list ``[..]`` or tuple ``(..)`` of items; None when none comes next."""
        if self.accept("["):
            return self.list_of(item, "]")
        if self.accept("("):
            return tuple(self.list_of(item, ")"))
        return None

    def literal(self) -> Any:
        """An argument: a reference to a node, a constant, or a list, tuple or dict of arguments."""
        kind = self.kind()
        if kind == "ref":
            name = self.name()
            if name not in self.values:
                self.fail(f"unknown value %{name}", "a value that is defined above")
            return self.values[name]
        if kind == "string":
            return self.string()
        if kind == "number":
            text = self.take("number", "a number")
            return int(text) if text.lstrip("-").isdigit() else float(text)
        if kind == "word":
            return self._word()
        if self.accept("{"):
            return dict(self.list_of(self._item, "}"))
        found = self.sequence_of(self.literal)
        if found is None:
            self.unexpected("an argument")
        return found

    def _item(self) -> tuple[Any, Any]:
        key = self.literal()
        self.expect(":")
        return key, self.literal()

    def _word(self) -> Any:
        if self.accept("slice", "("):
            return slice(*self.list_of(self.literal, ")"))
        if self.accept("complex", "("):
            return complex(*self.list_of(self.literal, ")"))
        word = self.take("word", "a word")
        found = find_word(word)
        if found is not None:
            return found[0]
        target = find_operator(word) if "." in word else None
        if target is None:
            self.fail(f"unknown word '{word}'", "a constant, dtype, memory format, layout, device or operator")
        return target

    def operator(self) -> Callable[..., Any]:
        """The operator that a line calls."""
        name = self.take("word", "an operator such as aten.mm")
        target = find_operator(name)
        if target is None:
            self.fail(f"unknown operator '{name}'", "one of torch.ops, written as aten.mm or aten.sum.dim_IntList")
        return target

    def type(self, device: str) -> Any:
        """A type, as a fake value in the ambient fake mode; ``Bucket`` for a pending value."""
        found = self.sequence_of(lambda: self.type(device))
        if found is not None:
            return found
        word = self.take("word", "a type such as f32[4, 8]")
        if word == "none":
            return None
        if word == "bucket":
            return Bucket
        if word in _SCALARS and self.accept("("):
            val = self.literal()
            self.expect(")")
            return val
        dtype = find_dtype(word)
        if dtype is None:
            self.fail(f"unknown dtype '{word}'", "one such as f32, bf16, i64 or b8")
        self.expect("[")
        shape = self.list_of(self.integer, "]")
        strides = self.list_of(self.integer, "}") if self.accept("{") else None
        if strides is not None and len(strides) != len(shape):
            self.fail(f"{len(strides)} strides for {len(shape)} dimensions", "one stride a dimension")
        if self.kind() == "mark" and self.peek() == "@" and find_device(self.peek(1)) is not None:
            self.position += 2
            device = self.peek(-1)
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
