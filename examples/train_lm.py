"""Train a byte-level Llama on real text: ``torchrun --nproc_per_node=2 examples/train_lm.py --check``."""

import argparse
import json
import os
import sys

import torch
import torch.distributed as dist
from corpus import Batches, read_bytes
from generate import generate
from llama import Llama, LlamaConfig
from reference import largest_difference
from report import Progress, held_bytes, print_summary, total_bytes

import zcompile

SIZES = dict(steps=300, batch=8, seq=128, hidden=128, layers=4, heads=4, kv_heads=2, check_steps=5, max_mib=4, seed=0)
TOLERANCE = 1e-5  # of --check, relative, in fp32


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a text file or a folder; default: the standard library's own text")
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--policy", default="prefetch")
    parser.add_argument("--backend", choices=("eager", "inductor"), help="default: inductor on GPUs, else eager")
    parser.add_argument("--precision", choices=("bf16", "fp16"))
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--tied", action="store_true", help="one weight for the embedding and the head")
    parser.add_argument("--check", action="store_true", help="repeat the first steps in one process of plain PyTorch")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    for name, value in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return parser.parse_args()


def new_model(args: argparse.Namespace, device: torch.device) -> Llama:
    torch.manual_seed(args.seed)
    sizes = dict(hidden=args.hidden, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads, tied=args.tied)
    return Llama(LlamaConfig(ffn=(args.hidden * 8 // 3 + 15) // 16 * 16, max_seq=args.seq, **sizes)).to(device)


def train(args: argparse.Namespace, device: torch.device) -> float | None:
    """Train, report on rank 0, and return the largest relative loss difference of ``--check`` there."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    batches = Batches(read_bytes(args.data, args.max_mib * 2**20), args.batch, args.seq, args.seed)
    backend = args.backend or ("inductor" if device.type == "cuda" else "eager")
    options = dict(stage=args.stage, policy=args.policy, backend=backend, precision=args.precision)
    model = zcompile.compile(new_model(args, device), **options)
    optimizer = zcompile.optim.AdamW(model.parameters(), lr=args.lr)
    losses, held = [], {}
    with Progress(args.steps, args.batch * args.seq * world_size, device, every=20, show=rank == 0) as progress:
        for step in range(args.steps):
            tokens, labels = (tensor.to(device) for tensor in batches.get(step, rank))
            loss = model(tokens, labels=labels)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step + 1 == args.steps:
                held = held_bytes(model.report(optimizer).to_dict())
            optimizer.zero_grad()
            mean = loss.detach() / world_size
            if world_size > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
            progress.show(step, losses[-1])
    with model.unsharded():
        text = generate(model.original, b"def ", num_bytes=200, max_seq=args.seq)
    if rank != 0:
        return None
    print_summary(progress.console, str(model.pipeline), held, text.decode(errors="replace"))
    difference = largest_difference(losses, new_model(args, device), batches, args, world_size) if args.check else None
    if args.json:
        result = dict(stage=args.stage, world_size=world_size, steps=args.steps, check_max_rel_diff=difference)
        result |= dict(first_loss=losses[0], last_loss=losses[-1], tokens_per_s=progress.tokens_per_s)
        print(json.dumps(result | total_bytes(held)))
    return difference


def main() -> None:
    args, device = parse(), torch.device("cpu")
    if "RANK" in os.environ:
        if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    try:
        difference = train(args, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if difference is not None and args.precision is None and not difference < TOLERANCE:
        sys.exit(f"check failed: the losses differ by {difference:.2e} relative, {TOLERANCE:.0e} are allowed")


if __name__ == "__main__":
    main()
