"""What the verifier accepts, how much it remembers, and the interface that it keeps."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.verify.steps import FACTS, step
from zcompile.errors import ConfigError, VerifyError
from zcompile.ir import edit, meta
from zcompile.ir.graph import Graph
from zcompile.ir.text import parse_graph, parse_step
from zcompile.verify.facts import Fact
from zcompile.verify.inference import Inference, Type, agree, type_name, type_of
from zcompile.verify.verifier import Interface, Verifier

JOINT = """
graph toy.joint
  inputs:
    %w: f32[8, 8] = param 'w' of [8, 8]
    %x: f32[4, 8] = input 0
    %m: f32[4, 8] = input 1
    %t: f32[4, 8] = tangent 0
  body:
    %xm: f32[4, 8] = aten.mul.Tensor(%x, %m)
    %y: f32[4, 8] = aten.mm(%xm, %w)
    %xt: f32[8, 4]{1, 8} = aten.t(%xm)
    %g: f32[8, 8] = aten.mm(%xt, %t)
  return output 0 %y, grad 'w' %g
"""


def test_levels() -> None:
    with pytest.raises(ConfigError, match=r"^verify is 'slow'; it must be one of full, fast, off$"):
        Verifier("slow")


def test_fast_takes_types_as_they_are() -> None:
    broken = parse_graph(JOINT.replace("%y: f32[4, 8]", "%y: f32[4, 9]"))
    Verifier("fast").verify_joint(broken, {})
    with pytest.raises(VerifyError, match=r"^%y in toy.joint is recorded as f32\[4, 9\]"):
        Verifier("full").verify_joint(broken, {})


def test_off_checks_nothing() -> None:
    Verifier("off").verify(parse_graph(JOINT.replace("%y: f32[4, 8]", "%y: f32[4, 9]")), {})


def test_a_joint_pass_may_drop_an_input_but_not_add_one() -> None:
    interface = Interface.of(parse_graph(JOINT))
    smaller = JOINT.replace("aten.mm(%xm, %w)", "aten.mm(%x, %w)")
    Verifier().verify_joint(parse_graph(smaller), {}, interface)
    larger = parse_graph(JOINT.replace("aten.mm(%xt, %t)", "aten.mm(%xt, %y)"))
    with pytest.raises(
        VerifyError, match=r"^%g in toy.joint is returned as grad 'w' but depends on param 'w', which it"
    ):
        Verifier().verify_joint(larger, {}, interface)


def test_replayed_randomness_is_accepted() -> None:
    """Forward saves the random state, backward runs the same dropout under it."""
    source = parse_step(
        """
graph toy.forward
  inputs:
    %x: f32[4, 8] = input 0
  body:
    %run: (u8[5056], (f32[4, 8], b8[4, 8])) = higher_order.run_and_save_rng_state(aten.native_dropout, %x, 0.5, True)
    %state: u8[5056] = operator.getitem(%run, 0)
    %both: (f32[4, 8], b8[4, 8]) = operator.getitem(%run, 1)
    %d: f32[4, 8] = operator.getitem(%both, 0)
  return output 0 %d, saved 'state' %state, saved 'x' %x
graph toy.backward
  inputs:
    %state: u8[5056] = saved 'state'
    %x: f32[4, 8] = saved 'x'
    %t: f32[4, 8] = tangent 0
  body:
    %d: f32[4, 8], %mask: b8[4, 8] = higher_order.run_with_rng_state(%state, aten.native_dropout, %x, 0.5, True)
    %g: f32[4, 8] = aten.native_dropout_backward(%t, %mask, 2.0)
  return input_grad 0 %g
"""
    )
    Verifier().verify_step(source, {Fact.RECOMPUTE_SAFE: {}}, Interface.of(source))
    bare = parse_step(
        str(source).replace("higher_order.run_with_rng_state(%state, aten.native_dropout, ", "aten.native_dropout(")
    )
    with pytest.raises(VerifyError, match=r"draws new random numbers with aten\.native_dropout"):
        Verifier().verify_step(bare, {Fact.RECOMPUTE_SAFE: {}})
    off = str(bare).replace("aten.native_dropout(%x, 0.5, True)", "aten.native_dropout(%x, 0.5, False)")
    Verifier().verify_step(parse_step(off), {Fact.RECOMPUTE_SAFE: {}})


def test_gradients_of_one_process_need_no_reduction() -> None:
    alone = step("plain")
    for graph in alone.graphs:
        graph.axes["dp"] = 1
    Verifier().verify_step(alone, {Fact.GRADS_REDUCED: {"stage": 0}})


def test_two_parameters_may_have_one_gradient() -> None:
    """The gradients of two biases that are added are one value, reduced for each."""
    source = parse_step(
        """
graph toy.forward  axis dp=2
  inputs:
    %a: f32[8] = param 'a' replicate of [8]
    %b: f32[8] = param 'b' replicate of [8]
    %x: f32[4, 8] = input 0
  body:
    %xa: f32[4, 8] = aten.add.Tensor(%x, %a)
    %y: f32[4, 8] = aten.add.Tensor(%xa, %b)
  return output 0 %y
graph toy.backward  axis dp=2
  inputs:
    %t: f32[4, 8] = tangent 0
  body:
    %g: f32[8] = aten.sum.dim_IntList(%t, [0])
    %r: bucket = zc.all_reduce([%g, %g], 'dp', 2)
    %ga: f32[8], %gb: f32[8] = zc.wait(%r)
  return grad 'a' %ga, grad 'b' %gb
