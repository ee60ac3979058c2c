"""The whole pipeline keeps the bits of real models: every stage, world sizes that do and do not divide the rows."""

import pytest

from tests.ir.captured import MODELS, joint_graph
from tests.passes.numbers import assert_same_numbers
from zcompile.capture.split import split
from zcompile.ir import meta
from zcompile.ir.graph import Kept, Step
from zcompile.ir.text import parse_step, print_step
from zcompile.passes import parse
from zcompile.passes.replay import replay

PIPELINE = (
    "plan-units,shard{{stage={stage} size={size}}},unshard{{stage={stage}}},reduce{{stage={stage}}},"
    "outline,keep{{units={keep}}},bucket{{mib={mib}}},prefetch{{lookahead=1}},cleanup"
)


@pytest.fixture(scope="module", params=MODELS)
def step(request: pytest.FixtureRequest) -> Step:
    graph = joint_graph(request.param)
    return split(graph, meta.tensor(graph.inputs[0]).fake_mode)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stage", "size", "mib", "keep"),
    [(0, 2, 0, 1), (1, 2, 0, 1), (2, 3, 1, 1), (3, 2, 0, 0), (3, 3, 1, 1), (3, 2, 0, 2), (3, 2, 0, 1000)],
)
def test_a_pipeline_keeps_the_numbers(step: Step, stage: int, size: int, mib: int, keep: int) -> None:
    after = step.copy()
    replay(after, parse(PIPELINE.format(stage=stage, size=size, mib=mib, keep=keep)))
    assert_same_numbers(step, after)
    text = print_step(after)
    assert print_step(parse_step(text)) == text
    assert_same_numbers(after, parse_step(text))


def test_the_backward_of_no_sync_takes_what_the_forward_keeps(step: Step) -> None:
    spec = PIPELINE.format(stage=3, size=2, mib=0, keep=2)
    usual, local = step.copy(), step.copy()
    replay(usual, parse(spec))
    replay(local, parse(spec.replace("reduce{stage=3}", "reduce{stage=3 local=true}")))
    assert usual.backward is not None and local.backward is not None
    kept = [{o for n in g.inputs if isinstance(o := meta.origin(n), Kept)} for g in (usual.backward, local.backward)]
    assert kept[0] == kept[1] == {role for _, role in usual.forward.outputs if isinstance(role, Kept)} != set()


def test_the_comparison_sees_a_wrong_schedule(step: Step) -> None:
    after = step.copy()
    replay(after, parse(PIPELINE.format(stage=3, size=2, mib=0, keep=1)))
    lines = print_step(after).split("\n")
    release = next(i for i, line in enumerate(lines) if "zc.release" in line)
    call = max(i for i, line in enumerate(lines[:release]) if " = call " in line)
    lines[call], lines[release] = lines[release], lines[call]
    with pytest.raises(AssertionError):
        assert_same_numbers(step, parse_step("\n".join(lines)))
