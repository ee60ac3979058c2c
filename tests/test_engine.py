"""The engine and ``initialize`` in one process: calls, reports, process groups and errors. On ranks: tests/dist/test_engine.py."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zcompile
from zcompile.errors import ConfigError, OptimizerError
from zcompile.loader import Loader

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,
    "steps_per_print": None,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def start(config: Any = None, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any, Any]:
    return zcompile.initialize(
        model=model or net(),
        config=CONFIG if config is None else config,
        **{"backend": "eager", "verify": "off", **options},
    )


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(rows(step)))
        engine.step()


def test_initialize_returns_four_things() -> None:
    engine, optimizer, loader, scheduler = start(
        CONFIG | {"scheduler": {"type": "WarmupLR", "params": {}}}, training_data=torch.arange(12.0)
    )
    assert isinstance(engine, zcompile.Engine) and engine.optimizer is optimizer and engine.lr_scheduler is scheduler
    assert isinstance(loader, Loader) and engine.training_dataloader is loader and len(loader) == 3
    assert isinstance(engine.module, zcompile.CompiledModule)
    assert start(CONFIG)[2:] == (None, None)


def test_what_a_script_asks_for() -> None:
    config = CONFIG | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
    engine, *_ = start(config)
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert (engine.device, engine.gradient_clipping(), engine.loss_scale()) == (torch.device("cpu"), 0.5, 1.0)
    assert (engine.get_lr(), engine.get_mom()) == ([0.1], [0])
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.zero_optimization_stage() == 0
    assert engine.get_global_grad_norm() is None
    assert engine.eval() is engine and not engine.module.training
    assert engine.train() is engine and engine.module.training
    assert [n for n, _ in engine.named_parameters()] == ["module.layer.weight", "module.layer.bias"]


def test_backward_returns_the_divided_loss_and_step_waits_for_the_boundary() -> None:
    engine, *_ = start(CONFIG | {"gradient_accumulation_steps": 2, "train_batch_size": 8})
    before = engine.module.full_state_dict()
    loss = engine(rows())
    assert not engine.is_gradient_accumulation_boundary()
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
    engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (1, 0, False)
    assert all(torch.equal(before[n], v) for n, v in engine.module.full_state_dict().items())
    assert engine.module.layer.weight.grad is not None and engine.is_gradient_accumulation_boundary()
    engine.backward(engine(rows()))
    engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.was_step_applied()) == (2, 1, True)
    assert engine.module.layer.weight.grad is None


def test_scale_wrt_gas_and_retain_graph() -> None:
    engine, *_ = start(CONFIG | {"gradient_accumulation_steps": 2, "train_batch_size": 8})
    loss = engine(rows())
    engine.backward(loss, retain_graph=True)
    half = engine.module.layer.weight.grad.clone()
    engine.backward(loss, scale_wrt_gas=False)
    torch.testing.assert_close(engine.module.layer.weight.grad, 3 * half)


def test_clipping_and_norm() -> None:
    model, reference = net(), net()
    engine, *_ = start(CONFIG | {"gradient_clipping": 0.01}, model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        reference(rows(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(rows(step)))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item())
    for name, value in engine.module.full_state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def test_gradients_are_clipped_at_one_by_default(caplog: pytest.LogCaptureFixture) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "gradient_clipping"}
    engine, *_ = start(config)
    assert engine.gradient_clipping() == 1.0
    assert "gradient_clipping is not given, and DeepSpeed's default is 1.0" in caplog.text
    before = engine.module.layer.weight.detach().clone()
    engine.backward(1e4 * engine(rows()))
    engine.step()
    after = engine.module.full_state_dict()
    change = torch.cat([(after["layer.weight"] - before).flatten(), after["layer.bias"] - net().layer.bias])
    assert change.norm().item() == pytest.approx(0.1, rel=1e-4)


# Reports. -------------------------------------------------------------------------------------------------------------


def test_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = start(CONFIG | {"steps_per_print": 2, "gradient_accumulation_steps": 2, "train_batch_size": 8})
    losses = [engine(rows(step)).item() for step in (2, 3)]
    model = net()
    for step in range(2):
        (model(rows(step)) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    losses = [model(rows(step)).item() for step in (2, 3)]
    train(engine, 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
    found = re.fullmatch(r"step 2: loss (\S+), lr 0.1, (\S+) samples/s", lines[0])
    assert found is not None and float(found[2]) > 0
    assert float(found[1]) == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_progress_under_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG | {"steps_per_print": 1, "fp16": {"enabled": True, "initial_scale_power": 4}}
    engine, *_ = start(config)
    engine.backward(engine(rows()) * math.inf)
    engine.step()
    assert ", loss scale 16, skipped 1, " in capsys.readouterr().out


def test_no_progress_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    train(start(CONFIG)[0], 3)
    assert capsys.readouterr().out == ""
    train(start(CONFIG | {"wall_clock_breakdown": True})[0], 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(r"time \(ms\): fwd \d+\.\d\d, bwd \d+\.\d\d, step \d+\.\d\d", line)
        assert min(float(value) for value in re.findall(r"\d+\.\d\d", line)) > 0


def test_what_makes_no_difference_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 2, "contiguous_gradients": True, "reduce_scatter": True}
    model = net()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = start(CONFIG | {"zero_optimization": zero, "wandb": {"enabled": False}}, model, optimizer=own)
    (record,) = [r for r in caplog.records if "make no difference" in r.message]
    assert record.levelno == logging.WARNING
    for part in (
        "zero_optimization.contiguous_gradients (",
        "zero_optimization.reduce_scatter (",
        "wandb.enabled (",
        "optimizer (",
    ):
        assert part in record.message
    train(engine, 2)
    assert len([r for r in caplog.records if "make no difference" in r.message]) == 1


def test_dump_state(capsys: pytest.CaptureFixture[str]) -> None:
    engine, *_ = start(CONFIG | {"dump_state": True})
    assert capsys.readouterr().out.strip() == str(engine.settings)


# What can be passed. --------------------------------------------------------------------------------------------------


def test_forms_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    options = {"backend": "eager", "verify": "off"}
    for given in (
        {"config": path},
        {"config": str(path)},
        {"config_params": CONFIG},
        {"args": SimpleNamespace(deepspeed_config=str(path), local_rank=0)},
    ):
        engine, *_ = zcompile.initialize(model=net(), **given, **options)
        assert engine.train_batch_size() == 4
    for given, message in (
        ({}, "no configuration is given"),
        ({"config": path, "args": SimpleNamespace(deepspeed_config=path)}, "2 configurations are given"),
    ):
        with pytest.raises(ConfigError, match=message):
            zcompile.initialize(model=net(), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2}, "stage is decided by the configuration; set its key zero_optimization.stage"),
        ({"precision": "bf16"}, "precision is decided by the configuration; set its key fp16.enabled or bf16.enabled"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is decided by the configuration"),
        ({"mpu": object()}, "mpu is given, and only data parallelism is supported"),
        ({"model_parameters": [torch.ones(3)]}, "model_parameters holds \\[3\\], which is no parameter of the model"),
        ({"optimizer": 3}, "optimizer is a int; pass a torch optimizer"),
        ({"dist_init_required": True}, "there is no process group, and the environment lacks RANK"),
        ({"policy": "none", "config": {"zero_optimization": {"overlap_comm": False}}}, "leave one out"),
    ],
)
def test_refused(options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=message):
        start(CONFIG | options.pop("config", {}), **options)


def test_the_model_comes_first() -> None:
    with pytest.raises(ConfigError, match="model is SimpleNamespace; pass the module by name"):
        zcompile.initialize(SimpleNamespace(), net())  # type: ignore[arg-type]


def test_optimizers_that_cannot_be() -> None:
    engine, *_ = start({"train_batch_size": 4, "steps_per_print": None})
    assert engine.optimizer is None
    loss = engine(rows())
    for call in (lambda: engine.backward(loss), engine.step, engine.get_lr):
        with pytest.raises(OptimizerError, match="engine has no optimizer; give the key optimizer"):
            call()
    with pytest.raises(OptimizerError, match="a scheduler is given without an optimizer"):
        start({"train_batch_size": 4, "scheduler": {"type": "WarmupLR"}})


def test_losses_that_cannot_be() -> None:
    engine, *_ = start()
    with pytest.raises(ConfigError, match=r"loss is a tensor of shape \[2\]; pass a tensor of one element"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(ConfigError, match="loss is a float"):
        engine.backward(3.0)


# The process group. ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The environment of a launcher that starts one process."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": free_port(),
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_process_group_is_made(launched: None, caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIG | {"timeout": 123, "nccl_socket_ifname": "lo"}
    engine, *_ = start(config)
    assert dist.is_initialized() and dist.get_world_size() == 1 and engine._mesh.is_distributed
    group: Any = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 123
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")
    train(engine, 2)
    start(config)
    assert [r.message for r in caplog.records if "came too late" in r.message] != []


def test_an_interface_that_gloo_cannot_use(launched: None) -> None:
    start(CONFIG | {"nccl_socket_ifname": "^docker0,veth"})
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0,veth" and "GLOO_SOCKET_IFNAME" not in os.environ


def test_no_process_group_is_made(launched: None) -> None:
    with pytest.raises(ConfigError, match="there is no process group, and dist_init_required is False"):
        start(CONFIG, dist_init_required=False)
    assert not dist.is_initialized()


def test_a_configuration_error_comes_before_the_process_group(launched: None) -> None:
    with pytest.raises(ConfigError, match="train_batch_size is 3"):
        start(CONFIG | {"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})
    assert not dist.is_initialized()
