"""A DeepSpeed script on zcompile: ``torchrun --nproc_per_node=2 examples/deepspeed_style.py --config ds_config.json``.

Only the import and ``initialize`` differ from what it was. Run it again with the same ``--save``, and it goes on where it stopped,
on as many processes as there are then.
"""

import argparse
import json

import torch
import torch.distributed as dist
from corpus import read_bytes
from llama import Llama, LlamaConfig
from torch import Tensor
from torch.utils.data import Dataset

import zcompile

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 200, "warmup_num_steps": 10, "warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto"},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "dataloader_drop_last": True,
    "steps_per_print": 10,
}


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Tokens and labels: neighbouring windows of a text, int64 [seq] each."""

    def __init__(self, text: Tensor, seq: int) -> None:
        self.text, self.seq = text, seq

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.seq : (index + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="a ds_config.json; default: the one in this file")
    parser.add_argument("--save", help="folder of checkpoints; goes on from the latest one in it")
    parser.add_argument("--data", help="a text file or a folder; default: the standard library's own text")
    parser.add_argument("--backend", choices=("eager", "inductor"), help="default: inductor on GPUs, else eager")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    for name, value in dict(steps=200, seq=128, hidden=128, layers=4, max_mib=1).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    model = Llama(LlamaConfig(hidden=args.hidden, layers=args.layers, ffn=args.hidden * 3, max_seq=args.seq))
    engine, _, loader, _ = zcompile.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Windows(read_bytes(args.data, args.max_mib * 2**20), args.seq),
        config=args.config or CONFIG,
        backend=args.backend or ("inductor" if torch.cuda.is_available() else "eager"),
    )
    assert loader is not None
    if engine.global_rank == 0:
        print(engine.settings)
    if args.save:
        engine.load_checkpoint(args.save)
    first, loss = engine.global_steps, torch.tensor(float("nan"))
    while engine.global_steps < args.steps:
        for tokens, labels in loader:
            loss = engine(tokens.to(engine.device), labels=labels.to(engine.device))["loss"]
            engine.backward(loss)
            engine.step()
            if engine.global_steps == args.steps:
                break
    if args.save:
        engine.save_checkpoint(args.save)
    if args.json and engine.global_rank == 0:
        print(
            json.dumps(
                dict(first_step=first, last_step=engine.global_steps, last_loss=loss.item(), lr=engine.get_lr()[0])
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
