"""Graph text: printing and parsing are inverse, names and types survive, mistakes are explained."""

import operator
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tests.ir.captured import MODELS, joint_graph
from zcompile import compat, ops
from zcompile.errors import TextError
from zcompile.ir import meta
from zcompile.ir.graph import Direction, Graph, Input, Output, Param
from zcompile.ir.scanner import Scanner
from zcompile.ir.text import parse_graph, parse_step, print_graph, print_node, print_step
from zcompile.ir.types import literal, tensors

EXAMPLE = """\
graph llama.forward  axis dp=2
  inputs:
    %w1: f32[16, 8] = param 'layers.0.up.weight' shard(0) of [32, 8] unit 'layers.0'
    %w2: f32[8] = param 'scale' replicate of [8]
    %w3: f32[8] = param 'x' of [8] frozen
    %rm: f32[8] = buffer 'bn.running_mean'
    %x: bf16[4, 8] = input 0
    %t: f32[] = tangent 0
    %s: f32[4, 8] = saved 'mm'
    %k: f32[32, 8] = kept 'layers.0.up.weight'
  region layer(%a: f32[4, 8], %w: f32[8, 8]):
    %mm: f32[4, 8] = aten.mm(%a, %w)
    %norm: f32[4, 8], _, _ = aten.native_layer_norm(%mm, [8], None, None, 1e-05)
    return %mm, %norm
  region nothing():
    return
  body:
    %b0: bucket = zc.all_gather([%w1], 'dp', 2)
    %w1_full: f32[32, 8] = zc.wait(%b0)
    %part: f32[8, 8] = aten.slice.Tensor(%w1_full, 0, 0, 8)
    %cast: f32[4, 8] = prims.convert_element_type(%x, f32)
    %t1: f32[8, 4]{1, 8} = aten.permute(%cast, [1, 0])
    %y: f32[4, 8], %z: f32[4, 8] = call layer(%cast, %part)
    _, %z2: f32[4, 8] = call layer(%y, %part)
    zc.release([%w1_full])
    %parts: [f32[2, 8], f32[2, 8]] = aten.split.Tensor(%cast, 2)
    %first: f32[2, 8] = operator.getitem(%parts, 0)
    %p0: f32[2, 8], %p1: f32[2, 8] = aten.split.Tensor(%cast, 2)
    %again: f32[2, 8] = operator.getitem(%parts, 0)
    %dead: (f32[4, 8], f32[4, 1], f32[4, 1]) = aten.native_layer_norm(%cast, [8], None, None, 1e-05)
    %empty: f32[2, 2] = aten.full([2, 2], -inf, dtype=f32, layout=strided, device=cpu, pin_memory=False) @3
    %copy: f32[4, 8] = aten.clone(%cast, memory_format=contiguous_format)
    %state: u8[5056], %noise: f32[2] = higher_order.run_and_save_rng_state(aten.rand, [2], device=cpu)
    _: u8[5056], %noise2: f32[2] = higher_order.run_and_save_rng_state(aten.rand, [2], device=cpu)
    %sum: f32[4] = aten.sum.dim_IntList(%cast, [1])
    %sum_1: f32[4] = operator.add(%sum, %sum)
    %constant: f32[] = attr '_tensor_constant0'
  return output 0 %y, saved 'mm' %sum, mutation 'rm' %rm, grad 'x' %w3, input_grad 0 %x, input_mutation 0 %x, kept 'w' %w2"""


def same(graph: Graph) -> str:
    """Check that text and graph are each other's image; returns the text."""
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text
    return text


def test_text_survives_parsing() -> None:
    assert print_graph(parse_graph(EXAMPLE)) == EXAMPLE
    assert print_graph(parse_graph(EXAMPLE).copy()) == EXAMPLE


def test_comments_blank_lines_and_indentation_do_not_matter() -> None:
    loose = "# idea\n\n" + "\n\n".join(line.strip() for line in EXAMPLE.split("\n")) + "\n   # end\n"
    assert print_graph(parse_graph(loose)) == EXAMPLE


