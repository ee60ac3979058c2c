"""What recognising an explicit causal mask is worth: Hugging Face models, one device, forward and backward.

python benchmarks/causal.py                             Llama and GPT-2, bf16, against eager and torch.compile
python benchmarks/causal.py --device cpu --quick        a few layers of a small size, to try the script

Dynamo makes Hugging Face models pass an explicit mask, which rules the flash kernel out; zcompile proves that the mask is the
causal one and drops it. The last column names the attention kernels that ran in one step; the first step includes compilation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WARMUP, STEPS = 4, 20
ATTENTION = ("flash", "fmha", "sdpa", "attention")


def llama(layers: int, hidden: int, seq: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "intermediate_size": 3 * hidden}
    config = LlamaConfig(
        vocab_size=32000, hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=seq, **sizes
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int, hidden: int, seq: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=hidden // 64, n_positions=seq, **off)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {"llama": llama, "gpt2": gpt2}


def systems() -> dict[str, Callable[[nn.Module], Any]]:
    import zcompile

    return {
        "eager": lambda model: model,
        "torch.compile": lambda model: torch.compile(model),
        "zcompile": lambda model: zcompile.compile(model),
    }


def measure(model: Any, tokens: Tensor) -> tuple[float, float, list[str]]:
    """Seconds of the first step, median milliseconds of forward and backward, and the attention kernels of one step."""
    on_gpu = tokens.is_cuda

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False)["loss"].backward()
        for p in model.parameters():
            p.grad = None

    start = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    first_s = time.perf_counter() - start
    for _ in range(WARMUP - 1):
        step()
    if not on_gpu:
        return first_s, float("nan"), []
    times = []
    for _ in range(STEPS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = {event.key.split("(")[0].split("<")[0][:48] for event in profile.key_averages()}
    return first_s, statistics.median(times), sorted(n for n in names if any(word in n.lower() for word in ATTENTION))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="llama,gpt2")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    args = parser.parse_args()
    layers, hidden, seq, batch = (2, 128, 64, 2) if args.quick else (8, 2048, 2048, 4)
    tokens = torch.randint(0, 30000, (batch, seq), generator=torch.Generator().manual_seed(0)).to(args.device)
    print(f"{layers} layers, hidden {hidden}, sequence {seq}, batch {batch}, bf16\n")
    print("| model | system | first step s | fwd+bwd ms | attention kernels |\n|---|---|---|---|---|")
    for name in args.models.split(","):
        for system, make in systems().items():
            torch.manual_seed(0)
            torch.compiler.reset()
            model = make(MODELS[name](layers, hidden, seq).to(args.device, torch.bfloat16))
            first_s, ms, kernels = measure(model, tokens)
            print(f"| {name} | {system} | {first_s:.1f} | {ms:.1f} | {', '.join(kernels) or '–'} |", flush=True)
            del model


if __name__ == "__main__":
    main()
