"""Running passes on text: which texts and facts are taken, and what is refused."""

import pytest

from zcompile.errors import PipelineError, TextError
from zcompile.passes import parse
from zcompile.passes.replay import missing_facts, opt, parse_facts, parse_target
from zcompile.verify.facts import Fact

FORWARD = """\
graph m.forward
  inputs:
    %w: f32[4, 4] = param 'w' of [4, 4]
    %x: f32[2, 4] = input 0
  body:
    %y: f32[2, 4] = aten.mm(%x, %w)
  return output 0 %y"""


def test_a_pipeline_runs_on_text() -> None:
    text = opt(FORWARD, "plan-units,shard{stage=3 size=2},unshard{stage=3},outline")
    assert (
        text
        == """\
graph m.forward  axis dp=2
  inputs:
    %w: f32[2, 4] = param 'w' shard(0) of [4, 4] unit 'w'
    %x: f32[2, 4] = input 0
  region forward_0(%a0: f32[2, 4], %a1: f32[4, 4]):
    %mm: f32[2, 4] = aten.mm(%a0, %a1)
    return %mm
  body:
    %w_gather: bucket = zc.all_gather([%w], 'dp', 2)
    %w_gathered: f32[4, 4] = zc.wait(%w_gather)
    %y: f32[2, 4] = call forward_0(%x, %w_gathered)
    zc.release([%w_gathered])
  return output 0 %y"""
    )
    assert opt(text, "cleanup") == text


def test_what_passes_require_is_taken_to_hold_unless_facts_are_given() -> None:
    assert missing_facts(parse("shard,unshard")) == {Fact.UNITS_PLANNED}
    planned = opt(FORWARD, "plan-units")
    assert "zc.unshard" in opt(planned, "shard{size=2}") and "zc.unshard" in opt(
        planned, "shard{size=2}", "units-planned"
    )
    with pytest.raises(PipelineError, match="pass 0 'shard' requires units-planned, which no earlier pass establishes"):
        opt(planned, "shard{size=2}", "outlined")


def test_facts_are_read() -> None:
    assert parse_facts("") == {}
    facts = parse_facts("units-planned, params-gathered{stage=3},prefetch-bounded{lookahead=1 limit_mib=none}")
    assert facts == {
        Fact.UNITS_PLANNED: {},
        Fact.PARAMS_GATHERED: {"stage": 3},
        Fact.PREFETCH_BOUNDED: {"lookahead": 1, "limit_mib": None},
    }
    with pytest.raises(
        PipelineError, match="'no-fact, outlined' starts with no known fact; the known ones are units-plan"
    ):
        parse_facts("no-fact, outlined")


def test_a_text_must_fit_the_passes() -> None:
    joint = FORWARD.replace("m.forward", "m.joint")
    assert str(parse_target(joint)) == joint
    with pytest.raises(PipelineError, match="pass 'cleanup' works on the split step but the text is a joint graph"):
        opt(joint, "cleanup")
    with pytest.raises(
        PipelineError, match="pass 'recompute-params' works on the joint graph but the text is a split step"
    ):
        opt(FORWARD, "recompute-params")
    with pytest.raises(TextError, match="the graphs of the text are none"):
        opt("", "cleanup")
