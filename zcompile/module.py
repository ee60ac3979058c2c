"""The compiled module: what ``compile`` returns and users train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zcompile import compat
from zcompile.config import Config
from zcompile.errors import ConfigError, RankError, ShardingError, StateError
from zcompile.explained import explained
from zcompile.ir.graph import Step
from zcompile.pipeline import History, Pipeline
from zcompile.planner.memory import Memory
from zcompile.planner.walk import predict
from zcompile.profiling.profile import Profile
from zcompile.report import DeviceMemory, Report, optimizer_bytes, optimizer_kind, state_bytes
from zcompile.runtime.checkpoint.saving import Checkpoints
from zcompile.runtime.ending import end
from zcompile.runtime.optim import norm
from zcompile.runtime.sharding import state
from zcompile.runtime.sharding.full import broadcast, broadcast_object
from zcompile.scheduled import Graphs
from zcompile.session import Session
from zcompile.unsharded import put_full, unsharded


class CompiledModule(nn.Module):
    """A model that trains under ZeRO. It takes the user's module over and shares its submodules, names and hooks.

    Attributes:
        original: the user's module; its parameters are shards, full only inside ``unsharded()``.
    """

    def __init__(self, original: nn.Module, config: Config, session: Session) -> None:
        super().__init__()
        own = self.__dict__
        for table in (
            "_parameters",
            "_buffers",
            "_modules",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_backward_hooks",
            "_backward_pre_hooks",
        ):
            own[table] = original.__dict__[table]
        for extra in (
            "_is_full_backward_hook",
            "_state_dict_hooks",
            "_state_dict_pre_hooks",
            "_load_state_dict_pre_hooks",
            "_load_state_dict_post_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
            "_forward_pre_hooks_with_kwargs",
            "_non_persistent_buffers_set",
        ):
            own[extra] = original.__dict__[extra]
        own["original"] = original
        own["_config"] = config
        own["_session"] = session
        own["_checkpoints"] = Checkpoints()
        own["training"] = original.training

    def __new__(cls, original: nn.Module, *_: Any) -> CompiledModule:
        """Of a container (such as ``nn.Sequential``), a container: with its length, items and iteration."""
        kept = {
            n: _of_original(n)
            for n in ("__len__", "__iter__", "__getitem__", "__contains__")
            if hasattr(type(original), n)
        }
        kind: Any = type(cls.__name__, (cls,), kept) if kept else cls
        return super().__new__(kind)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(original := self.__dict__["original"], name)
            return explained(value) if getattr(value, "__self__", None) is original else value

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "original" not in own or name in own or hasattr(type(self), name):
            super().__setattr__(name, value)
            if name == "training" and "original" in own:
                own["original"].training = value
        else:  # where forward reads it
            setattr(own["original"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured forward; the same arguments and result types as the user's."""
        return self._session.call(args, kwargs)

    def train(self, mode: bool = True) -> CompiledModule:
        """Set train or eval mode, as on any module."""
        super().train(mode)
        self.original.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> CompiledModule:
        raise ShardingError(
            "the compiled module's parameters are shards that cannot be moved or cast with .to(), .cuda() or .half(); "
            "do that before zcompile.compile, or pass precision= to it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        raise ShardingError(
            "a compiled module cannot be copied, because its shards belong to one process group; copy "
            "model.full_state_dict() instead, or the module that zcompile.unwrap(model) returns; for a moving average of weights, "
            "compile a copy of the plain module beside it, such as zcompile.compile(AveragedModel(plain))"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError("a compiled module cannot be pickled; save model.state_dict() or model.full_state_dict()")

    def _announce(self, what: str) -> None:
        """Agree with the other ranks on a collective outside of the graphs, before it starts."""
        self._session.runner.shards.mesh.announce(what)

    # State. -----------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """Every parameter and saved buffer at full size under its plain name, the same on every rank. Collective.

        Buffers, and what modules save of themselves with ``get_extra_state``, are rank 0's.
        """
        self._announce("full_state_dict")
        shards = self._session.runner.shards
        names = {n for n, _ in self.original.named_parameters(remove_duplicate=False)}
        plain = self.original.state_dict()
        wanted = list(plain)
        buffers = {
            n: b.detach().clone()
            for n, b in self.original.named_buffers(remove_duplicate=False)
            if n in wanted and n not in names
        }
        broadcast(shards.mesh, list(buffers.values()))
        full: dict[str, Any] = dict(state.full_state_dict(shards, buffers))
        extra = {n: value for n, value in plain.items() if n.rpartition(".")[2] == "_extra_state"}
        if extra:
            full |= broadcast_object(shards.mesh, extra)
        return {n: full[n] for n in wanted if n in full}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the user's module, with its own extra state and hooks: shards, by plain name."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors or DTensors by plain name; each rank takes its own part.

        Raises:
            StateError: a missing or unexpected name (with ``strict``), or another shape.
        """
        if assign:
            raise StateError("load_state_dict(assign=True) would replace the shards; leave assign=False")
        shards = self._session.runner.shards
        given = dict(state_dict)
        for spec in shards.specs.values():
            for name in spec.names:
                if given.get(name) is shards.parameter(spec.name) or _is_own_shard(
                    given.get(name), shards.parameter(spec.name)
                ):
                    shards.mark_filled(spec.name)
                    for alias in spec.names:
                        given.pop(alias, None)
        loaded = [
            s.name
            for s in shards.specs.values()
            if not any(n in given for n in s.names) and s.name not in shards.unfilled()
        ]
        missing, others = state.load_full_state(shards, given, strict=False)
        missing = [n for n in missing if n not in loaded or not any(a in state_dict for a in shards.specs[n].names)]
        buffers = dict(self.original.named_buffers(remove_duplicate=False))
        unexpected = [n for n in others if n not in buffers and not self._load_extra_state(n, given[n])]
        saved = set(self.original.state_dict())
        missing += [n for n in buffers if n in saved and n not in state_dict]
        if strict and (missing or unexpected):
            raise StateError(
                f"state dict does not fit: missing {missing[:5]}, unexpected {unexpected[:5]}; pass strict=False to load what fits"
            )
        self.load_buffers({n: given[n] for n in others if n in buffers})
        return compat.incompatible_keys(missing, unexpected)

    def _load_extra_state(self, name: str, value: Any) -> bool:
        """Give a module its extra state; False if ``name`` is none."""
        path, _, leaf = name.rpartition(".")
        if leaf != "_extra_state" or name not in self.original.state_dict():
            return False
        self.original.get_submodule(path).set_extra_state(value)
        return True

    @torch.no_grad()
    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Write buffers by plain name; those on ``meta`` come to the model's device."""
        buffers = dict(self.original.named_buffers(remove_duplicate=False))
        for name, value in values.items():
            if buffers[name].is_meta:
                owner, _, leaf = name.rpartition(".")
                device = self._session.runner.shards.mesh.device
                self.original.get_submodule(owner)._buffers[leaf] = value.detach().to(device, copy=True)
            else:
                buffers[name].copy_(value)

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Optimizer state by parameter name with full tensors, the same on every rank. Collective."""
        self._announce("full_optimizer_state_dict")
        return state.full_optimizer_state_dict(self._session.runner.shards, optimizer)

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load what ``full_optimizer_state_dict`` gave, at any world size and stage."""
        state.load_full_optimizer_state_dict(self._session.runner.shards, optimizer, state_dict)

    # Gradients. -------------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over flat gradient memory: the same value, in one pass. Collective."""
        self._announce("clip_grad_norm_")
        shards = self._session.runner.shards
        return norm.clip_grad_norm_(shards, shards.mesh, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep full gradients on this rank; the next backward outside reduces the sum.

        ``sync_gradients`` reduces it without another backward; an optimizer step before either is an error.
        """
        accumulator = self._session.runner.accumulator
        before, accumulator.local_only = accumulator.local_only, True
        try:
            yield
        finally:
            accumulator.local_only = before

    def sync_gradients(self) -> None:
        """Complete ``.grad`` now: reduce what backwards inside ``no_sync`` or of an unfinished window left. Collective.

        For the last, shorter window of an epoch. The next backward begins a window.
        """
        self._session.runner.accumulator.finish_window()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are not in ``.grad`` yet are dropped too, and a declared window begins anew."""
        super().zero_grad(set_to_none)
        self._session.runner.accumulator.begin_window()

    # Full parameters. -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the model without gathering its weights, so that its memory goes with the last reference. Collective.

        Also after an error, when every rank comes here. ``zcompile.unwrap`` ends a model and gives its weights back.
        """
        if self._session.runner.agreement.is_closed:
            return
        self._checkpoints.settle()
        with contextlib.suppress(RankError):  # after an error ranks need not agree any more
            self._announce("close")  # nothing of another rank is in flight then
        end(self._session.runner)

    @contextlib.contextmanager
    def unsharded(self, modifier_rank: int | None = 0) -> Iterator[nn.Module]:
        """``model.original`` has full parameters inside, to read, or to change in place on ``modifier_rank``. Collective.

        Yields:
            the original module.
        """
        self._announce("unsharded")
        with unsharded(self.original, self._session.runner.shards, modifier_rank):
            yield self.original

    # Inspection. ------------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The passes that run on every capture; with ``memory_budget``, on the latest."""
        return self._session.pipeline

    @property
    def graphs(self) -> Graphs:
        """The graphs of the step that ran last: ``.joint``, ``.forward``, ``.backward``."""
        return self._latest().graphs

    @property
    def history(self) -> History:
        """What each pass did to the step that ran last."""
        return self._latest().history

    def diff(self, name: str) -> str:
        """A unified diff of each graph that a pass changed."""
        return self.history[name].diff()

    def _latest(self) -> Any:
        if self._session.latest is None:
            raise ConfigError("nothing has been captured yet; call the model once first")
        return self._session.latest

    def report(self, optimizer: Optimizer | None = None) -> Report:
        """Measured bytes of what is in memory on this rank, beside what was predicted; with ``optimizer``, of its state too."""
        runner = self._session.runner
        params, all_params, grads, all_grads = state_bytes(runner.shards)
        mine, total = optimizer_bytes(runner.shards, optimizer)
        buffers, latest = runner.executor.buffers, self._session.latest
        host = runner.shards.hosting.memory
        return Report(
            world_size=runner.shards.mesh.size,
            stage=self._config.stage,
            parameter_bytes=params,
            parameter_bytes_total=all_params,
            gradient_bytes=grads + runner.executor.accumulation.num_bytes,
            gradient_bytes_total=all_grads,
            optimizer_bytes=mine,
            optimizer_bytes_total=total,
            gathered_live_bytes=buffers.live_bytes,
            gathered_peak_bytes=buffers.peak_bytes,
            gathered_held_bytes=buffers.held_bytes,
            saved_bytes=0 if latest is None else runner.saved_bytes.get(id(latest.program), 0),
            peer_bytes=runner.executor.collectives.peer_bytes,
            recorded_bytes=0 if runner.tapes is None else runner.tapes.hidden_bytes,
            replays=0 if runner.tapes is None else runner.tapes.replays,
            captures=self._session.num_captures,
            host_bytes=host.held_bytes,
            host_peak_bytes=host.peak_bytes,
            host_limit_bytes=host.limit_bytes,
            offloaded_bytes=host.values_bytes,
            device=DeviceMemory.of(runner.shards.mesh.device),
            predicted=None if latest is None else self._predicted(latest.graphs, optimizer),
            decision=None if self._session.budgeted is None else self._session.budgeted.decision,
        )

    def profile(self, steps: int = 3) -> Profile:
        """Measure coming training steps of this rank: where their time goes, what memory they hold, and what to do about it.

        One step more before them shows memory. Read the result when it is ``done``; also a context, whose end ends it.

        Raises:
            ConfigError: fewer steps than one.
            ProfileError: another profile is being taken.
        """
        return Profile.take(self._session, steps)

    def _predicted(self, graphs: Graphs, optimizer: Optimizer | None) -> Memory:
        """What planning says about the graphs that run."""
        specs = tuple(self._session.runner.shards.specs.values())
        return predict(Step(graphs.forward, graphs.backward), specs, self._session.setup(optimizer_kind(optimizer)))


def _of_original(name: str) -> Any:
    return lambda self, *args: getattr(type(self.original), name)(self.original, *args)


def unwrap(model: CompiledModule) -> nn.Module:
    """End a compiled model: the eager module with full plain parameters. Collective; the compiled module is unusable then."""
    runner = model._session.runner
    model._checkpoints.settle()
    model._announce("unwrap")
    if runner.shards.mesh.is_distributed or runner.shards.hosting.parameters:
        put_full(model.original, runner.shards)
    end(runner)
    return model.original


def _is_own_shard(value: Any, parameter: nn.Parameter) -> bool:
    """Whether a value is this very parameter's shard, as DCP loads it in place."""
    local = getattr(value, "_local_tensor", None)
    mine = getattr(parameter, "_local_tensor", None)
    return local is not None and mine is not None and local.data_ptr() == mine.data_ptr() and local.numel() > 0
