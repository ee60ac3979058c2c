"""The captures of one compiled model: which call runs which graphs, and how a new one is built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zcompile import compat
from zcompile.budgeted import Budgeted, device_bytes, sequences_of
from zcompile.build import Built, build
from zcompile.capture.convert import ParamType
from zcompile.capture.joint import Call, Captured, capture, check_capturable, path_name
from zcompile.capture.signature import Fingerprint, Signature, make_signature
from zcompile.capture.surroundings import collector_paused, rng_untouched
from zcompile.capture.tree import build as rebuild
from zcompile.capture.tree import flatten
from zcompile.config import Config
from zcompile.errors import RankError, ShardingError, SignatureError, UnfilledError
from zcompile.ir.graph import Input, Step
from zcompile.losses_alike import LossesAlike
from zcompile.lower.finite import Watch
from zcompile.passes.memory.chunk_loss import WHOLE, ChunkLoss
from zcompile.pipeline import Dump, Pipeline
from zcompile.planner.budget import fit
from zcompile.planner.memory import Setup
from zcompile.planner.walk import predict
from zcompile.planner.window import Window
from zcompile.program import StepProgram
from zcompile.runtime.executor import as_written
from zcompile.runtime.step import StepRunner
from zcompile.store import Store
from zcompile.verify.verifier import Verifier

log = logging.getLogger("zcompile")


class Session:
    """Captures of one model by signature, bounded, with the reason of every recapture logged on rank 0.

    Attributes:
        config: the options, those that a memory budget chose among them.
        pipeline: the passes that run on captures.
        budgeted: chooses options; None without a memory budget.
        alike: on several ranks, whether losses make their gradients in forward.
        latest: the capture that ran last; None before the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        pipeline: Pipeline,
        runner: StepRunner,
        param_type: Callable[[str], ParamType],
        name: str,
        budgeted: Budgeted | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.pipeline = pipeline
        self.runner = runner
        self.name = name
        self.budgeted = budgeted
        self.alike = LossesAlike()
        self.latest: Built | None = None
        self._param_type = param_type
        self._verifier = Verifier(config.verify)
        self._built: dict[Signature, Built] = {}
        self._fingerprint = Fingerprint(model)
        self._unfilled = True
        shards = runner.shards
        plain = () if shards.mesh.is_distributed else shards.specs
        self._plain = {name: shards.parameter(name) for name in plain}
        self._addresses = compat.addresses(self._plain.values())

    @property
    def num_captures(self) -> int:
        """How many captures there are."""
        return len(self._built)

    def built(self, program: StepProgram) -> Built | None:
        """The capture that a program comes from."""
        return next((built for built in self._built.values() if built.program is program), None)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model: ``model(*args, **kwargs)``."""
        self.runner.agreement.check_open()
        if self._unfilled:
            self._check_filled()
        if (now := compat.addresses(self._plain.values())) != self._addresses:
            moved = next(n for n, a, b in zip(self._plain, now, self._addresses, strict=True) if a != b)
            raise ShardingError(
                f"parameter '{moved}' was given other memory, by assigning its .data or by .to() of a submodule; write values in "
                "place (with torch.no_grad(): p.copy_(value)), and convert the model before zcompile.compile"
            )
        if self._fingerprint.has_forbidden_hooks():
            check_capturable(self.model)
        tensors, structure, paths = flatten((args, kwargs))
        training = torch.is_grad_enabled()
        signature = make_signature(tensors, structure, training, self._autocast(), self._fingerprint)
        built = self._built.get(signature)
        if built is None:
            call = Call(
                tensors, structure, training, signature.autocast, self.config.compute_dtype, self.config.differentiable
            )
            built = self._capture(signature, call, [path_name(path[1:]) for path in paths])
        self.latest = built
        outputs = self.runner.forward(built.program, built.captured.joint.constants, tensors)
        for index, alias in built.captured.joint.aliases.items():
            base = (
                tensors[alias.base.index] if isinstance(alias.base, Input) else self.runner.buffer_of(alias.base.name)
            )
            outputs[index] = (
                base
                if alias.size is None
                else base.as_strided(alias.size, alias.stride, base.storage_offset() + alias.offset)
            )
        return rebuild(built.captured.structure, outputs)

    def _autocast(self) -> torch.dtype | None:
        kind = self.runner.shards.mesh.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _check_filled(self) -> None:
        if names := self.runner.shards.unfilled():
            raise UnfilledError(
                f"parameter '{names[0]}' has no value yet ({len(names)} in all), because the model was built on the meta device; "
                "fill it with model.load_state_dict or zcompile.load_safetensors"
            )
        for name, b in self.model.named_buffers():
            if b.is_meta:
                raise UnfilledError(
                    f"buffer '{name}' has no value yet; fill it with model.load_state_dict, or assign it"
                )
        self._unfilled = False

    def _capture(self, signature: Signature, call: Call, arguments: list[str]) -> Built:
        number = len(self._built)
        reason = "first call" if not self._built else signature.difference(self._nearest(signature))
        if number >= self.config.max_captures:
            raise SignatureError(
                f"call needs capture {number + 1} and max_captures is {self.config.max_captures} (this one because {reason}); "
                "pad inputs to fewer shapes, pass numbers that change as tensors (attributes: keep them in buffers), or pass a larger "
                "max_captures to compile"
            )
        if self.runner.shards.mesh.rank == 0:
            log.info("capture %d of %s: %s", number + 1, self.name, reason)
        shards = self.runner.shards
        params = {id(shards.parameter(name)): self._param_type(name) for name in shards.specs}
        device = shards.mesh.device
        store = Store.from_environment()

        def captured_from(call: Call) -> Captured:
            with rng_untouched(device), collector_paused():
                return capture(self.model, call, params, device, self.name, store)

        label = ("train" if self.model.training else "eval") + ("" if signature.training else ", no_grad")
        try:
            captured = captured_from(call)
            trains = call.training and captured.joint.trains
            pipeline = self.pipeline
            if trains and self.budgeted is not None:
                pipeline = self.budgeted.pipeline(self, captured, call, captured_from)
            elif trains:
                pipeline = self._fitted(captured)
            if trains:
                pipeline = self.alike.pipeline(pipeline, captured, shards.mesh, self.name)
            with rng_untouched(device):
                dump = Dump.from_environment(f"{self.name}_{number}")
                with collector_paused(), as_written(device):
                    built = build(
                        captured,
                        pipeline,
                        self._verifier,
                        self.config.backend,
                        label=label,
                        dump=dump,
                        watch=self._watch(arguments),
                        store=store,
                    )
                if self.config.offload is not None:
                    self._keep_room(built)
        except RankError:
            raise
        except BaseException as error:
            self.runner.agreement.raised(error)
            raise
        self._built[signature] = built
        if self.config.recompute_mode is not None and call.training:
            self._say_what_it_saves(built)
        if self.budgeted is not None and built.graphs.backward is None:
            self.budgeted.check_inference(self, Step(built.graphs.forward, None))
        if call.training and self.runner.shards.mesh.rank == 0:
            self._say_what_is_whole(built)
        if self.config.offloading.activations is not None and call.training:
            self._say_what_moves(built)
        return built

    def setup(self, optimizer: str = "adamw") -> Setup:
        """What the memory of a step here depends on, beside its graphs; ``optimizer`` is one of the planner's."""
        mesh = self.runner.shards.mesh
        return Setup(
            optimizer=optimizer,
            rank=mesh.rank,
            fused=self.config.backend == "inductor",
            on_host=mesh.device.type == "cpu",
            copies=self.runner.executor.collectives.peers is not None,
            offloading=self.config.offloading,
            step=self.runner.shards.hosting.step,
            window=Window.of(self.config, self.pipeline, mesh.size if mesh.is_distributed else 1),
        )

    def sequences(self) -> set[tuple[str, ...]]:
        """The collectives of the training steps that there are: those that ranks may start beside each other."""
        graphs = [built.graphs for built in self._built.values() if built.graphs.backward is not None]
        return {sequences_of(Step(g.forward, g.backward)) for g in graphs}

    def _fitted(self, captured: Captured) -> Pipeline:
        """The pipeline, with recomputation that keeps the budget if there is one."""
        shards = self.runner.shards
        budget = self.config.recompute_bytes(device_bytes(shards.mesh.device, "recompute", self.config.recompute))
        if budget is None:
            return self.pipeline
        found = fit(captured, self.pipeline, tuple(shards.specs.values()), self.setup(), budget)
        if shards.mesh.rank == 0:
            log.info("recompute=%r in %s: %s", self.config.recompute, self.name, found)
        return found.pipeline

    def _watch(self, arguments: list[str]) -> Watch | None:
        mesh = self.runner.shards.mesh
        prefix = f"[rank {mesh.rank} of {mesh.size}] " if mesh.is_distributed else ""
        return Watch(prefix, tuple(arguments)) if self.config.debug_nonfinite else None

    def _say_what_it_saves(self, built: Built) -> None:
        stats = built.history["recompute"].stats
        if stats["bytes"] == stats["bytes at the least time"] and self.runner.shards.mesh.rank == 0:
            log.warning(
                "recompute=%r saves nothing in %s: %d blocks of a list of blocks hold values that backward needs",
                self.config.recompute,
                self.name,
                stats["blocks"],
            )

    def _say_what_is_whole(self, built: Built) -> None:
        """Which losses are not computed in pieces, and why: a warning, if the caller asked for pieces."""
        if self.config.loss_chunk is None:
            return
        say = log.info if self.config.loss_chunk_bytes is None else log.warning
        for stats in (entry.stats for entry in built.history if entry.name == ChunkLoss.name):
            reasons = [what for what in stats if what.startswith(WHOLE)]
            if not stats and say == log.warning:
                reasons = ["there is no cross-entropy of a linear layer"]
            for reason in reasons:
                say("loss_chunk=%r in %s: %s", self.config.loss_chunk, self.name, reason)

    def _keep_room(self, built: Built) -> None:
        """Keep room on the host for what a step offloads, before it runs."""
        step, shards = Step(built.graphs.forward, built.graphs.backward), self.runner.shards
        memory = shards.hosting.memory
        wanted = predict(step, tuple(shards.specs.values()), self.setup()).host.get("activations", 0)
        memory.promise(max(wanted - memory.values_bytes, 0), "activations")

    def _say_what_moves(self, built: Built) -> None:
        if not built.history["offload"].stats["values offloaded"] and self.runner.shards.mesh.rank == 0:
            log.warning(
                "offload=%r moves no activation of %s: none of those that forward saves has memory of its own, is large enough and "
                "is not needed at once",
                self.config.offload,
                self.name,
            )

    def _nearest(self, signature: Signature) -> Signature:
        """The capture that differs least, so that the reason is the interesting one."""
        return min(
            self._built, key=lambda s: sum(getattr(s, f) != getattr(signature, f) for f in s.__dataclass_fields__)
        )


def buffer_reader(model: nn.Module) -> Callable[[str], Tensor]:
    """A function from a buffer's dotted name to its present tensor."""
    owners: dict[str, tuple[dict[str, Any], str]] = {}

    def read(name: str) -> Tensor:
        if name not in owners:
            owner, _, leaf = name.rpartition(".")
            owners[name] = (model.get_submodule(owner)._buffers, leaf)
        table, leaf = owners[name]
        return table[leaf]

    return read
