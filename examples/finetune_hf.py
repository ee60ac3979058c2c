"""Fine-tune a Hugging Face model: ``torchrun --nproc_per_node=2 examples/finetune_hf.py``, with ``--accelerate`` too.

Accumulation, clipping and a schedule of transformers'. ``--plain`` leaves zcompile out: the same losses. Accelerate, where it is
used, starts the process group and divides the data; the model is never given to ``prepare``.
"""

import argparse
import contextlib
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import zcompile


class Texts(Dataset):
    """Rows of tokens that can be learned; put your tokenized texts here."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        first = torch.randint(vocab, (rows, 1), generator=torch.Generator().manual_seed(0))
        self.tokens = (first + torch.arange(length)) % vocab

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def build() -> torch.nn.Module:
    """A tiny model with random weights; ``LlamaForCausalLM.from_pretrained(name)`` is the real one."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, **sizes))


def train(args: argparse.Namespace, device: torch.device, accelerator: Any) -> list[float]:
    """The loss of each optimizer step, as the mean over ranks."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = Texts(args.steps * args.accumulate * args.batch * world_size, args.seq, 97)
    sampler = None if accelerator else DistributedSampler(data, world_size, rank, shuffle=False)
    loader = DataLoader(data, args.batch, sampler=sampler)
    loader = accelerator.prepare(loader) if accelerator else loader
    model: Any = build().to(device)
    if not args.plain:
        model = zcompile.compile(model, stage=args.stage, backend="inductor" if device.type == "cuda" else "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.steps // 4, args.steps)
    losses, total = [], torch.zeros((), device=device)
    for number, batch in enumerate(loader):
        is_last = (number + 1) % args.accumulate == 0
        with contextlib.nullcontext() if is_last or args.plain else model.no_sync():  # inside: gradients of this rank
            loss = model(**{k: v.to(device) for k, v in batch.items()}, use_cache=False).loss / args.accumulate
            loss.backward()
        total += loss.detach()
        if is_last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if world_size > 1:
                dist.all_reduce(total)
            losses.append(total.item() / world_size)
            total.zero_()
            if rank == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.4f}, lr {scheduler.get_last_lr()[0]:.2e}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(steps=8, accumulate=2, batch=4, seq=16, stage=3, lr=3e-3).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    for name in ("plain", "accelerate", "json"):
        parser.add_argument(f"--{name}", action="store_true")
    args, accelerator = parser.parse_args(), None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if args.accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu")
    elif "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    losses = train(args, device, accelerator)
    if args.json and (not dist.is_initialized() or dist.get_rank() == 0):
        print(json.dumps(losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
