"""``zcompile.initialize``: from a model and a DeepSpeed configuration to an engine that trains."""

from __future__ import annotations

import datetime
import glob
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zcompile.api import compile
from zcompile.components import build_optimizer, build_scheduler
from zcompile.config import names_tuple
from zcompile.dsconfig.settings import Facts, Settings, resolve
from zcompile.engine import Engine
from zcompile.errors import ConfigError, OptimizerError
from zcompile.loader import Loader
from zcompile.module import CompiledModule
from zcompile.runtime.optim.optimizer_guard import check_optimizer

log = logging.getLogger("zcompile")

#: options of ``compile`` that the configuration decides, and the key that does
_DECIDED = {
    "stage": "zero_optimization.stage",
    "precision": "fp16.enabled or bf16.enabled",
    "reduce_dtype": "communication_data_type",
    "accumulate_dtype": "data_types.grad_accum_dtype",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "timeout": "timeout",
}

_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def initialize(
    model: nn.Module | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    args: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    **options: Any,
) -> tuple[Engine, Optimizer | None, Loader | None, Any]:
    """Compile a model as a DeepSpeed configuration says. Collective: every rank calls it with the same model and configuration.

    Without a process group but in the environment of a launcher such as torchrun, the group is made: NCCL if there is a GPU for each
    process of the host, else gloo. Without that environment, this process trains alone.

    Args:
        model: a plain module; it is taken over, on its device or moved to this process's GPU.
        config: path of a ``ds_config.json``, or its contents. README lists the keys.
        optimizer: an optimizer over the model's parameters, or a function that makes one of parameters; instead of the key
            ``optimizer``.
        model_parameters: parameters or parameter groups to train; None: all that require gradients.
        training_data: a map-style dataset, for a loader of micro-batches.
        lr_scheduler: a scheduler on ``optimizer``, or a function that makes one of an optimizer; instead of the key ``scheduler``.
        args: its ``deepspeed_config`` is the configuration if ``config`` is None.
        collate_fn: makes a batch of rows of ``training_data``.
        config_params: an old name of ``config``.
        dist_init_required: False: the process group is not made here. True: one must be there or be made.
        distributed_port: of rank 0, where the environment does not say it.
        mpu: must be None: there is no model parallelism.
        options: further options of ``zcompile.compile``, such as ``backend`` or ``keep_fp32``.

    Returns:
        engine, optimizer, loader and scheduler; the last three are None where there is none.

    Raises:
        ConfigError: names the key or the argument; see ``zcompile.compile`` for what else is raised.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is {type(model).__name__}; pass the module by name, initialize(model=..., config=...)"
        )
    if mpu is not None:
        raise ConfigError("mpu is given, and only data parallelism is supported; leave it out")
    if distributed_port is not None:
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    settings = resolve(_config(config, config_params, args), _facts(model))
    _check_options(options, settings)
    _join(settings, dist_init_required)
    if all(p.device.type == "cpu" for p in model.parameters()):
        model.to(_device())
    named = dict(model.named_parameters(remove_duplicate=False))
    name_of = {id(p): name for name, p in named.items()}
    groups = None if model_parameters is None else list(model_parameters)
    compiled = compile(model, **options | _compile_options(model, settings, options))
    agreement = compiled._session.runner.agreement
    agreement.compare("the DeepSpeed configuration", "\n".join(map(str, settings.shared_rows)))
    try:
        present = dict(compiled.named_parameters(remove_duplicate=False))
        groups = _present_parameters(groups, name_of, present)
        built = _optimizer(optimizer, settings, groups)
        scheduler = _scheduler(lr_scheduler, settings, built)
        loader = _loader(training_data, settings, compiled, collate_fn)
    except BaseException as error:
        agreement.fail(error)
        raise
    engine = Engine(compiled, settings, built, scheduler, loader)
    if engine.global_rank == 0:
        _say(settings, config_optimizer_unused=optimizer is not None, config_scheduler_unused=lr_scheduler is not None)
    return engine, built, loader, scheduler


def _config(config: Any, config_params: Any, args: Any) -> Any:
    found = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(found) != 1:
        count = "no configuration is" if not found else f"{len(found)} configurations are"
        raise ConfigError(f"{count} given; pass one, as config= or as args.deepspeed_config")
    return found[0]


def _facts(model: nn.Module) -> Facts:
    """What ``auto`` values can be resolved from. The hidden size is looked for where Hugging Face's configurations have it."""
    world = dist.get_world_size() if dist.is_initialized() else 1 if _not_launched() else int(os.environ["WORLD_SIZE"])
    dtypes = [p.dtype for p in model.parameters() if p.dtype in _DTYPES]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    hidden = None
    for config in (getattr(model, "config", None), getattr(getattr(model, "config", None), "text_config", None)):
        for value in (getattr(config, "hidden_size", None), getattr(config, "hidden_sizes", None)):
            if hidden is None and isinstance(value, (int, list, tuple)) and value:
                hidden = value if isinstance(value, int) else max(value)
    return Facts(world, _DTYPES[widest], hidden)


