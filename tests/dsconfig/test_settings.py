"""What configurations come to: batch arithmetic, auto values, sizes as schedules, and the two sample files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zcompile import passes
from zcompile.dsconfig.settings import Facts, Scaling, Settings, resolve
from zcompile.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"


def settings(config: dict[str, Any] | None = None, facts: Facts | None = None, **more: Any) -> Settings:
    return resolve({"train_batch_size": 8, **(config or {}), **more}, facts or Facts(world_size=2))


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# Batch sizes. ---------------------------------------------------------------------------------------------------------


def sizes(train: Any, micro: Any, steps: Any) -> dict[str, Any]:
    given = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return {key: value for key, value in given.items() if value is not None}


@pytest.mark.parametrize(
    ("given", "world", "result"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 4), 2, (32, 4, 4)),
        ((None, 4, 4), 2, (32, 4, 4)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 4, None), 3, (12, 4, 1)),
        (("auto", 4, 2), 2, (16, 4, 2)),
        ((32, "auto", "auto"), 2, (32, 16, 1)),
        ((1, None, None), 1, (1, 1, 1)),
    ],
)
def test_batch_sizes(given: tuple[Any, ...], world: int, result: tuple[int, ...]) -> None:
    batch = resolve(sizes(*given), Facts(world_size=world)).batch
    assert (batch.train, batch.micro, batch.accumulation, batch.world) == (*result, world)


@pytest.mark.parametrize(
    ("given", "world", "message"),
    [
        (
            (32, 4, 2),
            2,
            "train_batch_size is 32, but train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * world size 2 = 16",
        ),
        (
            (30, 4, None),
            2,
            "train_batch_size is 30, which train_micro_batch_size_per_gpu 4 * world size 2 = 8 does not divide",
        ),
        (
            (30, None, 4),
            2,
            "train_batch_size is 30, which gradient_accumulation_steps 4 * world size 2 = 8 does not divide",
        ),
        (
            (5, None, None),
            2,
            "train_batch_size is 5, which gradient_accumulation_steps 1 * world size 2 = 2 does not divide",
        ),
        (
            (2, 4, None),
            2,
            "train_batch_size is 2, which train_micro_batch_size_per_gpu 4 * world size 2 = 8 does not divide",
        ),
        (
            (None, None, 4),
            2,
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given (only gradient_accumulation",
        ),
        ((None, None, None), 2, "neither train_batch_size nor train_micro_batch_size_per_gpu is given; "),
        (("auto", "auto", "auto"), 2, "neither train_batch_size nor train_micro_batch_size_per_gpu is given; "),
    ],
)
def test_batch_sizes_that_cannot_be(given: tuple[Any, ...], world: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(sizes(*given), Facts(world_size=world))
    assert str(error.value).startswith(message)


# Precision. -----------------------------------------------------------------------------------------------------------


def test_precision() -> None:
    assert settings().precision is None and settings().scaling is None
    assert settings(bf16={"enabled": True}).precision == "bf16"
    assert settings(bf16={"enabled": True}).scaling is None
    assert settings(fp16={"enabled": True}).scaling == Scaling(True, 2.0**16, 1000, 2, False, 1.0)
    given = {
        "loss_scale": 128,
        "loss_scale_window": 5,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
    }
    assert settings(fp16={"enabled": True, **given}).scaling == Scaling(False, 128.0, 5, 3, True, 4.0)
    assert settings(fp16={"enabled": True, "initial_scale_power": 8}).scaling == Scaling(
        True, 256.0, 1000, 2, False, 1.0
    )
    with pytest.raises(ConfigError, match=r"fp16.enabled and bf16.enabled are both true"):
        settings(fp16={"enabled": True}, bf16={"enabled": True})
    with pytest.raises(ConfigError, match=r"fp16.min_loss_scale is 8, more than the first scale 4 "):
        settings(fp16={"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8})


@pytest.mark.parametrize(("dtype", "precision"), [("fp32", None), ("fp16", "fp16"), ("bf16", "bf16")])
def test_automatic_precision_is_the_models(dtype: str, precision: str | None) -> None:
    both = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert settings(both, Facts(1, dtype)).precision == precision


def test_bf16_steps_that_are_not_finite() -> None:
    assert settings().skip_nonfinite is False
    assert settings(bf16={"enabled": True}).skip_nonfinite is True
    assert settings(bf16={"enabled": True, "check_grad_overflow": False}).skip_nonfinite is False


def test_dtypes_of_communication_and_accumulation() -> None:
    assert settings().reduce_dtype is None
    assert settings(communication_data_type="bf16").reduce_dtype == "bf16"
    assert settings(fp32_allreduce=True).reduce_dtype == "fp32"
    with pytest.raises(ConfigError, match=r"fp32_allreduce is true and communication_data_type is 'fp16'"):
        settings(fp32_allreduce=True, communication_data_type="fp16")
    bf16 = {"bf16": {"enabled": True}}
    settings(bf16, data_types={"grad_accum_dtype": "fp32", "param_dtype": "bf16"})
    settings(data_types={"grad_accum_dtype": "fp32"})
    settings(data_types={"grad_accum_dtype": "bf16"}, facts=Facts(1, "bf16"))
    narrow = Facts(1, "bf16")
    widened = settings(data_types={"grad_accum_dtype": "fp32"}, facts=narrow, gradient_accumulation_steps=2)
    assert widened.accumulate_dtype == "fp32"
    assert (
        settings(data_types={"grad_accum_dtype": "fp32"}, facts=narrow).accumulate_dtype is None
    )  # nothing is added up
    assert (
        settings(bf16, data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=2).accumulate_dtype is None
    )
    with pytest.raises(ConfigError, match=r"data_types.grad_accum_dtype is 'bf16', and it is 'fp32' here"):
        settings(bf16, data_types={"grad_accum_dtype": "bf16"})
    with pytest.raises(ConfigError, match=r"data_types.param_dtype is 'fp16', and it is 'bf16' here"):
        settings(bf16, data_types={"param_dtype": "fp16"})


def test_gradients() -> None:
    assert settings().gradient_clipping == 1.0  # DeepSpeed's default
    assert settings(gradient_clipping=0).gradient_clipping == 0.0
    assert settings(gradient_clipping="auto").gradient_clipping == 1.0
    assert settings().predivide == 1.0
    assert settings(gradient_predivide_factor=4).predivide == 4.0
    assert settings(prescale_gradients=True).predivide == 2.0  # the world size


# Schedules. -----------------------------------------------------------------------------------------------------------

M = 1 << 20  # elements: 2 MiB of bf16


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({}, None),
        (zero(stage=2), None),
        (zero(stage=2, overlap_comm=True), None),
        (zero(stage=2, overlap_comm=False), "bucket,prefetch{lookahead=0}"),
        (zero(stage=2, reduce_bucket_size=8 * M), "bucket{mib=32},prefetch{lookahead=1}"),
        (zero(stage=2, reduce_bucket_size=8 * M, allgather_bucket_size=4 * M), "bucket{mib=16},prefetch{lookahead=1}"),
        (zero(stage=1, reduce_bucket_size=0), "bucket{mib=0},prefetch{lookahead=1}"),
        (zero(stage=2, stage3_prefetch_bucket_size=1), None),
        (zero(stage=3, allgather_bucket_size=1), None),
        (zero(stage=3, stage3_prefetch_bucket_size=2 * M), "bucket{mib=8},prefetch{lookahead=1}"),
        (zero(stage=3, stage3_prefetch_bucket_size=0), "bucket,prefetch{lookahead=0}"),
        (zero(stage=3, stage3_max_live_parameters=2 * M), "keep{units=1 mib=8},bucket,prefetch{lookahead=1}"),
        (
            zero(stage=3, stage3_max_live_parameters=M, stage3_max_reuse_distance=2 * M),
            "keep{units=1000 mib=4},bucket,prefetch{lookahead=1}",
        ),
        (zero(stage=3, stage3_max_reuse_distance=0), "keep{units=1000 mib=0},bucket,prefetch{lookahead=1}"),
    ],
)
def test_sizes_in_elements_become_a_schedule(config: dict[str, Any], policy: str | None) -> None:
    assert settings(config).policy == policy
    if policy is not None:
        passes.schedule(policy)  # it parses


def test_sizes_follow_the_dtype_that_is_sent() -> None:
    bf16 = {"bf16": {"enabled": True}}
    assert settings(bf16, **zero(stage=2, reduce_bucket_size=8 * M)).policy == "bucket{mib=16},prefetch{lookahead=1}"
    wide = settings(bf16, communication_data_type="fp32", **zero(stage=2, reduce_bucket_size=8 * M))
    assert wide.policy == "bucket{mib=32},prefetch{lookahead=1}"
    gathered = settings(bf16, communication_data_type="fp32", **zero(stage=2, allgather_bucket_size=8 * M))
    assert gathered.policy == "bucket{mib=16},prefetch{lookahead=1}"
    assert settings(zero(reduce_bucket_size=8 * M), Facts(1, "fp64")).policy == "bucket{mib=64},prefetch{lookahead=1}"


def test_automatic_sizes_come_from_the_hidden_size() -> None:
    """Hugging Face's meaning: hidden squared, nine tenths of that, and ten times hidden."""
    auto = zero(
        stage=3,
        reduce_bucket_size="auto",
        stage3_prefetch_bucket_size="auto",
        stage3_param_persistence_threshold="auto",
    )
    found = settings(auto, Facts(2, "bf16", hidden_size=2048), bf16={"enabled": True})
    rows = {key: (value, source) for key, value, source in found.rows}
    assert rows["zero_optimization.reduce_bucket_size"] == (str(2048**2), "auto")
    assert rows["zero_optimization.stage3_prefetch_bucket_size"] == (str(int(0.9 * 2048**2)), "auto")
    assert found.persistent_elements == 20480
    assert found.policy == "bucket{mib=7.2},prefetch{lookahead=1}"
    unknown = settings(auto)  # DeepSpeed's meaning: as if it were not there
    assert unknown.policy is None and unknown.persistent_elements is None