@pytest.mark.parametrize("case", MODELS)
def test_captured_graphs_survive(case: str) -> None:
    graph = joint_graph(case)
    parsed = parse_graph(same(graph))
    assert [type(o) for _, o in parsed.outputs] == [type(o) for _, o in graph.outputs]
    by_name = {n.name: n for n in parsed.fx.nodes}
    for node in graph.fx.nodes:
        if node.name in by_name and node.op != "output":
            for old, new in zip(tensors(meta.value(node)), tensors(meta.value(by_name[node.name])), strict=True):
                assert (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device), node.name
                assert old.is_contiguous() == new.is_contiguous(), node.name
                assert old.is_contiguous() or old.stride() == new.stride(), node.name
    assert [n.target for n in parsed.body if not n.name.startswith("getitem")] == [
        n.target for n in graph.body if not n.name.startswith("getitem")
    ]


def test_cuda_text_parses_without_a_gpu() -> None:
    text = """\
graph m.forward  device cuda
  inputs:
    %q: bf16[1, 2, 16, 16] = input 0
    %n: i64[]@cpu = input 1
  body:
    %out: bf16[1, 2, 16, 16], _, _, _, %max: int(16), _, _, _, _ = aten._scaled_dot_product_flash_attention(%q, %q, %q)
    %zeros: f32[2] = aten.full([2], 0, dtype=f32, device=cuda, pin_memory=False)
  return output 0 %out"""
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert [meta.tensor(n).device.type for n in graph.inputs] == ["cuda", "cpu"]
    assert len({compat.is_fake(meta.tensor(n)) and id(meta.tensor(n).fake_mode) for n in graph.inputs}) == 1  # type: ignore[attr-defined]


def test_parsed_values_are_fake_and_complete() -> None:
    graph = parse_graph(EXAMPLE)
    by_name = {n.name: n for n in graph.fx.nodes}
    assert all(compat.is_fake(t) for n in graph.fx.nodes for t in tensors(meta.value(n)))
    assert meta.tensor(by_name["t1"]).stride() == (1, 8)
    bucket = meta.value(by_name["b0"])
    assert isinstance(bucket, list) and bucket[0].shape == (32, 8)
    norm = next(n for n in graph.regions["layer"].fx.nodes if n.name == "native_layer_norm")
    assert [t.shape for t in meta.value(norm)] == [(4, 8), (4, 1), (4, 1)]
    assert meta.region(by_name["empty"]) == 3 and meta.region(by_name["copy"]) is None
    assert by_name["z"].target is operator.getitem and by_name["z"].args[1] == 1
    assert meta.origin(by_name["w1"]) == Param("layers.0.up.weight", (32, 8), "shard", 0, "layers.0")
    assert by_name["noise"].args[0].args[0] is torch.ops.aten.rand.default  # type: ignore[union-attr]
    graph.fx.lint()


def test_nodes_to_recompute_are_marked() -> None:
    text = """\
graph m.joint
  inputs:
    %w: f32[4, 4] = param 'w' of [4, 4]
  body:
    %t: f32[4, 4]{1, 4} = aten.permute(%w, [1, 0]) !recompute @2
    %a: f32[2, 4], %b: f32[2, 4] = aten.split.Tensor(%w, 2) !recompute
    %split: [f32[2, 4], f32[2, 4]] = aten.split.Tensor(%w, 2)
    %c: f32[2, 4] = operator.getitem(%split, 0) !recompute
  return output 0 %t, output 1 %a, output 2 %b, output 3 %c"""
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert [n.name for n in graph.body if meta.recompute(n)] == ["t", "split_1", "a", "b", "c"]


def test_types_may_be_left_out() -> None:
    lines = EXAMPLE.split("\n")
    body = lines.index("  body:")
    kept = ("run_and_save", "attr ", "operator.add", "operator.getitem")
    for i in range(body, len(lines) - 1):
        if (
            not any(word in lines[i] for word in kept)
            and "=" in lines[i]
            and not lines[i].strip().startswith(("%parts", "%dead"))
        ):
            names = [
                part.split(":")[0] for part in lines[i].split(" = ", 1)[0].split(", ") if "%" in part or "_" in part
            ]
            lines[i] = f"    {', '.join(n.strip() for n in names)} = {lines[i].split(' = ', 1)[1]}"
    assert print_graph(parse_graph("\n".join(lines))) == EXAMPLE


def test_a_getitem_out_of_place_keeps_the_node_named() -> None:
    text = """\
graph m.forward
  inputs:
    %x: f32[4, 8] = input 0
  body:
    %norm: (f32[4, 8], f32[4, 1], f32[4, 1]) = aten.native_layer_norm(%x, [8], None, None, 1e-05) @0
    %rstd: f32[4, 1] = operator.getitem(%norm, 2) @0
    %y: f32[4, 8] = aten.neg(%x) @0
    %out: f32[4, 8] = operator.getitem(%norm, 0) @1
  return output 0 %out"""
    assert same(parse_graph(text)) == text


