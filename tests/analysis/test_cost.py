"""Flops against torch's own counter on real calls; bytes of fused kernels against what can be counted by hand."""

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from zcompile.analysis.cost import node_cost, region_cost, region_kernels
from zcompile.analysis.flops import node_flops
from zcompile.ir.graph import Region
from zcompile.ir.text import parse_step


def region(*lines: str) -> Region:
    """A region from text: its inputs, its nodes, its results."""
    inputs, *body, results = lines
    nodes = "".join(f"    {line}\n" for line in body)
    text = (
        f"graph m.forward\n  inputs:\n    %x: f32[] = input 0\n  region r({inputs}):\n{nodes}    return {results}\n"
        "  body:\n  return output 0 %x\n"
    )
    return parse_step(text).forward.regions["r"]


def exported(function: Callable[..., Tensor], *inputs: Tensor) -> list[torch.fx.Node]:
    """The operators of a function, with fake values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return list(make_fx(function, tracing_mode="fake")(*inputs).graph.nodes)


def gradients(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        grads = torch.autograd.grad(function(*inputs).sum(), inputs)
        return torch.stack([g.sum() for g in grads])

    return run


CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (lambda a, b: a @ b, [(3, 5), (5, 7)]),
    "linear": (functional.linear, [(4, 5), (6, 5), (6,)]),
    "bmm": (torch.bmm, [(2, 3, 5), (2, 5, 7)]),
    "convolution": (lambda x, w: functional.conv2d(x, w, stride=2, padding=1), [(2, 3, 8, 8), (4, 3, 3, 3)]),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_torch_forward_and_backward(case: str) -> None:
    function, shapes = CASES[case]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        gradients(function)(*inputs)
    assert sum(map(node_flops, exported(gradients(function), *inputs))) == counter.get_total_flops() > 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_attention_on_the_cpu_counts_as_the_two_products_that_it_is(heads: int, kv_heads: int) -> None:
    """Fake CPU captures hold an operator that torch's counter does not know; causal attention computes half of the square."""
    q, k, v = (torch.randn(2, h, 16, 8, requires_grad=True) for h in (heads, kv_heads, kv_heads))

    def attend(causal: bool) -> Callable[..., Tensor]:
        return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    products = 2 * 2 * 2 * heads * 16 * 16 * 8
    assert sum(map(node_flops, exported(attend(False), q, k, v))) == products
    assert sum(map(node_flops, exported(attend(True), q, k, v))) == products / 2
    # backward computes the scores again: five products for two
    assert sum(map(node_flops, exported(gradients(attend(True)), q, k, v))) == products / 2 * (1 + 2.5)


def test_a_node_reads_its_inputs_and_writes_its_result() -> None:
    (node,) = [n for n in exported(torch.mm, torch.zeros(3, 5), torch.zeros(5, 7)) if n.op == "call_function"]
    cost = node_cost(node)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == ({"f32": 2.0 * 3 * 5 * 7}, 4 * (15 + 35), 4 * 21)


NORM = (
    "%a0: f32[8, 16], %a1: f32[16]",
    "%mul: f32[8, 16] = aten.mul.Tensor(%a0, %a0)",
    "%mean: f32[8, 1] = aten.mean.dim(%mul, [1], True)",
    "%rsqrt: f32[8, 1] = aten.rsqrt(%mean)",
    "%mul_1: f32[8, 16] = aten.mul.Tensor(%a0, %rsqrt)",
    "%mul_2: f32[8, 16] = aten.mul.Tensor(%mul_1, %a1)",
    "%mul_2",
)


def test_a_norm_is_one_kernel_that_reads_once_and_writes_once() -> None:
    (kernel,) = region_kernels(region(*NORM))
    assert kernel.kind == "memory"
    assert (kernel.cost.bytes_read, kernel.cost.bytes_written) == (4 * (8 * 16 + 16), 4 * 8 * 16)


def test_matmuls_bound_groups_and_elementwise_values_are_computed_where_they_are_read() -> None:
    """exp of the first product is stored for the second one, and its cast is not: what reads it computes it again."""
    found = region_kernels(
        region(
            "%a0: f32[8, 8], %a1: bf16[8, 8]",
            "%mm: f32[8, 8] = aten.mm(%a0, %a0)",
            "%cast: f32[8, 8] = prims.convert_element_type(%a1, f32)",
            "%exp: f32[8, 8] = aten.exp(%mm)",
            "%add: f32[8, 8] = aten.add.Tensor(%exp, %cast)",
            "%mm_1: f32[8, 8] = aten.mm(%add, %a0)",
            "%mul: f32[8, 8] = aten.mul.Tensor(%mm_1, %cast)",
            "%mul",
        )
    )
    assert [k.kind for k in found] == ["matmul", "memory", "matmul", "memory"]
    assert [k.cost.num_bytes for k in found] == [2 * 256, 256 + 128 + 256, 3 * 256, 256 + 128 + 256]
    assert found[0].cost.flops == {"f32": 2.0 * 8**3}