# The rest. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"timeout": "auto"}, "timeout"),
        ({"communication_data_type": "auto"}, "communication_data_type"),
        (zero(stage="auto"), "zero_optimization.stage"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type"),
        ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, "scheduler.params"),
    ],
)
def test_auto_that_nothing_resolves(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} is 'auto', which nothing here can resolve"):
        settings(config)


def test_optimizer_and_scheduler() -> None:
    found = settings(
        optimizer={"type": "AdamW", "params": {"lr": 1e-3, "betas": "auto"}},
        scheduler={"type": "WarmupLR", "params": {}},
    )
    assert found.optimizer is not None and found.scheduler is not None
    assert (found.optimizer.type, found.optimizer.params, found.optimizer.auto) == ("AdamW", {"lr": 1e-3}, {"betas"})
    assert settings().optimizer is None
    with pytest.raises(ConfigError, match=r"optimizer.params is given without optimizer.type"):
        settings(optimizer={"params": {"lr": 1.0}})


def test_other_settings() -> None:
    found = settings(
        steps_per_print=3, wall_clock_breakdown=True, dataloader_drop_last=True, timeout=60, nccl_socket_ifname="eth1"
    )
    assert (found.steps_per_print, found.wall_clock_breakdown, found.drop_last) == (3, True, True)
    assert (found.timeout, found.interface) == (60.0, "eth1")
    assert settings().gather_on_save and not settings(zero(stage=3)).gather_on_save
    assert settings(zero(stage=3, stage3_gather_16bit_weights_on_model_save=True)).gather_on_save
    assert "nccl_socket_ifname" in dict(row[:2] for row in found.rows)
    assert "nccl_socket_ifname" not in dict(row[:2] for row in found.shared_rows)


