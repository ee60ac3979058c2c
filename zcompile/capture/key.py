"""The key of a traced program: equal keys give equal joint graphs, and equal graphs after each pass.

Dynamo's graph is what user code came to, with every constant in it. The key is a hash of that graph and of whatever else is read
from there to the step that runs. What cannot be told by its value (an operator of the user's, a tensor that belongs to no module)
leaves a program without a key.
"""

from __future__ import annotations

import enum
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zcompile import compat


class NoKey(Exception):
    """A program that depends on something that has no value to hash; says on what."""


def program_key(
    traced: fx.GraphModule, leaves: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], facts: tuple[Any, ...]
) -> str:
    """The key of a program that Dynamo traced on fake tensors.

    Args:
        traced: the program, whose parameters and buffers are fake.
        leaves: its arguments, fake.
        buffers: the real buffers, of which it counts which share memory.
        facts: what else its joint graph depends on: plain values.

    Raises:
        NoKey: there is none.
    """
    lines = hashlib.sha256()
    for line in _lines(traced, leaves, buffers, facts):
        lines.update(line.encode())
        lines.update(b"\0")
    return lines.hexdigest()


def _lines(
    traced: fx.GraphModule, leaves: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], facts: tuple[Any, ...]
) -> Iterator[str]:
    yield from _world()
    yield _value(facts)
    names: dict[int, str] = {}
    for index, leaf in enumerate(leaves):
        yield f"leaf {index}: {_tensor(leaf)}"
        names[id(leaf)] = f"leaf {index}"
    for kind, found in (("parameter", traced.named_parameters), ("buffer", traced.named_buffers)):
        for name, tensor in found(remove_duplicate=False):
            same = names.setdefault(id(tensor), f"{kind} {name}")
            yield f"{kind} {name}: {_tensor(tensor)} {same}"
    owners: dict[int, str] = {}
    for name, buffer in buffers.items():
        yield f"memory of {name}: {owners.setdefault(compat.storage_id(buffer), name) if buffer.numel() else ''}"
    inputs, outputs = compat.dynamo_ports(traced, tuple(leaves))
    yield from _graph(traced, [_known(names, value) for value in inputs])
    yield f"returns {[value if isinstance(value, str) else _known(names, value) for value in outputs]}"


def _known(names: Mapping[int, str], value: Any) -> str:
    if id(value) not in names:
        what = (
            f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        )
        raise NoKey(f"forward reads {what} that is no argument, parameter or buffer")
    return names[id(value)]


def _graph(module: fx.GraphModule, inputs: Sequence[str] | None = None) -> Iterator[str]:
    """Every node of a graph, and of the graphs that it calls; ``inputs`` says what its placeholders are."""
    if unknown := module.meta.keys() - _HARMLESS_OF_MODULES:
        raise NoKey(f"Dynamo says {', '.join(sorted(map(str, unknown)))} of a graph")
    numbers: dict[fx.Node, int] = {}
    given = None if inputs is None else iter(inputs)
    for node in module.graph.nodes:
        yield f"{node.op} {_meta(node)}"
        if node.op == "placeholder":
            yield next(given) if given is not None else ""
        elif node.op == "get_attr":
            owned = getattr(module, str(node.target), None)
            if not isinstance(owned, fx.GraphModule):
                raise NoKey(f"Dynamo's graph holds '{node.target}', a {type(owned).__name__}")
            yield from _graph(owned)
        elif node.op in ("call_function", "call_method"):
            yield _target(node.target)
        elif node.op != "output":
            raise NoKey(f"Dynamo's graph has a {node.op}")
        yield _value((node.args, node.kwargs), numbers)
        numbers[node] = len(numbers)


#: what Dynamo and ``torch.utils.checkpoint`` write into graphs, and what says nothing of what they compute
_HARMLESS_OF_MODULES = frozenset(
    (
        "dynamo_flat_name_to_original_fqn",
        "dynamo_compile_id",
        "backend_id",
        "module_call_specs",
        "fake_mode",
        "tracing_context",
    )
)
_HARMLESS = frozenset(
    ("example_value", "val", "source_fn_stack", "fwd_source_fn_stack", "creation_timestamp", "tensor_dict")
)
_VALUES = frozenset(("stack_trace", "custom"))
_STACKS = frozenset(("nn_module_stack", "fwd_nn_module_stack"))


