"""Gradients that are not rounded: sums of bf16 products in fp32, which only devices with such kernels give; here they get one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcompile
from zcompile.config import Config
from zcompile.passes import default_pipeline
from zcompile.passes.wide_gradients import WideGradients

HIDDEN, ROWS = 8, 16

_KERNELS = torch.library.Library("aten", "IMPL")  # processors have no kernel of these
_KERNELS.impl("mm.dtype", lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)), "CPU")
_KERNELS.impl("bmm.dtype", lambda a, b, dtype: torch.bmm(a.to(dtype), b.to(dtype)), "CPU")


class Model(nn.Module):
    """Layers with and without bias, a normalization, and a weight for each of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.norm = nn.RMSNorm(3 * HIDDEN)
        self.second = nn.Linear(3 * HIDDEN, 2 * HIDDEN, bias=False)
        self.experts = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.norm(torch.sin(self.first(x))))
        parts = h.view(ROWS, 2, HIDDEN).transpose(0, 1)
        return (torch.bmm(parts, self.experts).float() ** 2).mean()


def pipeline(size: int = 1, **options: Any) -> str:
    """The default pipeline, with the pass for the CPU."""
    usual = str(default_pipeline(Config(**options), size=size))
    assert str(WideGradients()) in usual
    return usual.replace(str(WideGradients()), str(WideGradients(device="cpu")))


def batch(rank: int) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank))


def wanted(model: Model, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Plain PyTorch's gradients in bf16, and those of the weights as fp32 sums of the same products, by hooks."""
    plain = copy.deepcopy(model).bfloat16()
    found: dict[str, Tensor] = {}
    for name in ("first", "second"):
        layer, seen = plain.get_submodule(name), []
        layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach().float()))
        layer.register_full_backward_hook(
            lambda _, of_x, of_y, name=name, seen=seen: found.update({f"{name}.weight": of_y[0].float().t() @ seen[0]})
        )
    plain(x.bfloat16().requires_grad_()).backward()
    return {name: p.grad.float() for name, p in plain.named_parameters()}, found


def test_gradients_are_the_unrounded_sums() -> None:
    torch.manual_seed(0)
    plain, x = Model(), batch(0)
    model = zcompile.compile(
        copy.deepcopy(plain), backend="eager", precision="bf16", pipeline=pipeline(precision="bf16")
    )
    model(x).backward()
    assert model.history["wide-gradients"].stats == {"products widened": 3, "casts dropped": 1}
    rounded, sums = wanted(plain, x)
    have = {name: p.grad for name, p in model.named_parameters()}
    for name, value in sums.items():
        torch.testing.assert_close(have[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
        assert not torch.equal(have[name], have[name].bfloat16().float()), "it was rounded"
    for name, value in rounded.items():
        torch.testing.assert_close(have[name], value, rtol=1e-2, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_sent_rounded_is_computed_rounded() -> None:
    """And gradients of low-precision parameters are in low precision."""
    for reduce, expected in ((None, True), ("fp32", True), ("bf16", False)):
        passes = str(default_pipeline(Config(precision="bf16", reduce_dtype=reduce), size=2))
        assert ("wide-gradients" in passes) == expected, reduce
    torch.manual_seed(0)
    low = zcompile.compile(Model().bfloat16(), backend="eager", pipeline=pipeline())
    low(batch(0).bfloat16()).backward()
    assert not low.history["wide-gradients"].stats


def test_plans_for_gpus_see_wide_gradients() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(64, 64, bias=False), torch.empty(128, 64)
    for hardware, count in (("h100", 1), ("cpu-2core", 0)):
        options = {"precision": "bf16", "world_size": 2, "hardware": hardware, "advise": False}
        plan = zcompile.plan(model, (x,), **options)
        assert plan.traced.history["wide-gradients"].stats["products widened"] == count


@pytest.mark.parametrize("form", ["autocast", "fp16"])
def test_other_ways_to_low_precision(form: str) -> None:
    """Autocast casts fp32 weights itself, and its gradients back; float16 is no different from bfloat16."""
    torch.manual_seed(0)
    plain, x = nn.Linear(HIDDEN, HIDDEN, bias=False), batch(0)
    options: dict[str, Any] = {"precision": "fp16"} if form == "fp16" else {}
    model = zcompile.compile(copy.deepcopy(plain), backend="eager", pipeline=pipeline(**options), **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        (model(x).float() ** 2).sum().backward()
    assert model.history["wide-gradients"].stats == {"products widened": 1}
    low = torch.float16 if form == "fp16" else torch.bfloat16
    y = (x.to(low) @ plain.weight.detach().to(low).t()).float()
    torch.testing.assert_close(model.weight.grad, (2 * y).to(low).float().t() @ x.to(low).float(), rtol=1e-5, atol=1e-5)