def test_keys_without_meaning_are_listed_with_the_reason() -> None:
    found = settings(zero(stage=2, contiguous_gradients=True, stage3_prefetch_bucket_size=5), wandb={"enabled": True})
    assert list(found.moot) == [
        "zero_optimization.contiguous_gradients",
        "zero_optimization.stage3_prefetch_bucket_size",
        "wandb.enabled",
    ]
    assert (
        found.moot["zero_optimization.stage3_prefetch_bucket_size"] == "it is read in stage 3 only, and the stage is 2"
    )
    assert settings(zero(stage=2)).moot == {}


def test_first_sample() -> None:
    found = resolve(DATA / "ds_stage2_fp16.json", Facts(world_size=2))
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == (32, 4, 4)
    assert (found.stage, found.precision, found.policy) == (2, "fp16", "bucket{mib=381.47},prefetch{lookahead=1}")
    assert found.scaling == Scaling(True, 65536.0, 1000, 2, False, 1.0)
    assert found.optimizer is not None and found.optimizer.params["weight_decay"] == 0.01
    lines = str(found).splitlines()
    assert lines[0].split() == ["train_batch_size", "32", "config"]
    assert lines[2].split() == ["gradient_accumulation_steps", "4", "derived"]
    assert ["gradient_clipping", "1.0", "default"] in [line.split() for line in lines]
    assert "zero_optimization.contiguous_gradients makes no difference: gradients always lie in flat memory" in lines


