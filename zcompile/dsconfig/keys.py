"""Every DeepSpeed key that is known, with its type, range and default, and what becomes of it here.

Sources: DeepSpeed's documentation of its configuration, and the defaults of its configuration classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

DTYPES = ("fp32", "fp16", "bf16")

#: other spellings of the dtypes
DTYPE_NAMES = {
    spelling: name
    for name, spellings in {"fp32": "float32 float", "fp16": "float16 half", "bf16": "bfloat16"}.items()
    for word in spellings.split()
    for spelling in (word, f"torch.{word}")
}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        kind: ``bool``, ``int``, ``float``, ``str`` or ``dict``, ``object`` for anything; ``5e8`` is an integer where one is due.
        default: what holds when it is left out; None also stands for ``null`` in the file.
        low: the smallest value.
        high: the largest value.
        above: values must be larger.
        choices: the possible values.
        moot: why it makes no difference here; said once when it is given.
        refuse: what to do instead; every value but the default is an error. With ``{}`` as the default, so is a dictionary that
            turns its feature on.
        refused: the values that are errors; empty: all but the default.
        when: the ZeRO stages in which the key matters; in others it is said to make no difference.
        endless: ``null`` and infinity are values, too, and both are read as None.
    """

    kind: type
    default: Any = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[Any, ...] = ()
    moot: str = ""
    refuse: str = ""
    refused: tuple[Any, ...] = ()
    when: tuple[int, ...] = (0, 1, 2, 3)
    endless: bool = False


_LEAVE_OUT = "leave it out"
_NOT_YET = "it is not supported yet; remove the block"
_FLAT = "gradients always lie in flat memory"
_ALWAYS = "collectives are always all-gathers, reduce-scatters and all-reduces"
_OFFLOAD_ONLY = "it tunes DeepSpeed's own offloading"
_ORDER = "the captured graph knows the order of parameters"
_LOGS = "nothing is logged elsewhere; use your own logger on what the engine returns"
_RECOMPUTE = "it configures DeepSpeed's own checkpoint function; torch.utils.checkpoint in the model is honoured"


def _moot(kind: type, default: Any, reason: str, names: str) -> dict[str, Key]:
    return {name: Key(kind, default, moot=reason) for name in names.split()}


def _feature(names: str, instead: str = _NOT_YET) -> dict[str, Key]:
    """Whole features: refused when turned on, whatever else their dictionaries hold."""
    return {name: Key(dict, {}, refuse=instead) for name in names.split()}


