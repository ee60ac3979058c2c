"""DeepSpeed-style scripts on ranks against plain PyTorch loops of one process on the global batch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import zcompile
from tests.dist.pool import Pools
from tests.dist.training import LR, Trained, assert_equal_training, mean_over_ranks, over_ranks, this_rank, world_size
from zcompile.errors import CheckpointError, ConfigError, RankMismatchError

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

DATA = Path(__file__).parents[1] / "data"
MICRO = 3


class Net(nn.Module):
    """Two layers with sizes that no world size divides, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.up(x))), y)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int, rank: int, count: int = MICRO) -> tuple[Tensor, Tensor]:
    """What a rank sees in a micro-step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(count, 7, generator=g), torch.randn(count, 5, generator=g)


def all_rows(step: int, world: int, count: int = MICRO) -> tuple[Tensor, Tensor]:
    parts = [rows(step, rank, count) for rank in range(world)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def config(stage: int = 0, *, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **keys,
    }


def start(settings: Any, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    model = model or net()
    given = {"backend": "eager", "verify": "off", "model_parameters": model.parameters(), **options}
    return zcompile.initialize(model=model, config=settings, **given)


def script(engine: Any, micro_steps: int, first: int = 0) -> list[float]:
    """The loop of a DeepSpeed script; the losses of the micro-steps, as this rank sees them."""
    losses = []
    for step in range(first, first + micro_steps):
        x, y = rows(step, this_rank())
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain(
    optimizer: Any,
    world: int,
    micro_steps: int,
    *,
    accumulation: int = 1,
    clip: float | None = None,
    rates: Any = None,
    skip: tuple[int, ...] = (),
) -> Trained:
    """The same in one process of plain PyTorch. ``rates``: the learning rate after k steps; ``skip``: steps without an update."""
    model = net()
    optimizer = optimizer(model.parameters())
    losses, taken = [], 0
    for step in range(micro_steps):
        loss = model(*all_rows(step, world))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            if (step + 1) // accumulation - 1 not in skip:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                if rates is not None:
                    optimizer.param_groups[0]["lr"] = rates(taken)
                optimizer.step()
                taken += 1
            optimizer.zero_grad()
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)


# The whole loop. ------------------------------------------------------------------------------------------------------

WARMUP = {"total_num_steps": 8, "warmup_min_lr": LR / 10, "warmup_max_lr": LR, "warmup_num_steps": 3}


def warmup(k: int) -> float:
    """The learning rate of step k of WarmupDecayLR with these parameters: the formula counts from the second step."""
    low, high, i = LR / 10, LR, k - 1
    if i < 3:
        return low + (high - low) * (math.log(max(i, 0) + 1) / math.log(3))
    return low + (high - low) * max(0.0, (8 - i) / (8 - 3))


def whole_loop(stage: int) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": WARMUP}
    engine, optimizer, loader, schedule = start(
        config(stage, accumulation=3, gradient_clipping=0.2, scheduler=scheduler)
    )
    assert optimizer is engine.optimizer and schedule is engine.lr_scheduler and loader is None
    assert type(optimizer) is zcompile.optim.AdamW
    assert engine.train_batch_size() == MICRO * 3 * world_size()
    assert engine.zero_optimization_stage() == stage and engine.world_size == world_size()
    losses = script(engine, 18)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (6, 18, 0)
    assert engine.global_samples == 6 * engine.train_batch_size()
    assert engine.get_lr() == [pytest.approx(warmup(6))]
    assert all(p.grad is None for p in engine.module.parameters())
    assert over_ranks(engine.get_global_grad_norm())[0] == engine.get_global_grad_norm() > 0.2
    result = Trained(mean_over_ranks(losses), engine.module.full_state_dict())
    assert_equal_training(result, plain(adamw, world_size(), 18, accumulation=3, clip=0.2, rates=warmup))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_loop(ranks: Pools, stage: int, world: int) -> None:
    """Accumulation, clipping, a schedule."""
    ranks(world, whole_loop, stage=stage)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "adam l2": (
        {"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.1),
    ),
    "sgd": ({"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}, lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "adagrad": ({"type": "Adagrad", "params": {"lr": LR}}, lambda p: torch.optim.Adagrad(p, lr=LR)),
    "lion": (
        {"type": "Lion", "params": {"lr": LR, "weight_decay": 0.1}},
        # on plain tensors: tests/runtime/optim/test_lion.py
        lambda p: zcompile.runtime.optim.lion.Lion(p, LR, (0.9, 0.999), 0.1),
    ),
}


def other_optimizers() -> None:
    for named, make in OPTIMIZERS.values():
        engine, *_ = start(config(3, optimizer=named))
        result = Trained(mean_over_ranks(script(engine, 5)), engine.module.full_state_dict())
        assert_equal_training(result, plain(make, world_size(), 5))


def test_other_optimizers(ranks: Pools) -> None:
    ranks(2, other_optimizers)


def own_objects(stage: int) -> None:
    """Parameter groups, an optimizer that was made before and a scheduler on it, as scripts pass them."""
    model = net()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    settings = config(stage)
    del settings["optimizer"]
    engine, same, _, schedule = start(
        settings, model, optimizer=optimizer, lr_scheduler=scheduler, model_parameters=None
    )
    assert same is optimizer and schedule is scheduler
    first = Trained(mean_over_ranks(script(engine, 6)), engine.module.full_state_dict())
    model = net()
    engine, *_ = start(
        settings,
        model,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=LR),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
        model_parameters=[
            {"params": [model.up.weight, model.down.weight], "weight_decay": 0.1},
            {"params": (p for p in (model.up.bias, model.down.bias)), "weight_decay": 0.0},
        ],
    )
    second = Trained(mean_over_ranks(script(engine, 6)), engine.module.full_state_dict())
    expected = plain_groups_loop()
    assert_equal_training(first, expected)
    assert_equal_training(second, expected)


def plain_groups_loop() -> Trained:
    model = net()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses = []
    for step in range(6):
        loss = model(*all_rows(step, world_size()))
        loss.backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.5 ** (step // 2)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [0, 3])
def test_optimizers_schedulers_and_groups_of_the_script(ranks: Pools, stage: int) -> None:
    ranks(2, own_objects, stage=stage)


def some_parameters() -> None:
    """Only the parameters that were named train, and only they count in the norm."""
    model, reference = net(), net()
    engine, *_ = start(config(3), model, model_parameters=model.down.parameters())
    x, y = all_rows(0, world_size())
    reference(x, y).backward()
    norm = math.sqrt(sum(p.grad.pow(2).sum().item() for p in reference.down.parameters() if p.grad is not None))
    script(engine, 1)
    assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    script(engine, 4, first=1)
    state = engine.module.full_state_dict()
    for name, value in net().state_dict().items():
        assert torch.equal(value, state[name]) == name.startswith("up"), name


def test_some_parameters(ranks: Pools) -> None:
    ranks(2, some_parameters)


def moved_boundary(stage: int) -> None:
    """The script says itself where the boundary is: a window of three, and one of one."""
    engine, *_ = start(config(stage, accumulation=2, gradient_clipping=0.5))
    reference = net()
    optimizer = adamw(reference.parameters())
    micro = 0
    for size in (3, 1, 2):
        for index in range(size):
            engine.set_gradient_accumulation_boundary(index == size - 1)
            assert engine.is_gradient_accumulation_boundary() == (index == size - 1)
            engine.backward(engine(*rows(micro, this_rank())))
            engine.step()
            assert engine.was_step_applied() == (index == size - 1)
            (reference(*all_rows(micro, world_size())) / 2).backward()
            micro += 1
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert (engine.global_steps, engine.micro_steps) == (3, 6)
    for name, value in engine.module.full_state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-2 * LR)


@pytest.mark.parametrize("stage", [1, 2])
def test_moved_boundary(ranks: Pools, stage: int) -> None:
    ranks(2, moved_boundary, stage=stage)


# Steps that are skipped. ----------------------------------------------------------------------------------------------


def overflow(stage: int, precision: str) -> None:
    """In micro-step 3 (of step 1) one rank's gradients overflow: no rank steps, nothing changes, and the scale falls."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}
    chosen = {"fp16": fp16} if precision == "fp16" else {"bf16": {"enabled": True}}
    scheduler = {"type": "WarmupDecayLR", "params": WARMUP}
    engine, optimizer, _, schedule = start(config(stage, accumulation=2, scheduler=scheduler, **chosen))
    scales, losses = [engine.loss_scale()], []
    for step in range(12):
        x, y = rows(step, this_rank())
        loss = engine(x, y)
        losses.append(loss.item())
        before = engine.module.full_state_dict(), engine.get_lr(), [s["step"] for s in optimizer.state.values()]
        engine.backward(loss * math.inf if step == 3 and this_rank() == world_size() - 1 else loss)
        engine.step()
        if step == 3:
            after = engine.module.full_state_dict(), engine.get_lr(), [s["step"] for s in optimizer.state.values()]
            assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
            assert (before[1], list(map(float, before[2]))) == (after[1], list(map(float, after[2])))
            assert not engine.was_step_applied() and not math.isfinite(engine.get_global_grad_norm() or 0.0)
        if engine.micro_steps % 2 == 0:
            scales.append(engine.loss_scale())
    assert (engine.global_steps, engine.skipped_steps, schedule.last_epoch) == (6, 1, 5)
    assert scales == ([256, 256, 128, 128, 128, 256, 256] if precision == "fp16" else [1.0] * 7)
    expected = plain(adamw, world_size(), 12, accumulation=2, rates=warmup, skip=(1,))
    tolerance = 1e-3 if precision == "fp16" else 2e-2
    assert mean_over_ranks(losses) == pytest.approx(expected.losses, rel=tolerance)
    for name, value in engine.module.full_state_dict().items():
        torch.testing.assert_close(value, expected.state[name], rtol=tolerance, atol=LR)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp16"), (2, "fp16"), (3, "fp16"), (3, "bf16")])
