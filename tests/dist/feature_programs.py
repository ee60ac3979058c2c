"""Features that are a program of their own: each runs at a stage on every rank and compares with plain PyTorch."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.dist.models import CASES, Case, all_rows, net, rows
from tests.dist.training import (
    LR,
    adamw,
    average_gradients,
    full,
    full_gradients,
    this_rank,
    train,
    world_size,
)
from tests.dist.training import copies as replicas
from zcompile.errors import ShardingError


def compiled(stage: int, model: nn.Module | None = None, **options: Any) -> Any:
    return zcompile.compile(net() if model is None else model, stage=stage, **{"backend": "eager", **options})


def mine(step: int, count: int = 3) -> Tensor:
    return rows(step, this_rank(), count)


def everyone(step: int) -> Tensor:
    return all_rows(step, world_size())


def close(have: Any, want: Tensor, what: str) -> None:
    torch.testing.assert_close(full(have), want.detach(), rtol=1e-5, atol=1e-2 * LR, msg=lambda m: f"{what}: {m}")


def close_state(model: Any, plain_model: nn.Module) -> None:
    """Equal parameters and buffers. Collective."""
    want = plain_model.state_dict()
    have = model.full_state_dict()
    assert list(have) == list(want)
    for name, value in want.items():
        close(have[name], value, name)


def both(
    stage: int,
    step: Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any],
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    steps: int = 4,
) -> None:
    """The same loop over a compiled and a plain ``Net``, on this rank's rows and on all rows; equal weights in the end."""
    model, reference = compiled(stage), net()
    for each in (model, reference):
        prepare(each)
    optimizers = adamw(model), adamw(reference)
    for number in range(steps):
        step(model, optimizers[0], mine(number))
        step(reference, optimizers[1], everyone(number))
    close_state(model, reference)


def ordinary_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


# Parameters. ----------------------------------------------------------------------------------------------------------


