"""Every private or unstable torch name that zcompile uses, one short function each, and a self-test of them all.

When a new torch changes one of them, ``python -m zcompile doctor`` (and the test suite) says which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

#: torch versions that the project is tested with; others get a warning from ``doctor``
TESTED = ("2.11", "2.13")


# Fake tensors. --------------------------------------------------------------------------------------------------------


def new_fake_mode() -> Any:
    """A fresh fake tensor mode that turns real tensors met on the way into fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What a fake run raises where the program depends on tensor values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is True inside, so that an eager run takes the path that a capture will take."""
    old = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = old


# Capture. -------------------------------------------------------------------------------------------------------------


def dynamo_capture(module: nn.Module, args: tuple[Any, ...]) -> fx.GraphModule:
    """Dynamo's full-graph capture of ``module(*args)``; parameters and buffers keep their dotted names."""
    from torch._dynamo import config
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    with config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True):
        return dynamo_graph_capture_for_export(module)(*args)


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """What Dynamo raises for a program that it cannot capture as one graph."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def aot_joint(stack: contextlib.ExitStack, module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """AOTAutograd's joint export with descriptors. Everything is fake until ``stack`` is closed."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    return aot_export_joint_with_descriptors(stack, module, args, {}, decompositions=decompositions())


def aot_metadata(joint: Any) -> Any:
    """The forward metadata of a joint export: ``output_info`` and ``input_info``."""
    return joint._aot_state.fw_metadata


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions, with random operators left whole so that masks equal eager PyTorch's."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(fallback_random=True):
        return dict(select_decomp_table())


def aot_descriptors() -> Any:
    """The module of AOTAutograd's descriptor classes (``ParamAOTInput``, ``GradAOTOutput``, ...)."""
    from torch._functorch._aot_autograd import descriptors

    return descriptors


def output_kind(info: Any) -> str:
    """How a captured output relates to the inputs: ``"fresh"``, ``"is_input"`` or ``"view_of_input"``."""
    from torch._functorch._aot_autograd.schemas import OutputType

    if info.output_type is OutputType.is_input:
        return "is_input"
    return "view_of_input" if info.output_type is OutputType.alias_of_input else "fresh"


# Split. ---------------------------------------------------------------------------------------------------------------


def min_cut_split(joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: list[int], fake_mode: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The min-cut partitioner on a pure joint graph, with rank-independent decisions.

    Args:
        joint: placeholders whose name contains ``tangents`` are backward inputs; outputs are forward's, then backward's.
        num_fwd_outputs: how many of the outputs belong to forward.
        static_inputs: positions of placeholders that live on anyway (parameters): free to read again in backward.
        fake_mode: the fake mode of the graph's values.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor import config as inductor_config

    with (
        tracing(TracingContext(fake_mode)),
        config.patch(activation_memory_budget=1.0, functionalize_rng_ops=False),
        inductor_config.patch(fallback_random=True),
    ):
        return min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_inputs
        )


# Inductor. ------------------------------------------------------------------------------------------------------------


def inductor_compile(module: fx.GraphModule, example_inputs: list[Any], fake_mode: Any) -> Callable[[list[Any]], Any]:
    """Compile one pure graph with Inductor.

    Returns:
        A function of one list of tensors, which it clears; it returns a sequence of results. Call it under ``no_grad``.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), config.patch(fallback_random=True):
        return compile_fx_inner(module, example_inputs)


# Autograd. ------------------------------------------------------------------------------------------------------------


def keeps_graph() -> bool:
    """Inside a backward: whether the caller passed ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def will_accumulate(nodes: list[Any]) -> list[bool]:
    """Inside a backward: for each autograd node, whether the engine will run it."""
    return [torch._C._will_engine_execute_node(n) for n in nodes]


def grad_accumulator(parameter: torch.Tensor) -> Any:
    """The ``AccumulateGrad`` node of a leaf that requires grad."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``register_hook`` was called on ``tensor`` and the hook is still there."""
    return bool(tensor._backward_hooks)


