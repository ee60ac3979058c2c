"""Weights from safetensors files into shards: each rank reads its own rows, and nothing is ever full."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from zcompile.errors import StateError
from zcompile.module import CompiledModule
from zcompile.placement import ParamSpec
from zcompile.runtime.sharding.shards import ParameterShards


def load_safetensors(model: CompiledModule, path: str | Path, *, strict: bool = True) -> list[str]:
    """Fill a compiled model, on ``meta`` or not, from safetensors files.

    Each rank reads only the rows that it holds, one parameter at a time; no communication. A tied weight may be stored under
    any of its names.

    Args:
        model: the compiled module.
        path: one ``.safetensors`` file, or a folder of them (with or without ``model.safetensors.index.json``).
        strict: every parameter and saved buffer must be in the files.

    Returns:
        names in the files that the model does not have.

    Raises:
        StateError: no such files, a missing name (with ``strict``), or another shape.
    """
    with ExitStack() as stack:
        where = _open(Path(path), stack)
        shards = model._session.runner.shards
        used: set[str] = set()
        for spec in shards.specs.values():
            name = next((n for n in spec.names if n in where), None)
            if name is not None:
                used.update(n for n in spec.names if n in where)
                _fill(shards, spec, where[name].get_slice(name), name)
            elif strict:
                raise StateError(f"parameter '{spec.name}' is not in {path}; pass strict=False to keep what it holds")
        buffers = dict(model.original.named_buffers(remove_duplicate=False))
        saved = set(torch.nn.Module.state_dict(model))
        found = {n: where[n].get_tensor(n) for n in buffers if n in where}
        missing = [n for n in buffers if n in saved and n not in found]
        if strict and missing:
            raise StateError(f"buffer '{missing[0]}' is not in {path}; pass strict=False to keep what it holds")
        model.load_buffers(found)
        return [n for n in where if n not in used and n not in found]


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """For each name, the open file that holds it."""
    from safetensors import safe_open

    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            files = sorted({path / f for f in json.loads(index.read_text())["weight_map"].values()})
        else:
            files = sorted(path.glob("*.safetensors"))
    else:
        files = [path]
    absent = [f for f in files if not f.exists()]
    if absent or not files:
        raise StateError(
            f"{absent[0] if absent else path} has no safetensors; pass a .safetensors file or a folder of them"
        )
    opened = [stack.enter_context(safe_open(f, framework="pt")) for f in files]
    return {name: file for file in opened for name in file.keys()}


def _fill(shards: ParameterShards, spec: ParamSpec, stored: Any, name: str) -> None:
    """Write this rank's part of one stored tensor into its shard."""
    shape = tuple(stored.get_shape())
    if shape != spec.shape:
        raise StateError(
            f"parameter '{name}' has shape {list(spec.shape)} and the file has {list(shape)}; load a file of the same model"
        )
    if not spec.is_sharded or spec.shard_dim != 0:
        shards.fill(spec.name, stored[...])
        return
    start, stop = spec.rows(shards.mesh.rank)
    with torch.no_grad():
        local = shards.local(spec.name)
        local.zero_()
        if stop > start:
            local[: stop - start].copy_(stored[start:stop])
    shards.mark_filled(spec.name)
