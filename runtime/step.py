"""One training step: a call runs the forward program, and an autograd function runs the backward program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zcompile import compat
from zcompile.errors import BackwardError, CaptureError, RankError
from zcompile.program import InWindow, Port, Program, Runnable, StepProgram
from zcompile.runtime.accumulator import Accumulator
from zcompile.runtime.executor import Executor, as_written
from zcompile.runtime.holding import Held, Holding
from zcompile.runtime.leaves import AllLeaves, Leaves
from zcompile.runtime.ranks.agreement import Agreement
from zcompile.runtime.replay.tape import Kind, Tape
from zcompile.runtime.replay.tapes import Tapes
from zcompile.runtime.saved import SavedValues
from zcompile.runtime.sharding.shards import Contents, ParameterShards


class StepRunner:
    """Runs the steps of one compiled model.

    Attributes:
        holding: full parameters between the micro-batches of a declared window.
        accumulator: takes the gradients of each backward.
        tapes: replays steps; None: every step is issued.
        one_at_a_time: for threads that run steps of the model at once, as the engine locks each leaf.
        saved_bytes: by ``id`` of a step, what its first forward left for its backward, shared storage once.
    """

    def __init__(
        self, shards: ParameterShards, executor: Executor, agreement: Agreement, buffer_of: Callable[[str], Tensor]
    ) -> None:
        self.shards = shards
        self.executor = executor
        self.agreement = agreement
        self.buffer_of = buffer_of
        self.holding = Holding(executor.buffers, agreement)
        self.accumulator = Accumulator(executor, agreement, self.holding)
        self.tapes: Tapes | None = None
        self.saved_bytes: dict[int, int] = {}
        self.one_at_a_time = threading.RLock()
        self._all_leaves = AllLeaves(shards)

    def forward(self, step: StepProgram, constants: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        """Run a step's forward.

        Args:
            step: what to run.
            constants: values of buffers that the capture made.
            inputs: the tensor leaves of the arguments.

        Returns:
            the output leaves by index; None for those that alias inputs. Attached to autograd when the step has a backward.
        """
        with self.one_at_a_time:
            if step.backward is None:
                outputs, _ = self.run_forward(step, constants, inputs)
                return outputs
            self.shards.drop_gradients()
            leaves = self._all_leaves.of(step.trainable)
            return list(_Step.apply(self, step, constants, leaves, leaves.end, *inputs))

    def run_forward(
        self, step: StepProgram, constants: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[list[Any], SavedValues]:
        """The output leaves, and what backward needs by name."""
        window = self._in_window(step)
        contents = Contents() if window is None else self.shards.contents(sums=self.holding.looks)
        if window is not None:
            held = self.holding.take(window.takes, contents)
        else:
            held = Held(self.executor.buffers)
            if step.backward is not None:  # its replay may write where another step's has lent from
                self.holding.drop()
        kind = self._kind(takes=bool(held.values), leaves=window is not None and self._will_leave())
        runnable = _forward(step, window, kind)
        program = runnable.program
        self.agreement.event(f"forward ({step.label}{', weights held' * kind.takes})", runnable.sequence)
        tape = self._replayed(step, kind, window, partial(self._read, constants, inputs, held.values))
        if tape is None:
            slots: list[Any] = [None] * program.num_slots
            read = partial(self._read, constants, inputs, held.own())
            for port in program.inputs:
                slots[port.slot] = read(port)
            del read
            with contextlib.nullcontext() if self.tapes is None else self.tapes.issuing_forward(step):
                ports, results = program.outputs, self._run(runnable, slots)
        else:
            held.give()
            ports, results = tape.ends, tape.forward.results
        outputs: list[Any] = [None] * step.num_outputs
        saved = SavedValues(self.executor.buffers, self.executor.mover.memory, kind, tape, contents)
        if tape is not None and self.tapes is not None:
            self.tapes.lease(saved)
        copies: dict[int, Tensor] = {}
        for port in ports:
            value = results[port.slot]
            if port.kind == "output":
                if tape is not None:  # the next replay writes over it
                    value = copies[port.slot] = copies[port.slot] if port.slot in copies else value.clone()
                outputs[port.key] = value.detach() if port.shared else value
            elif port.kind == "mutation":
                self.buffer_of(port.key).copy_(value)
            elif port.kind == "input_mutation":
                _write_input(inputs, port.key, value)
            else:
                saved.of(port.kind)[port.key] = value
        saved.note_versions()
        if id(step) not in self.saved_bytes:
            self.saved_bytes[id(step)] = saved.num_bytes()
        return outputs, saved

    def _read(
        self, constants: Mapping[str, Tensor], inputs: Sequence[Tensor], kept: Mapping[str, Tensor], port: Port
    ) -> Tensor:
        """What a forward reads at a port."""
        if port.kind == "kept":
            return kept[port.key]
        if port.kind == "param":
            return self.shards.local(port.key)
        if port.kind == "input":
            return inputs[port.key].detach()
        return constants[port.key] if port.key in constants else self.buffer_of(port.key)

    def run_backward(
        self, step: StepProgram, saved: SavedValues, tangents: Sequence[Tensor | None], keep: bool
    ) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Run a step's backward.

        Args:
            step: what to run.
            saved: what the forward left.
            tangents: the gradient of each output leaf.
            keep: another backward through the same forward will come (``retain_graph``).

        Returns:
            padded gradient shards by parameter, and the gradients of inputs by index.
        """
        default = self.accumulator.in_default_mode()
        window = self._in_window(step) if default and self._will_leave() else None
        kind = self._kind(takes=saved.kind.takes, leaves=window is not None, default=default)
        backward = self._backward(step, window, kind)
        program = backward.program
        text = (", no_sync" if self.accumulator.local_only else ", within a window") * kind.local
        text += ", weights stay" * kind.leaves
        self.executor.takes_local = default  # else they wait for a backward that accumulates
        self.agreement.event(f"backward ({step.label}{text})", backward.sequence)
        saved.check_versions()
        replayed = None
        if self.tapes is not None and saved.tape is not None and default and not keep:
            with self._told():
                replayed = self.tapes.backward(saved.tape, kind, tangents)
        results: Mapping[int, Any] | Sequence[Any]
        if replayed is None:
            with contextlib.nullcontext() if self.tapes is None else self.tapes.issuing_backward(step, kind):
                results = self._run(backward, self._backward_slots(program, saved, tangents, keep))
            if not keep:
                saved.give_offloaded()
            if self.shards.hosting.parameters:
                self.shards.hosting.arrived()
        else:
            results = replayed
        if kind.leaves:
            stay = {port.key: results[port.slot] for port in program.outputs if port.kind == "kept"}
            self.holding.put(stay, saved.contents, lent=replayed is not None)
        grads = {name: results[slot] for name, slot in program.grads.items()}
        input_grads = {port.key: results[port.slot] for port in program.outputs if port.kind == "input_grad"}
        if replayed is not None:  # the next replay writes over them
            input_grads = {key: value.clone() for key, value in input_grads.items()}
        return grads, input_grads

    def _backward_slots(
        self, program: Program, saved: SavedValues, tangents: Sequence[Tensor | None], keep: bool
    ) -> list[Any]:
        """What a backward reads; what was saved is given up unless ``keep``."""
        kept = saved.take_kept(keep)
        slots: list[Any] = [None] * program.num_slots
        for port in program.inputs:
            if port.kind == "param":
                slots[port.slot] = self.shards.local(port.key)
            elif port.kind == "tangent":
                slots[port.slot] = tangents[port.key]
            else:
                slots[port.slot] = kept[port.key] if port.kind == "kept" else saved.of(port.kind)[port.key]
        if not keep:
            saved.values = {}
        return slots

    def _backward(self, step: StepProgram, window: InWindow | None, kind: Kind) -> Runnable:
        """The backward that runs; the first use of one without reductions builds it."""
        assert step.backward is not None
        if window is None or not kind.leaves:
            if not kind.local:
                return step.backward
            with self._building():
                return step.local_backward()
        if not kind.local:
            return window.backward
        with self._building():
            return window.local_backward()

    def _kind(self, *, takes: bool, leaves: bool, default: bool = True) -> Kind:
        """The kind of the micro-batch whose forward or backward is next, if nothing comes between them.

        Args:
            takes: its forward reads what the backward before it left.
            leaves: its backward leaves full parameters.
            default: its backward runs in the engine's default mode.
        """
        local = default and self.accumulator.stays_local
        return Kind(takes, leaves, local, sums=bool(self.executor.accumulation.local) and not local)

    def _in_window(self, step: StepProgram) -> InWindow | None:
        """What runs in the middle of the declared window, if there is one and full parameters stay in it."""
        if step.backward is None or self.executor.accumulation.steps == 1:
            return None
        with self._building():
            return step.in_window()

    @contextlib.contextmanager
    def _building(self) -> Iterator[None]:
        with self._told(), as_written(self.executor.buffers.device):
            yield

    def _will_leave(self) -> bool:
        """Whether another forward of the declared window follows the next plain ``backward()``, and nothing is left to it yet."""
        return not (self.executor.accumulation.at_last or self.holding)

    def _replayed(
        self, step: StepProgram, kind: Kind, window: InWindow | None, read: Callable[[Port], Tensor]
    ) -> Tape | None:
        """The tape whose forward was replayed, if the step has one that may be."""
        if self.tapes is None or step.backward is None:
            return None
        with self._told():
            return self.tapes.forward(
                step, kind, lambda: (_forward(step, window, kind), self._backward(step, window, kind)), read
            )

    def _run(self, runnable: Runnable, slots: list[Any]) -> list[Any]:
        with self._told():
            return self.executor.run(runnable.program, runnable.bodies, slots)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the other ranks when the body fails here: they would wait for collectives that never come."""
        try:
            with self.shards.explaining_memory():
                yield
        except RankError:
            raise
        except BaseException as error:
            self.holding.drop()
            self.agreement.fail(error)
            raise


def _forward(step: StepProgram, window: InWindow | None, kind: Kind) -> Runnable:
    """The forward that runs."""
    return window.forward if window is not None and kind.takes else step.forward


def _write_input(inputs: Sequence[Tensor], index: int, value: Tensor) -> None:
    target = inputs[index]
    memory = target.untyped_storage().data_ptr()
    for other, tensor in enumerate(inputs):
        if other != index and memory and tensor.untyped_storage().data_ptr() == memory:
            raise CaptureError(
                f"tensor arguments {other} and {index} share memory and forward writes to {index} in place; pass a clone of one"
            )
    target.detach().copy_(value)


class _Step(torch.autograd.Function):
    """The step as autograd sees it: parameters, through their ``Leaves``, and inputs in, output leaves out."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: StepRunner,
        step: StepProgram,
        constants: Mapping[str, Tensor],
        leaves: Leaves,
        end: Tensor,
        *inputs: Tensor,
    ) -> tuple[Any, ...]:
        outputs, saved = runner.run_forward(step, constants, inputs)
        ctx.runner, ctx.step, ctx.saved, ctx.leaves, ctx.num_inputs = runner, step, saved, leaves, len(inputs)
        ctx.types = {i: (outputs[i].shape, outputs[i].dtype, outputs[i].device) for i in step.tangents}
        ctx.set_materialize_grads(False)
        attached = {*step.tangents, *step.detached}
        ctx.mark_non_differentiable(*[o for i, o in enumerate(outputs) if o is not None and i not in attached])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:
        step: StepProgram = ctx.step
        if torch.is_grad_enabled():
            raise BackwardError(
                "create_graph=True asks for a double backward, which the captured backward does not have; "
                "compute higher-order gradients on the uncompiled model"
            )
        for index, name in step.detached.items():
            if tangents[index] is not None:
                raise BackwardError(
                    f"a gradient arrives at output {name}, which was compiled as not differentiable because the output has a "
                    f"loss; pass differentiable=[..., {name!r}] to compile"
                )
        keep = compat.keeps_graph()
        if ctx.saved is None:
            raise BackwardError(
                "backward runs a second time through a step whose values were freed; pass retain_graph=True to the first backward"
            )
        saved, ctx.saved = ctx.saved, ctx.saved if keep else None
        # a DTensor comes from a loss to which something computed from parameters was added
        given = [t.full_tensor() if isinstance(t, DTensor) else t for t in tangents]
        for index, (shape, dtype, device) in ctx.types.items():
            tangent, strides = given[index], step.tangents[index]
            if tangent is None or tangent.stride() != strides:
                given[index] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                given[index].zero_() if tangent is None else given[index].copy_(tangent)
        with ctx.runner.one_at_a_time:
            ctx.runner.accumulator.leaves = ctx.leaves
            grads, input_grads = ctx.runner.run_backward(step, saved, given, keep)
            with ctx.runner.shards.explaining_memory():
                ctx.handed = ctx.leaves.hand(ctx.runner.accumulator.accumulate(step.label, grads))
        return (None, None, None, None, None, *map(input_grads.get, range(ctx.num_inputs)))