@pytest.mark.parametrize(("total", "wanted"), [("f32", "[True, True, False]"), ("bf16", "[True, False, False]")])
def test_a_loss_in_pieces_makes_its_gradients_in_three_products(total: str, wanted: str) -> None:
    """12 rows in pieces of 5: logits are read and written; the sum in float32 is written by a product, added to twice, and rounded."""
    grads = "%h: bf16[12, 8], %w: bf16[40, 8]" if "True, True" in wanted else "%h: bf16[12, 8]"
    found = region_kernels(
        region(
            "%a0: bf16[12, 8], %a1: bf16[40, 8], %a2: i64[12], %a3: f32[12]",
            f"%losses: f32[12], {grads} = zc.linear_cross_entropy_with_grads(%a0, %a1, None, %a2, %a3, dtype=f32, rows=5, "
            f"total={total}, wanted={wanted})",
            "%losses, %h",
        )
    )
    assert [k.kind for k in found] == ["matmul", "memory"]
    products, summed = (3, 40 * 8 * 4) if "True, True" in wanted else (2, 0)
    assert found[0].cost.flops == {"bf16": products * 2.0 * 12 * 8 * 40}
    logits = 12 * 40 * 2
    assert found[1].cost.bytes_read == found[1].cost.bytes_written == logits + 3 * summed


def test_views_and_constants_cost_nothing() -> None:
    found = region_kernels(
        region(
            "%a0: f32[8, 8]",
            "%t: f32[8, 8]{1, 8} = aten.t(%a0)",
            "%full: f32[8, 8] = aten.full([8, 8], 1.0)",
            "%add: f32[8, 8] = aten.add.Tensor(%a0, %full)",
            "%add, %t",
        )
    )
    assert [(k.cost.bytes_read, k.cost.bytes_written) for k in found] == [(256, 256)]


def test_a_reduction_over_rows_goes_with_its_group_and_one_over_columns_reads_by_itself() -> None:
    text = ("%a0: f32[8, 16]", "%exp: f32[8, 16] = aten.exp(%a0)")
    rows = region(*text, "%sum_1: f32[8] = aten.sum.dim_IntList(%exp, [1])", "%exp, %sum_1")
    columns = region(*text, "%sum_1: f32[16] = aten.sum.dim_IntList(%exp, [0])", "%exp, %sum_1")
    assert [k.cost.num_bytes for k in region_kernels(rows)] == [512 + 512 + 32]
    assert [k.cost.num_bytes for k in region_kernels(columns)] == [512 + 512, 512 + 64]


def test_an_embedding_reads_only_the_rows_that_it_picks() -> None:
    found = region("%a0: f32[1000, 4], %a1: i64[3]", "%embedding: f32[3, 4] = aten.embedding(%a0, %a1)", "%embedding")
    assert region_cost(found).bytes_read == 3 * 4 * 4 + 3 * 8


def test_what_two_groups_share_is_read_by_each_and_stored_once() -> None:
    """A value of more inputs than are worth computing twice is stored when a later group reads it too."""
    names = ", ".join(f"%a{i}: f32[64]" for i in range(6))
    body = ["%s0: f32[64] = aten.add.Tensor(%a0, %a1)"]
    body += [f"%s{i}: f32[64] = aten.add.Tensor(%s{i - 1}, %a{i + 1})" for i in range(1, 5)]
    body += [
        "%v: f32[8, 8] = aten.view(%s4, [8, 8])",
        "%mm: f32[8, 8] = aten.mm(%v, %v)",
        "%w: f32[64] = aten.view(%mm, [64])",
        "%mul: f32[64] = aten.mul.Tensor(%s4, %w)",
    ]
    found = region_kernels(region(names, *body, "%mul"))
    assert [k.cost.num_bytes for k in found] == [6 * 256 + 256, 2 * 256, 3 * 256]


def test_work_is_linear_in_nodes() -> None:
    """Eight times the chain takes eight times the calls."""

    def chain(count: int) -> Region:
        body = ["%m0: f32[8, 8] = aten.mm(%a0, %a0)"]
        for i in range(1, count):
            body += [f"%e{i}: f32[8, 8] = aten.exp(%m{i - 1})", f"%m{i}: f32[8, 8] = aten.mm(%e{i}, %a0)"]
        return region("%a0: f32[8, 8]", *body, f"%m{count - 1}")

    def num_calls(of: Region) -> int:
        with cProfile.Profile() as profile:
            region_kernels(of)
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]

    small, large = chain(50), chain(400)
    assert len(region_kernels(large)) == 2 * 400 - 1
    assert num_calls(large) < 8.5 * num_calls(small)
