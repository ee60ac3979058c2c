"""Ranks that do different things with a compiled model: every rank ends within 30 seconds, with the reason, never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcompile
from tests.dist.models import Net, net, rows
from tests.dist.pool import Pools
from tests.dist.training import adamw, this_rank

pytestmark = pytest.mark.dist

#: seconds from the divergence to the error on every rank
LIMIT = 30.0
#: the rank that does something else
ODD = 1


def is_odd() -> bool:
    return this_rank() == ODD


def compiled(model: nn.Module | None = None, **options: Any) -> Any:
    return zcompile.compile(
        model or net(), **{"stage": 3, "backend": "eager", "verify": "off", "timeout": 60.0, **options}
    )


def steps(model: Any, count: int, **arguments: Any) -> None:
    optimizer = adamw(model)
    for step in range(count):
        model(rows(step, this_rank()), **arguments)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def scenario(name: str) -> tuple[str, str, float]:
    """Run a scenario; returns the error's type, its text and the seconds since the divergence."""
    begin = time.monotonic()

    def diverge() -> None:
        nonlocal begin
        begin = time.monotonic()

    try:
        SCENARIOS[name](diverge)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


# Before the first step. -----------------------------------------------------------------------------------------------


def another_model(diverge: Callable[[], None]) -> None:
    model = net()
    if is_odd():
        model.norm = nn.LayerNorm(13, bias=False)
    compiled(model)


def another_shape(diverge: Callable[[], None]) -> None:
    model = net()
    if is_odd():
        model.unused = nn.Linear(6, 5)
    compiled(model)


class Swapped(Net):
    """The same parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        norm = self.norm
        del self.norm
        self.norm = norm


def another_order(diverge: Callable[[], None]) -> None:
    compiled(Swapped() if is_odd() else net())


def frozen_layer(diverge: Callable[[], None]) -> None:
    model = net()
    if is_odd():
        model.middle.requires_grad_(False)
    compiled(model)


def another_stage(diverge: Callable[[], None]) -> None:
    compiled(stage=2 if is_odd() else 3)


def another_policy(diverge: Callable[[], None]) -> None:
    compiled(policy="none" if is_odd() else "prefetch")


def never_compiles(diverge: Callable[[], None]) -> None:
    if not is_odd():
        compiled(timeout=5.0)


def compiles_late(diverge: Callable[[], None]) -> None:
    if is_odd():
        time.sleep(10.0)
        diverge()
    compiled(timeout=5.0)


def another_forward(diverge: Callable[[], None]) -> None:
    """Equal parameters, and a first call that uses others of them."""
    model = compiled()
    diverge()
    steps(model, 1, extra=is_odd())


# In the middle of training. -------------------------------------------------------------------------------------------


def stops_coming(diverge: Callable[[], None]) -> None:
    model = compiled(timeout=5.0)
    steps(model, 3)
    diverge()
    if is_odd():
        time.sleep(10.0)
        diverge()
    steps(model, 1)


def one_in_eval(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    if is_odd():
        model.eval()

        with torch.no_grad():
            model(rows(3, 1))
    steps(model, 3)


def frozen_later(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    if is_odd():
        model.original.middle.requires_grad_(False)
    steps(model, 3)


def one_in_no_sync(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    loss = model(rows(3, this_rank()))["loss"]
    if is_odd():
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()
    steps(model, 3)


def skips_a_backward(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    loss = model(rows(3, this_rank()))["loss"]
    if not is_odd():
        loss.backward()
    steps(model, 3)


def clips_alone(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    model(rows(3, this_rank()))["loss"].backward()
    if is_odd():
        model.clip_grad_norm_(1.0)
    steps(model, 3)


def writes_alone_in_a_window(diverge: Callable[[], None], **options: Any) -> None:
    """The weights that all others still hold are stale on one rank."""
    model = compiled(gradient_accumulation_steps=3, **options)
    for window in range(3):
        for micro in range(3):
            model(rows(3 * window + micro, this_rank()))["loss"].backward()
            if window == 2 and micro == 0:
                diverge()
                if is_odd():
                    with torch.no_grad():
                        model.norm.weight.add_(1.0)
        model.zero_grad()


def writes_alone_where_nothing_is_gathered(diverge: Callable[[], None]) -> None:
    """The others need no collective until the window ends."""
    writes_alone_in_a_window(diverge, stage=1)


class Touchy(Net):
    def forward(self, x: Any, extra: bool = False, fail: bool = False) -> Any:
        if fail:
            raise ValueError("a bad batch")
        return super().forward(x, extra)


def raises_in_forward(diverge: Callable[[], None]) -> None:
    """One rank's forward raises, and its program stops calling the model but lives on."""
    model = compiled(Touchy())
    steps(model, 3)
    diverge()
    steps(model, 1, fail=is_odd())


