"""The engine that ``initialize`` returns: DeepSpeed's calls on a compiled model."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zcompile import checkpoint, compat
from zcompile.dsconfig.settings import Settings
from zcompile.errors import ConfigError, OptimizerError
from zcompile.loader import Loader
from zcompile.module import CompiledModule
from zcompile.progress import Progress
from zcompile.runtime.optim.scaler import GradScaler
from zcompile.runtime.sharding.full import broadcast_object
from zcompile.runtime.sharding.placed import local_of

log = logging.getLogger("zcompile")

#: the file that holds the tag of the latest checkpoint
LATEST = "latest"

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Engine(nn.Module):
    """A compiled model with its optimizer, schedule and loss scale, driven by DeepSpeed's three calls::

        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    ``step`` acts after every ``gradient_accumulation_steps()`` micro-steps and only counts in between.

    Attributes:
        module: the compiled model.
        optimizer: the torch optimizer over its parameters; None if there is none.
        lr_scheduler: stepped after each step that was not skipped; None if there is none.
        training_dataloader: the loader of ``training_data``; None without that.
        settings: the effective settings; print them.
        global_steps: optimizer steps, those that were skipped included.
        micro_steps: calls of ``step``.
        global_samples: rows that all ranks together have trained on.
        skipped_steps: steps that were skipped because a gradient was not finite.
        local_rank: this process's number on its host.
    """

    def __init__(
        self,
        module: CompiledModule,
        settings: Settings,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        training_dataloader: Loader | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.settings = settings
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.scaler = _scaler(settings)
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._mesh = module._session.runner.shards.mesh
        self._boundary: bool | None = None
        self._num_backwards = 0  # since the last boundary
        self._step_applied = False
        self._norm: Tensor | None = None
        self._progress = Progress(
            settings.steps_per_print,
            timed=settings.wall_clock_breakdown,
            device=self._mesh.device,
            shows=self._mesh.rank == 0,
        )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer else set()
        self._not_stepped = [p for p in module.parameters() if id(p) not in held]

    # The three calls. -------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        with self._progress.phase("fwd"):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Accumulate the gradients of a micro-batch.

        Args:
            loss: a scalar, the mean over the micro-batch; divided by ``gradient_accumulation_steps()``, and multiplied by the loss
                scale under fp16.
            retain_graph: another backward through the same forward follows.
            scale_wrt_gas: False does not divide.

        Returns:
            The loss, divided but not scaled, and detached.

        Raises:
            OptimizerError: the engine has no optimizer.
            ConfigError: ``loss`` is no scalar.
        """
        self._optimizer()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ConfigError(f"loss is {what}; pass a tensor of one element, such as its mean")
        divisor = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        with self._progress.phase("bwd"):
            # in fp32, or the scale itself may overflow on its way back through an fp16 loss
            sent = (loss if self.scaler is None else loss.float()) / (divisor * self.settings.predivide)
            (sent if self.scaler is None else self.scaler.scale(sent)).backward(retain_graph=retain_graph)
        share = loss.detach() / divisor
        self._num_backwards += 1
        self._progress.add_loss(share)
        return share

    def step(self) -> None:
        """At the boundary: unscale, clip, step the optimizer and the schedule, forget the gradients. Else count a micro-step."""
        self._optimizer()
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            with self._progress.phase("step"):
                self._act()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            scale = "" if self.scaler is None else f", loss scale {self.loss_scale():g}, skipped {self.skipped_steps}"
            self._progress.end_step(self.global_steps, self.global_samples, self.get_lr(), scale)
        self.micro_steps += 1

    def _act(self) -> None:
        optimizer = self._optimizer()
        if self._num_backwards % self.gradient_accumulation_steps():
            self.module.sync_gradients()  # the boundary was moved by hand: the compiled model's window has not ended
        self._num_backwards = 0
        for parameter in self._not_stepped:
            parameter.grad = None  # it would count in the norm
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.settings.predivide != 1:
            grads = [local_of(p.grad) for p in self.module.parameters() if p.grad is not None]
            for device in {g.device for g in grads}:
                compat.foreach_mul(
                    [g for g in grads if g.device == device], torch.tensor(self.settings.predivide, device=device)
                )
        self._norm = self.module.clip_grad_norm_(self.settings.gradient_clipping or math.inf)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
            skipped = self.scaler.step_was_skipped
        else:
            skipped = self.settings.skip_nonfinite and not math.isfinite(self._norm.item())
            if not skipped:
                optimizer.step()
        self._step_applied = not skipped
        if skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of every parameter; ``step`` does it at each boundary."""
        self.module.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say by hand whether the next ``step`` updates the weights, from now on."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last ``step`` updated the weights."""
        return self._step_applied

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside keep full gradients on this rank, as the compiled model's ``no_sync``."""
        return self.module.no_sync()

    def _optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise OptimizerError(
                "engine has no optimizer; give the key optimizer in the configuration, or pass optimizer= to initialize"
            )
        return self.optimizer

    # What it has. -----------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Rows of a step on all ranks."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch on one rank."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps of a step."""
        return self.settings.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three batch sizes: of a step, of a micro-batch, and how many of these."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._optimizer().param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum or the betas of each parameter group; 0.0 where there is none."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._optimizer().param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last boundary, unscaled and before clipping; None before the first. Waits for the device."""
        return None if self._norm is None else self._norm.item()

    def loss_scale(self) -> float:
        """The present loss scale; 1.0 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.settings.stage

    def fp16_enabled(self) -> bool:
        """Whether fp16 is computed in."""
        return self.settings.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether bf16 is computed in."""
        return self.settings.precision == "bf16"

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0: no clipping."""
        return self.settings.gradient_clipping

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._mesh.device

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self._mesh.rank

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._mesh.size

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the data: all."""
        return self._mesh.size

    # Checkpoints. -----------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Write everything that training goes on from to ``save_dir/tag``, and the tag to ``save_dir/latest``. Collective.

        That is the model, optimizer, schedule, loss scale, position in ``training_data`` and counters. Call it between steps.

        Args:
            save_dir: a folder that all ranks share; made if it is not there.
            tag: a name without ``/``, the same on every rank; None: ``global_step{N}``.
            client_state: what the script wants back; rank 0's is saved.
            save_latest: False leaves ``latest`` as it is.
        """
        tag = _checked_tag(f"global_step{self.global_steps}" if tag is None else str(tag))
        self.module._session.runner.agreement.compare("the tag of a checkpoint", tag)
        extra = {
            "client_state": dict(client_state or {}),
            "counters": {name: getattr(self, name) for name in _COUNTERS},
        }
        checkpoint.save_checkpoint(
            Path(save_dir) / tag,
            self.module,
            self.optimizer,
            scaler=self.scaler,
            scheduler=self.lr_scheduler,
            data=self.training_dataloader,
            step=self.global_steps,
            extra=extra,
        )
        if save_latest and self.global_rank == 0:
            new = Path(save_dir) / "latest.new"
            new.write_text(tag)
            new.replace(Path(save_dir) / LATEST)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from ``save_checkpoint``, at any world size and ZeRO stage. Collective.

        Args:
            load_dir: as given to ``save_checkpoint``.
            tag: None: what ``latest`` says.
            load_module_strict: must be true: a checkpoint of another model is refused.
            load_optimizer_states: False keeps the optimizer's state and the loss scale as they are.
            load_lr_scheduler_states: False keeps the schedule as it is.
            load_module_only: take the weights and buffers alone; counters stay, too.

        Returns:
            The path that was loaded and the client state; (None, None), with a warning, where there is no file ``latest``.
        """
        if not load_module_strict:
            raise ConfigError("load_module_strict is False, which is not supported; use engine.module.load_state_dict")
        self.module._announce("engine.load_checkpoint")
        latest = Path(load_dir) / LATEST
        found = broadcast_object(self._mesh, latest.read_text().strip() if tag is None and latest.is_file() else tag)
        if found is None:
            if self.global_rank == 0:
                log.warning("no checkpoint is loaded, because there is no file %s; pass a tag, or start anew", latest)
            return None, None
        path = Path(load_dir) / _checked_tag(str(found))
        wants_state = load_optimizer_states and not load_module_only
        loaded = checkpoint.load_checkpoint(
            path,
            self.module,
            self.optimizer if wants_state else None,
            scaler=self.scaler if wants_state else None,
            scheduler=self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None,
            data=None if load_module_only else self.training_dataloader,
        )
        if not load_module_only:
            for name in _COUNTERS:
                setattr(self, name, loaded.extra["counters"][name])
            self.micro_steps = self.global_steps * self.gradient_accumulation_steps()  # the start of a window
        return str(path), loaded.extra["client_state"]

    def save_16bit_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """Write the full weights in the compute dtype, as one ``torch.save`` file by rank 0. Collective.

        Returns:
            False, and nothing was written, in stage 3 without ``stage3_gather_16bit_weights_on_model_save``.
        """
        if not self.settings.gather_on_save:
            if self.global_rank == 0:
                log.warning(
                    "%s was not written, because zero_optimization.stage3_gather_16bit_weights_on_model_save is false",
                    save_filename,
                )
            return False
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.settings.precision or "")
        state = self.module.full_state_dict()
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save({n: _narrow(value, dtype) for n, value in state.items()}, Path(save_dir) / save_filename)
        return True


def _scaler(settings: Settings) -> GradScaler | None:
    scaling = settings.scaling
    if scaling is None:
        return None
    return GradScaler(
        dynamic=scaling.dynamic,
        init_scale=scaling.init_scale,
        growth_interval=scaling.window,
        hysteresis=scaling.hysteresis,
        consecutive_hysteresis=scaling.consecutive_hysteresis,
        min_scale=scaling.min_scale,
    )


def _checked_tag(tag: str) -> str:
    if not tag or Path(tag).name != tag:
        raise ConfigError(f"tag is {tag!r}; it must be the name of a folder, without '/'")
    return tag


def _narrow(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and isinstance(value, Tensor) and value.is_floating_point() else value
