"""What the runtime executes: a scheduled graph as a flat list of instructions over numbered slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class TensorType:
    """What a tensor is, without its layout.

    Attributes:
        shape: its sizes.
        dtype: its element type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Port:
    """What a program reads or returns.

    Attributes:
        kind: ``param``, ``buffer``, ``input``, ``tangent``, ``saved``, ``kept``, ``offloaded`` for what it reads; ``output``, ``grad``,
            ``input_grad``, ``mutation``, ``input_mutation``, ``saved``, ``kept``, ``offloaded`` for what it returns.
        key: a name, or an index for ``input``, ``tangent``, ``output``, ``input_grad`` and ``input_mutation``.
        slot: where the value is.
        shared: for a returned value: whether another returned value, or an input, is the same tensor.
    """

    kind: str
    key: Any
    slot: int
    shared: bool = False


@dataclass(frozen=True)
class Start:
    """Start a collective; its results are in ``outputs`` after the ``Wait`` of the same ``ticket``.

    Attributes:
        op: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        inputs: slots of the tensors that go in.
        outputs: slots of the results.
        types: type of each result.
        grads: for a reduction, the parameter whose gradient each result is and nothing else; ``""`` where it is more than that.
        cast: for an all-gather, the dtype that its inputs are cast to first; None: they have it.
        label: for errors, such as ``all_gather of layers.3``.
        ticket: number of the collective in the program.
    """

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    types: tuple[TensorType, ...]
    grads: tuple[str, ...]
    cast: torch.dtype | None
    label: str
    ticket: int


@dataclass(frozen=True)
class Transfer:
    """Start copies between the device and the host; they are in ``outputs`` after the ``Wait`` of the same ``ticket``.

    Attributes:
        op: ``offload`` or ``reload``.
        inputs: slots of the tensors to copy.
        outputs: slots of the copies.
        types: type of each copy.
        label: for errors and profiles.
        ticket: shared with collectives.
    """

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    types: tuple[TensorType, ...]
    label: str
    ticket: int


@dataclass(frozen=True)
class Wait:
    """Have the results of collective or transfer ``ticket``, and forget what went in."""

    ticket: int
    frees: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """Run computation ``body`` on ``inputs``; results go to ``outputs`` (-1: dropped).

    ``frees`` are slots that nobody reads afterwards; ``types`` says what each result must be.
    """

    body: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    types: tuple[TensorType, ...]


@dataclass(frozen=True)
class Release:
    """Give gathered buffers back."""

    slots: tuple[int, ...]


Instruction = Start | Transfer | Wait | Call | Release


@dataclass(frozen=True)
class Program:
    """One graph, ready to run.

    Attributes:
        name: for errors and profiles.
        num_slots: size of the slot table.
        inputs: where each value comes from.
        instructions: in order.
        outputs: what is returned, in order.
        nodes: of each instruction, its node in the graph: what plans call it.
    """

    name: str
    num_slots: int
    inputs: tuple[Port, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Port, ...]
    nodes: tuple[str, ...] = ()

    @cached_property
    def grads(self) -> dict[str, int]:
        """By parameter, the slot of its gradient."""
        return {port.key: port.slot for port in self.outputs if port.kind == "grad"}


@dataclass(frozen=True)
class Runnable:
    """One direction of a step.

    Attributes:
        program: its instructions.
        bodies: what its calls run, by name.
        sequence: digest and lines of its collectives, for the ranks to agree on.
    """

    program: Program
    bodies: dict[str, Any]
    sequence: Any


@dataclass(frozen=True)
class InWindow:
    """What runs in the middle of a declared window, where full parameters stay from a backward to the next forward.

    Attributes:
        takes: types of the ``kept`` values that forward reads instead of gathering them, and backward returns, by name.
        forward: run where the backward before it left them.
        backward: run where another forward of the window will follow.
        local_backward: the same without reductions, built when first asked for.
    """

    takes: Mapping[str, TensorType]
    forward: Runnable
    backward: Runnable
    local_backward: Callable[[], Runnable]


@dataclass(frozen=True)
class StepProgram:
    """Everything the runtime needs to run one captured step.

    Attributes:
        forward: run by a call of the model.
        backward: run by ``backward()``; None when nothing needs a gradient.
        local_backward: gives the same without reductions, for ``no_sync``: gradients come in the form that reductions read. It is
            built when first asked for.
        in_window: what runs in the middle of a declared window instead, built when first asked for; None: the same.
        label: how the step is called in errors, such as ``train``.
        num_outputs: number of output leaves of the user's forward.
        tangents: output leaves that have a tangent, with the strides that backward was traced with.
        detached: output leaves that have none although they depend on parameters, with their names.
        trainable: parameters that get a gradient.
    """

    forward: Runnable
    backward: Runnable | None
    local_backward: Callable[[], Runnable]
    in_window: Callable[[], InWindow | None]
    label: str
    num_outputs: int
    tangents: dict[int, tuple[int, ...]]
    detached: dict[int, str]
    trainable: tuple[str, ...]
