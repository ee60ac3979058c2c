"""Sizes of a micro-batch as symbols: which sizes in a graph are rows, tokens of a row, or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import sympy

from zcompile.placement import ParamSpec

#: rows of a rank's micro-batch, and tokens in a row
ROWS = sympy.Symbol("B", integer=True, positive=True)
TOKENS = sympy.Symbol("S", integer=True, positive=True)


def size_symbols(rows: int, tokens: int, specs: Iterable[ParamSpec]) -> dict[int, sympy.Expr]:
    """What sizes of values mean, where that is sure.

    A size means rows, tokens or their product if no size of a parameter is equal to it and the three are different; a single
    row cannot be told from sizes of one, so formulas are for one row then.

    Args:
        rows: of the micro-batch; 0 when unknown.
        tokens: in a row; 0 when there are none.
        specs: the parameters.
    """
    sizes: dict[int, sympy.Expr] = {}
    if rows > 1:
        sizes[rows] = ROWS
    if tokens > 1:
        sizes[tokens] = TOKENS if tokens not in sizes else sympy.Integer(tokens)
    if rows > 1 and tokens > 1 and rows * tokens not in sizes:
        sizes[rows * tokens] = ROWS * TOKENS
    if rows == tokens:
        sizes.pop(rows, None)
    known = {size for spec in specs for size in spec.shape}
    return {size: symbol for size, symbol in sizes.items() if size not in known}


def bytes_formula(storages: Iterable[tuple[Sequence[int], int]], symbols: Mapping[int, sympy.Expr]) -> sympy.Expr:
    """Bytes of storages, each with its shape and present bytes, as a formula in the sizes of the micro-batch."""
    sums: dict[sympy.Expr, int] = {}
    for shape, num_bytes in storages:
        varying = [size for size in shape if size in symbols]
        factor = sympy.Mul(*(symbols[size] for size in varying))
        width = math.prod(varying)
        if num_bytes % max(width, 1):
            factor, width = sympy.Integer(1), 1  # a storage that is no plain product of its sizes
        sums[factor] = sums.get(factor, 0) + num_bytes // max(width, 1)
    return sympy.Add(*(factor * count for factor, count in sums.items()))
