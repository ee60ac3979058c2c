"""The features: which models train, which programs run, and what is refused."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.dist import feature_loops as loops
from tests.dist import feature_programs as programs
from tests.dist.feature_models import (
    CHANNELS_LAST,
    KEYS,
    LORA,
    MEANS,
    Attends,
    Both,
    Chain,
    Codebook,
    Islands,
    Layer,
    Mixed,
    Result,
    Square,
    TiedLm,
    Towers,
    by_name,
    chain,
    hf_checkpointed,
    images,
    in_bf16,
    in_turn,
    labelled,
    layer,
    no_batch,
    no_tensors,
    odd_steps,
    parameter,
    rows,
    same,
    sequences,
    sgd,
    shares_memory,
    two_layers,
    with_lstm,
)
from tests.dist.features import Feature, trains
from tests.dist.models import CASES, Case, tokens
from zcompile.errors import BackwardError, CaptureError, ConfigError, RankMismatchError, ShardingError, SignatureError

FEATURES: dict[str, Feature] = {
    # Parameters.
    "tied embedding and head, a module under two names": Feature(
        "parameters", trains(Case(TiedLm, lambda g: {"x": tokens(g)}, loss=same)), world=3
    ),
    "LoRA by peft: frozen base, adapters trained": Feature(
        "parameters",
        trains(LORA, after=programs.frozen_has_no_gradient),
        note="a frozen parameter is sharded and has no gradient memory",
    ),
    "LoRA: `save_pretrained`, `merge_and_unload`": Feature(
        "parameters",
        lambda stage: programs.lora(LORA, stage),
        note="adapters inside `model.unsharded()`, merge after `zcompile.unwrap(model)`",
    ),
    "parameters that no step uses": Feature(
        "parameters", trains(layer(lambda y, m: y, spare=lambda: nn.Linear(5, 3))), note="`.grad` stays None"
    ),
    "parameters that some steps use": Feature(
        "parameters",
        trains(Case(lambda: Layer(in_turn, a=nn.Linear(6, 5), b=nn.Linear(6, 5)), odd_steps, loss=same)),
        note="one capture for each branch; `.grad` stays None on the other's steps",
    ),
    "parameter groups by name": Feature(
        "parameters", trains(dataclasses.replace(Case(Islands, rows, loss=same), optimizer=by_name))
    ),
    "two towers, one left whole": Feature(
        "parameters",
        trains(
            Case(Towers, lambda g: images(g) | {"ids": tokens(g)}, loss=same),
            after=programs.vision_is_whole,
            ignore=["vision.*"],
        ),
        world=3,
        note='`ignore=["vision.*"]`',
    ),
    "bf16 body, fp32 head": Feature("parameters", trains(Case(Mixed, rows, loss=same, replicas=True))),
    "bf16 with an fp32 island": Feature(
        "parameters",
        trains(
            Case(Islands, rows, loss=same, replicas=True, reference=in_bf16), precision="bf16", keep_fp32=["*norm*"]
        ),
        note='`precision="bf16", keep_fp32=["*norm*"]`',
    ),
    "fp64": Feature("parameters", trains(layer(lambda y, m: m.p(y.double()), p=lambda: nn.Linear(6, 3).double()))),
    "complex": Feature(
        "parameters",
        trains(parameter(lambda y, p: (y * p).abs(), lambda: torch.randn(6, dtype=torch.complex64))),
        world=3,
    ),
    "integer and bool": Feature(
        "parameters", trains(parameter(lambda y, p: y[:, p], lambda: torch.tensor([2, 0, 1]), False))
    ),
    "no dimensions": Feature("parameters", trains(parameter(lambda y, p: y * p, lambda: torch.tensor(2.0)))),
    "no elements": Feature("parameters", trains(parameter(lambda y, p: torch.cat([y, p]), lambda: torch.zeros(0, 6)))),
    "fewer rows than ranks": Feature(
        "parameters",
        trains(
            layer(
                lambda y, m: y @ m.p.t() + y[:, :5] @ m.q.t(),
                p=lambda: nn.Parameter(torch.randn(2, 6)),
                q=lambda: nn.Parameter(torch.randn(2, 5)),
            )
        ),
        world=3,
    ),
    "transposed": Feature("parameters", trains(parameter(lambda y, p: y @ p, lambda: torch.randn(5, 6).t())), world=3),
    "channels last": Feature(
        "parameters",
        trains(
            parameter(
                lambda y, p: F.conv2d(y.view(-1, 6, 1, 1).expand(-1, 6, 2, 2), p),
                lambda: torch.randn(4, 6, 2, 2).to(memory_format=CHANNELS_LAST),
            )
        ),
    ),
    "expanded": Feature(
        "parameters",
        trains(parameter(lambda y, p: y * p, lambda: torch.randn(1, 6).expand(4, 6))),
        refused=r"parameter 'p' .*is expanded.*contiguous\(\)",
        error=ShardingError,
        note="pass `p.contiguous()`",
    ),
    "two parameters over one memory": Feature(
        "parameters",
        trains(layer(lambda y, m: y, p=shares_memory)),
        refused="parameter 'p.0.weight' and parameter 'p.1.weight' share memory",
        error=ShardingError,
        note="tie by assigning one `nn.Parameter` to both names",
    ),
    "weight norm and other parametrizations": Feature(
        "parameters", trains(layer(lambda y, m: m.p(y), p=lambda: parametrizations.weight_norm(nn.Linear(6, 5))))
    ),
    "spectral norm": Feature(
        "parameters",
        trains(
            dataclasses.replace(
                layer(lambda y, m: m.p(y), p=lambda: parametrizations.spectral_norm(nn.Linear(6, 5))), replicas=True
            )
        ),
    ),
    "weight norm by hooks (`nn.utils.weight_norm`)": Feature(
        "parameters",
        trains(layer(lambda y, m: m.p(y), p=lambda: programs.old_weight_norm(nn.Linear(6, 5)))),
        refused="changes attributes of modules",
        error=CaptureError,
        note="use `nn.utils.parametrizations.weight_norm`",
    ),
    "read outside forward: a penalty in the loss": Feature(
        "parameters", programs.penalty, note="with `.full_tensor()` where the loss is computed outside of the model"
    ),
    "read outside forward: another method, such as `generate()`": Feature(
        "parameters",
        programs.other_method,
        refused=r"method 'first_alone' works on parameters.*with model\.unsharded",
        error=ShardingError,
        note="inside `model.unsharded()`",
    ),
    "read outside forward: norms, sums, full tensors": Feature(
        "parameters",
        programs.full_values,
        note="`.full_tensor()` on every rank before `.item()` of a sum, which is refused without it",
    ),
    "created after compile": Feature(
        "parameters", programs.late_parameter, refused="added, removed or replaced.*unwrap", error=CaptureError
    ),
    "lazy": Feature(
        "parameters",
        trains(chain(rows, lambda: nn.LazyLinear(5))),
        refused="'0.weight' is lazy.*call the plain model once",
        error=ShardingError,
    ),
    "embedding with `sparse=True`": Feature(
        "parameters",
        trains(Case(lambda: Chain(nn.Embedding(37, 4, sparse=True)), lambda g: {"x": tokens(g)}, loss=same)),
        refused="sparse=True.*set sparse=False",
        error=CaptureError,
    ),
    # Layers.
    "convolutions with group norm": Feature(
        "layers",
        trains(
            chain(
                images,
                lambda: nn.Conv2d(3, 4, 3),
                lambda: nn.GroupNorm(2, 4),
                nn.ReLU,
                lambda: nn.ConvTranspose2d(4, 5, 2),
            )
        ),
    ),
    "convolutions in channels last": Feature(
        "layers",
        trains(
            chain(
                images, lambda: nn.Conv2d(3, 4, 3).to(memory_format=CHANNELS_LAST), nn.ReLU, lambda: nn.Conv2d(4, 5, 2)
            )
        ),
    ),
    "batch norm": Feature(
        "layers",
        trains(
            chain(images, lambda: nn.Conv2d(3, 5, 3), lambda: nn.BatchNorm2d(5), nn.ReLU, replicas=True, loose=MEANS)
        ),
        note="each rank has its own statistics, as under DDP; rank 0's are saved",
    ),
    "sync batch norm": Feature(
        "layers",
        trains(chain(images, lambda: nn.SyncBatchNorm(3))),
        refused="SyncBatchNorm.*use BatchNorm",
        error=CaptureError,
        note="use `BatchNorm` (statistics of each rank) or `GroupNorm`",
    ),
    "multi-head attention": Feature("layers", trains(chain(sequences, Attends, loose=KEYS))),
    "`nn.Transformer`": Feature("layers", trains(Case(Both, sequences, loss=same, optimizer=sgd))),
    "LSTM": Feature("layers", trains(chain(sequences, with_lstm))),
    "embedding bag": Feature(
        "layers", trains(Case(lambda: Chain(nn.EmbeddingBag(37, 5)), lambda g: {"x": tokens(g)}, loss=same))
    ),
    "dropout": Feature(
        "layers",
        trains(chain(rows, lambda: nn.Linear(7, 6), lambda: nn.Dropout(0.3), replicas=True)),
        note="each rank's random stream goes on as in plain PyTorch",
    ),
    "custom autograd function": Feature(
        "layers", trains(layer(lambda y, m: Square.apply(y, m.p), p=lambda: nn.Parameter(torch.randn(6, 5))))
    ),
    "activation checkpointing": Feature(
        "layers",
        trains(layer(lambda y, m: checkpoint(m.p, y, use_reentrant=False), p=two_layers)),
    ),
    "activation checkpointing, reentrant": Feature(
        "layers",
        trains(layer(lambda y, m: checkpoint(m.p, y, use_reentrant=True), p=two_layers)),
    ),
    "submodule under `torch.compile`": Feature(
        "layers",
        trains(layer(lambda y, m: m.p(y), p=lambda: torch.compile(nn.Linear(6, 5), backend="eager"))),
        note="traced with the rest",
    ),
    "integer and quantised buffers": Feature(
        "layers",
        trains(
            layer(
                lambda y, m: y @ (m.q.float() * m.scale),
                q=lambda: torch.randint(-128, 127, (6, 5), dtype=torch.int8),
                scale=lambda: torch.rand(5),
            )
        ),
    ),
    "buffers that forward updates": Feature(
        "layers", trains(dataclasses.replace(layer(lambda y, m: m.p(y), p=Codebook), replicas=True))
    ),
    "Hugging Face Llama": Feature("layers", trains(CASES["hf_llama"]), wide=True),
    "Hugging Face Llama with gradient checkpointing": Feature("layers", trains(Case(hf_checkpointed, labelled))),
    "Hugging Face GPT-2": Feature("layers", trains(CASES["gpt2"]), wide=True),
    "Hugging Face BERT": Feature("layers", trains(CASES["bert"]), wide=True),
    "Hugging Face T5": Feature("layers", trains(CASES["t5"]), wide=True),
    # Calls.
    "dataclass with nested dicts and None as the output": Feature(
        "calls",
        trains(
            Case(
                lambda: Layer(lambda y, m: Result(y.square().mean(), {"y": y, "more": [y.sum(), None, {"n": 3}]})),
                rows,
                loss=lambda out: out.loss,
            )
        ),
    ),
    "no output": Feature("calls", programs.no_output),
    "no tensor arguments": Feature("calls", trains(Case(no_tensors, no_batch, loss=same))),
    "batches of other sizes on each rank": Feature("calls", programs.ragged),
    "branches that differ between ranks": Feature(
        "calls",
        programs.other_branches,
        refused="ranks disagree about call.*'b.weight'",
        error=RankMismatchError,
        note="compute all branches and choose with `torch.where`",
    ),
    "a smaller last batch, other lengths": Feature(
        "calls", programs.lengths, note="one capture for each shape, up to `max_captures`"
    ),
    "more shapes than `max_captures`": Feature(
        "calls", programs.too_many_shapes, refused="max_captures is 2.*pad inputs", error=SignatureError
    ),
    "evaluation between steps": Feature("calls", programs.evaluates),
    "autocast": Feature("calls", programs.autocasts),
    "Hugging Face with its cache as output": Feature("calls", programs.cache_output),
    "Hugging Face with a cache as argument": Feature(
        "calls",
        programs.cache_argument,
        refused="changes argument past_key_values",
        error=CaptureError,
        note="call the model inside `model.unsharded()`",
    ),
    "`generate()`": Feature("calls", programs.generates, note="inside `model.unsharded()`"),
    # Training loops.
    "gradient hooks on parameters": Feature("training loops", loops.gradient_hooks),
    "post-accumulate hooks": Feature("training loops", loops.post_accumulate_hooks),
    "forward hooks of submodules": Feature("training loops", loops.forward_hooks),
    "backward hooks of submodules": Feature(
        "training loops",
        loops.backward_hooks,
        refused="backward hook, which a captured graph would drop.*remove the hook",
        error=CaptureError,
    ),
    "moving average by hand": Feature("training loops", loops.average_by_hand),
    "`swa_utils.AveragedModel`": Feature(
        "training loops", loops.averaged_model, note="`ema = AveragedModel(plain)`, then `zcompile.compile(ema)`"
    ),
    "`copy.deepcopy(model)`": Feature("training loops", loops.copies, refused="cannot be copied", error=ShardingError),
    "gradient clipping": Feature("training loops", loops.clips),
    "gradient accumulation, `no_sync`": Feature("training loops", loops.accumulates),
    "learning-rate schedulers": Feature("training loops", loops.schedules),
    "double backward": Feature(
        "training loops",
        loops.double_backward,
        refused="create_graph=True asks for a double backward",
        error=BackwardError,
    ),
    "wrapped in `DistributedDataParallel`": Feature(
        "training loops", loops.wrapped_in_ddp, refused="DistributedDataParallel.*plain module", error=ConfigError
    ),
    "wrapped in `DataParallel`": Feature(
        "training loops", loops.wrapped_in_dp, refused="DataParallel.*plain module", error=ConfigError
    ),
    "wrapped in `fully_shard`": Feature(
        "training loops", loops.wrapped_in_fsdp, refused="fully_shard.*plain module", error=ConfigError
    ),
}
