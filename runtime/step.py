"""One training step: a call runs the forward program, and an autograd function runs the backward program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zcompile import compat
from zcompile.errors import BackwardError, CaptureError, RankError
from zcompile.program import InWindow, Port, Program, Runnable, StepProgram
from zcompile.runtime.executor import Executor, as_written
from zcompile.runtime.full import logical
from zcompile.runtime.holding import Holding
from zcompile.runtime.leaves import AllLeaves, Leaves
from zcompile.runtime.ranks.agreement import Agreement, TextSequence
from zcompile.runtime.saved import SavedValues
from zcompile.runtime.shards import Contents, ParameterShards
from zcompile.runtime.tape import HELD, Tape, Tapes


class StepRunner:
    """Runs the steps of one compiled model.

    Attributes:
        holding: full parameters between the micro-batches of a declared window.
        tapes: replays steps; None: every step is issued.
        local_only: inside ``no_sync``: backwards keep their gradients on this rank.
        leaves: of the step whose backward runs.
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
        self.local_only = False
        self.holding = Holding(executor.buffers, agreement)
        self.tapes: Tapes | None = None
        self.saved_bytes: dict[int, int] = {}
        self.leaves: Leaves | None = None
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
        kept = {} if window is None else self.holding.take(window.takes, contents)
        runnable = window.forward if window is not None and kept else step.forward
        program = runnable.program
        self.agreement.event(f"forward ({step.label}{', weights held' * bool(kept)})", runnable.sequence)
        read = partial(self._read, constants, inputs, kept)
        tape = self._replayed(step, read, window)
        if tape is None:
            slots: list[Any] = [None] * program.num_slots
            for port in program.inputs:
                slots[port.slot] = read(port)
            kept.clear()
            with contextlib.nullcontext() if self.tapes is None else self.tapes.issuing_forward(step):
                ports, results = program.outputs, self._run(runnable, slots)
        else:
            ports, results = tape.ends, tape.forward.results
        outputs: list[Any] = [None] * step.num_outputs
        saved = SavedValues(self.executor.buffers, self.executor.mover.memory, tape, contents)
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
        local = self.keeps_local()
        window = self._in_window(step) if self._leaves() else None
        backward = self._backward(step, window, local)
        program = backward.program
        held = self.executor.accumulation
        kind = (", no_sync" if self.local_only else ", within a window") * local
        kind += ", weights stay" * (window is not None)
        self.executor.takes_local = self.in_default_mode()  # else they wait for a backward that accumulates
        self.agreement.event(f"backward ({step.label}{kind})", backward.sequence)
        saved.check_versions()
        tape = None if keep or local or held.local or not self.executor.takes_local else saved.tape
        results: Mapping[int, Any] | Sequence[Any] | None = None
        if tape is not None:
            with self._told():
                results = self.tapes.backward(tape, tangents) if self.tapes is not None else None
        if results is None:
            measured = None if local else self.tapes
            with contextlib.nullcontext() if measured is None else measured.issuing_backward(step):
                results = self._run(backward, self._backward_slots(program, saved, tangents, keep))
            if not keep:
                saved.give_offloaded()
            if self.shards.hosting.parameters:
                self.shards.hosting.arrived()
        if window is not None:
            stay = {port.key: results[port.slot] for port in program.outputs if port.kind == "kept"}
            self.holding.put(stay, saved.contents)
        grads = {name: results[slot] for name, slot in program.grads.items()}
        input_grads = {port.key: results[port.slot] for port in program.outputs if port.kind == "input_grad"}
        if saved.tape is not None:  # the next replay writes over them
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

    def _backward(self, step: StepProgram, window: InWindow | None, local: bool) -> Runnable:
        """The backward that runs; the first use of one without reductions builds it."""
        assert step.backward is not None
        if not local:
            return step.backward if window is None else window.backward
        with self._building():
            return step.local_backward() if window is None else window.local_backward()

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

    def _leaves(self) -> bool:
        """Inside a backward: whether it is a part of the declared window behind which another forward follows."""
        return not (self.executor.accumulation.at_last or self.holding) and self.in_default_mode()

    def _replayed(self, step: StepProgram, read: Callable[[Port], Tensor], window: InWindow | None) -> Tape | None:
        """The tape whose forward was replayed, if the step has one that may be."""
        if self.tapes is None or step.backward is None:
            return None
        if window is not None:  # what stays for the next micro-batch is in no recording, and ranks hold it alike
            self.tapes.refuse(HELD)
            return None
        with self._told():
            return self.tapes.forward(step, read)

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

    def keeps_local(self) -> bool:
        """Inside a backward: whether its gradients stay on this rank for now."""
        held = self.executor.accumulation
        return (self.local_only or (held.defers and not held.at_last)) and self.in_default_mode()

    def in_default_mode(self) -> bool:
        """Inside a backward: whether the engine runs every accumulation, as a plain ``backward()`` does."""
        assert self.leaves is not None
        return self.leaves.all_run()

    def accumulate(self, step: StepProgram, grads: dict[str, Tensor]) -> dict[str, Any]:
        """Put gradients where they belong; returns those that the engine must handle, by parameter."""
        held = self.executor.accumulation
        trains = compat.requires_grad(self.shards.parameters_of(grads))
        if not all(trains):  # frozen since the forward: the engine gives leaves that do not require grad nothing
            grads = dict(compress(grads.items(), trains))
        if self.keeps_local():
            for name, value in grads.items():
                held.add_local(name, value)
            held.advance(reduces=False)
            return self._for_hooks(step, list(grads))
        if not self.in_default_mode():
            return {name: self._fresh(name, value) for name, value in grads.items()}
        hooked = set(compress(grads, compat.tensor_hooks(self.shards.parameters_of(grads))))
        if held.local:
            self.agreement.event(f"reduction of local gradients ({step.label})", TextSequence.of(*held.local))
            for name, value in self.executor.reduce_local(list(held.local), "reduction"):
                grads[name] = grads[name] + value if name in grads else value
        grads = self._through_window(grads)
        returned = {name: self._fresh(name, value) for name, value in grads.items() if name in hooked} if hooked else {}
        self._accumulate({name: value for name, value in grads.items() if name not in hooked} if hooked else grads)
        return returned

    def _accumulate(self, grads: Mapping[str, Tensor]) -> None:
        self.shards.accumulate_many(list(grads), list(grads.values()))

    def _for_hooks(self, step: StepProgram, names: list[str]) -> dict[str, Any]:
        """Local gradients of the parameters that have hooks, reduced: a hook is called in every backward, with a gradient."""
        parameters = self.shards.parameters_of(names)
        hooks = zip(names, compat.tensor_hooks(parameters), map(compat.accumulation_hooks, parameters), strict=True)
        hooked = [name for name, before, after in hooks if before or after]
        if not hooked:
            return {}
        self.agreement.event(f"reduction of gradients with hooks ({step.label})", TextSequence.of(*hooked))
        reduced = self.executor.reduce_local(hooked, "reduction")
        return {name: self._fresh(name, value) for name, value in reduced}

    def _through_window(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that are complete: all but those that are added up over the window, and these when it ends."""
        held = self.executor.accumulation
        ends = held.at_last
        held.advance(reduces=True)
        if ends:
            self.holding.end()
        if held.dtype is None:
            return grads
        if ends:
            complete = {name: held.take_reduced(name, value) for name, value in grads.items()}
            return complete | self._take_reduced()
        complete = {}
        for name, value in grads.items():
            if held.holds_back(self.shards.specs[name].dtype):
                held.add_reduced(name, value)
            else:
                complete[name] = value
        return complete

    def _take_reduced(self) -> dict[str, Tensor]:
        """The gradients that were added up over a window; nothing is held any more."""
        held = self.executor.accumulation
        names = [name for name in self.shards.specs if name in held.reduced]
        return {name: held.reduced.pop(name) for name in names}

    def finish_window(self) -> None:
        """Reduce local gradients now, put all that was added up into ``.grad``, and begin a window. Collective."""
        held = self.executor.accumulation
        self.agreement.event("sync_gradients", TextSequence.of(*held.names()))
        local = self.executor.reduce_local(list(held.local), "sync_gradients")
        self._accumulate({name: held.take_reduced(name, value) for name, value in local} | self._take_reduced())
        self.begin_window()

    def begin_window(self) -> None:
        """Forget what earlier backward calls left: a declared window begins."""
        self.executor.accumulation.clear()
        self.holding.end()

    def _fresh(self, name: str, padded: Tensor) -> Tensor:
        """A gradient of its own memory, placed as its parameter is."""
        spec = self.shards.specs[name]
        own = logical(spec, padded, self.shards.mesh.rank).to(self.shards.hosting.home, copy=True)
        return self.shards.as_seen(spec, own)


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
            ctx.runner.leaves = ctx.leaves
            grads, input_grads = ctx.runner.run_backward(step, saved, given, keep)
            with ctx.runner.shards.explaining_memory():
                ctx.handed = ctx.leaves.hand(ctx.runner.accumulate(step, grads))
        return (None, None, None, None, None, *map(input_grads.get, range(ctx.num_inputs)))