def test_names_that_fx_would_change_are_kept() -> None:
    text = "graph m.forward\n  inputs:\n    %sum: f32[] = input 0\n    %sum_1: f32[] = input 1\n  body:\n"
    text += (
        "    %print: f32[] = aten.add.Tensor(%sum, %sum_1)\n    %x_3: f32[] = aten.neg(%print)\n  return output 0 %x_3"
    )
    graph = parse_graph(text)
    assert print_graph(graph.copy()) == text
    made = graph.fx.create_node("call_function", operator.neg, (), {}, name="x_3")
    assert made.name != "x_3"


def test_steps() -> None:
    forward = "graph m.forward\n  inputs:\n    %x: f32[2] = input 0\n  body:\n  return output 0 %x, saved 'x' %x"
    backward = "graph m.backward\n  inputs:\n    %x: f32[2] = saved 'x'\n  body:\n  return"
    step = parse_step(f"{forward}\n{backward}")
    assert print_step(step) == f"{forward}\n{backward}" == str(step)
    assert meta.tensor(step.forward.inputs[0]).fake_mode is meta.tensor(step.backward.inputs[0]).fake_mode  # type: ignore[union-attr,attr-defined]
    assert parse_step(forward).backward is None
    with pytest.raises(TextError, match=r"m\.backward, m\.forward; expected a forward graph"):
        parse_step(f"{backward}\n{forward}")


