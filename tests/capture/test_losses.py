"""The backward of ``nll_loss`` as captures have it, beside torch's own kernels."""

from __future__ import annotations

import pytest
import torch

from zcompile import compat

SHAPES = {"one row": ((5,), ()), "rows": ((4, 5), (4,)), "pictures": ((2, 5, 3, 2), (2, 3, 2))}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ignored", [-100, 2])
def test_the_gradient_is_that_of_the_kernel(shape: str, weighted: bool, reduction: int, ignored: int) -> None:
    aten = torch.ops.aten
    of_pictures = shape == "pictures"
    forward = (aten.nll_loss2d_forward if of_pictures else aten.nll_loss_forward).default
    backward = (aten.nll_loss2d_backward if of_pictures else aten.nll_loss_backward).default
    generator = torch.Generator().manual_seed(0)
    sizes, of_target = SHAPES[shape]
    log_probs = torch.randn(sizes, generator=generator).log_softmax(0 if len(sizes) == 1 else 1)
    target = torch.randint(5, of_target, generator=generator)
    if of_target:
        target.view(-1)[1] = ignored
    weight = torch.linspace(0.5, 2, 5) if weighted else None
    loss, total_weight = forward(log_probs, target, weight, reduction, ignored)
    grad = torch.rand(loss.shape, generator=generator)
    arguments = (grad, log_probs, target, weight, reduction, ignored, total_weight)
    have, want = compat.decompositions()[backward](*arguments), backward(*arguments)
    assert have.dtype == want.dtype and have.shape == want.shape
    torch.testing.assert_close(have, want, rtol=1e-6, atol=0)
