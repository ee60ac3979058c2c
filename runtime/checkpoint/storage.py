"""Pieces and blobs in files of ``torch.distributed.checkpoint``, without its collectives.

DCP plans a save in four object collectives. Here every rank knows its part from the placement of the parameters, so the
planners and the storage are driven directly: nothing needs a process group, no wait is unwatched, and a thread can do it
while the model trains. The files are DCP's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zcompile import compat
from zcompile.errors import StateError
from zcompile.runtime.checkpoint.folder import sync_folder, write_file
from zcompile.runtime.checkpoint.pieces import Piece


def pack(value: Any) -> bytes:
    """A Python value as ``torch.save`` writes it."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def unsafe_types(blob: bytes) -> list[str]:
    """The types in a packed value that ``unpack`` will refuse."""
    return torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(blob))


def unpack(name: str, data: io.BytesIO) -> Any:
    """The value in a blob, with tensors on the CPU; runs no code of the file.

    Raises:
        StateError: a type that is not known to be safe.
    """
    try:
        return torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        types = ", ".join(unsafe_types(data.getvalue())) or "something"
        raise StateError(
            f"'{name}' in the checkpoint holds {types}, which is not loaded from a file that might not be trusted; if you "
            f"trust it, allow the type with torch.serialization.add_safe_globals([...]) first"
        ) from error


class _SavePlanner(DefaultSavePlanner):
    """Saves given pieces and blobs."""

    def __init__(self, pieces: Mapping[str, Piece], blobs: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces, self._blobs = pieces, blobs

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, piece) for name, piece in self._pieces.items()]
        return SavePlan([*items, *(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._blobs)])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        name = write_item.index.fqn
        return io.BytesIO(self._blobs[name]) if name in self._blobs else self._pieces[name].local


def write(folder: Path, rank: int, pieces: Mapping[str, Piece], blobs: Mapping[str, bytes]) -> None:
    """Write this rank's part into ``folder``, which is there, and say in one more file what was written where.

    Everything is on the device when this returns. ``finish`` makes one checkpoint of all parts.
    """
    on_host = all(piece.local.device.type == "cpu" for piece in pieces.values())
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0 if on_host else 10_000_000)
    planner = _SavePlanner(pieces, blobs)
    planner.set_up_planner({}, writer.storage_meta(), rank == 0)
    writer.set_up_storage_writer(rank == 0)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]  # its place in the list names its files
    writing = writer.write_data(planner.finish_plan(plan), planner)
    write_file(_part(folder, rank), pickle.dumps((plan, writing.wait())))
    sync_folder(folder)


def finish(folder: Path, size: int) -> None:
    """Write DCP's metadata from what all ranks have written. One rank does it.

    Raises:
        ValueError: the parts do not make up whole tensors.
    """
    parts = [pickle.loads(_part(folder, rank).read_bytes()) for rank in range(size)]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({}, is_coordinator=True)
    _, metadata = planner.create_global_plan([plan for plan, _ in parts])
    FileSystemWriter(folder).finish(metadata, [results for _, results in parts])
    for rank in range(size):
        _part(folder, rank).unlink()
    sync_folder(folder)


class Stored:
    """A checkpoint's tensors and blobs, to read.

    Attributes:
        names: of everything in it.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)
        self.names = frozenset(self._metadata.state_dict_metadata)

    def read(self, pieces: Mapping[str, Piece], blobs: Iterable[str] = ()) -> dict[str, Any]:
        """Fill ``pieces`` in place, whatever pieces were saved, and return what is in ``blobs``.

        Needs memory for one saved piece at a time.
        """
        planner = _LoadPlanner(pieces, blobs)
        planner.set_up_planner({}, self._metadata, True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        with torch.no_grad():
            self._reader.read_data(plan, planner).wait()
        return planner.values


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return compat.load_dcp_metadata(file)


class _LoadPlanner(LoadPlanner):
    """Reads into given pieces, and the values of given blobs."""

    def __init__(self, pieces: Mapping[str, Piece], blobs: Iterable[str]) -> None:
        self._pieces, self._blobs = pieces, blobs
        self._metadata: Metadata | None = None
        self.values: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), f"{name} is a tensor"
            if piece.local.numel():
                items += create_read_items_for_chunk_list(name, stored, [_chunk(piece)])
        for name in self._blobs:
            assert isinstance(self._metadata.state_dict_metadata[name], BytesStorageMetadata), f"{name} is a blob"
            index, nothing = MetadataIndex(name), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.values[name] = unpack(name, value)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._pieces[read_item.dest_index.fqn].local
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # written in place


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.local.size())


def _write_item(name: str, piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.local)
    data = TensorWriteData(_chunk(piece), properties, torch.Size(piece.shape))
    return WriteItem(MetadataIndex(name, piece.offsets), WriteItemType.SHARD, tensor_data=data)


def _part(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}"