def test_second_sample() -> None:
    path = DATA / "ds_stage3_offload.json"
    found = resolve(path, Facts(world_size=2))
    assert (found.batch.train, found.batch.micro, found.batch.accumulation) == (4096, 2048, 1)
    assert (found.stage, found.precision, found.reduce_dtype, found.gradient_clipping) == (3, "fp16", "fp16", 1.0)
    assert (found.timeout, found.interface) == (1800.0, "eth0")
    assert found.offload == "optimizer"
    assert ["zero_optimization.offload_optimizer.device", "cpu", "config"] in [
        line.split() for line in str(found).splitlines()
    ]


@pytest.mark.parametrize(
    ("stage", "zero", "offload"),
    [
        (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "optimizer+parameters"),
        (3, {"offload_param": {"device": "cpu"}}, "parameters"),
        (2, {"offload_param": {"device": "cpu"}}, None),
        (1, {"cpu_offload": True}, "optimizer"),
        (0, {"offload_optimizer": {"device": "cpu"}}, None),
        (3, {"cpu_offload_param": True, "offload_optimizer": {"device": "none"}}, "parameters"),
        (3, {"offload_optimizer": {"device": "none"}}, None),
        (3, {"offload_optimizer": {"device": "cpu", "ratio": 0}}, None),
        (2, {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "optimizer{share=0.3}"),
        (2, {"offload_optimizer": {"device": "cpu", "ratio": 1e-5}}, "optimizer{share=1e-05}"),
        (2, {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, "optimizer"),
    ],
)
def test_offloading(stage: int, zero: dict[str, Any], offload: str | None) -> None:
    found = resolve({"train_batch_size": 2, "zero_optimization": {"stage": stage, **zero}}, Facts(world_size=2))
    assert found.offload == offload
    if offload is None and stage < 3 and zero:
        assert any(name.startswith("zero_optimization.") for name in found.moot)


def test_parameters_on_the_host_have_all_states_there() -> None:
    sections = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"offload_optimizer\.ratio is 0\.5 and parameters are offloaded"):
        resolve({"train_batch_size": 2, "zero_optimization": {"stage": 3, **sections}}, Facts(world_size=2))
