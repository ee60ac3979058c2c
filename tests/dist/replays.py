"""Twins of a model, one of which replays its steps on a recorder that stands for CUDA graphs, and what the same bits means."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zcompile
from tests.dist.models import net, rows
from tests.dist.training import LR, full_gradients, this_rank
from zcompile.runtime.communication.collectives import Pending
from zcompile.runtime.replay.tapes import Tapes


class Again:
    """A recorder for the CPU: a replay runs the program on the same tensors and writes over the same results.

    As with CUDA graphs, nothing is done while a program is recorded. All recordings have one memory, so a replay destroys what
    nobody may read any more: what other recordings left; with its backward, what a forward left; and memory of gradients that a
    recording took, where an earlier one or its own forward had used it. Full parameters in their places stay.

    Args:
        runner: of the model.
        fails_at: the group of collectives at which the device cannot record any more; 0: none.
    """

    def __init__(self, runner: Any, fails_at: int = 0) -> None:
        self.runner = runner
        self.executor = runner.executor
        self.left: list[list[Tensor]] = []  # by recording
        self.born: dict[int, int] = {}  # recordings by the address of gradient memory that they took
        self.placed: list[Tensor] = []
        self.forward = -1
        self.fails_at = fails_at
        self.closed = False

    def record(self, body: Callable[[], list[Any]]) -> tuple[Any, list[Any]]:
        assert isinstance(body, partial) and not self.closed
        run, runnable, slots = body.func, body.args[0], list(body.args[1])
        before = {arena.data_ptr() for arena in self.arenas()}
        with self.nothing_done(slots):
            results = list(body())
        number = len(self.left)
        is_backward = any(port.kind == "tangent" for port in runnable.program.inputs)
        for arena in self.arenas():
            if arena.data_ptr() not in before:
                arena.fill_(float("nan"))  # what it began with was recorded
                self.born[arena.data_ptr()] = number
        ends = list(dict.fromkeys(port.slot for port in runnable.program.outputs))
        stays = {t.data_ptr() for t in slots if t is not None} | {t.data_ptr() for t in self.places()}
        if is_backward:
            gradients = self.executor.shards.gradients.prepared
            stays |= {gradient.address for gradient in gradients if gradient is not None}
            stays |= {results[port.slot].data_ptr() for port in runnable.program.outputs if port.kind == "kept"}
        self.left.append([results[i] for i in ends if results[i].data_ptr() not in stays])
        forward = number if not is_backward else self.forward
        self.forward = forward

        def replay() -> None:
            assert not self.closed
            self.destroy(others_than={number, forward})
            for arena in self.arenas():
                if self.born.get(arena.data_ptr(), -1) >= number:
                    arena.fill_(float("nan"))
            with self.executor.recording():
                fresh = run(runnable, list(slots))
            for i in ends:
                if fresh[i] is not results[i] and fresh[i].data_ptr() != results[i].data_ptr():
                    results[i].copy_(fresh[i])
            if is_backward:
                self.destroy(others_than={number})

        return type("Recording", (), {"replay": staticmethod(replay)})(), list(results)

    def arenas(self) -> Iterable[Tensor]:
        """The memory of gradients that recordings write to, whether it exists for the model now or not."""
        taping = self.runner.tapes._taping
        chunks = {} if taping is None or taping.chunks is None else taping.chunks.arenas
        now = self.executor.shards.gradients.arenas
        return list({t.data_ptr(): t for t in (*chunks.values(), *now.values())}.values())

    def places(self) -> list[Tensor]:
        """They stay where they are also when all is closed, as long as somebody has them."""
        taping = self.runner.tapes._taping
        if taping is not None:
            self.placed = list(taping.places.values())
        return self.placed

    def destroy(self, others_than: set[int]) -> None:
        places = {t.data_ptr() for t in self.places()}
        for number, left in enumerate(self.left):
            for tensor in left if number not in others_than else ():
                if tensor.is_floating_point() and tensor.data_ptr() not in places:
                    tensor.fill_(float("nan"))

    @contextlib.contextmanager
    def nothing_done(self, slots: list[Any]) -> Iterator[None]:
        """Inside nothing is communicated, and what was written is undone in the end."""
        executor = self.executor
        local = executor.accumulation.local.values()
        memory = [t for t in (*slots, *local, *self.arenas(), *self.places()) if t is not None]
        copies = [t.clone() for t in memory]
        executor.collectives._start = self.start
        try:
            yield
        finally:
            del executor.collectives._start
            for tensor, copy in zip(memory, copies, strict=True):
                tensor.data.copy_(copy)

    def start(self, start: Any, description: str, finish: Any = None, kept: Any = None, lane: str = "group") -> Pending:
        """In place of ``Collectives._start``."""
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        collectives = self.executor.collectives
        collectives._unfinished += 1
        return Pending(collectives)

    def borrow(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if tensor.data_ptr() else tensor

    def hidden_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self.destroy(others_than=set())  # the memory is somebody else's then
        self.left, self.closed = [], True


def replayed(model: Any, recorder: Callable[[Any], Any] = Again) -> list[str]:
    """Let a compiled model replay its steps; the reasons why some are not go into the result."""
    said: list[str] = []
    runner = model._session.runner
    runner.tapes = Tapes(runner.executor, partial(recorder, weakref.proxy(runner)), said.append)
    return said


def twins(stage: int, make: Callable[[], nn.Module] = net, **options: Any) -> tuple[list[Any], list[Any], list[str]]:
    """One model that is replayed and one that is not, with their optimizers and what the first says."""
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(zcompile.compile(make(), stage=stage, backend="eager", verify="off", **options))
    said = replayed(models[0])
    return models, [zcompile.optim.AdamW(m.parameters(), lr=LR) for m in models], said


class Counting(nn.Module):
    """A model with a buffer that each forward changes, and one that users replace."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor, extra: bool = False) -> dict[str, Tensor]:
        return self.inner((self.norm(x) * self.scale).type_as(self.inner.first.weight), extra)


def mine(step: int, count: int = 3) -> Tensor:
    return rows(step, this_rank(), count)


def same(a: Any, b: Any, what: str) -> None:
    assert (a is None) == (b is None), what
    assert a is None or torch.equal(a, b), f"{what}: {a} and {b}"


def same_everywhere(models: list[Any], what: str) -> None:
    grads = [full_gradients(m) for m in models]
    states = [m.full_state_dict() for m in models]
    for name in grads[0]:
        same(grads[0][name], grads[1][name], f"gradient of {name} {what}")
    for name in states[0]:
        same(states[0][name], states[1][name], f"{name} {what}")
