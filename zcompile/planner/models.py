"""Models by name, by Hugging Face configuration or from the user's own factory, built on ``meta``, with a micro-batch to match."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcompile.errors import PlanError

#: tokens of a sequence where none are asked for and the model allows as many
DEFAULT_SEQ = 2048


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    Attributes:
        name: how it was asked for.
        module: on ``meta``.
        inputs: one micro-batch, on ``meta``.
        notes: what a reader of a plan should know about it.
    """

    name: str
    module: nn.Module
    inputs: Any
    notes: tuple[str, ...] = ()


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }


#: configurations as their authors publish them, in Hugging Face's terms
BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "llama3-8b": _llama(4096, 14336, 32, 32),
    "llama3-70b": _llama(8192, 28672, 80, 64),
    "mixtral-8x7b": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
    "vit-l": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_labels": 1000,
    },
    "bert-base": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
}


def load_model(spec: str, micro_batch: int = 1, seq: int | None = None, layers: int | None = None) -> Model:
    """A model by built-in name, ``path/to/config.json`` of Hugging Face, or ``module:factory``.

    A factory returns ``(model, example_inputs)``, or a model whose ``config`` tells what it takes. It is called on the ``meta``
    device, with ``micro_batch``, ``seq`` and ``layers`` where it takes arguments of these names.

    Args:
        spec: which one.
        micro_batch: rows.
        seq: tokens in a row; None: 2048, or as many as the model can.
        layers: so many layers instead of the model's own number.

    Raises:
        PlanError: it is not known or cannot be built, or sizes that have no meaning.
    """
    for name, value in (("micro-batch", micro_batch), ("sequence length", seq), ("number of layers", layers)):
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}; it must be at least 1")
    own = {} if layers is None else {"num_hidden_layers": layers}
    if spec in BUILT_IN:
        return _from_config(spec, {**BUILT_IN[spec], **own}, micro_batch, seq)
    if spec.endswith(".json"):
        return _from_config(spec, {**_read(Path(spec)), **own}, micro_batch, seq)
    module, colon, factory = spec.partition(":")
    if colon and module and factory:
        return _from_factory(spec, module, factory, {"micro_batch": micro_batch, "seq": seq, "layers": layers})
    raise PlanError(
        f"model '{spec}' is not known; the known ones are {', '.join(BUILT_IN)}, or pass the path of a Hugging Face config.json, "
        "or module:factory"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"config '{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        raise PlanError(f"config '{path}' is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise PlanError(f"config '{path}' has no model_type; pass the config.json of a Hugging Face model")
    return config


def _from_config(name: str, config: dict[str, Any], micro_batch: int, seq: int | None) -> Model:
    try:
        import transformers
    except ImportError as error:
        raise PlanError(
            f"model '{name}' needs transformers, which is not installed; pip install 'zcompile[hf]'"
        ) from error
    kind = config.pop("model_type")
    try:
        made = transformers.AutoConfig.for_model(kind, **config)
        wanted = (config.get("architectures") or [None])[0]
        cls = getattr(transformers, wanted, None) if wanted else None
        made.use_cache = False
        notes = _without_attention_dropout(made)
        if hasattr(made, "num_local_experts") or hasattr(made, "num_experts"):
            made._experts_implementation = "batched_mm"
            notes.append(
                "experts are not sharded by expert yet: each rank gathers all experts of a layer, and computes its tokens with copies "
                "of the weights that they need (experts_implementation='batched_mm')"
            )
        with torch.device("meta"):
            module = cls(made) if cls is not None else transformers.AutoModelForCausalLM.from_config(made)
    except Exception as error:
        raise PlanError(f"model '{name}' cannot be built: {type(error).__name__}: {error}") from error
    if kind == "gpt2":
        module.loss_type = "ForCausalLM"  # what it finds out by itself with a warning, which Dynamo cannot trace
    return Model(name, module.train(), inputs_of(made, micro_batch, seq), tuple(notes))


def _without_attention_dropout(config: Any) -> list[str]:
    """Take attention's dropout away: with it, the CPU tensors of a plan would get an attention that keeps all its probabilities,
    where a GPU has a kernel that does not."""
    names = [n for n in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop") if getattr(config, n, None)]
    if not names:
        return []
    shown = ", ".join(f"{n}={getattr(config, n)}" for n in names)
    for name in names:
        setattr(config, name, 0.0)
    return [f"planned without the dropout of attention ({shown}), for which a GPU's kernel takes no memory"]


def inputs_of(config: Any, micro_batch: int, seq: int | None) -> dict[str, torch.Tensor]:
    """What a model with a Hugging Face configuration takes: tokens or pixels, and labels.

    Raises:
        PlanError: more tokens than the model has positions, or a configuration that does not say what it takes.
    """
    if getattr(config, "image_size", None) and not hasattr(config, "vocab_size"):
        size = config.image_size
        pixels = torch.empty(micro_batch, getattr(config, "num_channels", 3), size, size, device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(micro_batch, dtype=torch.int64, device="meta")}
    if not hasattr(config, "vocab_size"):
        raise PlanError(
            f"configuration {type(config).__name__} does not say what the model takes; use module:factory with inputs"
        )
    most = getattr(config, "max_position_embeddings", None)
    if seq is not None and most is not None and seq > most:
        raise PlanError(f"sequence length is {seq} and the model has {most} positions; pass a shorter one")
    length = seq or min(most or DEFAULT_SEQ, DEFAULT_SEQ)
    tokens = torch.empty(micro_batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": torch.empty_like(tokens)}


def _from_factory(spec: str, module: str, factory: str, sizes: Mapping[str, int | None]) -> Model:
    try:
        make: Callable[..., Any] = getattr(importlib.import_module(module), factory)
    except Exception as error:
        raise PlanError(f"model '{spec}' cannot be imported: {type(error).__name__}: {error}") from error
    takes = inspect.signature(make).parameters
    if sizes["layers"] is not None and "layers" not in takes:
        raise PlanError(f"factory '{spec}' takes no 'layers'; leave the number of layers to it")
    with torch.device("meta"):
        made = make(**{name: value for name, value in sizes.items() if name in takes and value is not None})
    if isinstance(made, nn.Module):
        if not hasattr(made, "config"):
            raise PlanError(f"factory '{spec}' returns a model alone; return (model, example_inputs)")
        return Model(spec, made, inputs_of(made.config, sizes["micro_batch"] or 1, sizes["seq"]))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise PlanError(f"factory '{spec}' returns {type(made).__name__}; return (model, example_inputs)")
    return Model(spec, made[0], made[1])
