"""The verifier refuses a scheduled step that is broken in any of many ways, and names the node."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from tests.verify.steps import FACTS, Mutation, mutations, step
from zcompile import ops
from zcompile.errors import VerifyError
from zcompile.ir import meta
from zcompile.ir.graph import Step
from zcompile.verify.facts import Fact
from zcompile.verify.verifier import Interface, Verifier

VERIFIER = Verifier()
INTERFACE = Interface.of(step("plain"))


def refusal(broken: Step, facts: dict[Fact, dict[str, Any]]) -> str:
    """The first line of the error."""
    with pytest.raises(VerifyError) as caught:
        VERIFIER.verify(broken, facts, INTERFACE)
    first, *window = str(caught.value).splitlines()
    assert any(line.startswith("  >") for line in window), "the error shows no nodes"
    return first


@pytest.mark.parametrize("name", FACTS)
def test_accepts_the_step_itself(name: str) -> None:
    for level in ("full", "fast", "off"):
        Verifier(level).verify(step(name), FACTS[name], INTERFACE)
    VERIFIER.verify(step(name), FACTS[name], INTERFACE)


@pytest.mark.parametrize("mutation", mutations(), ids=lambda m: m.name)
def test_refuses(mutation: Mutation) -> None:
    assert refusal(mutation.apply(), FACTS[mutation.step]) == mutation.error


def test_mutations_have_names_of_their_own() -> None:
    names = [m.name for m in mutations()]
    assert len(names) == len(set(names)) >= 90


# What text cannot say: the parser refuses it, or it is not printed. ----------------------------------------------------


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


def move_wait_before_start(s: Step) -> None:
    g = s.forward.fx
    node(g, "gather_b").prepend(node(g, "wait_1"))


def gather_after_first_use(s: Step) -> None:
    g = s.forward.fx
    for name in ("gather_b", "wait_1", "bw_gathered"):
        node(g, "r2").append(node(g, name))


def reload_after_its_use(s: Step) -> None:
    assert s.backward is not None
    g = s.backward.fx
    anchor = node(g, "gbw")
    for n in (node(g, "d_reload"), next(iter(node(g, "d_reload").users)), node(g, "d_back")):
        anchor.append(n)
        anchor = n


def two_nodes_of_one_name(s: Step) -> None:
    node(s.forward.fx, "r2").name = "m2"


def read_a_node_of_another_graph(s: Step) -> None:
    node(s.forward.fx, "r2").args = (node(s.backward.fx, "r2"),)  # type: ignore[union-attr]


def call_an_unknown_region(s: Step) -> None:
    node(s.forward.fx, "forward_1").args = ("forward_9", node(s.forward.fx, "forward_1").args[1])


def list_a_region_under_another_name(s: Step) -> None:
    s.forward.regions["forward_1"].name = "layer"


def pass_a_constant_to_a_region(s: Step) -> None:
    call = node(s.forward.fx, "forward_1")
    call.args = ("forward_1", [1.0, call.args[1][1]])  # type: ignore[index]


def call_python(s: Step) -> None:
    node(s.forward.fx, "r2").target = print


def read_an_attribute(s: Step) -> None:
    r2 = node(s.forward.fx, "r2")
    with s.forward.fx.inserting_before(r2):
        s.forward.fx.create_node("get_attr", "constant", name="constant")


def pick_a_result_that_is_not_there(s: Step) -> None:
    node(s.forward.fx, "bw_gathered").args = (node(s.forward.fx, "wait_1"), 1)


def forget_what_an_input_is(s: Step) -> None:
    node(s.forward.fx, "x").meta.pop("zc_origin")


def one_input_twice(s: Step) -> None:
    meta.set_origin(node(s.forward.fx, "x"), meta.origin(node(s.forward.fx, "seen")))  # type: ignore[arg-type]


def forget_a_role(s: Step) -> None:
    meta.set_roles(s.forward.output, meta.roles(s.forward.output)[:-1])


def return_a_constant(s: Step) -> None:
    s.forward.output.args = ([1.0],)


def input_after_the_body(s: Step) -> None:
    g = s.forward.fx
    node(g, "r2").append(node(g, "seen"))


def send_nothing(s: Step) -> None:
    node(s.forward.fx, "gather_b").args = ([], "dp", 2)


def use_a_wait_as_a_list(s: Step) -> None:
    g = s.forward.fx
    with g.inserting_before(node(g, "release_1")):
        g.call_function(ops.release, (node(g, "wait_1"),))


def read_a_release(s: Step) -> None:
    g = s.forward.fx
    with g.inserting_after(node(g, "release")):
        g.call_function(operator.neg, (node(g, "release"),))


EDITS: list[tuple[str, Callable[[Step], None], str]] = [
    (
        "stage3",
        move_wait_before_start,
        "%wait_1 in mlp.forward reads %gather_b, which comes later or is not in the graph",
    ),
    (
        "stage3",
        gather_after_first_use,
        "%m2 in mlp.forward reads %bw_gathered, which comes later or is not in the graph",
    ),
    ("stage3", two_nodes_of_one_name, "%m2 in mlp.forward has the name of an earlier node; names are unique"),
    ("stage3", read_a_node_of_another_graph, "%r2 in mlp.forward reads %r2, which comes later or is not in the graph"),
    (
        "outlined",
        call_an_unknown_region,
        "%forward_1 in mlp.forward calls region 'forward_9', which the graph does not have; "
        "it has forward_0, forward_1, forward_2, forward_3",
    ),
    (
        "outlined",
        list_a_region_under_another_name,
        "%output in mlp.forward belongs to a graph that lists region 'layer' as 'forward_1'",
    ),
    (
        "outlined",
        pass_a_constant_to_a_region,
        "%forward_1 in mlp.forward passes 1.0 to region 'forward_1' for %a0; regions take values of nodes",
    ),
    (
        "stage3",
        call_python,
        "%r2 in mlp.forward calls builtins.print, which is no operator that graphs may hold",
    ),
    ("stage3", read_an_attribute, "%constant in mlp.forward is a get_attr; a graph holds calls of operators only"),
    ("stage3", pick_a_result_that_is_not_there, "%bw_gathered in mlp.forward picks result 1 of %wait_1, which has 1"),
    ("stage3", forget_what_an_input_is, "%x in mlp.forward is an input that does not say what it is"),
    (
        "offloaded",
        reload_after_its_use,
        "%backward_1 in mlp.backward reads %d_back, which comes later or is not in the graph",
    ),
    ("stage3", one_input_twice, "%x in mlp.forward is buffer 'seen', and so is %seen; each input comes once"),
    ("stage3", forget_a_role, "%output in mlp.forward returns 8 values with 7 roles"),
    ("stage3", return_a_constant, "%output in mlp.forward returns something other than a list of nodes"),
    ("stage3", input_after_the_body, "%seen_new in mlp.forward reads %seen, which comes later or is not in the graph"),
    ("stage3", send_nothing, "%gather_b in mlp.forward sends something other than a list of at least one tensor"),
    ("stage3", use_a_wait_as_a_list, "%release_default in mlp.forward reads all of %wait_1 at once; pick one result"),
    ("stage3", read_a_release, "%neg in mlp.forward reads %release, which gives nothing"),
]


@pytest.mark.parametrize(("name", "edit", "error"), EDITS, ids=[edit.__name__ for _, edit, _ in EDITS])
def test_refuses_an_edit(name: str, edit: Callable[[Step], None], error: str) -> None:
    broken = step(name)
    edit(broken)
    assert refusal(broken, FACTS[name]) == error


# Options of facts. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fact", "options", "error"),
    [
        (
            "stage3",
            Fact.PARAMS_SHARDED,
            {"stage": 0},
            "%aw in mlp.forward is a shard of parameter 'a.w'; stage 0 replicates every parameter",
        ),
        (
            "stage2",
            Fact.PARAMS_GATHERED,
            {"stage": 3},
            "%aw_gathered in mlp.forward is returned as kept 'a.w:float32'; stage 3 keeps no gathered parameter",
        ),
        (
            "kept",
            Fact.KEEP_BOUNDED,
            {"units": 0, "mib": None},
            "%fw_gathered in mlp.forward is returned as kept 'f.w:float32', which makes 1 kept units; keep allows 0",
        ),
        (
            "stage3",
            Fact.GRADS_REDUCED,
            {"dtype": "bf16"},
            "%reduce_a_1 in mlp.backward reduces grad 'a.w' in f32; the reduce dtype is bf16",
        ),
        (
            "stage3",
            Fact.GRADS_REDUCED,
            {"local": True},
            "%reduce_c in mlp.backward reduces a gradient; this step accumulates locally",
        ),
    ],
)
def test_refuses_other_options(name: str, fact: Fact, options: dict[str, Any], error: str) -> None:
    assert refusal(step(name), FACTS[name] | {fact: options}) == error


def test_stage_3_keeps_parameters_when_the_pass_says_so() -> None:
    facts = FACTS["stage2"] | {Fact.PARAMS_GATHERED: {"stage": 3}}
    num_bytes = (64 + 56 + 64 + 64) * 4
    VERIFIER.verify(step("stage2"), facts | {Fact.KEEP_BOUNDED: {"units": 4, "mib": num_bytes / 2**20}}, INTERFACE)
    limit = (num_bytes - 1) / 2**20
    error = f"and brings what is kept to {num_bytes} bytes; keep allows {limit} MiB"
    few = {Fact.KEEP_BOUNDED: {"units": 4, "mib": limit}}
    assert refusal(step("stage2"), facts | few).endswith(error)


def test_stage_2_keeps_parameters_whatever_the_policy_says() -> None:
    VERIFIER.verify(step("stage2"), FACTS["stage2"] | {Fact.KEEP_BOUNDED: {"units": 0, "mib": 0}}, INTERFACE)


def test_bounds_the_bytes_in_flight() -> None:
    (many,) = [m for m in mutations() if m.name == "too many gathers in flight"]
    limits = {"lookahead": 2, "limit_mib": 480 / 2**20}
    error = f"%gather_f in mlp.forward brings the gathers in flight to 736 bytes; the limit is {480 / 2**20} MiB"
    assert refusal(many.apply(), FACTS["outlined"] | {Fact.PREFETCH_BOUNDED: limits}) == error
    wide = {"lookahead": 2, "limit_mib": 736 / 2**20}
    VERIFIER.verify(many.apply(), FACTS["outlined"] | {Fact.PREFETCH_BOUNDED: wide}, INTERFACE)


def test_the_error_shows_where() -> None:
    broken = step("stage3")
    y = node(broken.forward.fx, "y")
    y.meta["stack_trace"] = '  File "/home/me/model.py", line 7, in forward\n    y = m @ w'
    y.args = (y.args[0], y.args[0])
    with pytest.raises(VerifyError) as caught:
        VERIFIER.verify(broken, {})
    assert str(caught.value).splitlines() == [
        "%y in mlp.forward cannot take these arguments: a and b must have same reduction dim, but got [4, 8] X [4, 8].",
        "  from /home/me/model.py:7",
        "    %wait_3: [f32[8, 8]] = zc.wait(%gather_f)",
        "    %fw_gathered: f32[8, 8] = operator.getitem(%wait_3, 0)",
        "    %ft_1: f32[8, 8]{1, 8} = aten.t(%fw_gathered) @3",
        "  > %y: f32[4, 8] = aten.mm(%m3, %m3) @3",
        "    %loss: f32[] = aten.sum(%y) @3",
        "    zc.release([%fw_gathered])",
        "    return output 0 %loss, output 1 %y, mutation 'seen' %seen_new, saved 'x' %x, saved 'h1' %h1, saved 'd' %d, "
        "saved 'mask' %mask, saved 'r2' %r2",
    ]
