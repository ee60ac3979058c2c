"""The sequence of collectives says what ranks must agree on, and nothing that may differ between them."""

import re

from tests.verify.steps import step, text
from zcompile.ir.graph import Step
from zcompile.ir.text import parse_step
from zcompile.passes import parse
from zcompile.verify.ranks import collective_sequence
from zcompile.verify.verifier import Verifier

SPEC = "plan-units,shard{stage=3 size=2 ignore=a.c},unshard{stage=3},reduce{stage=3},outline,bucket{mib=0},prefetch,cleanup"


def scheduled(rows: int) -> Step:
    """The step for inputs with ``rows`` rows."""
    ragged = re.sub(r"\b4, ([78])\]", rf"{rows}, \1]", text("plain"))
    ragged = re.sub(r"\[([78]), 4\]", rf"[\1, {rows}]", ragged)
    result = parse_step(ragged)
    parse(SPEC).run_step(result, Verifier("fast"))
    return result


def test_lines() -> None:
    assert collective_sequence(step("stage3")).lines == (
        "forward zc.all_gather dp=2 144 bytes: 'a.w' f32[4, 8], 'a.b' f32[4]",
        "forward zc.all_gather dp=2 112 bytes: 'b.w' f32[4, 7]",
        "forward zc.all_gather dp=2 128 bytes: 'c.w' f32[4, 8]",
        "forward zc.all_gather dp=2 128 bytes: 'f.w' f32[4, 8]",
        "backward zc.all_gather dp=2 128 bytes: 'f.w' f32[4, 8]",
        "backward zc.reduce_scatter dp=2 256 bytes: 'c.w' f32[8, 8]",
        "backward zc.all_gather dp=2 128 bytes: 'c.w' f32[4, 8]",
        "backward zc.reduce_scatter dp=2 224 bytes: 'b.w' f32[8, 7]",
        "backward zc.all_gather dp=2 112 bytes: 'b.w' f32[4, 7]",
        "backward zc.all_reduce dp=2 32 bytes: 'a.c' f32[8]",
        "backward zc.all_gather dp=2 128 bytes: 'a.w' f32[4, 8]",
        "backward zc.reduce_scatter dp=2 288 bytes: 'a.w' f32[8, 8], 'a.b' f32[8]",
    )


def test_ragged_ranks_have_one_sequence() -> None:
    one, other = collective_sequence(scheduled(4)), collective_sequence(scheduled(6))
    assert one == other and one.digest == other.digest
    assert one == collective_sequence(step("outlined"))


def test_names_of_nodes_do_not_count() -> None:
    renamed = step("outlined")
    for graph in renamed.graphs:
        for index, node in enumerate(graph.fx.nodes):
            node.name = f"n{index}"
    assert collective_sequence(renamed).digest == collective_sequence(step("outlined")).digest


def test_order_counts() -> None:
    assert collective_sequence(step("stage3")).digest != collective_sequence(step("outlined")).digest


def test_nothing_distributed_is_an_empty_sequence() -> None:
    assert collective_sequence(step("plain")).lines == ()
