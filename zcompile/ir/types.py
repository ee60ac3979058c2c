"""The text of types and literals: ``f32[4, 8]{1, 4}@cpu``, ``bf16``, ``contiguous_format``, ``[%x, 1.5, None]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex128: "c128",
    torch.complex64: "c64",
    torch.complex32: "c32",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None, "inf": float("inf"), "nan": float("nan")}


#: floating dtypes that parameters and reductions may have, by name
FLOATS = {name: dtype for name, dtype in _BY_NAME.items() if name in ("f16", "bf16", "f32", "f64")}


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``; dtypes without a short name keep their own."""
    return _DTYPES.get(dtype) or _torch_name(dtype)


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype with this text; None when there is none."""
    found = find_word(name)
    return found[0] if found and isinstance(found[0], torch.dtype) else None


def find_word(word: str) -> tuple[Any] | None:
    """What a bare word in a call stands for, in a tuple of one: a constant, dtype, memory format, layout or device."""
    if word in _WORDS:
        return (_WORDS[word],)
    if word in _BY_NAME:
        return (_BY_NAME[word],)
    named = getattr(torch, word, None)
    if isinstance(named, (torch.dtype, torch.memory_format, torch.layout)):
        return (named,)
    device = find_device(word)
    return None if device is None else (device,)


def find_device(word: str) -> torch.device | None:
    """The device type with this text; None when there is none."""
    try:
        return torch.device(word)
    except RuntimeError:
        return None


def type_text(value: Any, device: str) -> str:
    """The text of a fake value's type.

    Strides are printed where they are not those of a contiguous tensor, the device where it is not the graph's ``device``.
    """
    if isinstance(value, torch.Tensor):
        text = f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
        if not value.is_contiguous():
            text += f"{{{', '.join(map(str, value.stride()))}}}"
        return text if value.device.type == device else f"{text}@{value.device.type}"
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return _sequence([type_text(v, device) for v in value], value)
    return f"{type(value).__name__}({literal(value)})"


def literal(value: Any) -> str:
    """The text of an argument: a node reference, a constant, or a list, tuple or dict of arguments."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return _sequence([literal(v) for v in value], value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.memory_format, torch.layout)):
        return _torch_name(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, slice):
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    from zcompile.ir.operators import operator_name

    return operator_name(value) if callable(value) else repr(value)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Each tensor of a fake value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v)


def _sequence(items: list[str], like: list[Any] | tuple[Any, ...]) -> str:
    if isinstance(like, list):
        return f"[{', '.join(items)}]"
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")