"""
    )
    Verifier().verify_step(
        source,
        {fact: FACTS["stage0"][fact] for fact in (Fact.PARAMS_SHARDED, Fact.GRADS_REDUCED)},
        Interface.of(source),
    )


def layers(count: int) -> Graph:
    """A chain of equal layers of four operators."""
    graph = parse_graph(JOINT.replace("joint", "forward").replace(", grad 'w' %g", ""))
    value = graph.outputs[0][0]
    aten = torch.ops.aten
    calls: list[Callable[..., object]] = [aten.relu.default, aten.neg.default, aten.sigmoid.default, aten.tanh.default]
    with graph.fx.inserting_before(graph.output):
        for _ in range(count):
            for target in calls:
                node = graph.fx.call_function(target, (value,))  # type: ignore[arg-type]
                meta.set_value(node, meta.value(value))
                value = node
    graph.set_outputs([(value, role) for _, role in graph.outputs])
    return graph


def test_equal_layers_cost_one() -> None:
    inference = Inference()
    ran = []
    run = inference._run
    inference._run = lambda *args: ran.append(args[0]) or run(*args)  # type: ignore[method-assign]
    for _ in range(2):
        for node in layers(48).body:
            assert inference.check(node) is None
    assert len(ran) == 8, "an equal call ran again"


def test_types() -> None:
    tensor = Type(torch.bfloat16, (4, 1, 8), (8, 99, 1), "cpu")
    assert str(tensor) == "bf16[4, 1, 8]"
    assert str(Type(torch.float32, (4, 8), (1, 4), "cuda")) == "f32[4, 8]{1, 4}@cuda"
    assert agree(tensor, tensor._replace(strides=(8, 8, 1)), layout=True)
    assert not agree(tensor, tensor._replace(strides=(1, 8, 4)), layout=True)
    assert agree(tensor, tensor._replace(strides=(1, 8, 4)), layout=False)
    assert not agree(tensor, tensor._replace(device="cuda"), layout=False)
    assert not agree((tensor,), tensor, layout=False) and not agree(tensor, (tensor,), layout=False)
    assert agree(type_of([None, 3]), type_of([None, 3]), layout=True)
    assert not agree(type_of(3), type_of(3.0), layout=True)
    assert type_name(type_of((None, 3, torch.ones(2)))) == "(none, int(3), f32[2])"


def test_literals_are_told_apart() -> None:
    """1, 1.0 and True are equal as dictionary keys and give three types."""
    graph = parse_graph(JOINT)
    x = graph.inputs[1]
    inference = Inference()
    with graph.fx.inserting_before(graph.output):
        kinds = [edit.call(graph.fx, torch.ops.aten.full.default, ([2], value)) for value in (1, 1.0, True)]
    assert [inference.infer(n).dtype for n in kinds] == [torch.int64, torch.float32, torch.bool]
    assert meta.tensor(x).dtype == torch.float32


def chain(length: int) -> str:
    """The text of a step of ``length`` layers, each a unit with one weight; the first gradients depend on all of them."""

    def lines(template: str, layers: Iterable[int] = range(length)) -> str:
        return "".join(template.format(i=i, n=i + 1, r=length - 1 - i) for i in layers)

    gather = "    %s{i}: bucket = zc.all_gather([%w{i}], 'dp', 2)\n    %f{i}: f32[8, 8] = zc.wait(%s{i})\n"
    forward = "    %h{n}: f32[8, 8] = aten.mm(%h{i}, %f{i}) @{i}\n    zc.release([%f{i}])\n"
    backward = (
        "    %p{i}: f32[8, 8] = aten.mm(%h{i}, %g{n}) @{r}\n    %g{i}: f32[8, 8] = aten.mm(%g{n}, %f{i}) @{r}\n"
        "    %r{i}: bucket = zc.reduce_scatter([%p{i}], 'dp', 2)\n    %d{i}: f32[4, 8] = zc.wait(%r{i})\n    zc.release([%f{i}])\n"
    )
    weights = lines("    %w{i}: f32[4, 8] = param '{i}.w' shard(0) of [8, 8] unit '{i}'\n")
    saved = lines("    %h{i}: f32[8, 8] = saved 'h{i}'\n")
    saved_outputs, grads = lines(", saved 'h{i}' %h{i}"), lines(", grad '{i}.w' %d{i}")
    return (
        f"graph chain.forward  axis dp=2\n  inputs:\n{weights}    %h0: f32[8, 8] = input 0\n"
        f"  body:\n{lines(gather + forward)}  return output 0 %h{length}{saved_outputs}\n"
        f"graph chain.backward  axis dp=2\n  inputs:\n{weights}{saved}    %g{length}: f32[8, 8] = tangent 0\n"
        f"  body:\n{lines(gather + backward, reversed(range(length)))}"
        f"  return input_grad 0 %g0{grads}\n"
    )


def test_work_is_linear_in_depth() -> None:
    """Counted in calls of functions, which do not depend on the machine."""

    def num_calls(length: int) -> int:
        target, verifier, calls = parse_step(chain(length)), Verifier(), 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            verifier.verify(target, FACTS["stage3"], Interface.of(target))
        finally:
            sys.setprofile(None)
        return calls

    calls = [num_calls(length) for length in (30, 60, 120)]
    growth = (calls[2] - calls[1]) / (calls[1] - calls[0])
    assert growth < 2.02, f"{calls} calls for 30, 60 and 120 layers"
