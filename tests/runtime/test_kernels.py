"""Triton kernels without a GPU: in Triton's interpreter, and compiled for one; and which of kernel and reference runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zcompile.runtime.optim.adamw_update import AdamWOptions, Scaling, Segment, Segments, adamw_, update

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
OPTIONS = AdamWOptions(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=2.0, maximize=False)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env=variables, cwd=ROOT
    )


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    """The interpreter must be on before Triton is imported: a process of its own."""
    checks = "tests/runtime/kernel_checks.py"
    result = run(
        "-m", "pytest", "-q", "-p", "tests.runtime.on_cpu", "-p", "no:cacheprovider", checks, TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and "failed" not in result.stdout, result.stdout


COMPILE = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zcompile.runtime.kernels.adamw import _adamw_kernel, BLOCK_ELEMENTS, NUM_WARPS
from zcompile.runtime.kernels import average, blocks, cross_entropy, stage, sumsq

def compile(kernel, types, constants, num_warps, odd=()):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {}
    for i, name in enumerate(names):
        kind = signature[name]
        places = {(i, j): each for j, each in enumerate(kind)} if isinstance(kind, tuple) else {(i,): kind}
        aligned |= {place: [["tt.divisibility", 16]] for place, each in places.items() if each[0] in "*i" and name not in odd}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]

def wide(ptx, kind):
    return len(re.findall(rf"{kind}\\.global[.:\\w]*\\.v4\\.b32", ptx))

for param, grad in (("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
    types = {name: f"*{param}" for name in ("param", "exp_avg", "exp_avg_sq", "maxima")}
    types |= dict(grad=f"*{grad}", copy_out="*bf16", clip_factor="*fp32", grad_scale="*fp32")
    types |= dict(table="*i64", block_segment="*i32")
    types |= dict.fromkeys(("step_size", "decay", "weight1", "beta2", "weight2", "eps", "root_correction", "sign"), "fp32")
    constants = dict(BLOCK=BLOCK_ELEMENTS, CLIP=True, SCALE=True, AMSGRAD=False, COPY=True)
    ptx = compile(_adamw_kernel, types, constants, NUM_WARPS)
    each = BLOCK_ELEMENTS // (32 * NUM_WARPS)  # elements of a thread
    size = {"fp32": 4, "bf16": 2}
    loads = each * (3 * size[param] + size[grad]) // 16
    stores = each * (3 * size[param] + 2) // 16
    assert (wide(ptx, "ld"), wide(ptx, "st")) == (loads, stores), (param, grad, wide(ptx, "ld"), wide(ptx, "st"), loads, stores)
for kind, size in (("fp32", 4), ("bf16", 2)):
    types = dict(memory=f"*{kind}", partial="*fp32", bad="*i32", numel="i64")
    ptx = compile(sumsq._partial_kernel, types, dict(BLOCK=sumsq.BLOCK_ELEMENTS, NUM_BLOCKS=5), sumsq.NUM_WARPS)
    assert wide(ptx, "ld") and not re.search(r"ld\\.global(?![.:\\w]*v4)", ptx), "only wide loads"
for wire in ("fp32", "bf16"):
    constants = dict(BLOCK=blocks.BLOCK_ELEMENTS)
    each = blocks.BLOCK_ELEMENTS // (32 * blocks.NUM_WARPS) * (2 if wire == "bf16" else 4) // 16  # accesses of a thread
    places = {name: ("*fp32",) * 2 for name in ("outs", "owns", "received")} | dict(owns=(f"*{wire}",) * 2, received=(f"*{wire}",) * 2)
    types = places | dict(strides=("i32",) * 2, starts=("i32",) * 2, numels=("i32",) * 2, factor="fp32")
    ptx = compile(average._average_kernel, types, constants | dict(RANK=1, SIZE=3), blocks.NUM_WARPS, odd=("starts", "numels"))
    assert (wide(ptx, "ld"), wide(ptx, "st")) == (3 * each, 2), (wire, wide(ptx, "ld"), wide(ptx, "st"))
    types = dict(sources=("*fp32",) * 2, firsts=(f"*{wire}",) * 2, seconds=(f"*{wire}",) * 2, starts=("i32",) * 2, numels=("i32",) * 2)
    ptx = compile(stage._stage_kernel, types, constants, blocks.NUM_WARPS, odd=("starts", "numels"))
    assert (wide(ptx, "ld"), wide(ptx, "st")) == (2, 2 * each), (wire, wide(ptx, "ld"), wide(ptx, "st"))
for kind, size in (("fp32", 4), ("bf16", 2)):  # any number of columns: rows begin at multiples of 16
    types = dict(logits=f"*{kind}", labels="*i64", losses="*fp32", lse="*fp32", grad="*fp32", weights="*fp32")
    types |= dict(first="i32", num_columns="i32", stride="i32")
    each = cross_entropy.BLOCK_COLUMNS // (32 * cross_entropy.NUM_WARPS) * size // 16
    kernels = {cross_entropy._reduce_kernel: (1, 0), cross_entropy._differentiate_kernel: (1, 1), cross_entropy._gradients_kernel: (2, 1)}
    for kernel, times in kernels.items():
        constants = dict(BLOCK=cross_entropy.BLOCK_COLUMNS)
        ptx = compile(kernel, types, constants, cross_entropy.NUM_WARPS, odd=("num_columns", "first"))
        assert (wide(ptx, "ld"), wide(ptx, "st")) == tuple(each * n for n in times), (kernel, kind, wide(ptx, "ld"), wide(ptx, "st"))
print("all wide")
"""


