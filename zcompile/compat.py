"""Every private or unstable torch name that zcompile uses, one short function each, and a self-test of them all.

When a new torch changes one of them, ``python -m zcompile doctor`` (and the test suite) says which.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

#: torch versions that the project is tested with; others get a warning from ``doctor``
TESTED = ("2.11", "2.13")
#: whether Dynamo traces ``copy.copy`` and ``copy.deepcopy``
TRACES_COPIES = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 12)

# What is done for each of many tensors, in C: a replayed step asks these of every parameter.
_data_ptr, _use_count = torch.Tensor.data_ptr, torch.Tensor._use_count  # pyright: ignore[reportAttributeAccessIssue]
_requires_grad, _grad, _tensor_hooks = map(operator.attrgetter, ("requires_grad", "grad", "_backward_hooks"))


# Fake tensors. --------------------------------------------------------------------------------------------------------


def new_fake_mode() -> Any:
    """A fresh fake tensor mode that turns real tensors met on the way into fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def storage_id(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while it is alive; works for fake tensors."""
    return tensor.untyped_storage()._cdata


def describe_fake(tensor: Any) -> tuple[Any, ...]:
    """What ``make_fake`` takes to make a fake tensor again, beside its storage.

    Raises:
        TypeError: there is more to it than memory and layout.
    """
    if tensor.layout is not torch.strided or is_lazy(tensor) or tensor.is_quantized:
        raise TypeError(f"a fake tensor of layout {tensor.layout} cannot be described by its memory")
    return (
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        isinstance(tensor, nn.Parameter),
        tensor.requires_grad,
    )


def make_fake(
    mode: Any,
    beside: torch.Tensor | None,
    num_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    is_parameter: bool,
    requires_grad: bool,
) -> Any:
    """A fake tensor over the memory of another one, ``beside``, or over memory of its own."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._mode_utils import no_dispatch

    with no_dispatch():
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="meta") if beside is None else beside
        placed = torch.empty(0, dtype=dtype, device="meta").set_(memory.untyped_storage(), offset, shape, stride)
        fake = FakeTensor(mode, placed, device)
    return nn.Parameter(fake, requires_grad) if is_parameter else fake.requires_grad_(requires_grad)


@contextlib.contextmanager
def quiet_fake_kernels() -> Iterator[None]:
    """A fake kernel that raises inside does not also log the error with its whole stack."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds the conjugate or the negative of what it is."""
    return tensor.is_conj() or tensor.is_neg()


def flatten_node(value: Any) -> list[Any] | None:
    """The children of a value whose type is registered as a pytree node; None for any other value."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else list(node.flatten_fn(value)[0])


def unflatten_node(like: Any, children: list[Any]) -> Any:
    """A value like ``like``, of a registered pytree type, with other children."""
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES[type(like)]
    return node.unflatten_fn(children, node.flatten_fn(like)[1])


def copy_of(value: Any, attributes: tuple[str, ...]) -> Any:
    """A shallow copy of a mapping or object, also inside a capture; ``attributes`` are the names in its ``__dict__``."""
    if TRACES_COPIES or not torch.compiler.is_dynamo_compiling():
        return copy.copy(value)
    if isinstance(value, Mapping):
        new = type(value)()
        new.update(value)  # pyright: ignore[reportAttributeAccessIssue]
        return new
    new = object.__new__(type(value))
    for name in attributes:
        object.__setattr__(new, name, getattr(value, name))
    return new


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """What ``Module.load_state_dict`` returns."""
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys(missing, unexpected)


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


def dynamo_capture(module: nn.Module, args: tuple[Any, ...], changed: list[str] | None = None) -> fx.GraphModule:
    """Dynamo's full-graph capture of ``module(*args)``; parameters and buffers keep their dotted names.

    Python objects that the program changes, which the captured graph will not, are appended to ``changed``: all but modules
    and their tables, of which Dynamo names also those that are assigned what they hold already.
    """
    from torch._dynamo import config
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    # these ran in the fake eager run
    logging_calls = {f for f in vars(logging.Logger).values() if callable(f)} | {warnings.warn}
    options = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logging_functions": logging_calls,
        "allow_rnn": True,
    }
    names = type(module).forward.__globals__
    known = set(names)
    with config.patch(options), _quiet("torch._dynamo.metrics_context"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            captured = dynamo_graph_capture_for_export(module)(*args)
        finally:
            for name in names.keys() - known:  # Dynamo leaves what it compiled there, which holds the module for good
                del names[name]
    for warning in caught:
        text = str(warning.message)
        if "found certain side effects" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        elif changed is not None:
            sources = re.findall(r"[\"']([^,]+)[\"'](?:, |\]$)", text.partition("check: ")[2])
            changed += [s for s in sources if not re.fullmatch(r"L\['self'\](\._modules\['[^']*'\])*(\._[a-z]+)?", s)]
    return captured


def dynamo_ports(traced: fx.GraphModule, args: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """What a captured program feeds its graph, one value a placeholder, and what it returns: result ``3`` as ``"result 3"``."""
    program: Any = traced
    output = traced.graph.find_nodes(op="output")[0]
    results = tuple(f"result {index}" for index in range(len(output.args[0])))
    return list(program._dynamo_bytecode_flatten(*args)), program._dynamo_bytecode_unflatten(results, args)


def compile_settings() -> Iterator[str]:
    """Versions, machine and switches that graphs captured by torch depend on, as texts that other processes have alike.

    Raises:
        TypeError: a setting is an object, or somebody's own code, that cannot be compared.
    """
    import platform

    from torch import _inductor, backends
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _inductor is not None
    yield f"torch {torch.__version__} {torch.version.git_version} {torch.version.cuda} {torch.version.hip}"
    yield f"{platform.machine()} {backends.cpu.get_cpu_capability()} {backends.mkldnn.is_available()}"
    if torch.cuda.is_initialized():  # asking would initialise it
        yield f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {backends.cudnn.version()}"
    yield f"{torch.get_default_dtype()} {torch.get_default_device()} {torch.get_float32_matmul_precision()}"
    yield f"{torch.are_deterministic_algorithms_enabled()} {torch.is_deterministic_algorithms_warn_only_enabled()}"
    yield f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()} {torch.is_anomaly_enabled()}"
    yield f"{backends.mkldnn.enabled} {backends.opt_einsum.enabled} {backends.opt_einsum.strategy}"
    yield f"{backends.cudnn.enabled} {backends.cudnn.benchmark} {backends.cudnn.deterministic} {backends.cudnn.allow_tf32}"
    attention = backends.cuda
    yield f"{attention.flash_sdp_enabled()} {attention.mem_efficient_sdp_enabled()} {attention.math_sdp_enabled()}"
    yield f"{attention.cudnn_sdp_enabled()} {attention.fp16_bf16_reduction_math_sdp_allowed()}"
    for switch in ("_get_sdp_priority_order", "_get_fa3_sdp_enabled", "_get_overrideable_sdp_enabled"):
        yield f"{switch} {getattr(torch._C, switch, tuple)()}"
    modes = [type(mode) for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())]
    yield str(modes)
    if foreign := [mode for mode in modes if mode.__module__.partition(".")[0] != "torch"]:
        raise TypeError(f"the mode {foreign[0].__name__} is active, which is not torch's")
    _check_kernels()
    for config in (dynamo, functorch, inductor):
        settings: Any = config
        for name, value in sorted(settings.save_config_portable(ignore_private_configs=False).items()):
            members = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
            if " at 0x" in repr(members):
                raise TypeError(f"{config.__name__}.{name} is {members!r}")
            yield f"{config.__name__}.{name} = {members!r}"


def _check_kernels() -> None:
    """Raises TypeError if somebody has given an operator of torch's another decomposition or gradient."""
    ours = (f"{os.path.dirname(torch.__file__)}{os.sep}", __file__)
    for overload, function in decompositions().items():
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None and overload.namespace in ("aten", "prims") and not code.co_filename.startswith(ours):
            raise TypeError(f"the decomposition of {overload.name()} is in {code.co_filename}, which is not torch's")
    for kernel in torch.library._impls:
        namespace, name, key = kernel.split("/")
        if namespace == "aten" and "Auto" in key:
            raise TypeError(f"aten::{name} has a kernel for {key} that is not torch's")


