"""The copies between ranks' memories, with one thread a rank and ordinary memory of one device that all of them share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zcompile.runtime.communication.peers import PeerCopies, average


class Threads:
    """Ranks that are threads. What one rank calls shared memory, all find in the same order."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.made: list[list[Tensor]] = []
        self.barriers: list[threading.Barrier] = []
        self._lock = threading.Lock()

    def run(self, program: Callable[[int, PeerCopies], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            made = iter(range(1 << 20))

            def share(num_bytes: int) -> Memory:
                return Memory(*self._slabs(next(made), num_bytes))

            try:
                results[number] = program(number, PeerCopies(number, self.size, self.device, share))
            except BaseException as error:
                errors.append(error)
                for barrier in self.barriers:
                    barrier.abort()

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results

    def _slabs(self, number: int, num_bytes: int) -> tuple[list[Tensor], threading.Barrier]:
        with self._lock:
            if number == len(self.made):
                self.made.append(
                    [torch.full((num_bytes,), 0x7F, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
                )
                self.barriers.append(threading.Barrier(self.size, timeout=30))
            slabs = self.made[number]
        assert slabs[0].numel() == num_bytes, "every rank makes memory of the same size"
        return slabs, self.barriers[number]


class Memory:
    def __init__(self, slabs: list[Tensor], barrier: threading.Barrier) -> None:
        self.slabs = slabs
        self._barrier = barrier

    def barrier(self) -> None:
        if self.slabs[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._barrier.wait()

    def unblock(self) -> None:
        raise AssertionError("nobody waits for ever here")


def value(
    rank: int, shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(device, dtype)


SHAPES = [(3, 5), (1,), (128, 2), (7,)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_all_ranks_shards_in_the_dtype_of_the_output(
    device: torch.device, size: int, dtype: torch.dtype
) -> None:
    def program(rank: int, peers: PeerCopies) -> list[Tensor]:
        outputs = [torch.zeros((size * s[0], *s[1:]), dtype=dtype, device=device) for s in SHAPES]
        peers.all_gather(outputs, [value(rank, s, i, device) for i, s in enumerate(SHAPES)]).wait()
        return outputs

    want = [torch.cat([value(r, s, i, device) for r in range(size)]).to(dtype) for i, s in enumerate(SHAPES)]
    for outputs in Threads(size, device).run(program):
        assert all(torch.equal(a, b) for a, b in zip(outputs, want, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_averages_what_travels_narrow_in_the_dtype_of_the_output(
    device: torch.device, size: int, sent: torch.dtype
) -> None:
    def program(rank: int, peers: PeerCopies) -> list[Tensor]:
        outputs = [torch.zeros(s, device=device) for s in SHAPES]
        grads = [value(rank, (size * s[0], *s[1:]), i, device, sent) for i, s in enumerate(SHAPES)]
        peers.reduce_scatter(outputs, grads).wait()
        return outputs

    for rank, outputs in enumerate(Threads(size, device).run(program)):
        for i, (shape, out) in enumerate(zip(SHAPES, outputs, strict=True)):
            whole = torch.stack(
                [value(r, (size * shape[0], *shape[1:]), i, device, sent).double() for r in range(size)]
            ).mean(0)
            torch.testing.assert_close(out.double(), whole.chunk(size)[rank], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_shared_memory_is_used_again(device: torch.device, in_flight: int) -> None:
    """Buckets of many sizes, some waited for only after later ones started: nothing is overwritten before it was read."""
    size, rows = 2, [40, 8, 300, 300, 12, 500, 8, 8, 300]

    def program(rank: int, peers: PeerCopies) -> tuple[list[Tensor], int]:
        pending, results = [], []
        for i, n in enumerate(rows * 2):
            outputs = [torch.zeros(size * n, 4, device=device), torch.zeros(size * n, device=device)]
            shards = [value(rank, (n, 4), i, device), value(rank, (n,), i + 50, device)]
            pending.append((peers.all_gather(outputs, shards), outputs))
            if len(pending) == in_flight:
                started, done = pending.pop(0)
                started.wait()
                results += done
            grads = [value(rank, (size * n, 4), i, device)]
            peers.reduce_scatter([torch.zeros(n, 4, device=device)], grads).wait()
        for started, done in pending:
            started.wait()
            results += done
        return results, peers.num_bytes

    ranks = Threads(size, device).run(program)
    for results, num_bytes in ranks:
        for i, n in enumerate(rows * 2):
            assert torch.equal(results[2 * i], torch.cat([value(r, (n, 4), i, device) for r in range(size)]))
            assert torch.equal(results[2 * i + 1], torch.cat([value(r, (n,), i + 50, device) for r in range(size)]))
        largest = 500 * 16 + 500 * 4 + 2 * 256
        assert num_bytes <= largest + (size - 1) * largest, "as large as the largest bucket of each kind"


def test_an_average_is_added_up_wide(device: torch.device) -> None:
    """1024 and three ones in bfloat16: added narrow, the ones would be lost."""
    for rank in range(4):
        sent = torch.tensor([1024.0 if r == 0 else 3.0 for r in range(4)], dtype=torch.bfloat16, device=device)
        own, others = sent[rank : rank + 1].clone(), torch.cat([sent[:rank], sent[rank + 1 :]])
        out = [torch.zeros(1, device=device)]
        average(out, [own], [[piece] for piece in others.split(1)], rank)
        assert out[0].item() == (1024 + 9) / 4