def test_overflow(ranks: Pools, stage: int, precision: str) -> None:
    ranks(2, overflow, stage=stage, precision=precision)


def fixed_scale() -> None:
    engine, *_ = start(config(3, fp16={"enabled": True, "loss_scale": 64}))
    x, y = rows(0, this_rank())
    loss = engine(x, y)
    engine.backward(loss)
    reference = net()
    reference(*all_rows(0, world_size())).backward()
    grad = engine.module.up.weight.grad.full_tensor()
    torch.testing.assert_close(grad, 64 * reference.up.weight.grad, rtol=2e-2, atol=1e-2)
    engine.step()
    assert engine.loss_scale() == 64
    engine.backward(engine(x, y) * math.inf)
    engine.step()
    assert (engine.loss_scale(), engine.skipped_steps) == (64, 1)


def test_fixed_loss_scale(ranks: Pools) -> None:
    ranks(2, fixed_scale)


# What single keys do. -------------------------------------------------------------------------------------------------


def gradient_keys(stage: int) -> None:
    """Gradients are smaller while they are reduced, and the result is the mean all the same."""
    states, grads = {}, {}
    for name, keys in {
        "mean": {},
        "predivide": {"gradient_predivide_factor": 4},
        "prescale": {"prescale_gradients": True},
    }.items():
        engine, *_ = start(config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **keys))
        engine.backward(engine(*rows(0, this_rank())))
        grads[name] = engine.module.up.weight.grad.full_tensor().clone()
        engine.step()
        script(engine, 2, first=1)
        states[name] = engine.module.full_state_dict()
    assert torch.equal(grads["mean"], 4 * grads["predivide"])
    assert torch.equal(grads["mean"], world_size() * grads["prescale"])
    for name in ("predivide", "prescale"):
        for key, value in states["mean"].items():
            assert torch.equal(value, states[name][key]), (name, key)  # powers of two


