"""``zcompile.compile``: from a plain module to one that trains under ZeRO."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile import passes
from zcompile.budgeted import Budgeted
from zcompile.capture.convert import ParamType
from zcompile.config import Config, dtype_name, names_tuple, outputs_tuple
from zcompile.errors import ConfigError, ShardingError
from zcompile.module import CompiledModule
from zcompile.modules import check_modules
from zcompile.out_of_memory import explain
from zcompile.parameters import compute_dtype, parameter_specs
from zcompile.pipeline import Pipeline, StepPass
from zcompile.placement import ParamSpec
from zcompile.planner.hosted import step_here
from zcompile.runtime.accumulation import Accumulation
from zcompile.runtime.buffers import Buffers
from zcompile.runtime.communication.collectives import Collectives
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.communication.peers import connect
from zcompile.runtime.ending import leave
from zcompile.runtime.executor import Executor
from zcompile.runtime.offload.host import HostMemory, Mover, ranks_here
from zcompile.runtime.offload.hosting import Hosting
from zcompile.runtime.optim.optimizer_guard import repoint, watch_optimizers
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.replay.pace import Pace
from zcompile.runtime.replay.recorder import CudaRecorder
from zcompile.runtime.replay.tapes import Tapes
from zcompile.runtime.sharding.adopt import adopt, install, sync_buffers
from zcompile.runtime.sharding.fill import fill
from zcompile.runtime.sharding.placed import refuse_numbers_of_parts
from zcompile.runtime.sharding.shards import ParameterShards
from zcompile.runtime.step import StepRunner
from zcompile.session import Session, buffer_reader

log = logging.getLogger("zcompile")

_names = itertools.count()

#: process groups of models that nobody has any more; they are given back at the next ``compile``, as the garbage collector
#: comes at any moment, and a group of gloo keeps threads busy as long as it exists
_abandoned: list[Callable[[], None]] = []


def compile(
    model: nn.Module,
    *,
    stage: int = 3,
    precision: str | torch.dtype | None = None,
    reduce_dtype: str | torch.dtype | None = None,
    backend: str = "inductor",
    policy: str | StepPass | Sequence[StepPass] | None = None,
    recompute: str | float | None = None,
    loss_chunk: str | None = None,
    offload: str | Sequence[str] | None = None,
    memory_budget: str | float | None = None,
    gradient_accumulation_steps: int = 1,
    accumulate_dtype: str | torch.dtype | None = None,
    ignore: str | Iterable[str] = (),
    keep_fp32: str | Iterable[str] = (),
    differentiable: Sequence[str | int] | None = None,
    mesh: DeviceMesh | None = None,
    pipeline: str | Pipeline | None = None,
    verify: str = "full",
    timeout: float = 600.0,
    max_captures: int = 16,
    sync_init: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
    cuda_graphs: bool | None = None,
    debug_nonfinite: bool = False,
) -> CompiledModule:
    """Compile a model for data-parallel training. Collective: every rank calls it with the same model and options.

    The model is taken over: its parameters become shards (DTensors where there is a process group), and it is captured
    at the first call with each new kind of arguments.

    Args:
        model: any module that can be captured as one graph. It may be on the ``meta`` device.
        stage: ZeRO stage: 0 replicates, 1 and 2 shard gradients and optimizer state, 3 shards parameters too.
        precision: None computes in the model's own dtypes; ``"bf16"`` or ``"fp16"``: fp32 masters, computed and gathered in that dtype.
        reduce_dtype: dtype of gradient reductions; None: that of the masters.
        backend: ``"inductor"`` compiles regions, ``"eager"`` interprets them (the reference).
        policy: schedule passes, such as ``"keep{units=2},prefetch{lookahead=2}"``, or ``"none"``. None: ``"prefetch"``. A ``StepPass`` of
            one's own, or a list, runs alone, as it is.
        recompute: what is computed again in backward instead of being saved: None leaves it to the split, which computes cheap
            things again; ``"selective"``: everything in repeated blocks but matmuls, attention and convolutions; ``"full"``: whole
            blocks, of which only what they hand on is saved. A budget for all tensors of a rank, such as ``"24GiB"`` or ``0.8`` of
            the device: as little as keeps the predicted peak under it. Random numbers are saved, never drawn again.
        loss_chunk: how the cross-entropy of a linear layer (a language model's head) is computed. ``"auto"``: from 32000 classes and
            256 MiB of logits on in pieces, with its gradients in forward, where that saves memory, the model does not return the
            logits, and the losses become one scalar (their mean, sum, ...). A size such as ``"64MiB"``: in pieces of at most that
            for any number of classes; logits that the model returns beside the loss are None in training; of other losses, and in
            float16, gradients recompute logits, one matmul more. ``"none"``: as the model says. None: ``"auto"`` on GPUs.
        offload: what is kept in the host's memory: ``"activations"``, ``"optimizer"`` (the states of ``zcompile.optim.AdamW``),
            ``"parameters"`` (shards and their gradients), or several, as a list or joined by ``+``. Options in braces:
            ``"activations{mib=4 lookahead=2}"``, ``"optimizer{step=cpu}"``.
        memory_budget: what all tensors of a rank may take on its device at most, such as ``"24GiB"``, a number of bytes, or ``0.8`` of
            a GPU. Of ``policy``, ``recompute``, ``loss_chunk`` and ``offload`` those that are None are chosen: the combination with
            the shortest predicted step whose predicted peak keeps the budget (``"none"`` for ``recompute`` and ``offload``: not
            chosen, and not done). That is decided at the first training call, by the rank with the largest batch for all, with
            what is on the device already counted in; ``model.report().decision`` holds it and its alternatives, and the log of rank
            0 shows them. ``stage`` and parameters on the host must be there before, so they stay as given. States go to the host
            only if ``zcompile.optim.AdamW`` was built before that call; they stay where they are then. A later capture chooses
            again what may differ: on several ranks not what would change the order of collectives. If it cannot keep the budget, a
            warning says so. The peak is predicted for updates by ``zcompile.optim``; building the full model on the device, and
            ``no_sync``, may take more. Of options that save nothing it is said.
        gradient_accumulation_steps: the declared window of backward calls: ``.grad`` is complete after every so many; the caller
            scales the loss. Stages 0 and 1 reduce at its end alone, and keep full gradients until then. Kept weights and the first
            unit's stay gathered (``"hold{units=0 first=0}"``: none): do not write inside by ``.data`` or ``_foreach_*``.
        accumulate_dtype: ``"fp32"`` adds gradients up in it over the window and rounds them once, where the parameters' dtype
            is narrower; None: their own dtype.
        ignore: glob patterns of parameters that are not sharded.
        keep_fp32: glob patterns of parameters that are computed in fp32 under ``precision``.
        differentiable: names or indices of the outputs that may get a gradient. Default: a float scalar called ``loss``
            alone if there is one, else every float output.
        mesh: a device mesh with one axis; None: all ranks.
        pipeline: a whole pass pipeline instead of the one built from the other options.
        verify: ``"full"``, ``"fast"`` or ``"off"``.
        timeout: seconds that any wait on other ranks may take.
        max_captures: most captures that are held.
        sync_init: start every rank from rank 0's parameters and buffers.
        init: gives values to a model on ``meta``, called with one module at a time whose own parameters and buffers are full
            then, such as ``lambda module: module.reset_parameters()``; modules that own none are left out.
        cuda_graphs: on a GPU, record the step of the most frequent kind of arguments as CUDA graphs, so that the host issues forward
            and backward as one each. None: if the first steps show that the device waits for the host, as with small models and
            batches. What cannot be replayed runs as ever, with a reason in the log: gradients that exist at the forward, another
            kind of arguments. Outputs are copies then; results are the same. Memory of the recorded step stays reserved.
        debug_nonfinite: check what every region computes, and end the step with an error that names the operator, its source
            line and module, or the argument or parameter, where the first NaN or infinity comes from. For finding it: every
            region waits for the device, and keeps its inputs until then. Infinities that masks are made of are no alarm.

    Returns:
        the compiled module.

    Raises:
        ConfigError: options that have no meaning, alone or together.
        BudgetError: at the first training call: nothing keeps ``memory_budget``; says what comes nearest, and what would fit.
        ShardingError: a parameter that cannot be taken over.
        RankError: ranks have different models or options, or one is missing.
    """
    check_modules(model)
    policy_spec, own_policy = passes.read_policy(policy)
    config = Config.choosing(
        memory_budget,
        policy=policy_spec,
        own_policy=own_policy,
        recompute=recompute,
        loss_chunk=loss_chunk,
        offload=offload,
        stage=stage,
        precision=dtype_name(precision),
        reduce_dtype=dtype_name(reduce_dtype),
        backend=backend,
        gradient_accumulation_steps=gradient_accumulation_steps,
        accumulate_dtype=dtype_name(accumulate_dtype),
        ignore=names_tuple("ignore", ignore),
        keep_fp32=names_tuple("keep_fp32", keep_fp32),
        differentiable=outputs_tuple(differentiable),
        verify=verify,
        timeout=timeout,
        max_captures=max_captures,
        sync_init=sync_init,
        cuda_graphs=cuda_graphs,
        debug_nonfinite=debug_nonfinite,
    )
    while _abandoned:
        _abandoned.pop()()
    budgeted = Budgeted.on(_device(model), config)
    place = Mesh.create(mesh, device=_device(model), timeout=timeout)
    chosen = _pipeline(config, pipeline, place)
    label = f"{type(model).__name__.lower()}"
    agreement = Agreement(place.store, place.rank, place.size, timeout=timeout, name=f"{label}.{next(_names)}")
    try:
        return _take_over(model, config, chosen, place, agreement, label, init, budgeted)
    except BaseException as error:
        agreement.fail(error)
        raise


def _take_over(
    model: nn.Module,
    config: Config,
    pipeline: Pipeline,
    mesh: Mesh,
    agreement: Agreement,
    label: str,
    init: Callable[[nn.Module], Any] | None,
    budgeted: Budgeted | None,
) -> CompiledModule:
    specs = parameter_specs(model, config, mesh.size)
    agreement.compare("the parameters", "\n".join(_describe(s) for s in specs))
    agreement.compare("the options", _describe_options(config, pipeline, init is not None))
    collectives = Collectives(mesh, agreement)
    if mesh.is_distributed:
        mesh.starter = collectives  # what the shards gather and broadcast is watched, too
        collectives.peers = connect(mesh, agreement)
    mesh.agreement = agreement
    memory = HostMemory(mesh.device, ranks_on_host=ranks_here(mesh.size))
    hosting = Hosting(mesh.device, memory, config.offloading, step_here(config.offloading, mesh.device))
    shards = ParameterShards(specs, mesh, hosting)
    named = dict(model.named_parameters(remove_duplicate=False))
    replaced = adopt(shards, {s.name: named[s.name] for s in specs}, sync_init=config.sync_init)
    if config.sync_init:
        sync_buffers(mesh, dict(model.named_buffers()))
    install(shards, model)
    if init is not None:
        fill(shards, model, init, sync=config.sync_init)
    repoint(shards, replaced)
    accumulation = Accumulation(
        config.gradient_accumulation_steps,
        defers=config.defers_reduction and mesh.is_distributed,
        dtype=config.wide_dtype,
    )
    watch_optimizers(shards, accumulation)
    buffers = Buffers(mesh.device)
    mover = Mover(memory, hosting.lanes, buffers)
    executor = Executor(shards, collectives, buffers, accumulation, mover)
    refuse_numbers_of_parts(mesh)
    runner = StepRunner(shards, executor, agreement, buffer_reader(model))
    # not NCCL's: their end is a collective, and collectors come at different times
    if mesh.is_distributed and mesh.device.type == "cpu":
        weakref.finalize(runner, _abandoned.append, partial(leave, collectives, agreement, mesh)).atexit = False

    def param_type(name: str) -> ParamType:
        spec = shards.specs[name]
        return ParamType(name, spec.shape, compute_dtype(spec, config), shards.parameter(name).requires_grad)

    if config.cuda_graphs is not False and config.can_replay:
        _replay_steps(runner, label, asked=config.cuda_graphs is True)
    session = Session(model, config, pipeline, runner, param_type, label, budgeted)
    shards.when_out_of_memory = _explainer(session)
    return CompiledModule(model, config, session)


def _replay_steps(runner: StepRunner, label: str, asked: bool) -> None:
    """Let the runner replay steps, where the device can: always, or when it waits for the host."""
    mesh = runner.shards.mesh

    def say(reason: str) -> None:
        if mesh.rank == 0:
            log.log(
                logging.WARNING if asked else logging.INFO,
                "cuda_graphs: a step of %s is not replayed: %s",
                label,
                reason,
            )

    if mesh.device.type != "cuda":
        if asked:
            say(f"the model is on {mesh.device}")
        return
    pace = None if asked else Pace(partial(torch.cuda.Event, enable_timing=True))
    runner.tapes = Tapes(runner.executor, partial(CudaRecorder, mesh.device), say, pace)
    weakref.finalize(runner, runner.tapes.close)  # before the process ends: NCCL waits for graphs that use it


def _explainer(session: Session) -> Callable[[torch.OutOfMemoryError, str], BaseException]:
    """What the device's own error becomes; the other ranks are told. Holds nothing alive."""
    known = weakref.ref(session)

    def explained(error: torch.OutOfMemoryError, what: str) -> BaseException:
        living = known()
        if living is None:
            return error
        result = explain(error, what, living)
        living.runner.agreement.fail(result)
        return result

    return explained


def _pipeline(config: Config, given: str | Pipeline | None, mesh: Mesh) -> Pipeline:
    if given is None:
        pipeline = passes.default_pipeline(config, size=mesh.size, axis=mesh.axis)
    elif config.memory_budget is not None:
        raise ConfigError(
            f"pipeline and memory_budget={config.memory_budget!r} are both given; a pipeline says itself what is saved and kept"
        )
    elif config.policy != "prefetch" or config.offloading.activations:
        both = f"policy={config.policy!r}" if config.policy != "prefetch" else f"offload={config.offload!r}"
        raise ConfigError(f"pipeline and {both} are both given; a pipeline contains its schedule passes")
    else:
        pipeline = passes.parse(given) if isinstance(given, str) else given
    pipeline.check()
    return pipeline


def _device(model: nn.Module) -> torch.device:
    """The device of the model; of a ``meta`` model, where it will run."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ShardingError(
            f"parameters are on {', '.join(sorted(map(str, devices)))}; move the whole model to one device first"
        )
    if devices:
        return devices.pop()
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _describe_options(config: Config, pipeline: Pipeline, has_init: bool) -> str:
    """Everything that makes ranks run different collectives, a line each."""
    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "timeout"}
    options |= {"init": "given" if has_init else None, "pipeline": str(pipeline), "torch": torch.__version__}
    return "\n".join(f"{name} = {value!r}" for name, value in options.items())


def _describe(spec: ParamSpec) -> str:
    frozen = "" if spec.requires_grad else " frozen"
    tied = f" = {', '.join(spec.aliases)}" if spec.aliases else ""
    return f"{spec.name}{tied}: {spec.dtype} {list(spec.shape)}{frozen}"