HEAD = "graph m.forward\n  inputs:\n    %x: f32[2, 2] = input 0\n  body:\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("graph m.sideways", "line 1: graph name ends with 'sideways'; expected .joint, .forward or .backward"),
        ("graph m.forward axis dp", "line 1: not a graph header; expected graph NAME.forward  axis dp=2  device cuda"),
        ("hello", "line 1: a text starts with a graph; expected graph NAME.forward"),
        ("graph m.forward\ninputs:\n%x: f32[2, = input 0", "line 3: found '='; expected a whole number"),
        (
            "graph m.forward\ninputs:\n%x: g32[2] = input 0",
            "line 3: unknown dtype 'g32'; expected one such as f32, bf16, i64 or b8",
        ),
        (
            "graph m.forward\ninputs:\n%x: f32[2] = output 0",
            "line 3: found 'output'; expected param, buffer, input, tangent, saved, kept or offloaded",
        ),
        (HEAD, "line 4: the text ends after this line; expected a 'return' line"),
        (
            HEAD + "%y: f32[2] = aten.mmm(%x)",
            "line 5: unknown operator 'aten.mmm'; expected one of torch.ops, written as aten.mm or aten.sum.dim_IntList",
        ),
        (HEAD + "%y: f32[2] = aten.neg(%z)", "line 5: unknown value %z; expected a value that is defined above"),
        (HEAD + "%x: f32[2] = aten.neg(%x)", "line 5: %x is defined twice; expected a new name"),
        (HEAD + "%y: f32[2] = aten.neg(%x", "line 5: the line ends too early; expected ',' or ')'"),
        (HEAD + "%y: f32[2] = aten.neg(%x) %x", "line 5: found '%x'; expected the end of the line"),
        (HEAD + "%y: f32[2] = aten.neg(a=%x, %x)", "line 5: found '%x'; expected a keyword argument such as dtype=f32"),
        (
            HEAD + "%y: f32[2] = aten.neg(maybe)",
            "line 5: unknown word 'maybe'; expected a constant, dtype, memory format, layout, device or operator",
        ),
        (
            HEAD + "%y: f32[2] = call layer(%x)",
            "line 5: unknown region 'layer'; expected one of those above; there are none",
        ),
        (
            HEAD + "%y: bucket = aten.neg(%x)",
            "line 5: aten.neg starts nothing that is waited for; expected the type of a tensor",
        ),
        (
            HEAD + "aten.neg(%x)",
            "line 5: the result of neg has no name; expected %name: type = ... (or _ for a result not used)",
        ),
        (
            HEAD + "%y, _ = aten.native_layer_norm(%x, [2], None, None, 1e-5)",
            "line 5: 2 names for 3 results; expected one name, or _, for each result",
        ),
        (HEAD + "%y: f32[2] = 'neg", 'line 5: unexpected "\'neg"; expected a value, name, number or string'),
        (
            HEAD + "return param 'x' %x",
            "line 5: found 'param'; expected output, grad, mutation, input_grad, input_mutation, saved, kept or offloaded",
        ),
        (HEAD + "return output 0 %x\nzc.release([%x])", "line 6: a line after 'return'; expected the end of the graph"),
    ],
)
def test_errors_show_line_and_expectation(text: str, error: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_graph(text)
    number = int(error.removeprefix("line ").split(":")[0])
    assert str(caught.value) == f"{error}\n    {text.split(chr(10))[number - 1].strip()}"


def test_a_text_without_a_graph_is_refused() -> None:
    with pytest.raises(TextError, match="the text has 0 graphs; expected one"):
        parse_graph("# nothing")


def test_a_call_that_cannot_be_inferred_says_why() -> None:
    with pytest.raises(
        TextError, match=r"line 5: aten\.mm does not accept these arguments \(.+\); expected arguments that fit"
    ):
        parse_graph(HEAD + "%y = aten.mm(%x, 3)")


NODE = fx.Graph().placeholder("x")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.complex_numbers(),
    st.sampled_from([0.0, -0.0, float("inf"), float("-inf"), float("nan"), "it's", '"', "\\", "\n", "# no comment", "]"]),
    st.sampled_from([v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.memory_format))]),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.sparse_csr, torch.device("cpu"), torch.device("cuda"), torch.device("meta")]),
    st.sampled_from([torch.ops.aten.mm.default, torch.ops.aten.sum.dim_IntList, operator.add, ops.wait]),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers()),
    st.just(NODE),
)  # fmt: skip
ARGUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def read(text: str) -> Any:
    scanner = Scanner(1, text, {"x": NODE})
    value = scanner.literal()
    scanner.end()
    return value


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS)
def test_literals_survive(value: Any) -> None:
    text = literal(value)
    assert "\n" not in text
    back = read(text)
    assert literal(back) == text
    assert type(back) is type(value)
    assert repr(back).replace("-nan", "nan") == repr(value).replace("-nan", "nan")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(ARGUMENTS, max_size=3), st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), ARGUMENTS, max_size=3)
)
def test_calls_survive(args: list[Any], kwargs: dict[str, Any]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    meta.set_origin(x, Input(0))
    args, kwargs = fx.map_arg((args, kwargs), lambda _: x)  # type: ignore[assignment]
    y = graph.call_function(operator.add, tuple(args), kwargs)
    with compat.new_fake_mode():
        for node in (x, y):
            meta.set_value(node, torch.empty(2))
    meta.set_roles(graph.output([y]), [Output(0)])
    same(Graph("m.forward", Direction.FORWARD, graph))


@given(st.text(alphabet=st.sampled_from(" %x_=:@[](){},.'\"\\-0123456789abfi\n#"), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        parse_graph(HEAD + text)
    except TextError as error:
        assert str(error).startswith("line ")


def test_printing_is_fast() -> None:
    """20,000 nodes take less than two seconds."""
    with compat.new_fake_mode():
        value = torch.empty(4, 8)
    graph = fx.Graph()
    node = graph.placeholder("x")
    meta.set_origin(node, Input(0))
    meta.set_value(node, value)
    for _ in range(20_000):
        node = graph.call_function(torch.ops.aten.add.Tensor, (node, 1.5), {"alpha": 2})
        meta.set_value(node, value)
    meta.set_roles(graph.output([node]), [Output(0)])
    start = time.perf_counter()
    text = print_graph(Graph("m.forward", Direction.FORWARD, graph))
    assert time.perf_counter() - start < 2
    assert text.count("\n") == 20_004


def test_one_node_prints_as_its_line() -> None:
    graph = parse_graph(EXAMPLE)
    lines = {line.strip() for line in EXAMPLE.split("\n")}
    several = ("wait", "layer", "layer_1", "split", "run_and_save_rng_state", "run_and_save_rng_state_1")
    for node in graph.fx.nodes:
        if node.name not in several and not (node.target is operator.getitem and print_node(node) not in lines):
            assert print_node(node) in lines
    by_name = {n.name: n for n in graph.fx.nodes}
    assert print_node(by_name["split"]) == "%split: [f32[2, 8], f32[2, 8]] = aten.split.Tensor(%cast, 2)"