@pytest.mark.parametrize("stage", [0, 2])
def test_predivided_gradients(ranks: Pools, stage: int) -> None:
    ranks(2, gradient_keys, stage=stage)


def compile_keys() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1 << 19, "allgather_bucket_size": 1 << 20, "overlap_comm": False}
    engine, *_ = start(
        config(communication_data_type="bf16", zero_optimization=zero, timeout=77, bf16={"enabled": True})
    )
    spec = str(engine.module.pipeline)
    assert "reduce{stage=2 dtype=bf16" in spec and "bucket{mib=1}" in spec and "prefetch{lookahead=0" in spec
    assert engine._mesh.timeout == 77 and engine.bfloat16_enabled() and not engine.fp16_enabled()
    script(engine, 2)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 13, "stage3_max_live_parameters": 1 << 18}
    engine, *_ = start(config(zero_optimization=zero), ignore="down.weight")
    assert "keep{units=1 mib=1}" in str(engine.module.pipeline)
    kept = {n for n, p in engine.module.named_parameters() if p.placements[0] == Replicate()}
    assert kept == {"up.bias", "down.bias", "down.weight"}
    zero |= {"stage3_model_persistence_threshold": 13}
    engine, *_ = start(config(zero_optimization=zero))
    assert {n for n, p in engine.module.named_parameters() if p.placements[0] == Replicate()} == {"up.bias"}
    losses = mean_over_ranks(script(engine, 3))
    assert losses == pytest.approx(plain(adamw, world_size(), 3).losses, rel=1e-5)