def _check_options(options: Mapping[str, Any], settings: Settings) -> None:
    for name in options:
        if name in _DECIDED:
            raise ConfigError(
                f"{name} is decided by the configuration; set its key {_DECIDED[name]}, and leave {name} out"
            )
    if settings.offload is not None and "offload" in options:
        raise ConfigError(
            f"the configuration offloads {settings.offload}, and offload is passed, too; leave one out, or set the devices to 'none'"
        )
    if settings.policy is not None and ("policy" in options or "pipeline" in options):
        raise ConfigError(
            f"the configuration's sizes ask for the schedule {settings.policy!r}, and policy or pipeline is passed, too; leave one out"
        )


def _not_launched() -> list[str]:
    """What the environment lacks to be that of a launcher."""
    return [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]


def _join(settings: Settings, required: bool | None) -> None:
    """Make the process group, if there is none and the environment is that of a launcher."""
    if dist.is_initialized():
        if settings.interface is not None and dist.get_rank() == 0:
            log.warning(
                "nccl_socket_ifname is %r and came too late, because the process group is there already; call initialize before "
                "init_process_group, or set NCCL_SOCKET_IFNAME",
                settings.interface,
            )
        return
    absent = _not_launched()
    if absent and not required:
        return
    if absent or required is False:
        why = "dist_init_required is False" if not absent else f"the environment lacks {', '.join(absent)}"
        raise ConfigError(
            f"there is no process group, and {why}; start the script with torchrun, or call init_process_group first"
        )
    device = _device()
    if settings.interface is not None:
        os.environ["NCCL_SOCKET_IFNAME"] = settings.interface
        if settings.interface in [
            name for _, name in socket.if_nameindex()
        ]:  # NCCL takes prefixes and lists, gloo one name
            os.environ["GLOO_SOCKET_IFNAME"] = settings.interface
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=settings.timeout)
    )


def _device() -> torch.device:
    """This process's GPU, if every process of the host has one and the process group, if there is one, works on it."""
    local, count = os.environ.get("LOCAL_RANK"), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.is_available() and torch.cuda.device_count() >= count:
        if not dist.is_initialized() or "cuda" in dist.get_backend_config():
            return torch.device("cuda", torch.cuda.current_device() if local is None else int(local))
    return torch.device("cpu")


