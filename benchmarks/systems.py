"""The systems that are compared: each turns the same plain model into one that trains on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from benchmarks.llama import Llama, Size, fill


@dataclass
class Options:
    """What a run was asked for.

    Attributes:
        dtype: compute dtype; masters and optimizer state are float32.
        backend: of compiled systems: ``inductor``, or ``eager`` to leave compilation out.
        policy: zcompile's; None is its default.
        reduce: dtype of zcompile's and FSDP2's gradient reduction, ``fp32`` or ``bf16``.
        recompute: zcompile's, or ``full`` for checkpointed blocks in the others; None saves what backward needs.
        clip: the norm that ``Trainee.clip`` will be called with, for systems that must know it before.
        others: further options of ``zcompile.compile``; the peers know ``offload`` of them.
    """

    size: Size
    device: torch.device
    world_size: int
    dtype: torch.dtype = torch.bfloat16
    backend: str = "inductor"
    policy: str | None = None
    reduce: str = "fp32"
    recompute: str | None = None
    keep: bool = False
    clip: float | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def offload(self) -> tuple[str, ...]:
        """What is kept in the host's memory."""
        return tuple(self.others.get("offload", "").split("+")) if "offload" in self.others else ()


@dataclass
class Trainee:
    """A model ready to train.

    Attributes:
        model: called with tokens and labels, gives the loss.
        optimizer: None where only forward and backward are measured.
        clip: clips the gradients to a norm.
        context: entered around the forward.
        backward: called with the loss.
        facts: read after the first steps, for the table.
        close: gives back what joins the ranks, also when one of them has failed; None where collectives go over the group of all
            rows, in which ranks may be out of step then.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    clip: Callable[[float], Any]
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    backward: Callable[[Tensor], Any] = Tensor.backward
    facts: Callable[[], dict[str, Any]] = field(default=dict)
    close: Callable[[], None] | None = None

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def zero(self) -> None:
        """Drop the gradients."""
        for p in self.parameters:
            p.grad = None


def built(options: Options) -> Llama:
    torch.manual_seed(0)
    with options.device:
        return Llama(options.size)


def compile_blocks(model: Llama, options: Options) -> None:
    """Per-block checkpoints if wanted, and per-block compilation, as the peers' documentation recommends."""
    if options.recompute is not None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    if options.backend != "eager":
        for block in model.blocks:
            block.compile(backend=options.backend)


def torch_adamw(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.device.type == "cuda")


def single(options: Options, *, how: str = "blocks") -> Trainee:
    """The limit: one device, everything in the compute dtype, no communication, no optimizer.

    Args:
        how: compiled by ``blocks``, as a ``whole``, or in the ``regions`` that zcompile makes.
    """
    import zcompile

    model: Any = built(options).to(options.dtype)
    if how == "blocks":
        compile_blocks(model, options)
    elif how == "whole":
        model.compile(backend=options.backend)
    else:
        model = zcompile.compile(model, backend=options.backend, cuda_graphs=False)
    return Trainee(model, None, partial(nn.utils.clip_grad_norm_, model.parameters()), close=lambda: None)


def ddp(options: Options) -> Trainee:
    """DistributedDataParallel around per-block compilation, under autocast."""
    model = built(options)
    compile_blocks(model, options)
    ids = [options.device.index] if options.device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    enabled = options.dtype is not torch.float32
    context = partial(
        torch.autocast, options.device.type, dtype=options.dtype if enabled else torch.bfloat16, enabled=enabled
    )
    return Trainee(
        wrapped, torch_adamw(wrapped, options), partial(nn.utils.clip_grad_norm_, wrapped.parameters()), context
    )


def fsdp2(options: Options, *, compiled: bool) -> Trainee:
    """``fully_shard`` on every block and on the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    with torch.device("meta"):
        model = Llama(options.size)
    if compiled:
        compile_blocks(model, options)
    reduce = torch.float32 if options.reduce == "fp32" else torch.bfloat16
    mixed = MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=reduce)
    mesh = init_device_mesh(options.device.type, (options.world_size,))
    pinned = options.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if options.offload else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=not options.keep, offload_policy=offload)
    model.to_empty(device="cpu" if options.offload else options.device)
    torch.manual_seed(0)
    model.fill()
    model.cos, model.sin = model.cos.to(options.device), model.sin.to(options.device)
    return Trainee(model, torch_adamw(model, options), partial(nn.utils.clip_grad_norm_, model.parameters()))


def fsdp2_best(options: Options) -> Trainee:
    """Weights kept gathered from forward to backward, gradients reduced in the compute dtype."""
    options.keep, options.reduce = True, "bf16"
    return fsdp2(options, compiled=True)


class Engine(torch.optim.Optimizer):
    """DeepSpeed's engine, called as an optimizer is."""

    def __init__(self, engine: Any) -> None:
        self.step = engine.step


