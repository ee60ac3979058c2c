"""Many tensors in one launch: the host pays for a launch, whatever a tensor's size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

#: elements that one program works on, and its warps: short programs leave most of the device to the computation beside them
BLOCK_ELEMENTS = 1024
NUM_WARPS = 4

#: Most tensors in a launch. One long kernel takes more from the computation beside it than short ones in a row, between which that gets
#: hold of the device (H200, beside 2.3 ms of products: 0.25 ms all seven in one, 0.17 to 0.22 by three or four, 0.16 to 0.20 alone).
#: Launches in a replay cost the host nothing.
MAX_TENSORS = 4
MAX_TENSORS_REPLAYED = 1


@dataclass(eq=False)
class LaunchedTensors:
    """Some tensors, and how one launch of a kernel divides them among programs.

    Attributes:
        places: which tensors.
        starts: the first block of each.
        numels: the elements of each.
        num_blocks: of all, each a program's.
    """

    places: tuple[int, ...]
    starts: tuple[int, ...]
    numels: tuple[int, ...]
    num_blocks: int

    def of(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """What belongs to these tensors, of what belongs to all."""
        return tuple([row[place] for place in self.places])


def launches(*rows: Sequence[Tensor]) -> Iterator[LaunchedTensors]:
    """Cut work on ``rows[0][i]``, ``rows[1][i]`` and so on, of as many elements, into launches, each of tensors of the same dtypes.

    Every number of tensors is a kernel of its own, so they are shared out evenly. Inside, the device of the tensors, which is the same
    for all, is the current one, where Triton launches.
    """
    kinds: dict[tuple[torch.dtype, ...], list[tuple[int, int]]] = {}
    for place, tensors in enumerate(zip(*rows, strict=True)):
        if numel := tensors[0].numel():
            kinds.setdefault(tuple([tensor.dtype for tensor in tensors]), []).append((place, numel))
    if not kinds:
        return
    device = rows[0][0].device
    recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    most = MAX_TENSORS_REPLAYED if recorded else MAX_TENSORS
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        for members in kinds.values():
            each = -(-len(members) // -(-len(members) // most))
            for first in range(0, len(members), each):
                places, numels = zip(*members[first : first + each], strict=True)
                *starts, num_blocks = accumulate([-(-numel // BLOCK_ELEMENTS) for numel in numels], initial=0)
                yield LaunchedTensors(places, tuple(starts), numels, num_blocks)