def _section(name: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{name}.{key}": value for key, value in keys.items()}


def _in_stages(stages: tuple[int, ...], keys: dict[str, Key]) -> dict[str, Key]:
    return {name: replace(key, when=stages) for name, key in keys.items()}


_BATCH = {
    name: Key(int, None, low=1)
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
}

_GENERAL = {
    "gradient_clipping": Key(float, 1.0, low=0),
    "communication_data_type": Key(str, None, choices=DTYPES),
    "fp32_allreduce": Key(bool, False),
    "prescale_gradients": Key(bool, False),
    "gradient_predivide_factor": Key(float, 1.0, above=0),
    "gradient_allreduce_op": Key(
        str,
        "mean",
        choices=("mean", "sum"),
        refuse="gradients are averaged; scale the loss by the world size for a sum",
    ),
    "steps_per_print": Key(int, 10, low=1, endless=True),
    "wall_clock_breakdown": Key(bool, False),
    "dump_state": Key(bool, False),
    "dataloader_drop_last": Key(bool, False),
    "timeout": Key(float, 600.0, above=0),
    "nccl_socket_ifname": Key(str, None),
    "managed_gradient_accumulation": Key(
        bool, True, refuse="call engine.set_gradient_accumulation_boundary to move the boundary"
    ),
    "sparse_gradients": Key(bool, False, refuse="gradients are dense; use Embedding(sparse=False)"),
    "disable_allgather": Key(bool, False, refuse=_LEAVE_OUT),
    "sequence_parallel_size": Key(int, 1, low=1, refuse="only data parallelism is supported; pass 1"),
    "zero_allow_untested_optimizer": Key(bool, False, moot="optimizers that cannot step shards are refused by name"),
    "zero_force_ds_cpu_optimizer": Key(bool, True, moot=_OFFLOAD_ONLY),
    "memory_breakdown": Key(bool, False, moot="model.report() has the bytes"),
    "vocabulary_size": Key(int, None, moot="it only warns about alignment"),
    "graph_harvesting": Key(bool, False, moot="nothing is captured into CUDA graphs"),
    "use_data_before_expert_parallelism": Key(bool, False, moot="there is no expert parallelism"),
    "seq_parallel_communication_data_type": Key(str, None, choices=DTYPES, moot="there is no sequence parallelism"),
    "log_level": Key(str, None, moot="set the level of the logger 'zcompile'"),
    "optimizer.type": Key(str),
    "optimizer.params": Key(dict, {}),
    "optimizer.legacy_fusion": Key(bool, False, moot="there is one fused AdamW"),
    "scheduler.type": Key(str),
    "scheduler.params": Key(dict, {}),
}

_PRECISION = (
    _section(
        "fp16",
        {
            "enabled": Key(bool, False),
            "loss_scale": Key(float, 0.0, low=0),
            "initial_scale_power": Key(int, 16, low=0, high=127),
            "loss_scale_window": Key(int, 1000, low=1),
            "hysteresis": Key(int, 2, low=1),
            "consecutive_hysteresis": Key(bool, False),
            "min_loss_scale": Key(float, 1.0, above=0),
            "auto_cast": Key(bool, False, moot="floating inputs are always cast to the compute dtype"),
            "fp16_master_weights_and_grads": Key(bool, False, refuse="masters are fp32"),
        },
    )
    | _section(
        "bf16",
        {
            "enabled": Key(bool, False),
            "check_grad_overflow": Key(bool, True),
            "immediate_grad_update": Key(bool, False, moot="gradients are accumulated as backward makes them"),
            "bf16_master_weights_and_grads": Key(bool, False, refuse="masters are fp32"),
            "bf16_optimizer_states": Key(bool, False, refuse="optimizer state is fp32"),
        },
    )
    | _section(
        "data_types",
        {
            "grad_accum_dtype": Key(str, None, choices=DTYPES),
            "param_dtype": Key(str, None, choices=DTYPES),
            "buffer_dtype": Key(
                str, None, choices=DTYPES, refuse="buffers keep their dtype; convert them in the model"
            ),
        },
    )
)

_OFFLOAD = {
    "device": Key(
        str,
        "none",
        choices=("none", "cpu", "nvme"),
        refuse="nothing is offloaded to disks; set it to 'cpu', or to 'none'",
        refused=("nvme",),
    ),
    **_moot(bool, None, "memory of the host is page-locked always", "pin_memory"),
    **_moot(bool, None, _OFFLOAD_ONLY, "pipeline pipeline_read pipeline_write fast_init super_offload"),
    **_moot(float, None, _OFFLOAD_ONLY, "cpuadam_cores_perc"),
    **_moot(int, None, _OFFLOAD_ONLY, "buffer_count buffer_size max_in_cpu"),
    "nvme_path": Key(str, None, moot=_OFFLOAD_ONLY),
}

_ZERO = _section(
    "zero_optimization",
    {
        "stage": Key(int, 0, choices=(0, 1, 2, 3)),
        "overlap_comm": Key(bool),
        "reduce_bucket_size": Key(int, None, low=0),
        "allgather_bucket_size": Key(int, None, low=0, when=(0, 1, 2)),
        "stage3_prefetch_bucket_size": Key(int, None, low=0, when=(3,)),
        "stage3_max_live_parameters": Key(int, None, low=0, when=(3,)),
        "stage3_max_reuse_distance": Key(int, None, low=0, when=(3,)),
        "stage3_param_persistence_threshold": Key(int, None, low=0, when=(3,)),
        "stage3_model_persistence_threshold": Key(int, None, low=0, when=(3,)),
        "stage3_gather_16bit_weights_on_model_save": Key(bool, False, when=(3,)),
        **_moot(bool, True, _FLAT, "contiguous_gradients"),
        **_moot(bool, True, _ALWAYS, "reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce"),
        **_moot(bool, False, _ALWAYS, "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential"),
        **_moot(int, 1_000_000_000, _OFFLOAD_ONLY, "sub_group_size"),
        **_moot(bool, False, _OFFLOAD_ONLY, "round_robin_gradients cpu_offload_use_pin_memory"),
        **_moot(bool, False, _OFFLOAD_ONLY, "save_muon_momentum_buffer_in_memory"),
        **_moot(int, 0, _ORDER, "stage3_module_granularity_threshold"),
        **_moot(bool, False, _ORDER, "log_trace_cache_warnings enable_sanity_checks"),
        **_moot(bool, True, "checkpoints hold the fp32 masters", "load_from_fp32_weights"),
        **_moot(bool, False, "checkpoints load at any world size", "elastic_checkpoint pipeline_loading_checkpoint"),
        **_moot(bool, True, "the compiler chooses the kernels", "memory_efficient_linear override_module_apply"),
        **_moot(bool, False, "there is one implementation", "legacy_stage1"),
        **_moot(bool, True, "gradients are reduced inside backward", "grad_hooks"),
        **_moot(dict, {}, _ORDER, "leaf_module"),
        "ignore_unused_parameters": Key(
            bool, True, refuse="unused parameters are allowed and keep .grad None; check them in the script"
        ),
        "zero_hpz_partition_size": Key(int, 1, low=1, refuse="shards lie on all ranks; pass 1"),
        "mics_shard_size": Key(int, -1, refuse="shards lie on all ranks; pass -1"),
        "mics_hierarchical_params_gather": Key(bool, False, refuse=_LEAVE_OUT),
        **{
            f"zero_quantized_{what}": Key(bool, False, refuse="collectives are not quantised; pass false")
            for what in ("weights", "nontrainable_weights", "gradients")
        },
        "zeropp_loco_param": Key(dict, None, refuse=_NOT_YET),
        "zenflow": Key(dict, None, refuse=_NOT_YET),
        "cpu_offload": Key(bool, False, when=(1, 2, 3)),
        "cpu_offload_param": Key(bool, False, when=(3,)),
        **_section("offload_optimizer", _in_stages((1, 2, 3), {**_OFFLOAD, "ratio": Key(float, 1.0, low=0, high=1)})),
        **_section("offload_param", _in_stages((3,), _OFFLOAD)),
    },
)

_OTHER = {
    **_section(
        "activation_checkpointing",
        {
            **_moot(
                bool,
                False,
                _RECOMPUTE,
                "partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary profile",
            ),
            **_moot(int, None, _RECOMPUTE, "number_checkpoints"),
        },
    ),
    **_section(
        "checkpoint",
        {
            "tag_validation": Key(str, "Warn", moot="tags that differ between ranks are always an error"),
            "load_universal": Key(bool, False, moot="checkpoints load at any world size"),
            "use_node_local_storage": Key(bool, False, refuse="checkpoints need a folder that all ranks share"),
            "writer": Key(dict, None, moot="every rank writes its shards"),
            "checkpoint_serialization": Key(bool, True, moot="every rank writes its shards"),
            "parallel_write": Key(dict, {}, moot="every rank writes its shards"),
        },
    ),
    **_section(
        "aio",
        {
            **_moot(int, None, _OFFLOAD_ONLY, "block_size queue_depth thread_count intra_op_parallelism"),
            **_moot(bool, None, _OFFLOAD_ONLY, "single_submit overlap_events use_gds"),
        },
    ),
    **_section("tensorboard", _moot(object, None, _LOGS, "enabled output_path job_name")),
    **_section("csv_monitor", _moot(object, None, _LOGS, "enabled output_path job_name")),
    **_section("wandb", _moot(object, None, _LOGS, "enabled group team project")),
    **_section(
        "comet",
        _moot(
            object,
            None,
            _LOGS,
            "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
        ),
    ),
    **_section("comms_logger", _moot(object, None, _LOGS, "enabled verbose prof_all debug prof_ops")),
    **_section(
        "flops_profiler",
        _moot(
            object,
            None,
            _LOGS,
            "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
        ),
    ),
    **_section("timers", _section("throughput", _moot(object, None, _LOGS, "enabled synchronized"))),
    **_section(
        "pipeline",
        _moot(
            object,
            None,
            "only pipeline engines read it",
            "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant",
        ),
    ),
    **_section(
        "compile",
        _moot(
            object,
            None,
            "zcompile compiles the model itself",
            "deepcompile free_activation free_activation_threshold offload_activation offload_opt_states offload_parameters "
            "double_buffer symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather "
            "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes",
        ),
    ),
    **_section(
        "nebula",
        _moot(
            object,
            None,
            "checkpoints are written by zcompile",
            "enabled persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path",
        ),
    ),
    **_feature("amp torch_autocast", "use bf16 or fp16 instead"),
    **_feature("elasticity", "checkpoints load at any world size; give the batch sizes"),
    **_feature(
        "autotuning compression_training sparse_attention data_efficiency curriculum_learning progressive_layer_drop eigenvalue "
        "quantize_training weight_quantization hybrid_engine tensor_parallel expert_parallel zenflow domino"
    ),
}

#: every key by its dotted name, in the order in which settings are printed
KEYS: dict[str, Key] = {**_BATCH, **_GENERAL, **_PRECISION, **_ZERO, **_OTHER}

#: old spellings
ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}


def sections() -> set[str]:
    """The dotted names of dictionaries that hold keys."""
    return {name for key in KEYS for name in _parents(key)}


def names_in(section: str) -> Iterable[str]:
    """What a section holds: keys and sections, by the last part of their names."""
    head = f"{section}." if section else ""
    return dict.fromkeys(key[len(head) :].split(".")[0] for key in KEYS if key.startswith(head))


def _parents(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


#: what each key offloads, by the sections and by the old keys that meant the same
OFFLOADS = {
    f"zero_optimization.{name}": kind
    for kind, names in {
        "optimizer": ("offload_optimizer.device", "cpu_offload"),
        "parameters": ("offload_param.device", "cpu_offload_param"),
    }.items()
    for name in names
}
