"""A model with fake full-size parameters for the time of a capture, and what one fake eager run shows about it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcompile import compat
from zcompile.errors import CaptureError


@contextlib.contextmanager
def fake_state(
    model: nn.Module,
    mode: Any,
    param_types: Mapping[int, tuple[tuple[int, ...], torch.dtype, bool]],
    device: torch.device,
) -> Iterator[dict[int, str]]:
    """Replace every parameter and buffer of ``model`` by a fake one of full size while the context is open.

    Args:
        model: the user's module; its own tensors may be shards, plain or ``meta``.
        mode: the fake mode of the capture.
        param_types: by ``id`` of the parameter: full shape, compute dtype, requires_grad.
        device: where the computation will run.

    Yields:
        the name of each fake parameter by the identity of its storage.
    """
    saved: list[tuple[dict[str, Any], str, Any]] = []
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    try:
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in list(table.items()):
                    if tensor is None:
                        continue
                    if id(tensor) not in memo:
                        memo[id(tensor)] = _fake(tensor, mode, param_types.get(id(tensor)), device)
                    saved.append((table, name, tensor))
                    table[name] = memo[id(tensor)]
                    if table is module._parameters:
                        names.setdefault(compat.storage_id(memo[id(tensor)]), f"{prefix}.{name}" if prefix else name)
        yield names
    finally:
        for table, name, tensor in saved:
            table[name] = tensor


def _fake(
    tensor: torch.Tensor, mode: Any, param_type: tuple[tuple[int, ...], torch.dtype, bool] | None, device: torch.device
) -> Any:
    with mode:
        if param_type is not None:
            shape, dtype, requires_grad = param_type
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=requires_grad)
        place = device if tensor.device.type == "meta" else tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


def fake_inputs(tensors: list[torch.Tensor], mode: Any) -> list[torch.Tensor]:
    """Fake leaves with the shapes, strides, dtypes, devices and requires_grad of ``tensors``."""
    with mode:
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors]
    return [f.requires_grad_(t.requires_grad) for f, t in zip(fakes, tensors, strict=True)]


def eager_run(model: nn.Module, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward once on fake tensors, and refuse what a capture would get wrong.

    Returns:
        the model's output, in the user's own types, with fake tensors.

    Raises:
        CaptureError: the forward depends on tensor values, or changes attributes of modules.
        Exception: whatever the user's forward raises, as itself.
    """
    before = _snapshot(model)
    try:
        with mode, compat.as_if_compiling():
            out = model.forward(*args, **kwargs)
    except compat.data_dependent_errors() as error:
        raise CaptureError(
            f"control flow depends on tensor values at {user_line(error, model)}{_hooked(model)} ({first_line(error)}); compute it "
            "with tensor operators such as torch.where, or move the decision out of forward and pass it as a bool, int or float"
        ) from error
    except RuntimeError as error:
        if "is not supported for tensor subclasses" not in str(error):
            raise
        raise CaptureError(
            f"forward leaves PyTorch at {user_line(error, model)} ({first_line(error).partition(' is not')[0]}), where a captured graph "
            "cannot follow; compute it with tensor operators, or outside of the model"
        ) from error
    finally:
        changed = _restore(model, before)
    if changed:
        raise CaptureError(
            f"forward changes attributes of modules, which a captured graph would not do again: {', '.join(changed[:5])}; "
            "return the value as an output, or write to a registered buffer in place (buffer.copy_(value), buffer.add_(1))"
        )
    return out


def still_changed(sources: list[str], run: Callable[[], Any], mode: Any) -> list[str]:
    """Of the changed objects that Dynamo names, those that differ after a fake ``run`` from before.

    A global that a library sets for the time of a forward and puts back (as transformers does) is no side effect.
    """
    found = {source: compat.dynamo_global(source) for source in sources}
    before = {source: _attributes_of(o) for source, o in found.items() if hasattr(o, "__dict__")}
    if before:
        with mode, compat.as_if_compiling():
            run()
    return [source for source in sources if source not in before or _attributes_of(found[source]) != before[source]]


def _attributes_of(value: Any) -> dict[str, Any]:
    return {name: _fingerprint(attribute) for name, attribute in vars(value).items()}


_ROOT = Path(__file__).parent.parent
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{_ROOT}/")
_MODULES = f"{Path(torch.__file__).parent}/nn/"


def _hooked(model: nn.Module) -> str:
    """A hint that names the submodules with forward hooks, which are traced with the forward."""
    names = [
        name for name, module in model.named_modules() if module is not model and any(compat.forward_hooks(module))
    ]
    return f", where the forward hook of {', '.join(map(repr, names[:3]))} is captured too" if names else ""


def user_line(error: BaseException, model: nn.Module) -> str:
    """``file:line`` of the innermost frame of user code in a traceback: code outside torch and zcompile."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}"
    torch_frame = next((f for f in reversed(frames) if f.filename.startswith(_MODULES)), None)
    return f"{torch_frame.filename}:{torch_frame.lineno}" if torch_frame else f"{type(model).__name__}.forward"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200]


#: tables of a module; what changes in them is named by entry
_TABLES = ("_parameters", "_buffers", "_modules")
_Attributes = dict[str, tuple[Any, Any, Any]]


def _snapshot(model: nn.Module) -> dict[nn.Module, tuple[str, _Attributes]]:
    """For each module its path and its attributes: value, shallow fingerprint, and the contents of a container."""
    return {module: (path, _attributes(module)) for path, module in model.named_modules()}


def _attributes(module: nn.Module) -> _Attributes:
    return {k: (v, _fingerprint(v), _contents(v)) for k, v in vars(module).items() if "hooks" not in k}


def _fingerprint(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, dict):
        return (
            id(value),
            tuple((k if isinstance(k, str) else id(k), id(v), _requires_grad(v)) for k, v in value.items()),
        )
    if isinstance(value, (list, set, tuple)):
        return (id(value), tuple(id(v) for v in value))
    return id(value)


def _requires_grad(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.requires_grad


def _contents(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else None


def _restore(model: nn.Module, before: dict[nn.Module, tuple[str, _Attributes]]) -> list[str]:
    """Undo what changed in the attributes of modules since ``before``; returns the names of what did."""
    names = []
    for module, (path, old) in before.items():
        new = _attributes(module)
        for key in sorted(old.keys() | new.keys()):
            was, now = old.get(key), new.get(key)
            if was is not None and now is not None and was[1] == now[1]:
                continue
            entries = [key]
            if key in _TABLES and was is not None and now is not None:
                entries = [n for n in was[2] | now[2] if was[2].get(n) is not now[2].get(n)] or [key]
            if not (isinstance(module, nn.RNNBase) and key.startswith("_flat_weight")):  # its cache of its parameters
                names += [f"'{path}.{n}'" if path else f"'{n}'" for n in entries]
            if was is None:
                module.__dict__.pop(key)
                continue
            value, _, contents = was
            module.__dict__[key] = value
            if isinstance(value, list):
                value[:] = contents
            elif contents is not None:
                value.clear()
                value.update(contents)
    return names
