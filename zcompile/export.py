"""Weights for other programs: safetensors files as Hugging Face reads them, streamed from the shards."""

from __future__ import annotations

import copy
import json
import logging
import os
import uuid
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zcompile.checkpoint import meeting_of
from zcompile.contents import check_filled, dtype_name, saved_buffers
from zcompile.errors import ConfigError
from zcompile.module import CompiledModule
from zcompile.runtime.checkpoint.folder import write_file
from zcompile.runtime.checkpoint.swap import put_in_place, recover, take_over
from zcompile.runtime.sharding.full import BATCH_BYTES

log = logging.getLogger("zcompile")

INDEX = "model.safetensors.index.json"
#: what an export replaces in a folder; other files there stay
_OURS = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "config.json", "generation_config.json")


def export_safetensors(
    model: CompiledModule,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write the whole weights as ``transformers.AutoModel.from_pretrained(path)`` reads them. Collective.

    Tensors are gathered a batch at a time and rank 0 writes one file after the other, so it needs memory for one file and one
    batch beside its shards. A tied weight is written once, under its first name; of buffers those that the state dict has.
    Where the model has a Hugging Face ``config``, it is written too, with the dtype.

    The folder appears at one moment, when it is complete; so does its replacement, into which files that are not an export's
    (a tokenizer) are taken over. A file system that cannot exchange folders (NFS) has a moment without one.

    Args:
        model: the compiled module.
        path: a folder; only rank 0 touches it.
        dtype: of floating-point tensors in the files; None: as they are held.
        max_shard_bytes: of one file; a single tensor may exceed it. With more than one file there is an index.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write; what was at ``path`` is still there.
        UnfilledError: a parameter or buffer has no value yet.
        ConfigError: an argument that has no meaning.
        RankError: another rank is gone, or makes another call.
    """
    path = Path(path)
    meeting = meeting_of(model, "export_safetensors", path, "what was there before is still there")
    shards = model._session.runner.shards
    buffers, extra_state = saved_buffers(model)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.new")
    writer = _Writer(new, dtype, int(max_shard_bytes))

    def prepare() -> dict[str, Any]:
        if max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes}; pass a positive number of bytes")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype is {dtype}; pass a floating-point dtype, or None to keep that of each tensor")
        check_filled(model, "exported")
        if shards.mesh.rank == 0:
            if extra_state:
                log.warning("safetensors files hold tensors only: '%s' is left out", next(iter(extra_state)))
            path.parent.mkdir(parents=True, exist_ok=True)
            recover(path)
            new.mkdir()
            writer.plan(
                [(n, s.numel, s.dtype) for n, s in shards.specs.items()]
                + [(n, b.numel(), b.dtype) for n, b in buffers.items()]
            )
        return {"arguments": f"{path} with {max_shard_bytes} bytes a file and dtype {dtype}"}

    try:
        answers = meeting.step("preparation", prepare)
        meeting.same(answers, "arguments")
        failure: Exception | None = None
        for name, full in shards.iter_full(batch_bytes=min(BATCH_BYTES, int(max_shard_bytes))):
            failure = failure or (writer.add(name, full) if shards.mesh.rank == 0 else None)
            del full  # before the next batch comes

        def finish() -> None:
            if failure is not None:
                raise failure
            if shards.mesh.rank != 0:
                return
            for name, buffer in buffers.items():
                if problem := writer.add(name, buffer.clone()):  # two may share memory
                    raise problem
            writer.finish(model.original)
            take_over(path, new, lambda name: any(fnmatchcase(name, pattern) for pattern in _OURS))
            put_in_place(new, path)

        meeting.step("writing", finish)
    finally:
        if shards.mesh.rank == 0:
            recover(path)


class _Writer:
    """Writes tensors that come one after the other into files of a bounded size."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
        self._folder, self._dtype, self._max_bytes = folder, dtype, max_bytes
        self._files: dict[str, list[str]] = {}
        self._total_bytes = 0
        self._held: dict[str, Tensor] = {}

    def plan(self, tensors: list[tuple[str, int, torch.dtype]]) -> None:
        """Divide tensors, given by name, elements and dtype, over files in the order in which they will come."""
        groups: list[list[str]] = [[]]
        filled = 0
        for name, numel, dtype in tensors:
            num_bytes = numel * self._stored_dtype(dtype).itemsize
            if groups[-1] and filled + num_bytes > self._max_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += num_bytes
            self._total_bytes += num_bytes
        count = len(groups)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        )
        self._files = dict(zip(names, groups, strict=True))

    def add(self, name: str, tensor: Tensor) -> Exception | None:
        """Take the next tensor, and write the file that it completes. Returns what went wrong: the ranks go on gathering then."""
        from safetensors.torch import save_file

        try:
            self._held[name] = tensor.detach().to("cpu", self._stored_dtype(tensor.dtype)).contiguous()
            file, members = next((f, m) for f, m in self._files.items() if name in m)
            if len(self._held) == len(members):
                save_file(self._held, self._folder / file, metadata={"format": "pt"})
                self._held = {}
                with open(self._folder / file, "rb") as written:
                    os.fsync(written.fileno())
        except Exception as error:
            self._held = {}
            return error
        return None

    def finish(self, original: Any) -> None:
        """Write the index, if there is more than one file, and the model's config, if it has one."""
        if len(self._files) > 1:
            weight_map = {name: file for file, members in self._files.items() for name in members}
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            write_file(self._folder / INDEX, json.dumps(content, indent=2).encode())
        if not hasattr(getattr(original, "config", None), "save_pretrained"):
            return
        config = copy.deepcopy(original.config)
        config.architectures = [type(original).__name__]
        dtype = next((p.dtype for p in original.parameters() if p.is_floating_point()), None)
        if dtype is not None:
            config.dtype = dtype_name(self._stored_dtype(dtype))
        config.save_pretrained(self._folder)
        if hasattr(getattr(original, "generation_config", None), "save_pretrained"):
            original.generation_config.save_pretrained(self._folder)

    def _stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and dtype.is_floating_point else dtype