@pytest.mark.slow
def test_kernels_compile_to_wide_accesses(tmp_path: Path) -> None:
    """For Hopper, without one: every access to the arenas of a full block is 16 bytes."""
    result = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert "all wide" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("count", "shares"), [(0, []), (1, [1]), (4, [4]), (5, [3, 2]), (9, [3, 3, 3]), (10, [4, 4, 2])]
)
def test_launches_share_tensors_evenly(count: int, shares: list[int]) -> None:
    from zcompile.runtime.kernels import blocks

    each = [torch.zeros(blocks.BLOCK_ELEMENTS * i + 1) for i in range(count)]
    found = list(blocks.launches(each, each))
    assert [len(launch.places) for launch in found] == shares
    assert [place for launch in found for place in launch.places] == list(range(count))
    for launch in found:
        blocks_of = [place + 1 for place in launch.places]
        assert launch.starts == tuple(sum(blocks_of[:i]) for i in range(len(blocks_of)))
        assert launch.num_blocks == sum(blocks_of)
        assert launch.numels == launch.of([tensor.numel() for tensor in each])


def test_launches_are_of_one_kind_of_tensors_and_leave_out_empty_ones() -> None:
    from zcompile.runtime.kernels import blocks

    sizes = (3, 0, 5, 7)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    rows = [torch.zeros(n) for n in sizes], [torch.zeros(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
    assert [launch.places for launch in blocks.launches(*rows)] == [(0, 3), (2,)]


@pytest.mark.parametrize("scaled", [False, True])
def test_on_the_cpu_the_reference_runs(scaled: bool) -> None:
    def make() -> Segments:
        torch.manual_seed(0)
        param, grad, first = torch.randn(3, 200).unbind()
        return Segments(param.clone(), grad.clone(), first.clone(), torch.rand(200), None, (Segment(64, 64, 100),))

    scaling = Scaling(torch.tensor([0.5]), torch.tensor([4.0])) if scaled else Scaling()
    got, want, copy = make(), make(), torch.zeros(200, dtype=torch.bfloat16)
    update([(got, OPTIONS)], scaling, copy)
    if scaled:
        want.grad.mul_(0.125)
    adamw_(want, OPTIONS)
    for name in ("param", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert torch.equal(copy[64:164], got.param[64:164].bfloat16())
    assert not copy[:64].any() and not copy[164:].any()
    assert torch.equal(got.param[:64], make().param[:64])
