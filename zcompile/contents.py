"""What of a compiled model and its optimizer goes to disk from this rank."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import zcompile
from zcompile.errors import CheckpointError, UnfilledError
from zcompile.module import CompiledModule
from zcompile.runtime.checkpoint.folder import Manifest
from zcompile.runtime.checkpoint.pieces import Piece, optimizer_pieces, own_part, parameter_pieces, staged
from zcompile.runtime.checkpoint.random_state import random_state
from zcompile.runtime.checkpoint.storage import pack


@dataclass
class Contents:
    """What this rank has to save.

    Attributes:
        manifest: without what only the call knows.
        pieces: that it writes, by name in the files.
        blobs: that it writes.
        packed: what it writes if rank 0's differs.
        digests: what tells whether two ranks have packed the same.
    """

    manifest: Manifest
    pieces: dict[str, Piece]
    blobs: dict[str, bytes]
    packed: dict[str, bytes]
    digests: dict[str, str]


def own_contents(model: CompiledModule, optimizer: Optimizer | None, data: Any, asynchronous: bool) -> Contents:
    """What this rank saves of a model, its optimizer and its data.

    Args:
        model: complete: no parameter or saved buffer is without a value.
        optimizer: over the model's parameters, or None.
        data: with a ``state_dict``, or None.
        asynchronous: copy what will change.
    """
    shards = model._session.runner.shards
    rank, size = shards.mesh.rank, shards.mesh.size
    buffers, extra_state = saved_buffers(model)
    check_filled(model, "saved")
    pieces = {f"model.{name}": piece for name, piece in parameter_pieces(shards).items()}
    blobs = {f"random.{rank}": pack(random_state(shards.mesh.device))}
    saved_optimizer = None
    if optimizer is not None:
        states, numbers = optimizer_pieces(shards, optimizer)
        pieces |= {f"optimizer.{name}.{key}": piece for (name, key), piece in states.items()}
        dtypes: dict[str, dict[str, str]] = {}
        for (name, key), piece in states.items():
            dtypes.setdefault(name, {})[key] = dtype_name(piece.local.dtype)
        saved_optimizer = {"type": type(optimizer).__name__, "state": dtypes}
        if rank == 0:
            blobs["optimizer"] = pack(numbers)
    pieces = own_part(pieces, rank, size)
    position = None if data is None else data.state_dict()
    packed = {
        "buffers": pack({"buffers": {n: b.cpu() for n, b in buffers.items()}, "extra_state": extra_state}),
        "data": pack(position),
    }
    if rank == 0:
        pieces |= {f"model.{name}": Piece.whole(buffer) for name, buffer in buffers.items()}
        blobs["data"], blobs["extra_state"] = packed["data"], pack(extra_state)
    manifest = Manifest(
        data="",
        step=0,
        world_size=size,
        stage=model._config.stage,
        versions={"zcompile": zcompile.__version__, "torch": str(torch.__version__)},
        parameters={
            name: {"names": list(spec.names), "shape": list(spec.shape), "dtype": dtype_name(spec.dtype)}
            for name, spec in shards.specs.items()
        },
        buffers={n: {"shape": list(b.shape), "dtype": dtype_name(b.dtype)} for n, b in buffers.items()},
        optimizer=saved_optimizer,
        helpers=[],
    )
    digests = {"buffers": _digest(packed["buffers"]), "data": _digest(_in_one_form(position, packed["data"]))}
    return Contents(manifest, staged(pieces) if asynchronous else pieces, blobs, packed, digests)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _in_one_form(value: Any, packed: bytes) -> bytes:
    """Bytes that are the same for equal values, where the value is JSON: pickles of equal values may differ."""
    try:
        return json.dumps(value, sort_keys=True).encode()
    except (TypeError, ValueError):
        return packed


def check_filled(model: CompiledModule, what: str) -> None:
    """Refuse a model with a parameter or saved buffer that has no value yet.

    Raises:
        UnfilledError: names the first.
    """
    buffers, _ = saved_buffers(model)
    names = model._session.runner.shards.unfilled() + [n for n, b in buffers.items() if b.is_meta]
    if names:
        raise UnfilledError(f"'{names[0]}' has no value yet ({len(names)} in all) and cannot be {what}; fill it first")


def saved_buffers(model: CompiledModule) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The buffers that the model's state dict holds, and the extra state of its modules."""
    plain = model.original.state_dict()
    buffers = {n: b for n, b in model.original.named_buffers(remove_duplicate=False) if n in plain}
    return buffers, {n: value for n, value in plain.items() if n.rpartition(".")[2] == "_extra_state"}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name that ``dtype_name`` gave."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"checkpoint has the dtype {name!r}, which this torch does not know")
    return dtype
