"""Random training loops on twins, one of which replays every kind of micro-batch: the same bits after every action.

The loops are the same in every run. ``--wide`` runs many more.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.dist.models import rows
from tests.dist.pool import Pools
from tests.dist.replays import Again, Counting, replayed, same, twins
from tests.dist.training import this_rank
from zcompile.errors import RankError, ZCompileError
from zcompile.runtime.replay import tapes

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

#: loops that one job runs, and jobs
LOOPS, JOBS, WIDE_JOBS = 5, 3, 60
WINDOWS = 9

POLICIES = (
    None,
    "keep{units=99},prefetch",
    "keep{units=0},hold{first=99},prefetch",
    "keep{units=0},prefetch",
    "hold{units=0 first=0},prefetch",
)

#: what may happen beside micro-batches, and how often
DISTURBANCES = {
    "open": 4,  # a forward whose backward comes later
    "close": 4,  # that backward
    "drop": 2,
    "twice": 2,
    "both": 2,
    "asked": 2,
    "asked_and_backward": 1,
    "evaluate": 2,
    "zero": 2,
    "zero_in_place": 1,
    "zero_some": 2,
    "sync": 2,
    "write": 2,
    "write_unseen": 1,
    "load": 1,
    "step": 2,
    "clip": 2,
    "keep_gradients": 3,
    "assign": 1,
    "hook": 1,
    "unhook": 1,
    "freeze": 1,
    "replace_buffer": 1,
    "write_buffer": 2,
    "forget": 2,
}


@dataclass(frozen=True)
class Action:
    """One thing that a loop does.

    Attributes:
        name: a method of ``Loop``.
        number: of the batch, or of whatever is chosen.
        local: ``f`` and ``b``: what is inside ``no_sync``.
        count: rows.
        extra: the other branch of the model.
        inputs: the gradient of the batch is asked for.
    """

    name: str
    number: int = 0
    local: str = ""
    count: int = 3
    extra: bool = False
    inputs: bool = False


@dataclass(frozen=True)
class Example:
    """A loop.

    Attributes:
        homeless: gradients come and go, as a large model's.
        poison: released buffers are NaN.
        ragged: some ranks have more rows than others, so that they record at other times.
        fails: a rank, and the group of collectives at which its device cannot record any more; 0: none.
    """

    stage: int
    options: dict[str, Any]
    homeless: bool
    poison: bool
    ragged: bool
    fails: tuple[int, int]
    actions: list[Action]


def example(seed: int) -> Example:
    draw = random.Random(seed)
    steps = draw.choice([1, 1, 2, 3, 4])
    options: dict[str, Any] = {"gradient_accumulation_steps": steps, "precision": draw.choice([None, "bf16"])}
    policy = draw.choice(POLICIES)
    if policy is not None:
        options["policy"] = policy
    if steps > 1 and draw.random() < 0.4:
        options["accumulate_dtype"] = torch.float32
    disturbed, branches = draw.choice([0.0, 0.1, 0.3]), draw.choice([[False], [False, True]])
    counts, inputs = draw.choice([[3], [3], [3, 4]]), draw.random() < 0.3
    manner = draw.choice(["plain", "plain", "no_sync"])
    actions: list[Action] = []

    def add(name: str, local: str = "") -> None:
        batch = (draw.choice(counts), draw.choice(branches), inputs)
        actions.append(Action(name, len(actions), local, *batch))

    for _ in range(WINDOWS):
        micro = steps if steps > 1 or manner == "plain" else 3
        for i in range(micro):
            while draw.random() < disturbed:
                add(draw.choices(list(DISTURBANCES), list(DISTURBANCES.values()))[0], draw.choice(["", "", "b", "fb"]))
            local = "fb" if manner == "no_sync" and i < micro - 1 else ""
            if draw.random() < disturbed / 3:
                local = draw.choice(["f", "b", "fb"])
            add("micro", local)
        if disturbed and draw.random() < 0.2:
            continue  # the next window is added to what is there
        if draw.random() < 0.3:
            add("clip")
        add("step")
        add("zero" if draw.random() < 0.8 else "zero_in_place")
    return Example(
        draw.choice([0, 1, 2, 3, 3]),
        options,
        homeless=draw.random() < 0.5,
        poison=draw.random() < 0.5,
        ragged=draw.random() < 0.3,
        fails=(draw.randrange(2), draw.randrange(1, 60) if draw.random() < 0.2 else 0),
        actions=actions,
    )


class Loop:
    """What one of the twins does. Each action returns what the twins must agree on."""

    def __init__(self, model: Any, optimizer: Any, ragged: bool) -> None:
        self.model = model
        self.optimizer = optimizer
        self.ragged = ragged
        self.open: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.hooks: list[Any] = []

    def local(self, inside: bool) -> Any:
        return self.model.no_sync() if inside else contextlib.nullcontext()

    def forward(self, action: Action, shift: int = 0) -> tuple[Tensor, Tensor]:
        count = action.count + (self.ragged and this_rank() == action.number % 3)
        x = rows(2 * action.number + shift, this_rank(), count).requires_grad_(action.inputs)
        with self.local("f" in action.local):
            loss = self.model(x, extra=action.extra)["loss"]
        return loss, x

    def backward(self, action: Action, loss: Tensor, **options: Any) -> None:
        with self.local("b" in action.local):
            loss.backward(**options)

    def named(self, number: int) -> Any:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        return parameters[number % len(parameters)]

    # Micro-batches.

    def micro(self, action: Action) -> list[Any]:
        loss, x = self.forward(action)
        self.backward(action, loss)
        return [loss, x.grad]

    def twice(self, action: Action) -> list[Any]:
        loss, x = self.forward(action)
        self.backward(action, loss, retain_graph=True)
        self.backward(action, loss)
        return [loss, x.grad]

    def both(self, action: Action) -> list[Any]:
        losses = [self.forward(action, shift)[0] for shift in range(2)]
        self.backward(action, losses[0] + 2 * losses[1])
        return losses

    def open_one(self, action: Action) -> list[Any]:
        self.open.append(self.forward(action)[0])
        return self.open[-1:]

    def close(self, action: Action) -> list[Any]:
        if self.open:
            self.backward(action, self.open.pop(-1 if action.number % 2 else 0))
        return []

    def drop(self, action: Action) -> list[Any]:
        self.forward(action)
        self.open = []
        return []

    def asked(self, action: Action, retain_graph: bool = False) -> list[Any]:
        loss, _ = self.forward(action)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters[:2], retain_graph=retain_graph, allow_unused=True)
        if retain_graph:
            self.backward(action, loss)
        return [loss, *map(local_of, found)]

    def asked_and_backward(self, action: Action) -> list[Any]:
        return self.asked(action, retain_graph=True)

    def evaluate(self, action: Action) -> list[Any]:
        loss, _ = self.forward(action)
        self.model.train(action.number % 2 == 0)
        with torch.no_grad():
            out = self.model(rows(action.number, this_rank()))["out"]
        self.model.train()
        self.backward(action, loss)
        return [loss, out]

    # Gradients.

    def zero(self, action: Action) -> list[Any]:
        self.model.zero_grad()
        return []

    def zero_in_place(self, action: Action) -> list[Any]:
        self.model.zero_grad(set_to_none=False)
        return []

    def zero_some(self, action: Action) -> list[Any]:
        for i, parameter in enumerate(self.model.parameters()):
            if (i + action.number) % 3:
                parameter.grad = None
        return []

    def sync(self, action: Action) -> list[Any]:
        self.model.sync_gradients()
        return []

    def clip(self, action: Action) -> list[Any]:
        return [self.model.clip_grad_norm_(0.1)] if any(p.grad is not None for p in self.model.parameters()) else []

    def step(self, action: Action) -> list[Any]:
        self.optimizer.step()
        return []

    def keep_gradients(self, action: Action) -> list[Any]:
        grad = self.named(action.number).grad
        if grad is not None:
            self.kept.append(grad)
            self.model.zero_grad()
        return [*map(local_of, self.kept)]

    def assign(self, action: Action) -> list[Any]:
        parameter = self.named(action.number)
        parameter.grad = torch.ones_like(parameter)
        return []

    def forget(self, action: Action) -> list[Any]:
        self.kept = []
        return []

    # Parameters and buffers.

    def hook(self, action: Action) -> list[Any]:
        parameter = self.named(action.number)
        if action.number % 2:
            self.hooks.append(parameter.register_hook(lambda grad: 2 * grad))
        else:
            self.hooks.append(parameter.register_post_accumulate_grad_hook(halve))
        return []

    def unhook(self, action: Action) -> list[Any]:
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        return []

    def freeze(self, action: Action) -> list[Any]:
        parameter = self.model.get_parameter("inner.middle.bias")
        parameter.requires_grad_(not parameter.requires_grad)
        return []

    def write(self, action: Action) -> list[Any]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        return []

    def write_unseen(self, action: Action) -> list[Any]:
        """In a way that torch does not count."""
        self.named(action.number).data.mul_(0.9)
        return []

    def load(self, action: Action) -> list[Any]:
        self.model.load_state_dict({name: 0.9 * value for name, value in self.model.full_state_dict().items()})
        return []

    def replace_buffer(self, action: Action) -> list[Any]:
        self.model.scale = torch.full((7,), 1.0 + action.number / 100)
        return []

    def write_buffer(self, action: Action) -> list[Any]:
        self.model.scale.mul_(0.9)
        return []


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def local_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state(model: Any) -> dict[str, Any]:
    """All that twins must have alike on this rank."""
    found: dict[str, Any] = dict(model.original.named_buffers())
    for name, parameter in model.named_parameters():
        found |= {name: local_of(parameter.detach()), f"gradient of {name}": local_of(parameter.grad)}
    held = model._session.runner.executor.accumulation
    found |= {f"local gradient of {name}": value for name, value in held.local.items()}
    found |= {f"waiting gradient of {name}": value for name, value in held.reduced.items()}
    return found | {"position": torch.tensor(held.position)}


def holes_are_zero(model: Any) -> bool:
    """Whether memory that belongs to no gradient is zero, where there are gradients."""
    if all(p.grad is None for p in model.parameters()):
        return True
    gradients = model._session.runner.shards.gradients
    return not any(hole.count_nonzero() for key in gradients.arenas for hole in gradients.holes(key))


def attempt(loop: Loop, action: Action) -> tuple[list[Any], str]:
    """What an action gave, or the kind of error."""
    try:
        name = "open_one" if action.name == "open" else action.name
        return [t if t is None else t.detach() for t in getattr(loop, name)(action)], ""
    except RankError:
        raise
    except ZCompileError as error:
        return [], type(error).__name__


def run(example: Example) -> int:
    """Do it; returns how many micro-batches were replayed."""
    models, optimizers, said = twins(example.stage, Counting, **example.options)
    if this_rank() == example.fails[0]:
        said = replayed(models[0], partial(Again, fails_at=example.fails[1]))
    for model in models:
        model._session.runner.shards.gradients.stay = not example.homeless
        model._session.runner.executor.buffers.poison = example.poison
    loops = [Loop(m, o, example.ragged) for m, o in zip(models, optimizers, strict=True)]
    for number, action in enumerate(example.actions):
        (mine, failed), (theirs, wanted) = [attempt(loop, action) for loop in loops]
        what = f"action {number}, {action}"
        assert failed == wanted, f"{what}: {failed or 'no error'}, and {wanted or 'none'} without replays"
        for i, pair in enumerate(zip(mine, theirs, strict=True)):
            same(*pair, f"result {i} of {what}")
        assert holes_are_zero(models[0]), f"memory between gradients is not zero after {what}"
        have, want = map(state, models)
        assert have.keys() == want.keys(), f"after {what}: {have.keys() ^ want.keys()}"
        for name, value in want.items():
            same(have[name], value, f"{name} after {what}")
    for loop in loops:
        loop.open = []
        loop.model.zero_grad()
        assert loop.model._session.runner.executor.buffers.live_bytes == 0
    assert example.fails[1] or not any("cannot record" in reason for reason in said), said
    assert models[0]._session.runner.executor.collectives._unfinished == 0
    return models[0].report().replays


def run_all(seeds: list[int]) -> list[int]:
    """All of them on this rank, with tapes as soon as may be and as many as it takes."""
    counts = []
    with mock.patch.multiple(tapes, WARM_STEPS=1, MAX_RECORDINGS=100, MAX_TAPES=100):
        for seed in seeds:
            try:
                counts.append(run(example(seed)))
            except Exception as error:
                error.add_note(f"seed {seed}, {example(seed)}")
                raise
    return counts


@pytest.mark.parametrize(
    "job", [*range(JOBS), *(pytest.param(j, marks=pytest.mark.wide) for j in range(JOBS, WIDE_JOBS))]
)
def test_random_loops(ranks: Pools, job: int) -> None:
    seeds = list(range(job * LOOPS, (job + 1) * LOOPS))
    for counts in ranks(2, run_all, seeds=seeds):
        assert sum(counts) >= 3 * LOOPS, counts
