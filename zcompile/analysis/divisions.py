"""In what pieces a loss is computed whose gradients are made in forward, and the memory that this takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from zcompile.analysis.losses import LinearLoss
from zcompile.cross_entropy import row_stride
from zcompile.ir import meta

#: the gradient of a weight in 16 bits may be added up over so many pieces: its error, beside eager's, becomes 1.4 times as large
_FEW = 3
#: rows and columns of pieces are multiples of this, where they are so many
_ALIGNMENT = 64


@dataclass(frozen=True)
class Division:
    """Pieces in which gradients are made in forward.

    Attributes:
        rows: of a piece.
        total: the dtype in which the gradient of the weight is added up.
        num_bytes: the most that there is at a time, beside inputs and the gradient of the hidden states.
    """

    rows: int
    total: torch.dtype
    num_bytes: int

    @classmethod
    def best(cls, loss: LinearLoss, most_bytes: int, *, may_grow: bool) -> Division:
        """The division that is taken: sums in float32, but where a few pieces in 16 bits save more than ``most_bytes``.

        Args:
            loss: with gradients.
            most_bytes: of the logits of a piece.
            may_grow: whether pieces may be larger: as large as the gradient of the weight, which exists twice when there is no piece
                any more, and as large as makes them few. The sum is read and written with each.
        """
        num_rows, dtype = len(meta.tensor(loss.logits)), meta.tensor(loss.logits).dtype
        largest = max(most_bytes, _weight_bytes(loss)) if may_grow else most_bytes
        rows = rows_of_pieces(loss, largest)
        wide = cls._of(loss, rows, torch.promote_types(dtype, torch.float32))
        few = max(rows, _aligned(math.ceil(num_rows / _FEW))) if may_grow else rows
        narrow = cls._of(loss, few, dtype)
        return narrow if few * _FEW >= num_rows and narrow.num_bytes + most_bytes < wide.num_bytes else wide

    @classmethod
    def _of(cls, loss: LinearLoss, rows: int, total: torch.dtype) -> Division:
        logits, of_weight = meta.tensor(loss.logits), _weight_bytes(loss)
        size = logits.element_size()
        summed = of_weight // size * total.itemsize
        end = summed + of_weight if total.itemsize > size else summed
        # backward has the gradient twice: it is alive until it was multiplied
        return cls(rows, total, max(summed + rows * logits.shape[1] * size, end, 2 * of_weight))


def rows_of_pieces(loss: LinearLoss, most_bytes: int) -> int:
    """Rows of the pieces of logits that take no more than ``most_bytes``."""
    logits = meta.tensor(loss.logits)
    return piece_size(len(logits), most_bytes // (row_stride(logits.shape[1]) * logits.element_size()))


def whole_bytes(loss: LinearLoss) -> int:
    """The most that there is at a time of a loss that is computed whole.

    Logits and their gradient, as what is between fuses with them, or this and the gradient of the weight.
    """
    return loss.num_bytes + max(loss.num_bytes, _weight_bytes(loss))


def _weight_bytes(loss: LinearLoss) -> int:
    """Bytes of the gradient of the weight; 0 if nobody wants it."""
    of_weight = None if loss.gradients is None else loss.gradients.weight
    return 0 if of_weight is None else meta.num_bytes(meta.value(of_weight))


def _aligned(size: int) -> int:
    return size if size < _ALIGNMENT else math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def piece_size(total: int, most: int) -> int:
    """The size of equal pieces of ``total``, the last one perhaps smaller, none larger than ``most``, if that is at least 1."""
    total, most = max(total, 1), max(most, 1)
    size = math.ceil(total / math.ceil(total / most))
    aligned = math.ceil(size / _ALIGNMENT) * _ALIGNMENT
    return aligned if aligned <= most else most - most % _ALIGNMENT or size
