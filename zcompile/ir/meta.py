"""The only reader and writer of ``node.meta``: what zcompile knows about a node beside its operator and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from zcompile.ir.graph import Origin, Role

_VALUE = "val"
_ORIGIN = "zc_origin"
_ROLES = "zc_roles"
_REGION = "zc_region"
_SOURCE = "stack_trace"
_MODULE = "zc_module"
_PLACES = "zc_places"
_RECOMPUTE = "recompute"
_CHECKPOINT = "ac_graph_id"
_DIRECTION = "partitioner_tag"
#: the partitioner treats tagged nodes with one id as one checkpointed region; far from the ids that user checkpoints get
_PARAM_CHAINS = 100_000


def value(node: fx.Node) -> Any:
    """The node's fake value: a tensor, a list or tuple of tensors, or None."""
    return node.meta.get(_VALUE)


def set_value(node: fx.Node, val: Any) -> None:
    """Record the node's fake value."""
    node.meta[_VALUE] = val


def tensor(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that has exactly one."""
    val = value(node)
    assert isinstance(val, torch.Tensor), f"{node.name} has no single tensor value but {type(val).__name__}"
    return val


def origin(node: fx.Node) -> Origin | None:
    """What a placeholder is."""
    return node.meta.get(_ORIGIN)


def set_origin(node: fx.Node, what: Origin) -> None:
    """Say what a placeholder is."""
    node.meta[_ORIGIN] = what


def roles(output: fx.Node) -> list[Role]:
    """The role of each value that an output node returns."""
    return output.meta.get(_ROLES, [])


def set_roles(output: fx.Node, what: list[Role]) -> None:
    """Say what each returned value is."""
    output.meta[_ROLES] = what


def region(node: fx.Node) -> int | None:
    """The index of the region that a compute node belongs to; None before the unit plan."""
    return node.meta.get(_REGION)


def set_region(node: fx.Node, index: int) -> None:
    """Put a compute node into a region."""
    node.meta[_REGION] = index


def recompute(node: fx.Node) -> bool:
    """Whether the split must compute this node again in backward instead of saving it."""
    return node.meta.get(_RECOMPUTE) is CheckpointPolicy.MUST_RECOMPUTE


def set_recompute(node: fx.Node) -> None:
    """Tag a node for the split: never saved, computed again where backward needs it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta[_CHECKPOINT] = _PARAM_CHAINS


def saved(node: fx.Node) -> bool:
    """Whether the split must save this node, if backward needs it, and not compute it again."""
    return node.meta.get(_RECOMPUTE) is CheckpointPolicy.MUST_SAVE


def set_saved(node: fx.Node) -> None:
    """Tag a node for the split: never computed again, saved where backward needs it."""
    node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE


def is_tagged(node: fx.Node) -> bool:
    """Whether anybody said what the split is to do with this node, a user's checkpoint also."""
    return _RECOMPUTE in node.meta


def clear_recompute(node: fx.Node) -> None:
    """Take the tag off again, after the split."""
    for key in (_RECOMPUTE, _CHECKPOINT):
        node.meta.pop(key, None)


def source(node: fx.Node) -> str:
    """The user's source line that a node came from (``file:line``); empty when unknown."""
    return _last_line(node.meta.get(_SOURCE) or "")


def _last_line(trace: str) -> str:
    files = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not files:
        return ""
    parts = files[-1].split(",")
    path = parts[0].removeprefix("File ").strip().strip('"')
    line = parts[1].replace("line", "").strip() if len(parts) > 1 else "?"
    return f"{path}:{line}"


def module(node: fx.Node) -> str:
    """The dotted path of the submodule whose forward a node came from, or whose backward it is; empty when unknown."""
    return node.meta.get(_MODULE, "")


def set_module(node: fx.Node, path: str) -> None:
    """Say which submodule a node came from."""
    node.meta[_MODULE] = path


def copy_place(node: fx.Node, like: fx.Node) -> None:
    """Let a node come from where ``like`` does: source line and submodule."""
    for key in (_SOURCE, _MODULE):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def is_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph was made by autograd."""
    return node.meta.get(_DIRECTION) == "is_backward"


def set_backward(node: fx.Node) -> None:
    """Say that a node of a joint graph belongs to backward."""
    node.meta[_DIRECTION] = "is_backward"


def set_forward(node: fx.Node) -> None:
    """Say that a node of a joint graph belongs to forward, whoever made it."""
    node.meta.pop(_DIRECTION, None)


def copy_split(node: fx.Node, like: fx.Node) -> None:
    """Let the split treat a node as it does ``like``: the direction it belongs to, and what was tagged."""
    for key in (_DIRECTION, _RECOMPUTE, _CHECKPOINT):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def places(call: fx.Node) -> list[tuple[str, str]]:
    """For each compute node of the region that a call runs, the source line and submodule that this call is of.

    Calls of several places share one region. Empty when unknown.
    """
    return [(_last_line(trace), path) for trace, path in call.meta.get(_PLACES, ())]


def set_places(call: fx.Node, nodes: list[fx.Node]) -> None:
    """Say which nodes a region call stands for."""
    call.meta[_PLACES] = tuple((node.meta.get(_SOURCE) or "", module(node)) for node in nodes)


def num_bytes(val: Any) -> int:
    """Bytes of a fake value; lists count all their tensors."""
    if isinstance(val, torch.Tensor):
        return val.numel() * val.element_size()
    if isinstance(val, (list, tuple)):
        return sum(num_bytes(v) for v in val)
    return 0