def inductor_folder() -> str:
    """The folder of Inductor's caches."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return cache_dir()


def dynamo_reason(error: BaseException) -> str:
    """Why Dynamo cannot capture a program: the kind of problem, its explanation and what it was about."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    parts = [
        line.strip().partition(": ")[2]
        for line in lines
        if line.strip().startswith(("Explanation: ", "Developer debug context: "))
    ]
    return ": ".join([lines[0], *filter(None, parts)])[:400]


def dynamo_name(source: str) -> str:
    """What Dynamo calls ``G['x'].y`` or ``L['self']._modules['model'].y``, in words."""
    if match := re.fullmatch(r"G\['__import_(\w+)'\](.*)", source):
        return f"a global of {match[1].replace('_dot_', '.')}{match[2] and ': ' + match[2].removeprefix('.')}"
    if match := re.fullmatch(r"G\['(\w+)'\](.*)", source):
        return f"global '{match[1]}{match[2]}'"
    if match := re.fullmatch(r"L\['self'\]\._modules\['model'\](.*)", source):
        path = re.sub(r"\._modules\['([^']*)'\]", r".\1", match[1])
        if hook := re.match(r"(.*)\._forward_(?:pre_)?hooks\[", path):
            return f"what a forward hook of module '{hook[1].removeprefix('.')}' holds"
        return f"'{path.removeprefix('.')}'"
    return source


def dynamo_module(source: str) -> str:
    """The dotted path of what Dynamo calls ``L['self'].model.layers.0`` below the wrapped model; empty for anything else."""
    path = re.sub(r"\._modules\['([^']*)'\]|\[(\d+)\]", lambda m: f".{m[1] or m[2]}", source)
    return path.removeprefix("L['self'].model.") if path.startswith("L['self'].model.") else ""


def dynamo_global(source: str) -> Any:
    """The object that Dynamo calls ``G['__import_a_dot_b'].name``: a global of another module; None for other sources."""
    match = re.fullmatch(r"G\['__import_(\w+)'\]((?:\.\w+)+)", source)
    value: Any = sys.modules.get(match[1].replace("_dot_", ".")) if match else None
    for name in match[2].split(".")[1:] if match else ():
        value = getattr(value, name, None)
    return value


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Silence a logger: torch 2.11 cannot write a set of functions into its metrics and logs a traceback about it."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def is_attention(target: Any) -> bool:
    """Whether a call in Dynamo's graph is ``scaled_dot_product_attention``."""
    inner = torch._C._nn.scaled_dot_product_attention  # pyright: ignore[reportAttributeAccessIssue]
    return target in (inner, nn.functional.scaled_dot_product_attention)


