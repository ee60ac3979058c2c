"""Buffers: nothing that is made from one keeps it alive."""

import gc
import weakref

import torch

from zcompile.program import TensorType
from zcompile.runtime.buffers import Buffers, parts

KIND = TensorType((4, 3), torch.float32)


def test_parts_are_the_memory_of_a_buffer_and_do_not_hold_it() -> None:
    with torch.no_grad():
        buffers = Buffers(torch.device("cpu"))
        (buffer,) = buffers.take([KIND])
        first, second = parts(buffer, 2)
        second.fill_(7)
        assert torch.equal(buffer.view(-1)[6:], torch.full((6,), 7.0)) and first.numel() == 6
        assert parts(buffer, 2)[0] is first and len(parts(buffer, 4)) == 4
        known = weakref.ref(buffer)
        del buffer, first, second
        gc.collect()
        assert known() is None


def test_buffers_apart_are_forgotten() -> None:
    buffers = Buffers(torch.device("cpu"))
    kept = buffers.take([KIND])
    known = weakref.ref(kept[0])
    buffers.give(kept)
    del kept
    with buffers.apart():
        assert known() is None, "what was free is free memory"
        (inside,) = buffers.take([KIND])
        assert buffers.live_bytes == 48
    assert buffers.live_bytes == 0 and buffers.held_bytes == 0
    (outside,) = buffers.take([KIND])
    assert outside.data_ptr() != inside.data_ptr()