def _meta(node: fx.Node) -> str:
    found = []
    for key, value in sorted(node.meta.items()):
        if key in _STACKS:
            found.append((key, tuple(path for path, _ in (value or {}).values())))
        elif key in _VALUES:
            found.append((key, value))
        elif key not in _HARMLESS:
            raise NoKey(f"Dynamo says '{key}' of a node")
    return _value(tuple(found))


def _value(value: Any, numbers: Mapping[fx.Node, int] | None = None) -> str:
    """A plain value as text that tells it from every other."""
    if isinstance(value, fx.Node):
        assert numbers is not None, "only arguments hold nodes"
        return f"%{numbers[value]}"
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return f"{kind}({','.join(_value(v, numbers) for v in value)})"
    if isinstance(value, dict):
        return f"dict({','.join(f'{_value(k)}:{_value(v, numbers)}' for k, v in value.items())})"
    if isinstance(value, slice):
        return f"slice({','.join(_value(v, numbers) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, enum.Enum) or type(value) in _PLAIN:
        return f"{type(value).__name__}({value!r})"
    raise NoKey(f"the program holds a {type(value).__name__}")


_PLAIN = frozenset(
    (
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)


def _tensor(tensor: torch.Tensor) -> str:
    assert compat.is_fake(tensor), "what a capture traces is fake"
    try:
        return repr(compat.describe_fake(tensor))
    except TypeError as error:
        raise NoKey(str(error)) from error


#: higher-order operators whose graphs say all that they do
_TAKEN_APART = frozenset(("tag_activation_checkpoint", "autograd_function_apply", "wrap"))
#: namespaces of torch's own operators, and of ours
_NAMESPACES = frozenset(("aten", "prims", "prim", "zc"))
_TORCH = f"{Path(torch.__file__).parent}/"
_MODULES = frozenset(("torch", "operator", "_operator", "math", "builtins"))


def _target(target: Any) -> str:
    """What a node calls, by name; the versions of torch and zcompile say the rest."""
    if isinstance(target, str):
        return f"method {target}"
    if compat.is_higher_order(target):
        if target.name() not in _TAKEN_APART:
            raise NoKey(f"forward calls the higher-order operator {target.name()}")
        return f"higher-order {target.name()}"
    if compat.is_overload(target):
        if target.namespace not in _NAMESPACES:
            raise NoKey(f"forward calls {target.name()}, an operator that is not torch's")
        return f"operator {target.name()}"
    module: str | None = getattr(target, "__module__", None)
    names = (getattr(target, "__qualname__", ""), getattr(target, "__name__", ""))
    code = getattr(target, "__code__", None)  # a function may have another's name
    if code is not None and not code.co_filename.startswith(_TORCH):
        raise NoKey(f"forward calls {target} of {code.co_filename}, which is not torch's")
    if module is not None and module.partition(".")[0] in _MODULES:
        for name in names:  # the second for torch.tanh, a method of a class that has all of them, and for max_pool2d
            if _found(module, name) == target:
                return f"{module} {name}"
    raise NoKey(f"forward calls {target}, which is not torch's")


def _found(module: str, name: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


# Everything beside the program. ---------------------------------------------------------------------------------------


def _world() -> Iterator[str]:
    """Versions, machine, and switches of torch that captures, passes and the split depend on."""
    yield f"{_SOURCES} {sys.version} {sys.byteorder}"
    try:
        yield from compat.compile_settings()
    except TypeError as error:
        raise NoKey(str(error)) from error


def _sources() -> str:
    """A hash of zcompile's own code."""
    lines = hashlib.sha256()
    root = Path(compat.__file__).parent
    files = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    for path in sorted(path for path in files if path.suffix == ".py"):
        lines.update(f"{path.relative_to(root)}".encode())
        lines.update(path.read_bytes())
    return lines.hexdigest()


#: as they are when this process starts: it runs these, whatever is edited later
_SOURCES = _sources()
