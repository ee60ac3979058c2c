"""Runs passes on graph text: what ``python -m zcompile opt`` and the golden tests do."""

from __future__ import annotations

import re
from typing import Any

from zcompile.errors import PipelineError
from zcompile.ir.graph import Direction, Graph, Step
from zcompile.ir.text import parse_graphs, parse_step
from zcompile.passes import parse
from zcompile.pipeline import Facts, History, Pipeline, parse_option
from zcompile.verify.facts import Fact
from zcompile.verify.verifier import Verifier

_FACT = re.compile(r"\s*([a-z-]+)\s*(?:\{([^{}]*)\})?\s*(?:,|$)")


def opt(text: str, spec: str, given: str = "") -> str:
    """The text of a joint graph or step after a pipeline.

    Args:
        text: graph text.
        spec: the passes to run.
        given: facts that the text holds, such as ``params-gathered{stage=3}``; see ``replay``.

    Raises:
        TextError, PipelineError, PassError, VerifyError: as in a compilation.
    """
    target = parse_target(text)
    replay(target, parse(spec), given)
    return str(target)


def parse_target(text: str) -> Graph | Step:
    """What a text describes: one joint graph, or a forward and at most one backward graph.

    Raises:
        TextError: with the line number, the line and what was expected.
    """
    graphs = parse_graphs(text)
    if len(graphs) == 1 and graphs[0].direction is Direction.JOINT:
        return graphs[0]
    return parse_step(text)


def replay(target: Graph | Step, pipeline: Pipeline, given: str = "") -> History:
    """Run a pipeline on a graph that came from text, in place, with full verification.

    A text does not say what earlier passes established. Without ``given``, what the passes require is taken to hold; with
    it, the order is checked against it, and its facts are verified after every pass.

    Raises:
        PipelineError: a pass that does not work on this kind of graph.
    """
    facts = parse_facts(given)
    pipeline.check(list(facts) if given else sorted(missing_facts(pipeline), key=lambda f: f.value))
    wrong = pipeline.step if isinstance(target, Graph) else pipeline.joint
    if wrong:
        kind, wants = ("joint graph", "split step") if isinstance(target, Graph) else ("split step", "joint graph")
        raise PipelineError(
            f"pass '{wrong[0].name}' works on the {wants} but the text is a {kind}; run it on that text"
        )
    if isinstance(target, Graph):
        return pipeline.run_joint(target, Verifier("full"), facts=facts)
    return pipeline.run_step(target, Verifier("full"), facts=facts)


def missing_facts(pipeline: Pipeline) -> set[Fact]:
    """The facts that a pipeline requires and does not establish itself before."""
    missing: set[Fact] = set()
    have: set[Fact] = set()
    for p in pipeline.passes:
        missing |= p.requires - have
        have = (have - p.breaks) | p.establishes
    return missing


def parse_facts(text: str) -> Facts:
    """Facts with the options of the pass that established each: ``params-gathered{stage=3}, grads-reduced{stage=3}``.

    Raises:
        PipelineError: an unknown fact, or text that is not a list of facts.
    """
    known = {fact.value: fact for fact in Fact}
    facts: Facts = {}
    position = 0
    while position < len(text.rstrip()):
        match = _FACT.match(text, position)
        if match is None or match[1] not in known:
            raise PipelineError(
                f"'{text[position:].strip()}' starts with no known fact; the known ones are {', '.join(known)}"
            )
        options: dict[str, Any] = {}
        for item in (match[2] or "").split():
            name, _, value = item.partition("=")
            options[name] = parse_option(value)
        facts[known[match[1]]] = options
        position = match.end()
    return facts