def _compile_options(model: nn.Module, settings: Settings, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``compile`` that the settings decide; ``options`` are the user's."""
    decided: dict[str, Any] = {
        "stage": settings.stage,
        "precision": settings.precision,
        "reduce_dtype": settings.reduce_dtype,
        "accumulate_dtype": settings.accumulate_dtype,
        "gradient_accumulation_steps": settings.batch.accumulation,
        "timeout": settings.timeout,
        "ignore": (*names_tuple("ignore", options.get("ignore", ())), *_persistent(model, settings)),
    }
    if settings.policy is not None:
        decided["policy"] = settings.policy
    if settings.offload is not None:
        decided["offload"] = settings.offload
    return decided


def _persistent(model: nn.Module, settings: Settings) -> tuple[str, ...]:
    """Patterns of the parameters that stay whole: small ones, in the model's order, until their total is used up."""
    if settings.persistent_elements is None:
        return ()
    names, total = [], 0
    for name, parameter in model.named_parameters():
        size, limit = parameter.numel(), settings.persistent_elements_total
        if size <= settings.persistent_elements and (limit is None or total + size <= limit):
            names.append(glob.escape(name))
            total += size
    return tuple(names)


def _present_parameters(
    groups: list[Any] | None, name_of: Mapping[int, str], present: Mapping[str, nn.Parameter]
) -> list[Any]:
    """The compiled model's parameters in place of those that were given; groups keep their options."""
    if groups is None:
        return [p for p in dict.fromkeys(present.values()) if p.requires_grad]

    def find(parameter: Any) -> nn.Parameter:
        name = name_of.get(id(parameter))
        if name is None:
            shape = list(parameter.shape) if isinstance(parameter, torch.Tensor) else type(parameter).__name__
            raise ConfigError(
                f"model_parameters holds {shape}, which is no parameter of the model; pass model.parameters()"
            )
        return present[name]

    def one(entry: Any) -> Any:
        if isinstance(entry, Mapping):
            params = [entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"]
            return {**entry, "params": [find(p) for p in params]}
        return find(entry[1] if isinstance(entry, tuple) else entry)  # named_parameters() is as good as parameters()

    return [one(entry) for entry in groups]


def _optimizer(given: Any, settings: Settings, groups: list[Any]) -> Optimizer | None:
    if given is None:
        return None if settings.optimizer is None else _usable(build_optimizer(settings.optimizer, groups))
    return _usable(given if isinstance(given, Optimizer) or not callable(given) else given(groups))


def _usable(optimizer: Any) -> Optimizer:
    """An optimizer that can step the model's shards."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; pass a torch optimizer, or a function that makes one"
        )
    check_optimizer(optimizer)
    return optimizer


def _scheduler(given: Any, settings: Settings, optimizer: Optimizer | None) -> Any:
    if given is not None and hasattr(given, "step"):
        return given
    if given is None and settings.scheduler is None:
        return None
    if optimizer is None:
        raise OptimizerError("a scheduler is given without an optimizer; give the key optimizer, or pass optimizer=")
    if given is not None:
        return given(optimizer)
    assert settings.scheduler is not None
    return build_scheduler(settings.scheduler, optimizer)


def _loader(data: Any, settings: Settings, model: CompiledModule, collate_fn: Any) -> Loader | None:
    if data is None:
        return None
    mesh = model._session.runner.shards.mesh
    return Loader(
        data,
        settings.batch.micro,
        rank=mesh.rank,
        world_size=mesh.size,
        drop_last=settings.drop_last,
        collate_fn=collate_fn,
        pin_memory=mesh.device.type == "cuda",
    )


def _say(settings: Settings, *, config_optimizer_unused: bool, config_scheduler_unused: bool) -> None:
    """Once, on rank 0: what the configuration holds that makes no difference."""
    unused = dict(settings.moot)
    for name, replaced, given in (
        ("optimizer", config_optimizer_unused, settings.optimizer),
        ("scheduler", config_scheduler_unused, settings.scheduler),
    ):
        if replaced and given is not None:
            unused[name] = "one is passed to initialize"
    if settings.dump_state:
        print(settings, flush=True)
    if settings.clips_by_default:
        log.warning(
            "gradient_clipping is not given, and DeepSpeed's default is %s: gradients are clipped; give 0 for no clipping",
            settings.gradient_clipping,
        )
    if unused:
        log.warning(
            "keys of the DeepSpeed configuration that make no difference here: %s",
            "; ".join(f"{key} ({why})" for key, why in unused.items()),
        )