def frozen_has_no_gradient(model: Any) -> None:
    """The base is sharded and has neither a gradient nor gradient memory; the adapters train."""
    frozen = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) > 5 and all(p.grad is None for _, p in frozen)
    report = model.report(torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert report.gradient_bytes_total <= trained < report.parameter_bytes_total / 4
    if model._config.stage == 3:
        assert report.parameter_bytes < 0.6 * report.parameter_bytes_total


def vision_is_whole(model: Any) -> None:
    """``ignore`` leaves the vision tower whole on every rank, and shards the other."""
    specs = model._session.runner.shards.specs
    assert not any(s.is_sharded for n, s in specs.items() if n.startswith("vision."))
    assert model._config.stage == 0 or any(s.is_sharded for n, s in specs.items() if n.startswith("text."))


def lora(case: Case, stage: int) -> None:
    """Adapters saved by peft and the merged model are those of a plain model with the same weights."""
    from safetensors.torch import load_file

    model, reference = compiled(stage, case.build()), case.build()
    optimizer = adamw(model)
    train(model, case, optimizer=optimizer, steps=3)
    reference.load_state_dict(model.full_state_dict())
    moments = model.full_optimizer_state_dict(optimizer)["state"]
    assert moments and all("lora_" in name for name in moments), "the frozen base has no optimizer state"
    with tempfile.TemporaryDirectory() as folder, model.unsharded(modifier_rank=None) as original:
        original.save_pretrained(f"{folder}/mine")
        reference.save_pretrained(f"{folder}/plain")
        saved, want = (load_file(f"{folder}/{w}/adapter_model.safetensors") for w in ("mine", "plain"))
        assert saved.keys() == want.keys() and all(torch.equal(saved[n], want[n]) for n in want)
    with pytest.raises(ShardingError, match=r"'save_pretrained' works on parameters.*with model\.unsharded"):
        model.save_pretrained(f"{folder}/shards")
    merged, want_merged = zcompile.unwrap(model).merge_and_unload(), reference.merge_and_unload()
    assert not any("lora" in n for n, _ in merged.named_parameters())
    for (name, p), q in zip(merged.named_parameters(), want_merged.parameters(), strict=True):
        assert torch.equal(p, q), name


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def penalty(stage: int) -> None:
    """The squares of all weights, added to the loss outside of the model, as DTensors or as what they are in full."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        for whole in (False, True):
            squares = [p.square().sum() for p in model.parameters() if p.requires_grad]
            if whole:
                squares = [s.full_tensor() if isinstance(s, DTensor) else s for s in squares]
            (model(x)["loss"] + 0.05 * torch.stack(squares).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    both(stage, step)


def full_values(stage: int) -> None:
    """``full_tensor()`` and ``unsharded()`` show the whole; arithmetic on a DTensor is that of the whole.

    torch would take a number from this rank's part of a sum: that is refused.
    """
    model, reference = compiled(stage), net()
    for name, p in reference.named_parameters():
        have = model.get_parameter(name)
        assert have.shape == p.shape and torch.equal(full(have), p.detach())
        close(have.detach().norm(), p.detach().norm(), f"norm of {name}")
        close((have.detach() * 2).sum(), (p.detach() * 2).sum(), f"sum of {name}")
    total = model.get_parameter("middle.weight").detach().sum()
    if stage > 0:
        for number in (torch.Tensor.item, float, bool):
            with pytest.raises(ShardingError, match=r"this rank's part of it only; call \.full_tensor\(\)"):
                number(total)
    close(torch.tensor(full(total).item()), reference.middle.weight.sum(), "number")
    with model.unsharded(modifier_rank=None) as original:
        for name, p in reference.named_parameters():
            assert torch.equal(original.get_parameter(name), p)


def other_method(stage: int) -> None:
    model, reference = compiled(stage), net()
    with model.unsharded(modifier_rank=None) as original:
        assert torch.equal(original.first_alone(mine(0)), reference.first_alone(mine(0)))
        assert torch.equal(model.first_alone(mine(0)), reference.first_alone(mine(0)))
    model.first_alone(mine(0))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(7, 4)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return (self.b if second else self.a)(x).square().mean()


def other_branches(stage: int) -> None:
    """Rank 1 goes where rank 0 does not."""
    torch.manual_seed(0)
    model = compiled(stage, Branches())
    model(mine(0), this_rank() == 1).backward()


def late_parameter(stage: int) -> None:
    model = compiled(stage)
    model(mine(0))["loss"].backward()
    model.original.head = nn.Linear(3, 3)
    model(mine(1))


# Calls. ---------------------------------------------------------------------------------------------------------------


class Silent(nn.Module):
    """Counts what it saw in a buffer and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> None:
        self.total.add_(self.layer(x).detach().sum(0))


def no_output(stage: int) -> None:
    torch.manual_seed(0)
    reference = Silent()
    model = compiled(stage, copy.deepcopy(reference))
    for step in range(3):
        assert model(mine(step)) is None and reference(mine(step)) is None
    torch.testing.assert_close(model.get_buffer("total"), reference.get_buffer("total"))


def ragged(stage: int) -> None:
    """Ranks with 2, 3 and 4 rows in turn: the mean of the ranks' means."""
    model, references = compiled(stage), replicas(net(), world_size())
    optimizers = [adamw(m) for m in (model, *references)]
    for step in range(5):
        counts = [2 + (step + rank) % 3 for rank in range(world_size())]
        model(mine(step, counts[this_rank()]))["loss"].backward()
        for rank, reference in enumerate(references):
            reference(rows(step, rank, counts[rank]))["loss"].backward()
        average_gradients(references)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close_state(model, references[0])


def lengths(stage: int) -> None:
    """Sequences of other lengths, then a last batch with fewer rows."""
    case = CASES["deep"]
    model, reference = compiled(stage, case.build()), case.build()
    optimizers = adamw(model), adamw(reference)
    for step, (count, length) in enumerate(((2, 6), (2, 4), (2, 6), (1, 6))):
        parts = [{k: v[:count, :length] for k, v in case.data(step, r).items()} for r in range(world_size())]
        case.loss(model(**parts[this_rank()])).backward()
        case.loss(reference(**{k: torch.cat([p[k] for p in parts]) for k in parts[0]})).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close_state(model, reference)


def too_many_shapes(stage: int) -> None:
    model = compiled(stage, max_captures=2)
    for count in (2, 3, 4):
        model(mine(0, count))


def evaluates(stage: int) -> None:
    """Evaluation shows the present weights, in the middle of a training that goes on as if there had been none."""
    model, reference = compiled(stage), net()
    optimizers = adamw(model), adamw(reference)
    for step in range(4):
        ordinary_step(model, optimizers[0], mine(step))
        ordinary_step(reference, optimizers[1], everyone(step))
        for each in (model, reference):
            each.eval()
        with torch.no_grad():
            out = model(mine(50))["out"]
            close(out, reference(mine(50))["out"], "evaluation")
        assert not out.requires_grad
        for each in (model, reference):
            each.train()
    close_state(model, reference)


def autocasts(stage: int) -> None:
    """Under the caller's autocast, forward computes in bf16 and gradients are fp32, as on each rank of plain PyTorch."""
    model, references = compiled(stage), replicas(net(), world_size())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(mine(0))
        outs = [reference(rows(0, rank)) for rank, reference in enumerate(references)]
    want = outs[this_rank()]
    assert out["out"].dtype == want["out"].dtype == torch.bfloat16 and torch.equal(out["out"], want["out"])
    out["loss"].backward()
    for each in outs:
        each["loss"].backward()
    average_gradients(references)
    have = full_gradients(model)
    for name, p in references[0].named_parameters():
        assert (have[name] is None) == (p.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(have[name], p.grad, rtol=2e-2, atol=1e-3)


def hf(stage: int, name: str) -> tuple[Any, nn.Module, dict[str, Tensor]]:
    """A compiled and a plain Hugging Face model, and a batch."""
    case = CASES[name]
    return compiled(stage, case.build()), case.build(), case.data(0, this_rank())


def cache_output(stage: int) -> None:
    """A ``DynamicCache`` comes out in evaluation, as ``use_cache`` asks by default."""
    model, reference, batch = hf(stage, "hf_llama")
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        out, want = (each(input_ids=batch["input_ids"]) for each in (model, reference))
    assert type(out) is type(want) and type(out.past_key_values) is type(want.past_key_values)
    assert out.past_key_values.get_seq_length() == want.past_key_values.get_seq_length() > 0
    for a, b in zip(out.past_key_values.layers, want.past_key_values.layers, strict=True):
        close(a.keys, b.keys, "keys")
        close(a.values, b.values, "values")


def cache_argument(stage: int) -> None:
    model, _, batch = hf(stage, "hf_llama")
    with torch.no_grad():
        out = model.eval()(input_ids=batch["input_ids"])
        model(input_ids=batch["input_ids"][:, :1], past_key_values=out.past_key_values)


def generates(stage: int) -> None:
    """After a training step, ``generate`` inside ``unsharded()`` writes what the plain model with these weights writes."""
    model, reference, batch = hf(stage, "hf_llama")
    train(model, CASES["hf_llama"], steps=2)
    reference.load_state_dict(model.full_state_dict())
    options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    with model.unsharded(modifier_rank=None) as original, torch.no_grad():
        written = original.eval().generate(batch["input_ids"], **options)
    assert torch.equal(written, reference.eval().generate(batch["input_ids"], **options))
    model.train()
    assert train(model, CASES["hf_llama"], steps=1)[0] > 0
