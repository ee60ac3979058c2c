"""Sample bytes from a language model."""

import torch
from torch import nn


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, num_bytes: int, max_seq: int, temperature: float = 0.7) -> bytes:
    """Continue ``prompt`` byte by byte; the same on every rank that holds the same weights."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    text = list(prompt)
    for _ in range(num_bytes):
        logits = model(torch.tensor([text[-max_seq:]], device=device))["logits"][0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
