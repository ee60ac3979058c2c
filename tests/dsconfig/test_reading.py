"""DeepSpeed configurations are read key by key: unknown names, types, ranges, and what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zcompile.dsconfig.keys import KEYS
from zcompile.dsconfig.reading import read
from zcompile.errors import ConfigError


def tree(name: str, value: Any) -> dict[str, Any]:
    """A configuration with one key."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train_batchsize", "key 'train_batchsize' is not known; did you mean 'train_batch_size'?"),
        ("fp16.enable", "key of fp16 'enable' is not known; did you mean 'enabled'?"),
        ("zero_optimization.stag", "key of zero_optimization 'stag' is not known; did you mean 'stage'?"),
        (
            "zero_optimization.offload_param.dev",
            "key of zero_optimization.offload_param 'dev' is not known; did you mean 'device'?",
        ),
        ("zero_optimisation.stage", "key 'zero_optimisation' is not known; did you mean 'zero_optimization'?"),
        ("optimizer.param", "key of optimizer 'param' is not known; did you mean 'params'?"),
        ("timers.throughput.enable", "key of timers.throughput 'enable' is not known; did you mean 'enabled'?"),
        (
            "data_types.qqq",
            "key of data_types 'qqq' is not known; known are buffer_dtype, grad_accum_dtype, param_dtype",
        ),
    ],
)
def test_unknown_keys_at_every_level(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tree(name, 1))
    assert str(error.value) == hint


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train_batch_size", "32", "train_batch_size is '32'; it must be an integer"),
        ("train_batch_size", 2.5, "train_batch_size is 2.5; it must be an integer"),
        ("train_batch_size", True, "train_batch_size is True; it must be an integer"),
        ("train_batch_size", 0, "train_batch_size is 0; it must be at least 1"),
        ("gradient_clipping", -1, "gradient_clipping is -1.0; it must be at least 0"),
        ("gradient_clipping", float("nan"), "gradient_clipping is nan; it must be a number"),
        ("fp16.enabled", 1, "fp16.enabled is 1; it must be true or false"),
        ("fp16.loss_scale_window", 0, "fp16.loss_scale_window is 0; it must be at least 1"),
        ("fp16.min_loss_scale", 0, "fp16.min_loss_scale is 0.0; it must be larger than 0"),
        ("fp16.initial_scale_power", 200, "fp16.initial_scale_power is 200; it must be at most 127"),
        ("zero_optimization.stage", 4, "zero_optimization.stage is 4; it must be one of 0, 1, 2, 3"),
        ("zero_optimization", True, "zero_optimization is True; it must be a dictionary"),
        (
            "zero_optimization.reduce_bucket_size",
            -5,
            "zero_optimization.reduce_bucket_size is -5; it must be at least 0",
        ),
        (
            "zero_optimization.contiguous_gradients",
            "yes",
            "zero_optimization.contiguous_gradients is 'yes'; it must be true or",
        ),
        (
            "communication_data_type",
            "int8",
            "communication_data_type is 'int8'; it must be one of 'fp32', 'fp16', 'bf16'",
        ),
        ("optimizer.params", [1], "optimizer.params is [1]; it must be a dictionary"),
        ("timeout", 0, "timeout is 0.0; it must be larger than 0"),
        ("gradient_predivide_factor", 0, "gradient_predivide_factor is 0.0; it must be larger than 0"),
        ("wall_clock_breakdown", None, "wall_clock_breakdown is None; it must be true or false"),
    ],
)
def test_types_and_ranges(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tree(name, value))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_optimization.offload_optimizer", {"device": "nvme", "nvme_path": "/somewhere"}),
        ("zero_optimization.offload_param", {"device": "nvme", "nvme_path": "/somewhere"}),
        ("zero_optimization.zero_quantized_weights", True),
        ("zero_optimization.zero_hpz_partition_size", 8),
        ("zero_optimization.mics_shard_size", 4),
        ("zero_optimization.ignore_unused_parameters", False),
        ("amp", {"enabled": True, "opt_level": "O1"}),
        ("torch_autocast", {"enabled": True}),
        ("elasticity", {"enabled": True}),
        ("sparse_attention", {"mode": "fixed"}),
        ("tensor_parallel", {"autotp_size": 2}),
        ("bf16", {"bf16_master_weights_and_grads": True}),
        ("fp16", {"fp16_master_weights_and_grads": True}),
        ("data_types.buffer_dtype", "bf16"),
        ("sparse_gradients", True),
        ("gradient_allreduce_op", "sum"),
        ("managed_gradient_accumulation", False),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}.* is .*, which is not supported here: ."):
        read(tree(name, value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zero_optimization.offload_optimizer", {"device": "none", "pin_memory": True}),
        ("zero_optimization.offload_param", None),
        ("zero_optimization.offload_optimizer", {"device": "cpu", "pin_memory": True}),
        ("zero_optimization.offload_param", {"device": "CPU"}),
        ("zero_optimization.cpu_offload", True),
        ("amp", {"enabled": False, "opt_level": "O1"}),
        ("curriculum_learning", {}),
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("gradient_allreduce_op", "mean"),
    ],
)
def test_what_is_turned_off_is_accepted(name: str, value: Any) -> None:
    read(tree(name, value))


def test_every_key_takes_its_default_and_auto_where_it_says_so() -> None:
    for name, key in KEYS.items():
        assert read(tree(name, key.default)).get(name) == key.default
        assert name in read(tree(name, "auto")).auto


def test_numbers_as_files_write_them() -> None:
    given = read({"zero_optimization": {"reduce_bucket_size": 5e8}, "gradient_clipping": 1, "timeout": 1800})
    assert given.get("zero_optimization.reduce_bucket_size") == 500_000_000
    assert isinstance(given.get("zero_optimization.reduce_bucket_size"), int)
    assert isinstance(given.get("gradient_clipping"), float)


@pytest.mark.parametrize("never", [None, float("inf")])
def test_steps_per_print_can_be_never(never: Any) -> None:
    assert read({"steps_per_print": never}).get("steps_per_print") is None
    assert read({}).get("steps_per_print") == 10


def test_other_spellings() -> None:
    given = read(
        {
            "bfloat16": {"enabled": True},
            "data_types": {"grad_accum_dtype": "torch.float32"},
            "communication_data_type": "BF16",
            "zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True},
        }
    )
    assert given.get("bf16.enabled") is True
    assert given.get("data_types.grad_accum_dtype") == "fp32"
    assert given.get("communication_data_type") == "bf16"
    assert given.get("zero_optimization.stage3_gather_16bit_weights_on_model_save") is True
    with pytest.raises(ConfigError, match=r"bf16.enabled is given twice"):
        read({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config '.*config.json' is no file"):
        read(path)
    for text, message in (
        ("{", "is no JSON: "),
        ("[]", "holds list; it must hold one object"),
        ('{"timeout": 1, "timeout": 2}', "key 'timeout' is in the config twice"),
        ('{"fp16": {"enabled": true, "enabled": true}}', "key 'enabled' is in the config twice"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read(path)
    path.write_text(json.dumps({"train_batch_size": 8, "optimizer": {"params": {"lr": "auto", "eps": 1e-6}}}))
    given = read(str(path))
    assert dict(given.values) == {"train_batch_size": 8, "optimizer.params": {"lr": "auto", "eps": 1e-6}}
    assert given.auto == {"optimizer.params.lr"}