def module_hooks(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module carries and that a capture would drop."""
    kinds = {
        "forward pre-hook": module._forward_pre_hooks,
        "forward hook": module._forward_hooks,
        "backward hook": module._backward_hooks,
        "backward pre-hook": module._backward_pre_hooks,
    }
    return [kind for kind, hooks in kinds.items() if hooks]


# Distributed. ---------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# Self-test. -----------------------------------------------------------------------------------------------------------


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return nn.functional.dropout(self.linear(x), 0.5).sum()


def _check_capture() -> None:
    mode = new_fake_mode()
    probe = _Probe()
    with mode:
        for name, p in list(probe.linear.named_parameters()):
            setattr(probe.linear, name, nn.Parameter(torch.empty(p.shape)))
        probe.count = torch.empty(())
        x = torch.empty(2, 4)
    graph = dynamo_capture(probe, (x,))
    with contextlib.ExitStack() as stack:
        joint = aot_joint(stack, graph, (x,))
    d = aot_descriptors()
    inputs = [n.meta["desc"] for n in joint.graph_module.graph.nodes if n.op == "placeholder"]
    kinds = {type(i) for i in inputs}
    assert kinds == {d.ParamAOTInput, d.BufferAOTInput, d.PlainAOTInput, d.TangentAOTInput}, f"placeholder descriptors are {kinds}"
    assert {i.target for i in inputs if isinstance(i, d.ParamAOTInput)} == {"linear.weight", "linear.bias"}
    outputs = {type(o) for o in next(n for n in reversed(joint.graph_module.graph.nodes)).meta["desc"]}
    assert {d.InputMutationAOTOutput, d.PlainAOTOutput, d.GradAOTOutput} <= outputs, f"output descriptors are {outputs}"
    assert output_kind(aot_metadata(joint).output_info[0]) == "fresh"
    targets = {n.target for n in joint.graph_module.graph.nodes}
    assert torch.ops.aten.native_dropout.default in targets, "dropout was decomposed: fallback_random no longer keeps it whole"


def _check_split_and_inductor() -> None:
    mode = new_fake_mode()
    with mode:
        a, t = torch.empty(2, 3), torch.empty(2, 3)
    graph = fx.Graph()
    x = graph.placeholder("x")
    tangent = graph.placeholder("tangents_0")
    y = graph.call_function(torch.ops.aten.sigmoid.default, (x,))
    g = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, y))
    graph.output([y, g])
    for node, val in ((x, a), (tangent, t), (y, a), (g, a)):
        node.meta["val"] = val
    forward, backward = min_cut_split(fx.GraphModule(nn.Module(), graph), 1, [], mode)
    names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    assert names[-1] == "tangents_0" and len(names) == 2, f"backward inputs are {names}"
    assert len(forward.graph.find_nodes(op="output")[0].args[0]) >= 1


def _check_autograd() -> None:
    w = nn.Parameter(torch.ones(2))
    seen: list[Any] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            return w.sum()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> None:
            seen.append((keeps_graph(), will_accumulate([grad_accumulator(w)])))
            w.grad = torch.full((2,), 3.0)

    fired: list[Any] = []
    w.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    Probe.apply(w).backward(retain_graph=True)
    assert seen == [(True, [True])], f"inside backward: keeps graph, will accumulate = {seen}"
    assert len(fired) == 1 and fired[0][0] == 3.0, "a None gradient no longer fires the post-accumulate hook once"
    assert not tensor_hooks(w)
    assert module_hooks(nn.Linear(1, 1)) == []


def _check_fake() -> None:
    with new_fake_mode():
        value = torch.empty(2)
    assert is_fake(value) and not is_fake(torch.empty(2))
    assert all(issubclass(e, BaseException) for e in (*data_dependent_errors(), *dynamo_errors()))
    with as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


#: what ``doctor`` and the test suite run
SELF_TESTS: dict[str, Callable[[], None]] = {
    "fake tensors": _check_fake,
    "capture with descriptors": _check_capture,
    "min-cut split": _check_split_and_inductor,
    "autograd hooks": _check_autograd,
}


def self_test() -> dict[str, str]:
    """Run every check; returns the failures by name, empty when all is well."""
    failures = {}
    for name, check in SELF_TESTS.items():
        try:
            check()
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    return failures