def test_keys_that_the_compiler_reads(ranks: Pools) -> None:
    ranks(2, compile_keys)


def save_16bit(folder: str) -> None:
    for name, gather in (("left out", False), ("weights", True)):
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gather}
        engine, *_ = start(config(zero_optimization=zero, bf16={"enabled": True}))
        assert engine.save_16bit_model(Path(folder) / name, "model.bin") is gather
        dist.barrier()
        path = Path(folder) / name / "model.bin"
        assert path.exists() is gather
    state = torch.load(path)
    assert list(state) == list(net().state_dict())
    for key, value in net().state_dict().items():
        assert torch.equal(state[key], value.bfloat16())


def test_save_16bit_model(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, save_16bit, folder=str(tmp_path))


def data_loader() -> list[int]:
    data = [(torch.full((7,), float(i)), torch.zeros(5)) for i in range(14)]
    _, _, loader, _ = start(config(dataloader_drop_last=True), training_data=data)
    assert len(loader) == 2
    batches = [x[:, 0].int().tolist() for x, _ in loader]
    assert [len(b) for b in batches] == [MICRO] * 2
    return [row for batch in batches for row in batch]


def test_training_data(ranks: Pools) -> None:
    mine, others = ranks(2, data_loader)
    assert len({*mine, *others}) == 12  # every row on one rank only


# Checkpoints. ---------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Rows that depend on their number alone."""

    def __len__(self) -> int:
        return 4 * MICRO * 2 + 1  # a step is 2 micro-batches on 2 ranks, or 4 on 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = rows(index, 7, count=1)
        return x[0], y[0]


def resumable(stage: int, **keys: Any) -> Any:
    """An engine with everything that has state, and steps that have the same rows at any world size."""
    settings = config(
        stage,
        accumulation=4 // world_size(),
        gradient_clipping=0.3,
        scheduler={"type": "WarmupDecayLR", "params": WARMUP},
        dataloader_drop_last=True,
        **keys,
    )
    return start(settings, training_data=Rows())[0]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}}


def go_on(engine: Any, steps: int, save_at: int = 0, folder: str = "") -> list[float]:
    """Train until so many steps are made; the losses after ``save_at``, where checkpoints are written in the middle of an epoch."""
    losses = []
    while engine.global_steps < steps:
        for x, y in engine.training_dataloader:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps == save_at > 0 and engine.was_step_applied():
                assert engine.save_checkpoint(folder, client_state={"note": "three", "best": 0.5}) is True
                engine.save_checkpoint(folder, tag="second", save_latest=False)
                losses.clear()
            if engine.global_steps == steps:
                break
    return losses


def save_and_go_on(stage: int, folder: str, keys: dict[str, Any]) -> None:
    """A run that is saved twice; a second engine goes on from the first checkpoint, bit for bit."""
    engine = resumable(stage, **keys)
    expected = go_on(engine, 7, save_at=3, folder=folder)
    again = resumable(stage, **keys)
    path, client_state = again.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client_state == {"note": "three", "best": 0.5}
    assert (again.global_steps, again.micro_steps, again.skipped_steps) == (
        3,
        3 * again.gradient_accumulation_steps(),
        0,
    )
    assert again.loss_scale() == (2048 if keys else 1) and again.get_lr() == [pytest.approx(warmup(3))]
    assert go_on(again, 7) == expected
    assert again.loss_scale() == engine.loss_scale() and again.get_lr() == engine.get_lr()
    state = engine.module.full_state_dict()
    for name, value in again.module.full_state_dict().items():
        assert torch.equal(value, state[name])
    if this_rank() == 0:
        torch.save(state, Path(folder) / "expected.pt")


def go_on_elsewhere(stage: int, folder: str) -> None:
    """The same from that checkpoint at another world size and stage."""
    engine = resumable(stage)
    assert engine.load_checkpoint(folder, tag="second")[1] == {}
    go_on(engine, 7)
    for name, value in torch.load(Path(folder) / "expected.pt").items():
        torch.testing.assert_close(engine.module.full_state_dict()[name], value, rtol=1e-5, atol=1e-2 * LR)


