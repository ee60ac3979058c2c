"""What always holds, whatever passes ran."""

from __future__ import annotations

from zcompile.ir.graph import Graph, Step
from zcompile.verify import gradients, interface
from zcompile.verify.collectives import check_collectives
from zcompile.verify.hosted import check_hosted
from zcompile.verify.inference import Inference
from zcompile.verify.structure import check_structure, check_types
from zcompile.verify.subject import Subject


def check_invariants(target: Step | Graph, inference: Inference, *, types: bool) -> list[Subject]:
    """Check everything that always holds, from what later checks rely on to what they do not.

    Args:
        target: a joint graph or a step.
        inference: remembers operators' types.
        types: whether to infer every recorded type again.

    Returns:
        The graphs with their analyses, forward first.

    Raises:
        VerifyError: the first violation.
    """
    graphs = target.graphs if isinstance(target, Step) else [target]
    for graph in graphs:
        check_structure(Subject(graph), inference)
    params = {name: entry for graph in graphs for name, entry in Subject(graph).params.items()}
    subjects = [Subject(graph, params) for graph in graphs]
    for subject in subjects:
        check_collectives(subject)
        check_hosted(subject)
        if types:
            check_types(subject, inference)
    interface.check_params_agree(subjects)
    gradients.check_roles(subjects)
    if isinstance(target, Step):
        interface.check_step(target, subjects[0], subjects[1] if len(subjects) > 1 else None)
    return subjects