def deepspeed_zero(options: Options, *, stage: int) -> Trainee:
    """DeepSpeed, an optional install (``pip install deepspeed``), with per-block compilation."""
    import deepspeed

    def host(part: str) -> dict[str, Any]:
        return {"device": "cpu", "pin_memory": True} if part in options.offload else {"device": "none"}

    zero = {"stage": stage, "offload_optimizer": host("optimizer"), "overlap_comm": True}
    if stage == 3:
        zero |= {"offload_param": host("parameters")}
    config = {
        "train_micro_batch_size_per_gpu": options.size.micro_batch,
        "bf16": {"enabled": options.dtype is torch.bfloat16},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": options.clip or 0.0,
        "steps_per_print": 2**31,
    }
    deepspeed.init_distributed()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3), options.device:
        model = Llama(options.size)
    compile_blocks(model, options)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    # the engine clips in its step
    return Trainee(engine, Engine(engine), lambda norm: None, backward=engine.backward, close=engine.destroy)


def zcompile_stage(options: Options, *, stage: int) -> Trainee:
    """This project."""
    import zcompile

    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: None}[options.dtype]
    extra: dict[str, Any] = (
        {**options.others} if options.policy is None else {**options.others, "policy": options.policy}
    )
    if options.reduce != "fp32":
        extra["reduce_dtype"] = options.reduce
    if options.recompute is not None:
        extra["recompute"] = options.recompute
    torch.manual_seed(0)
    with torch.device("meta"):
        plain = Llama(options.size)
    model = zcompile.compile(plain, stage=stage, precision=precision, backend=options.backend, init=fill, **extra)

    def facts() -> dict[str, Any]:
        graphs = [g for g in (model.graphs.forward, model.graphs.backward) if g is not None]
        report = model.report()
        return {
            "distinct_regions": sum(len(g.regions) for g in graphs),
            "regions": sum(len(text_calls(g)) for g in graphs),
            "passes": str(model.pipeline),
            "gathered_peak_gib": report.gathered_peak_bytes / 2**30,
            "peer_gib": report.peer_bytes / 2**30,
            "recorded_gib": report.recorded_bytes / 2**30,
            "decision": None if report.decision is None else str(report.decision),
            "replays": report.replays,
        }

    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-4)
    return Trainee(model, optimizer, model.clip_grad_norm_, facts=facts, close=model.close)


def text_calls(graph: Any) -> list[str]:
    """The region calls of a scheduled graph, as it prints them."""
    body = str(graph).partition("\n  body:\n")[2]
    return [line for line in body.splitlines() if " = call " in line]


SYSTEMS: dict[str, Callable[[Options], Trainee]] = {
    "single": single,
    "single-each": single,
    "single-whole": partial(single, how="whole"),
    "single-zc": partial(single, how="regions"),
    "ddp-c": ddp,
    "fsdp2": partial(fsdp2, compiled=False),
    "fsdp2-c": partial(fsdp2, compiled=True),
    "fsdp2-best": fsdp2_best,
    "ds2": partial(deepspeed_zero, stage=2),
    "ds3": partial(deepspeed_zero, stage=3),
    "zc0": partial(zcompile_stage, stage=0),
    "zc1": partial(zcompile_stage, stage=1),
    "zc2": partial(zcompile_stage, stage=2),
    "zc3": partial(zcompile_stage, stage=3),
}

#: how each row is called in tables
TITLES = {
    "single": "limit: one device, per-block compile",
    "single-each": "the same on each device at once, the slowest",
    "single-whole": "one device, compiled as a whole",
    "single-zc": "one device, compiled in zcompile's regions",
    "ddp-c": "DDP + per-block compile",
    "fsdp2": "FSDP2 eager",
    "fsdp2-c": "FSDP2 + per-block compile",
    "fsdp2-best": "FSDP2 + compile, kept, bf16 reduction",
    **{f"ds{stage}": f"DeepSpeed ZeRO-{stage} + per-block compile" for stage in (2, 3)},
    **{f"zc{stage}": f"zcompile stage {stage}" for stage in range(4)},
}


def batch(options: Options, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of one rank, the same in every step."""
    generator = torch.Generator().manual_seed(rank)
    size = options.size
    tokens = torch.randint(0, size.vocab, (size.micro_batch, size.seq + 1), generator=generator).to(options.device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
