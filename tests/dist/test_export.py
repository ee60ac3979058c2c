"""Exported weights: what from_pretrained reads, in bounded memory, in the place of what was there at one moment."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import zcompile
from tests.dist.checkpoints import every
from tests.dist.models import VOCAB, hf_llama
from tests.dist.pool import Pools
from tests.dist.training import this_rank
from zcompile import export
from zcompile.errors import CheckpointError, ConfigError, UnfilledError
from zcompile.export import INDEX
from zcompile.runtime.checkpoint import swap
from zcompile.runtime.sharding import full as full_tensors

pytestmark = pytest.mark.dist


def tiny(tied: bool) -> nn.Module:
    torch.manual_seed(2)
    return hf_llama(tied)


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def trained_and_exported(path: str, tied: bool) -> None:
    model = zcompile.compile(tiny(tied), stage=3, backend="eager", verify="off")
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        ids = tokens(step, this_rank())
        model(input_ids=ids, labels=ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    zcompile.export_safetensors(model, path)
    assert sorted(os.listdir(path)) == ["config.json", "generation_config.json", "model.safetensors"]
    reference = tiny(tied)
    reference.load_state_dict(model.full_state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded) is LlamaForCausalLM and loaded.dtype is torch.float32
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = tokens(9, 0)
    assert torch.equal(loaded(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)

    zcompile.export_safetensors(model, path, dtype=torch.bfloat16, max_shard_bytes=8000)  # in the place of the first
    names = sorted(os.listdir(path))
    index = json.loads((Path(path) / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert names == ["config.json", "generation_config.json", *files, INDEX]
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))] and len(files) > 2
    assert ("lm_head.weight" in index["weight_map"]) != tied
    held = {}
    for file in files:
        with safe_open(Path(path) / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        assert sum(t.nbytes for t in tensors.values()) <= 8000
        assert all(index["weight_map"][name] == file for name in tensors)
        held |= tensors
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())
    narrow = AutoModelForCausalLM.from_pretrained(path)
    assert narrow.dtype is torch.bfloat16
    for name, value in narrow.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name].bfloat16()), name


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_what_was_trained(ranks: Pools, tmp_path: Path, tied: bool) -> None:
    ranks(2, trained_and_exported, path=str(tmp_path / "llama"), tied=tied)


def every_tensor(path: str) -> None:
    """Buffers, tensors without elements or dimensions, and what another program reads back."""
    model = zcompile.compile(every(), backend="eager", verify="off", ignore="ignored.*")
    zcompile.export_safetensors(model, path, max_shard_bytes=1000)
    full = {n: v for n, v in model.full_state_dict().items() if not n.endswith("_extra_state")}
    held = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            held |= {name: opened.get_tensor(name) for name in opened.keys()}
    assert held.keys() == full.keys() - {"head.weight"}
    for name, value in held.items():
        assert value.dtype == full[name].dtype and torch.equal(value, full[name]), name
    with torch.device("meta"):
        empty = every()
    other = zcompile.compile(empty, stage=1, backend="eager", verify="off")
    assert zcompile.load_safetensors(other, path) == []
    for name, value in full.items():
        assert torch.equal(other.full_state_dict()[name], value), name


@pytest.mark.parametrize("world", [0, 3])
def test_every_kind_of_tensor_is_exported(ranks: Pools, tmp_path: Path, world: int) -> None:
    ranks(world, every_tensor, path=str(tmp_path / "weights"))


def live_bytes() -> int:
    """Bytes of all tensors of this process, each memory once."""
    storages: dict[int, int] = {}
    for t in gc.get_objects():
        if type(t) in (Tensor, nn.Parameter) and not t.is_meta:
            try:
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            except RuntimeError:  # of an earlier test's tracing: without memory
                continue
    return sum(storages.values())


def in_bounded_memory(path: str) -> tuple[int, int]:
    """The most bytes of tensors that this rank had more than before, at each gather and each file; and of the whole model."""
    torch.manual_seed(0)
    model = zcompile.compile(nn.Sequential(*[nn.Linear(99, 100) for _ in range(24)]), backend="eager", verify="off")
    limit = 100_000  # two layers and a half
    whole = sum(spec.num_bytes for spec in model._session.runner.shards.specs.values())
    gc.collect()
    before, peak = live_bytes(), 0
    assemble, add = full_tensors.assemble, export._Writer.add

    def measure() -> None:
        nonlocal peak
        peak = max(peak, live_bytes() - before)

    def assembled(*args: Any) -> Tensor:
        full = assemble(*args)
        measure()
        return full

    def added(self: Any, name: str, tensor: Tensor) -> Any:
        self._held = _Watched(self._held, measure) if not isinstance(self._held, _Watched) else self._held
        return add(self, name, tensor)

    full_tensors.assemble, export._Writer.add = assembled, added  # type: ignore[assignment, method-assign]
    try:
        zcompile.export_safetensors(model, path, max_shard_bytes=limit)
    finally:
        full_tensors.assemble, export._Writer.add = assemble, add  # type: ignore[method-assign]
    assert len(list(Path(path).glob("*.safetensors"))) == 12
    return peak, whole


class _Watched(dict[str, Tensor]):
    """Measures whenever a tensor has come."""

    def __init__(self, held: dict[str, Tensor], measure: Any) -> None:
        super().__init__(held)
        self.measure = measure

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(name, value)
        self.measure()


def test_an_export_needs_memory_for_a_file_and_a_batch(ranks: Pools, tmp_path: Path) -> None:
    limit, layer = 100_000, 4 * 99 * 100
    for rank, (peak, whole) in enumerate(ranks(2, in_bounded_memory, path=str(tmp_path / "big"))):
        assert peak > layer, "something was measured"
        assert peak < (2 if rank == 0 else 1) * limit + 2 * layer, (rank, peak)
        assert peak < whole / 3


# In the place of another. ---------------------------------------------------------------------------------------------


def replaced(path: str) -> None:
    model = zcompile.compile(tiny(True), backend="eager", verify="off")
    folder = Path(path)
    if this_rank() == 0:
        (folder / "sub").mkdir(parents=True)
        (folder / "tokenizer.json").write_text("mine")
        (folder / "sub" / "note").write_text("mine too")
        (folder / "model-00001-of-00009.safetensors").write_text("old")
        leftover = folder.with_name(f".{folder.name}.abc.new")
        leftover.mkdir()
    torch.distributed.barrier()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    import safetensors.torch

    save_file = safetensors.torch.save_file
    safetensors.torch.save_file = fails
    with pytest.raises(CheckpointError, match=r"export_safetensors\(.*\) failed on rank 0 with OSError: \[Errno 28\]"):
        zcompile.export_safetensors(model, path)
    safetensors.torch.save_file = save_file
    torch.distributed.barrier()
    assert (folder / "model-00001-of-00009.safetensors").read_text() == "old", "nothing was changed"
    assert os.listdir(folder.parent) == [folder.name], "nothing is left over"
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        zcompile.export_safetensors(model, path, max_shard_bytes=0)
    with pytest.raises(ConfigError, match=r"dtype is torch\.int8"):
        zcompile.export_safetensors(model, path, dtype=torch.int8)
    exchange = swap._exchange
    for attempt in range(2):
        zcompile.export_safetensors(model, path)
        assert (folder / "tokenizer.json").read_text() == "mine"
        assert (folder / "sub" / "note").read_text() == "mine too"
        assert list(folder.glob("*.safetensors")) == [folder / "model.safetensors"], "no weights but the new ones"
        assert os.listdir(folder.parent) == [folder.name]
        torch.distributed.barrier()
        swap._exchange = lambda *_: False  # a file system that cannot
        if attempt and this_rank() == 0:
            os.rename(folder, folder.with_name(f".{folder.name}.old"))  # the end came between two renames
            swap.recover(folder)
            assert (folder / "model.safetensors").exists()
    swap._exchange = exchange
    torch.distributed.barrier()
    assert (folder / "model.safetensors").exists()


def test_an_export_takes_the_place_of_another(ranks: Pools, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    ranks(2, replaced, path=str(tmp_path / "in" / "out"))


def unfilled(path: str) -> None:
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    model = zcompile.compile(empty, backend="eager", verify="off")
    with pytest.raises(UnfilledError, match=r"'weight' has no value yet \(2 in all\) and cannot be exported"):
        zcompile.export_safetensors(model, path)
    with pytest.raises(UnfilledError, match=r"'weight' has no value yet \(2 in all\) and cannot be saved"):
        zcompile.save_checkpoint(path, model)
    assert not Path(path).exists()


def test_a_model_without_values_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, unfilled, path=str(tmp_path / "c"))
