"""A batch that is too large for a GPU: what the error says is what the allocator says, and training goes on with less."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import zcompile
from examples.llama import Llama, LlamaConfig
from zcompile.errors import OutOfMemoryError

pytestmark = pytest.mark.gpu

LIMIT = 2 << 30
CONFIG = LlamaConfig(vocab_size=509, hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, max_seq=256)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """This process may take 2 GiB of the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_batch_that_is_too_large() -> None:
    torch.manual_seed(0)
    model = zcompile.compile(Llama(CONFIG).cuda(), backend="eager")
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=1e-3)

    def step(num_rows: int) -> float:
        tokens = torch.randint(509, (num_rows, 256), device="cuda")
        loss = model(tokens, tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = step(2)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(2048)
    error = caught.value
    assert isinstance(error, OutOfMemoryError)
    parts, num_parameters = error.anatomy, sum(p.numel() for p in model.parameters())
    assert 4 * num_parameters <= parts["parameters"] < 4.2 * num_parameters
    assert parts["optimizer"] >= 8 * num_parameters
    kinds = ("parameters", "gradients", "optimizer", "gathered", "activations", "unallocated")
    assert sum(parts[kind] for kind in kinds) <= LIMIT, "what torch reserved"
    assert parts["activations"] + parts["requested"] > LIMIT // 2
    assert parts["total"] == torch.cuda.mem_get_info()[1]
    saved, text = error.advice[0]
    assert saved == (parts["activations"] + parts["requested"]) // 2 and "half the micro-batch" in text
    del caught, error
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(10):
        last = step(2)
    assert last < first