def test_checkpoints(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, save_and_go_on, stage=3, folder=str(tmp_path), keys={})
    assert (tmp_path / "latest").read_text() == "global_step3"
    ranks(0, go_on_elsewhere, stage=2, folder=str(tmp_path))


def test_checkpoints_of_fp16(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, save_and_go_on, stage=2, folder=str(tmp_path), keys=FP16)


def weights_only(folder: str) -> None:
    engine = resumable(3, **FP16)
    go_on(engine, 2)
    engine.save_checkpoint(folder)
    again = resumable(2, **FP16)
    again.load_checkpoint(folder, load_module_only=True)
    assert (again.global_steps, again.loss_scale(), again.get_lr()) == (0, 1024, [pytest.approx(warmup(0))])
    assert not again.optimizer.state
    for name, value in engine.module.full_state_dict().items():
        assert torch.equal(value, again.module.full_state_dict()[name])
    assert again.load_checkpoint(Path(folder) / "nowhere") == (None, None)
    with pytest.raises(ConfigError, match="tag is 'a/b'"):
        again.load_checkpoint(folder, tag="a/b")
    with pytest.raises(CheckpointError):
        again.load_checkpoint(folder, tag="missing")
    with pytest.raises(RankMismatchError, match="ranks disagree about the tag of a checkpoint"):
        again.save_checkpoint(folder, tag=f"rank{this_rank()}")


def test_checkpoints_in_part_and_missing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, weights_only, folder=str(tmp_path))


# The samples. ---------------------------------------------------------------------------------------------------------


def first_sample() -> tuple[list[float], str]:
    engine, optimizer, _, _ = start(str(DATA / "ds_stage2_fp16.json"))
    losses = []
    for step in range(8):
        loss = engine(*rows(step, this_rank(), engine.train_micro_batch_size_per_gpu()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert optimizer.param_groups[0]["lr"] == 2e-5
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    assert "bucket{mib=381.47}" in str(engine.module.pipeline)
    return mean_over_ranks(losses), str(engine.settings)


def test_first_sample(ranks: Pools) -> None:
    (losses, table), _ = ranks(2, first_sample)
    print(table)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    expected = []
    for step in range(8):
        loss = model(*all_rows(step, 2, count=4))
        (loss / 4).backward()
        expected.append(loss.item())
        if step % 4 == 3:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-3)


def second_sample() -> str:
    settings = json.loads((DATA / "ds_stage3_offload.json").read_text())
    settings["train_batch_size"] = 2 * MICRO
    with pytest.raises(ConfigError, match="the configuration offloads optimizer, and offload is passed, too"):
        start(settings, offload="activations")
    engine, *_ = start(settings, optimizer=lambda p: zcompile.optim.AdamW(p, lr=LR))
    assert engine.module.report().host_limit_bytes > 0
    assert "NCCL_SOCKET_IFNAME" not in os.environ  # the group was there already
    script(engine, 3)
    assert engine.global_steps == 3 and engine._mesh.timeout == 1800
    assert "dtype=f16" in str(engine.module.pipeline)
    return str(engine.settings)


def test_second_sample(ranks: Pools) -> None:
    print(ranks(2, second_sample)[0])


# Ranks that disagree. -------------------------------------------------------------------------------------------------


def another_configuration() -> None:
    start(config(optimizer={"type": "AdamW", "params": {"lr": LR * (1 + this_rank())}}))


def test_ranks_with_different_configurations(ranks: Pools) -> None:
    outcomes = ranks.outcomes(2, another_configuration, limit=60.0)
    assert [o.error for o in outcomes] == ["RankMismatchError"] * 2
    assert all("DeepSpeed configuration" in o.text and "optimizer.params.lr" in o.text for o in outcomes)


def one_fails() -> None:
    model = net()
    foreign = [nn.Parameter(torch.ones(1))]
    engine, *_ = start(config(), model, model_parameters=foreign if this_rank() else model.parameters())
    script(engine, 1)


def test_a_rank_that_fails_in_initialize(ranks: Pools) -> None:
    outcomes = ranks.outcomes(2, one_fails, limit=60.0)
    assert outcomes[1].error == "ConfigError" and "no parameter of the model" in outcomes[1].text
    assert outcomes[0].error == "RankError" and "no parameter of the model" in outcomes[0].text