def killed(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    diverge()
    if is_odd():
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model, 3)


def killed_in_backward(diverge: Callable[[], None]) -> None:
    model = compiled()
    steps(model, 3)
    if is_odd():
        model.norm.bias.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    diverge()
    steps(model, 3)


def host_killed(diverge: Callable[[], None]) -> None:
    """The rank that hosts the store."""
    model = compiled()
    steps(model, 3)
    diverge()
    if this_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(model, 3)


SCENARIOS: dict[str, Callable[[Callable[[], None]], None]] = {
    f.__name__: f
    for f in (
        another_model,
        another_shape,
        another_order,
        frozen_layer,
        another_stage,
        another_policy,
        never_compiles,
        compiles_late,
        another_forward,
        stops_coming,
        one_in_eval,
        frozen_later,
        one_in_no_sync,
        skips_a_backward,
        clips_alone,
        writes_alone_in_a_window,
        writes_alone_where_nothing_is_gathered,
        raises_in_forward,
        killed,
        killed_in_backward,
        host_killed,
    )
}

#: for each scenario: the error's type, a pattern of its text, and ranks that end by themselves (another way, or dead)
EXPECTED: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "another_model": ("RankMismatchError", r"ranks disagree about the parameters: .*'last\.weight: .*norm\.bias", ()),
    "another_shape": ("RankMismatchError", r"unused\.weight: torch\.float32 \[5, 6\].*\[5, 5\]", ()),
    "another_order": ("RankMismatchError", r"ranks disagree about the parameters: .*norm\.weight.*", ()),
    "frozen_layer": ("RankMismatchError", r"middle\.weight: torch\.float32 \[13, 13\] frozen", ()),
    "another_stage": ("RankMismatchError", r"ranks disagree about the options: .*stage = 2.*stage = 3", ()),
    "another_policy": (
        "RankMismatchError",
        r"ranks disagree about the options: .*policy = 'none'.*policy = 'prefetch'",
        (),
    ),
    "never_compiles": ("RankTimeoutError", r"missing: rank 1", (ODD,)),
    "compiles_late": ("RankTimeoutError", r"missing: rank 1|calls compile after others gave up", ()),
    "another_forward": ("RankMismatchError", r"ranks disagree about call 1: .*spare", ()),
    "stops_coming": ("RankTimeoutError", r"missing: rank 1", ()),
    "one_in_eval": ("RankMismatchError", r"forward \(eval, no_grad\)", ()),
    "frozen_later": ("RankMismatchError", r"middle\.weight", ()),
    "one_in_no_sync": ("RankMismatchError", r"no_sync", ()),
    "skips_a_backward": ("RankMismatchError", r"forward \(train\)", ()),
    "clips_alone": ("RankMismatchError", r"clip_grad_norm_", ()),
    "writes_alone_in_a_window": ("RankMismatchError", r"weights held|weights stay", ()),
    "writes_alone_where_nothing_is_gathered": (
        "RankMismatchError",
        r"rank 1 waits to confirm call 15 as forward \(train\)",
        (),
    ),
    "raises_in_forward": ("RankError", r"rank 1 raised ValueError: a bad batch", (ODD,)),
    "killed": ("RankError", r"rank 1 is gone", (ODD,)),
    "killed_in_backward": ("RankError", r"rank 1 is gone", (ODD,)),
    "host_killed": ("RankError", r"rank 0, which hosts the store, is gone", (0,)),
}


def check(ranks: Pools, world: int, name: str) -> None:
    kind, pattern, own = EXPECTED[name]
    outcomes = ranks.outcomes(world, scenario, name=name, limit=90.0, grace=2 * LIMIT)
    ranks.drop()
    for rank, outcome in enumerate(outcomes):
        if rank in own:
            continue
        assert outcome.kind == "returned", f"rank {rank}: {outcome}"
        error, text, seconds = outcome.value
        assert text.startswith(f"[rank {rank} of {world}] "), f"rank {rank}: {error}: {text}"
        assert re.search(pattern, text, re.DOTALL), f"rank {rank}: {error}: {text}"
        assert error == kind, f"rank {rank}: {error}: {text}"
        assert seconds < LIMIT, f"rank {rank} took {seconds:.1f} s: {text}"


@pytest.mark.parametrize("name", EXPECTED)
def test_every_rank_ends_with_the_reason(ranks: Pools, name: str) -> None:
    check(ranks, 2, name)


@pytest.mark.parametrize("name", ["another_forward", "one_in_eval", "killed"])
@pytest.mark.parametrize("world", [3])
def test_every_rank_of_three_ends_with_the_reason(ranks: Pools, name: str, world: int) -> None:
    check(ranks, world, name)