def is_random_call(target: Any) -> bool:
    """Whether a call in Dynamo's graph draws random numbers."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(
        word in name for word in ("rand", "bernoulli", "dropout", "normal", "uniform", "exponential", "multinomial")
    )


def dynamo_errors() -> tuple[type[BaseException], ...]:
    """What Dynamo raises for a program that it cannot capture as one graph."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException,)


def aot_joint(stack: contextlib.ExitStack, module: fx.GraphModule, args: tuple[Any, ...]) -> Any:
    """AOTAutograd's joint export with descriptors. Everything is fake until ``stack`` is closed."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    # mkldnn's LSTM saves nothing for backward under no_grad, where graphs run
    with _without_mkldnn(), _right_lstm():
        return aot_export_joint_with_descriptors(stack, module, args, {}, decompositions=decompositions())


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


@contextlib.contextmanager
def _right_lstm() -> Iterator[None]:
    """The decomposition of LSTMs gives hidden states of the right shape, which those of torch 2.11 have not."""
    from torch._decomp import decompositions

    original = decompositions.one_layer_lstm

    def one_layer_lstm(inp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, states = original(inp, hidden, *args, **kwargs)
        return out, tuple(state.reshape(before.shape) for state, before in zip(states, hidden, strict=True))

    decompositions.one_layer_lstm = one_layer_lstm
    try:
        yield
    finally:
        decompositions.one_layer_lstm = original


def aot_metadata(joint: Any) -> Any:
    """The forward metadata of a joint export: ``output_info`` and ``input_info``."""
    return joint._aot_state.fw_metadata


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions, with random operators left whole so that masks equal eager PyTorch's."""
    from torch._inductor import config, lowering
    from torch._inductor.decomposition import select_decomp_table

    assert lowering is not None  # max_pool2d's decomposition reads torch._inductor.lowering without importing it
    with config.patch(fallback_random=True):
        table = dict(select_decomp_table())
    table.pop(torch.ops.aten.rrelu_with_noise_functional.default, None)  # torch 2.11 leaves it in
    table[torch.ops.aten.nll_loss_backward.default] = _nll_loss_backward
    table[torch.ops.aten.nll_loss2d_backward.default] = _nll_loss_backward
    return table


def _nll_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """The gradient of ``nll_loss`` as a comparison of every class with the target, which fuses into what reads it.

    torch's own scatters into zeros, as large as the logits. Inductor takes that away in its passes over whole joint graphs,
    which regions do not see.
    """
    if reduction == 1:  # mean
        grad = grad / total_weight
    dim = 0 if log_probs.dim() < 2 else 1
    if log_probs.dim() == 1 and target.dim() == 1:
        target = target[0]
    shape = [-1 if i == dim else 1 for i in range(log_probs.dim())]
    target = target.unsqueeze(dim)
    grad = grad.unsqueeze(dim) if log_probs.dim() > grad.dim() > 0 else grad
    grad = torch.where(target != ignore_index, grad, 0)
    safe = torch.where(target != ignore_index, target, 0)
    is_target = torch.arange(log_probs.shape[dim], device=target.device).view(shape) == safe
    if weight is not None:
        grad = grad * weight.view(shape)
    return torch.where(is_target, -grad, 0)


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


