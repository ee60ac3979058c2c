"""The whole pipeline keeps the bits of real models: every stage, world sizes that do and do not divide the rows."""

import pytest

from tests.ir.captured import MODELS, joint_graph
from tests.passes.numbers import assert_same_numbers
from zcompile.capture.split import split
from zcompile.ir import meta
from zcompile.ir.graph import Step
from zcompile.ir.text import parse_step, print_step
from zcompile.passes import parse
from zcompile.passes.replay import replay

PIPELINE = (
    "plan-units,shard{{stage={stage} size={size}}},unshard{{stage={stage}}},reduce{{stage={stage}}},"
    "outline,bucket{{mib={mib}}},prefetch{{lookahead=1}},cleanup"
)


@pytest.fixture(scope="module", params=MODELS)
def step(request: pytest.FixtureRequest) -> Step:
    graph = joint_graph(request.param)
    return split(graph, meta.tensor(graph.inputs[0]).fake_mode)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stage", "size", "mib"), [(0, 2, 0), (1, 2, 0), (2, 3, 1), (3, 2, 0), (3, 3, 1)])
def test_a_pipeline_keeps_the_numbers(step: Step, stage: int, size: int, mib: int) -> None:
    after = step.copy()
    replay(after, parse(PIPELINE.format(stage=stage, size=size, mib=mib)))
    assert_same_numbers(step, after)
    text = print_step(after)
    assert print_step(parse_step(text)) == text
    assert_same_numbers(after, parse_step(text))


def test_the_comparison_sees_a_wrong_schedule(step: Step) -> None:
    after = step.copy()
    replay(after, parse(PIPELINE.format(stage=3, size=2, mib=0)))
    lines = print_step(after).split("\n")
    release = next(i for i, line in enumerate(lines) if "zc.release" in line)
    call = max(i for i, line in enumerate(lines[:release]) if " = call " in line)
    lines[call], lines[release] = lines[release], lines[call]
    with pytest.raises(AssertionError):
        assert_same_numbers(step, parse_step("\n".join(lines)))