def min_cut_split(
    joint: fx.GraphModule, num_fwd_outputs: int, static_inputs: list[int], fake_mode: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
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


# Operators. -----------------------------------------------------------------------------------------------------------


def is_overload(target: Any) -> bool:
    """Whether ``target`` is one overload of a torch operator, such as ``torch.ops.aten.sum.dim_IntList``."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: Any) -> bool:
    """Whether ``target`` is a higher-order operator, such as ``torch.ops.higher_order.run_and_save_rng_state``."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def higher_order_operator(name: str) -> Any:
    """The higher-order operator called ``name``, those that save and restore random state included; None without one."""
    from torch._prims import rng_prims

    assert rng_prims is not None  # its import registers operators
    try:
        return getattr(torch.ops.higher_order, name)
    except AttributeError:
        return None


def schema_returns(target: Any) -> list[str] | None:
    """The types of an overload's results, such as ``["Tensor", "Tensor[]"]``; None for what has no schema."""
    return [str(r.type) for r in target._schema.returns] if is_overload(target) else None


@functools.cache
def shared_arguments(op: Any) -> tuple[tuple[str, ...], ...]:
    """For each return of an operator overload, the names of the arguments whose memory it may share, by its schema."""
    if op is torch.ops.aten._unsafe_view.default:  # a view whose schema does not say so
        return (("self",),)
    arguments = [(a.name, set(a.alias_info.before_set)) for a in op._schema.arguments if a.alias_info is not None]
    shared = []
    for result in op._schema.returns:
        letters = None if result.alias_info is None else set(result.alias_info.before_set)
        # a list of views (``Tensor(a)[]``) comes without its letter
        shared.append(tuple(name for name, own in arguments if letters is not None and (not letters or letters & own)))
    return tuple(shared)


@functools.cache
def argument_names(op: Any) -> tuple[str, ...]:
    """The names of an operator overload's arguments, in order."""
    return tuple(a.name for a in op._schema.arguments)


@functools.cache
def is_mutating(op: Any) -> bool:
    """Whether an operator overload writes into one of its arguments."""
    return op._schema.is_mutable


# Inductor. ------------------------------------------------------------------------------------------------------------


def inductor_compile(
    module: fx.GraphModule, example_inputs: list[Any], fake_mode: Any, tag: str
) -> Callable[[list[Any]], Any]:
    """Compile one pure graph with Inductor, or find it in Inductor's cache on disk.

    Every result keeps the strides that the graph says: other regions are compiled for them (Inductor would otherwise choose a
    layout of its own, channels last after a convolution).

    Args:
        module: the graph.
        example_inputs: fake tensors.
        fake_mode: their mode.
        tag: what is found in the cache has an equal one. Inductor's own key does not tell which results keep their strides.

    Returns:
        A function of one list of tensors, which it clears; it returns a sequence of results. Call it under ``no_grad``.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    caches: Any = torch.compiler.config
    output = module.graph.find_nodes(op="output")[0]
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    with (
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        _shape_env(fake_mode),
        config.patch(fallback_random=True),
        caches.patch(cache_key_tag=tag),
    ):
        return compile_fx_inner(module, example_inputs)


@contextlib.contextmanager
def _shape_env(fake_mode: Any) -> Iterator[None]:
    """Give a fake mode of static shapes what Inductor's cache evaluates guards in; there are none."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    before = fake_mode.shape_env
    fake_mode.shape_env = before or ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    try:
        yield
    finally:
        fake_mode.shape_env = before


# Memory. --------------------------------------------------------------------------------------------------------------


def allocator_settings() -> str:
    """What torch's allocator for GPUs was told last, by the environment or since."""
    if torch.cuda.is_initialized() and torch.cuda.get_allocator_backend() == "native":
        settings = dict[str, Any](torch.cuda.memory._snapshot())["allocator_settings"]
        return settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def expands_segments() -> bool:
    """Whether what torch's allocator takes from a GPU lies in segments that grow and give pages back."""
    return "expandable_segments:true" in allocator_settings().lower()


def expand_segments() -> bool:
    """Have it be so from now on; False where the user has decided otherwise.

    What is free in pieces is then of use for what is larger than a piece.
    """
    told = allocator_settings()
    if torch.cuda.get_allocator_backend() != "native":
        return True  # it has no segments
    if "expandable_segments" not in told:
        told = ",".join(filter(None, (told, "expandable_segments:True")))  # what is not said again is forgotten
        torch._C._accelerator_setAllocatorSettings(told)  # pyright: ignore[reportAttributeAccessIssue]
    return expands_segments()


# Autograd. ------------------------------------------------------------------------------------------------------------


def keeps_graph() -> bool:
    """Inside a backward: whether the caller passed ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportAttributeAccessIssue]


def graph_task() -> int:
    """Inside a backward: the engine's number of it."""
    return torch._C._current_graph_task_id()


def will_run(node: Any) -> bool:
    """Inside a backward: whether the engine will run an autograd node."""
    return torch._C._will_engine_execute_node(node)


def run_as_leaf(node: Any) -> None:
    """Let the engine run an autograd node of Python's before all others that are ready, as it does with leaves."""
    node._set_sequence_nr(2**64 - 1)


def grad_accumulator(parameter: torch.Tensor) -> Any:
    """The ``AccumulateGrad`` node of a leaf that requires grad."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def version(value: Any) -> int:
    """How often a tensor's memory was written in place, through any view that autograd knows; 0 where that is not counted."""
    return 0 if not isinstance(value, torch.Tensor) or value.is_inference() else value._version


def versions(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """``version`` of many."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the memory of each begins."""
    return list(map(_data_ptr, tensors))


def requires_grad(tensors: Iterable[torch.Tensor]) -> tuple[bool, ...]:
    """The flag of each. To ask every DTensor first whether it overrides attributes would take as long again."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(map(_requires_grad, tensors))


def gradients(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The ``.grad`` of each, likewise."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(_grad, tensors))


def set_gradients(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Assign the ``.grad`` of each, likewise."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient


def tensor_hooks(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """Whether ``register_hook`` was called on each tensor and the hook is still there."""
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(bool, map(_tensor_hooks, tensors)))


def accumulation_hooks(tensor: torch.Tensor) -> bool:
    """Whether ``register_post_accumulate_grad_hook`` was called on ``tensor`` and the hook is still there."""
    return bool(tensor._post_accumulate_grad_hooks)


def forward_hooks(module: nn.Module) -> list[dict[Any, Any]]:
    """The hooks of a module that become part of a captured graph: tables of functions."""
    return [module._forward_pre_hooks, module._forward_hooks]


def backward_hooks(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """The hooks of a module that a capture would drop, by kind."""
    return {
        "backward hook": module._backward_hooks,
        "backward pre-hook": module._backward_pre_hooks,
    }


def global_module_hooks() -> dict[str, dict[Any, Any]]:
    """The hooks that are registered for all modules, by kind."""
    from torch.nn.modules import module

    return {
        "forward pre-hook": module._global_forward_pre_hooks,
        "forward hook": module._global_forward_hooks,
        "backward hook": module._global_backward_hooks,
        "backward pre-hook": module._global_backward_pre_hooks,
    }


# Distributed. ---------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


# What the pickle of DCP's metadata is made of; nothing else in one is trusted.
_DCP_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
}


def load_dcp_metadata(file: Any) -> Any:
    """The ``.metadata`` of a DCP checkpoint, of which torch unpickles anything; this runs no code of the file.

    Raises:
        pickle.UnpicklingError: it holds something else than metadata.
    """
    import pickle

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name in _DCP_METADATA.get(module, ()) or (
                module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
            ):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"DCP metadata holds {module}.{name}, which does not belong there")

    return Reader(file).load()


# Ranks: stores and collectives of our own process group. ---------------------------------------------------------------


def store_client(store: Any) -> Any:
    """A client of ``store`` that another thread may use at the same time; ``store`` itself where it needs no connection."""
    return store.clone() if store_host(store) else store


def store_host(store: Any) -> str:
    """The process that takes a TCPStore with it when it ends, in words; empty for file and in-memory stores."""
    from torch.distributed import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return ""
    return "the launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def set_group_timeout(group: Any, seconds: float) -> None:
    """How long a collective of ``group`` may take until the backend itself gives up (gloo) or ends the process (NCCL)."""
    import datetime

    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(datetime.timedelta(seconds=seconds), group)


@contextlib.contextmanager
def group_store_timeout(group: Any, seconds: float) -> Iterator[None]:
    """How long waits on the store of ``group`` may take inside. The store may be shared with other groups of this process."""
    import datetime

    from torch.distributed.distributed_c10d import _get_process_group_store

    store: Any = _get_process_group_store(group)
    before = store.timeout
    store.set_timeout(datetime.timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


def is_broken_collective(error: BaseException) -> bool:
    """Whether a collective of torch's, or its store, lost another process."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def urgent_nccl() -> Any:
    """Options of a NCCL group whose kernels go before computation.

    A collective needs all its thread blocks at once; on a stream of normal priority it waits for them behind every matmul
    (measured: a 116 MiB gather under a Llama forward takes 1.4 ms instead of 0.3).
    """
    options = torch.distributed.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


class SymmetricMemory:
    """Memory of the same size on every rank of a NCCL group, which all of them can read and write. Collective to make.

    Attributes:
        slabs: by rank, flat uint8. This rank's own is memory of its own device.
    """

    def __init__(self, num_bytes: int, device: torch.device, group: Any, timeout: float) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self._handle = _SymmetricMemory.rendezvous(memory, group.group_name)
        self._rank, self._size = self._handle.rank, self._handle.world_size
        self.slabs = [
            memory if rank == self._rank else self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(self._size)
        ]
        # A barrier sets its rank's flag in every other rank's pad once that is clear, then clears the others' flags in its own.
        self._pads = [self._handle.get_signal_pad(rank, (self._size,), torch.uint32) for rank in range(self._size)]
        self._side = torch.cuda.Stream(device, priority=-3)  # of a priority of its own: in no queue behind what waits
        self._timeout_ms = int(min(timeout * 1e3, 2**31 - 1))

    def barrier(self) -> None:
        """Let the current stream go on when the current streams of all ranks are here. Nothing waits on the host.

        After ``timeout`` seconds the kernel that waits ends with an error of the device.
        """
        self._handle.barrier(0, self._timeout_ms)

    def unblock(self) -> None:
        """Let a barrier go on whatever the other ranks do.

        Writes by the stream itself: neither a kernel, which may first have to be loaded, nor a copy, which is one on the same
        device; both wait for a barrier that runs (seen in a copy of 8 bytes that never returned).
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        with torch.cuda.stream(self._side):
            for rank in range(self._size):
                _SymmetricMemory.stream_write_value32(self._pads[self._rank], rank, 1)
                if rank != self._rank:
                    _SymmetricMemory.stream_write_value32(self._pads[rank], self._rank, 0)


def start_all_gather(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
    """One coalesced all-gather along dim 0: ``outputs[i]`` is all ranks' ``inputs[i]``."""
    return group.allgather_into_tensor_coalesced(outputs, inputs)


def start_reduce_scatter(group: Any, outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any) -> Any:
    """One coalesced reduce-scatter along dim 0. Gloo's work of this ignores the timeout of a wait."""
    from torch.distributed import ReduceScatterOptions

    options = ReduceScatterOptions()
    options.reduceOp = op
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)


def start_all_reduce(group: Any, tensors: list[torch.Tensor], op: Any) -> Any:
    """One coalesced all-reduce in place. Gloo concatenates the tensors, which changes how it rounds."""
    from torch._C._distributed_c10d import AllreduceCoalescedOptions

    options = AllreduceCoalescedOptions()
    options.reduceOp = op
    return group.allreduce_coalesced(tensors, options)


def start_one_all_reduce(group: Any, tensor: torch.Tensor, op: Any) -> Any:
    """An all-reduce of one tensor in place."""
    from torch.distributed import AllreduceOptions

    options = AllreduceOptions()
    options.reduceOp = op
    return group.allreduce([tensor], options)


def start_broadcast(group: Any, tensor: torch.Tensor, root: int) -> Any:
    """A broadcast of one tensor in place."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensor], options)


def is_short_wait_over(error: RuntimeError) -> bool:
    """Whether ``error`` only says that ``work.wait(timeout)`` ended before the work did (which stays intact on gloo)."""
    return "Operation timed out" in str(error)


def group_error(group: Any, device: torch.device) -> str:
    """What broke a group's connections, "" while nothing did. Only NCCL tells; its works count as done then, and as not failed."""
    ask = getattr(group._get_backend(device), "get_error", None)
    error = None if ask is None else ask().name
    return "" if error in (None, "SUCCESS") else error


def abort_group(group: Any) -> None:
    """End all collectives of ``group`` at once, so that streams which wait for them go on (NCCL only)."""
    group.abort()


def keep_forever(value: Any) -> None:
    """Never destroy ``value``: destroying a gloo group joins threads that may wait for an absent rank."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


# Tensors in lists, hooks of tensors. ---------------------------------------------------------------------------------


def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``target.copy_(source)`` for each pair."""
    torch._foreach_copy_(targets, sources)


def foreach_add(targets: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """``target.add_(other)`` for each pair."""
    torch._foreach_add_(targets, others)


def foreach_mul(targets: list[torch.Tensor], factor: torch.Tensor) -> None:
    """``target.mul_(factor)`` for each; ``factor`` has no dimensions."""
    torch._foreach_mul_(targets, factor)


def foreach_zero(targets: list[torch.Tensor]) -> None:
    """``target.zero_()`` for each."""
    torch._foreach_zero_(targets)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each, computed in ``dtype``."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_unscale(targets: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """``target.mul_(factor)`` for each, and ``found`` becomes 1 if an element was not finite before; both float32 of one element.

    The tensors have one device and one real dtype.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(targets, found, factor)


@contextlib.contextmanager
def no_workspaces() -> Iterator[None]:
    """Matrix products keep no memory of their own from before the body, and none that they take inside of it.

    cuBLAS has a workspace for each stream, which lives as long as the process. One that a recording writes to must belong to it:
    from before, it could be given back under the recording; from inside, it would hold the recording's memory for ever.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def lock_pages(memory: torch.Tensor) -> int:
    """Page-lock memory on the host for every CUDA context; 0, or CUDA's error.

    ``pin_memory=True`` rounds each size up to a power of two, which a flat arena cannot afford.
    """
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1))
    if code:
        # CUDA keeps the error for whoever asks next, which is the next launch of a kernel: let it be this one
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code


def unlock_pages(memory: torch.Tensor) -> int:
    """Undo ``lock_pages``; no copy may be under way."""
    runtime: Any = torch.cuda.cudart()
    return int(runtime.cudaHostUnregister(memory.data_ptr()))


def move_tensor_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target`` run the tensor and post-accumulate hooks of ``source``; their handles keep working."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


class Loan:
    """A tensor for users over memory of ours, and how to see whether they keep it.

    Args:
        local: has a storage of its own.
        like: a DTensor that differs in nothing but its values, or a plain tensor.

    Attributes:
        tensor: a DTensor (made in a tenth of the time of ``DTensor.from_local``), or ``local`` itself.
        local: this rank's part of it.
        address: of its memory; 0 without elements.
    """

    __slots__ = ("_memory", "address", "local", "tensor")

    def __init__(self, local: torch.Tensor, like: torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        make: Any = DTensor
        spec: Any = getattr(like, "_spec", None)
        self.tensor: torch.Tensor = make(local, spec, requires_grad=False) if isinstance(like, DTensor) else local
        self.local = local
        self.address = local.data_ptr()
        self._memory = local.untyped_storage()._cdata

    @staticmethod
    def references(loans: Sequence[Loan]) -> list[int]:
        """Counts of references to these tensors, to their parts, and from tensors to their memory, one kind after the other.

        Whoever holds a tensor or a view of it adds to them. All loans have elements. Empty where a part was given other memory
        (its ``.data`` was assigned).
        """
        tensors, locals_ = [loan.tensor for loan in loans], [loan.local for loan in loans]
        if addresses(locals_) != [loan.address for loan in loans]:
            return []
        return [
            *map(sys.getrefcount, tensors),
            *map(sys.getrefcount, locals_),
            *map(_use_count, tensors),  # saved for a backward, say, or the .grad of something
            *map(_use_count, locals_),
            *map(
                torch._C._storage_Use_Count, [loan._memory for loan in loans]
            ),  # still there: nothing else has its address
        ]


def dtensor_of(
    local: torch.Tensor, mesh: Any, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...]
) -> Any:
    """A DTensor over a local tensor that stays on its own device, such as a shard on the host of a mesh of GPUs."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec: Any = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    make: Any = DTensor
    return make(local, spec, requires_grad=False)


def before_item(look: Callable[[Any], None]) -> None:
    """Call ``look`` with each DTensor of which a Python number is taken (``item``, ``float``, ``bool``), before it is.

    torch takes the number from this rank's part, whatever the placement. Holds for the whole process; the last call counts.
    """
    from torch.distributed.tensor import DTensor

    def take(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        look(args[0])
        return op(args[0]._local_tensor)

    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = take


# Self-test. -----------------------------------------------------------------------------------------------------------


class _Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.count: torch.Tensor
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
    assert dynamo_global("G['__import_torch_dot_nn'].Linear") is nn.Linear
    inputs, outputs = dynamo_ports(graph, (x,))
    assert {id(i) for i in inputs} == {id(t) for t in (x, *probe.parameters(), *probe.buffers())}, "other inputs"
    assert outputs == "result 0", f"Dynamo's program returns {outputs}"
    with contextlib.ExitStack() as stack:
        joint = aot_joint(stack, graph, (x,))
    d = aot_descriptors()
    described = [n.meta["desc"] for n in joint.graph_module.graph.nodes if n.op == "placeholder"]
    kinds = {type(i) for i in described}
    assert kinds == {d.ParamAOTInput, d.BufferAOTInput, d.PlainAOTInput, d.TangentAOTInput}, (
        f"placeholder descriptors are {kinds}"
    )
    assert {i.target for i in described if isinstance(i, d.ParamAOTInput)} == {"linear.weight", "linear.bias"}
    kinds = {type(o) for o in next(n for n in reversed(joint.graph_module.graph.nodes)).meta["desc"]}
    assert {d.InputMutationAOTOutput, d.PlainAOTOutput, d.GradAOTOutput} <= kinds, f"output descriptors are {kinds}"
    assert output_kind(aot_metadata(joint).output_info[0]) == "fresh"
    targets = {n.target for n in joint.graph_module.graph.nodes}
    assert torch.ops.aten.native_dropout.default in targets, (
        "dropout was decomposed: fallback_random no longer keeps it whole"
    )


def _check_lstm() -> None:
    from torch._decomp import decompositions

    state, weights = torch.zeros(4, 2), [torch.ones(8, 3), torch.ones(8, 2)]
    with _right_lstm():
        _, states = decompositions.one_layer_lstm(torch.ones(5, 4, 3), (state, state), weights, False)
    assert [s.shape for s in states] == [(4, 2)] * 2, f"the states of an LSTM are {[list(s.shape) for s in states]}"


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
        def backward(ctx: Any, *grad_outputs: Any) -> None:
            seen.append((keeps_graph(), will_run(grad_accumulator(w)), graph_task() >= 0))
            w.grad = torch.full((2,), 3.0)

    fired: list[Any] = []
    w.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    loss = Probe.apply(w)
    run_as_leaf(loss.grad_fn)
    assert loss.grad_fn._sequence_nr() == grad_accumulator(w)._sequence_nr(), (
        "leaves have another place in the engine's order"
    )
    loss.backward(retain_graph=True)
    assert seen == [(True, True, True)], f"inside backward: keeps graph, will accumulate, has a number = {seen}"
    assert len(fired) == 1 and fired[0][0] == 3.0, "a None gradient no longer fires the post-accumulate hook once"
    assert (
        not any(tensor_hooks([w])) and gradients([w]) == [w.grad] and requires_grad([w, torch.ones(1)]) == (True, False)
    )
    handle = w.register_hook(lambda g: None)
    assert tensor_hooks([w, torch.ones(1)]) == [True, False]
    handle.remove()
    set_gradients([w], [None])
    assert not any(tensor_hooks([w])) and w.grad is None
    assert (
        not any([*forward_hooks(nn.Linear(1, 1)), *backward_hooks(nn.Linear(1, 1)).values()]) and global_module_hooks()
    )
    assert version(torch.zeros(1).add_(1)) == 1


def _check_caches() -> None:
    settings = list(compile_settings())
    assert settings == list(compile_settings()) and any("torch._inductor" in line for line in settings)
    caches: Any = torch.compiler.config
    assert caches.cache_key_tag == "" and inductor_folder()
    mode = new_fake_mode()
    with _shape_env(mode):
        assert mode.shape_env is not None and mode.static_shapes
    assert mode.shape_env is None


def _check_operators() -> None:
    mm, split, save = (
        torch.ops.aten.mm.default,
        torch.ops.aten.split.Tensor,
        higher_order_operator("run_and_save_rng_state"),
    )
    assert is_overload(mm) and not is_overload(save)
    assert is_higher_order(save) and not is_higher_order(mm)
    names = (mm.name(), split.name(), save.name())
    assert names == ("aten::mm", "aten::split.Tensor", "run_and_save_rng_state"), f"operators are called {names}"
    assert higher_order_operator("no_such_operator") is None
    assert schema_returns(split) == ["List[Tensor]"], f"a list result is {schema_returns(split)}"


def _check_fake() -> None:
    assert flatten_node([1, 2]) == [1, 2] and flatten_node(3) is None and unflatten_node((1,), [2]) == (2,)
    assert incompatible_keys(["a"], []).missing_keys == ["a"]
    mode = new_fake_mode()
    with mode:
        value = torch.empty(2)
    assert is_fake(value) and not is_fake(torch.empty(2))
    assert all(issubclass(e, BaseException) for e in (*data_dependent_errors(), *dynamo_errors()))
    assert storage_id(value) == storage_id(value.view(1, 2)) != storage_id(torch.empty(2))
    again = make_fake(mode, None, *describe_fake(value.t()))
    assert is_fake(again) and describe_fake(again) == describe_fake(value.t()), f"a fake tensor is made as {again}"
    assert storage_id(make_fake(mode, again, *describe_fake(value))) == storage_id(again)
    with as_if_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def _check_tensor_lists() -> None:
    a, b = torch.ones(3), torch.full((2,), 2.0)
    foreach_add([a, b], [a.clone(), b.clone()])
    foreach_mul([a, b], torch.tensor(0.5))
    assert [n.item() for n in foreach_norm([a, b], 1.0, torch.float64)] == [3.0, 4.0]
    foreach_copy([a], [torch.full((3,), 5.0)])
    foreach_zero([b])
    assert a.tolist() == [5.0] * 3 and b.tolist() == [0.0] * 2
    flags = torch.tensor([0.0, 0.5])
    for value, found in ((4.0, 0.0), (float("-inf"), 1.0)):
        c = torch.tensor([2.0, value])
        foreach_unscale([a, c], flags[0], flags[1])
        assert flags[0] == found and c.tolist() == [1.0, value / 2], f"{flags.tolist()} {c.tolist()}"
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen: list[str] = []
    handle = old.register_hook(lambda g: seen.append("hook"))
    old.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    move_tensor_hooks(old, new)
    new.sum().backward()
    handle.remove()
    new.sum().backward()
    assert seen == ["hook", "post", "post"], f"moved hooks ran as {seen}"


def _check_lending() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    like = DTensor.from_local(
        torch.zeros(2, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((2, 3)), stride=(3, 1)
    )
    placed = Loan(torch.ones(2, 3), like).tensor
    assert isinstance(placed, DTensor) and placed.placements == like.placements and placed.device_mesh == mesh
    assert placed.shape == like.shape and placed.to_local().sum() == 6 and not placed.requires_grad
    loans = [Loan(torch.ones(2, 3), torch.zeros(2, 3)) for _ in range(2)]
    free, one, other = (Loan.references(some) for some in (loans, loans[:1], loans[1:]))
    assert free == [n for pair in zip(one, other, strict=True) for n in pair], (
        f"{free} references, but {one} and {other}"
    )
    view, leaf = loans[1].tensor.detach(), nn.Parameter(torch.zeros(2, 3))
    assert Loan.references(loans) != free, "a view is not counted"
    del view
    leaf.grad = loans[1].tensor
    assert Loan.references(loans) != free, "the .grad of a tensor is not counted"
    leaf.grad = None
    assert Loan.references(loans) == free, f"{Loan.references(loans)} references are left of {free}"
    loans[1].tensor.data = torch.ones(2, 3)
    assert Loan.references(loans) == []


def _check_items() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    item = torch.ops.aten._local_scalar_dense.default
    before, seen = handlers.get(item), []
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    part = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()], run_check=False)
    try:
        before_item(seen.append)
        assert part.item() == 3.0 and len(seen) == 1, f"item() of a DTensor is not seen: {seen}"
    finally:
        handlers.pop(item, None)
        handlers.update({item: before} if before else {})


def _check_schemas() -> None:
    aten = torch.ops.aten
    assert shared_arguments(aten.view.default) == (("self",),) and shared_arguments(aten.mm.default) == ((),)
    assert shared_arguments(aten.split.Tensor) == (("self",),)
    assert argument_names(aten.mm.default) == ("self", "mat2")
    assert is_mutating(aten.add_.Tensor) and not is_mutating(aten.add.Tensor)
    state, x = higher_order_operator("run_and_save_rng_state")(aten.bernoulli.p, torch.ones(4), 0.5)
    assert torch.equal(higher_order_operator("run_with_rng_state")(state, aten.bernoulli.p, torch.ones(4), 0.5), x)


def _check_ranks() -> None:
    from torch.distributed import HashStore, PrefixStore, ProcessGroup, TCPStore

    store = PrefixStore("a", PrefixStore("b", HashStore()))
    assert store_host(store) == "" and store_client(store) is store
    assert store.underlying_store is not None and hasattr(TCPStore, "clone")
    for name in ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "allreduce_coalesced", "abort"):
        assert hasattr(ProcessGroup, name), f"ProcessGroup has no {name}"
    from torch.distributed import distributed_c10d

    nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL", None)  # only builds for GPUs have it
    assert hasattr(ProcessGroup, "_get_backend") and (nccl is None or hasattr(nccl, "get_error"))
    assert is_short_wait_over(RuntimeError("Operation timed out!"))
    from torch._C._distributed_c10d import _SymmetricMemory

    for name in ("empty_strided_p2p", "rendezvous", "get_buffer", "get_signal_pad", "barrier"):
        assert hasattr(_SymmetricMemory, name), f"_SymmetricMemory has no {name}"
    assert callable(distributed_c10d._set_pg_timeout) and callable(distributed_c10d._get_process_group_store)
    waiting: Any = store
    assert waiting.timeout.total_seconds() > 0 and hasattr(waiting, "set_timeout")
    assert is_broken_collective(torch.distributed.DistNetworkError("")) and not is_broken_collective(ValueError())


def _check_dcp_metadata() -> None:
    import io
    import pickle
    import tempfile
    from pathlib import Path

    from torch.distributed.checkpoint import FileSystemWriter, save

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"a": torch.ones(2, 3), "b": 1}, storage_writer=FileSystemWriter(folder), no_dist=True)
        with open(Path(folder) / ".metadata", "rb") as file:
            metadata = load_dcp_metadata(file)
    assert metadata.state_dict_metadata["a"].size == (2, 3), "DCP's metadata has another form"
    try:
        load_dcp_metadata(io.BytesIO(pickle.dumps(nn.Linear)))
    except pickle.UnpicklingError:
        return
    raise AssertionError("foreign types are loaded from DCP's metadata")


#: what ``doctor`` and the test suite run
SELF_TESTS: dict[str, Callable[[], None]] = {
    "fake tensors": _check_fake,
    "operators": _check_operators,
    "operator schemas": _check_schemas,
    "capture with descriptors": _check_capture,
    "decomposition of LSTMs": _check_lstm,
    "min-cut split": _check_split_and_inductor,
    "settings and caches": _check_caches,
    "autograd hooks": _check_autograd,
    "tensor lists and moved hooks": _check_tensor_lists,
    "lent tensors": _check_lending,
    "numbers of DTensors": _check_items,
    "ranks": _check_ranks,
    "metadata of DCP": _check_dcp_metadata,
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
