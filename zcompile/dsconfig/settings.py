"""What a DeepSpeed configuration comes to here: every ``auto`` resolved, sizes converted, batch sizes worked out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zcompile.dsconfig.batch import BATCH_KEYS, Batch
from zcompile.dsconfig.keys import KEYS, OFFLOADS
from zcompile.dsconfig.reading import Given, read
from zcompile.errors import ConfigError

MIB = 1 << 20
#: bytes of an element, by dtype
ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
_RATIO = "zero_optimization.offload_optimizer.ratio"
#: as many units as a memory bound lets in
ANY_UNITS = 1000


@dataclass(frozen=True)
class Facts:
    """What ``initialize`` knows besides the configuration.

    Attributes:
        world_size: ranks.
        dtype: of the model's parameters: ``fp64``, ``fp32``, ``fp16`` or ``bf16``.
        hidden_size: of the model, as its ``config`` has it; None: unknown.
    """

    world_size: int = 1
    dtype: str = "fp32"
    hidden_size: int | None = None


@dataclass(frozen=True)
class Scaling:
    """How an fp16 loss is scaled; the first scale stays when it is not dynamic."""

    dynamic: bool
    init_scale: float
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_scale: float


@dataclass(frozen=True)
class Component:
    """An optimizer or a scheduler by name. ``auto`` holds the names of parameters that the name's default stands for."""

    type: str
    params: Mapping[str, Any]
    auto: frozenset[str]


@dataclass(frozen=True)
class Settings:
    """The effective settings. ``print`` shows them as a table.

    Attributes:
        batch: batch sizes.
        stage: ZeRO stage.
        precision: ``fp16``, ``bf16`` or None, as ``compile`` takes it.
        reduce_dtype: dtype of gradient reductions; None: as ``compile`` has it.
        accumulate_dtype: ``fp32`` adds narrower gradients up in it; None: their own dtype.
        policy: schedule passes; None: ``compile``'s own.
        offload: what is kept in the host's memory, as ``compile`` takes it; None: nothing.
        persistent_elements: parameters up to so many elements are not sharded; None: as ``compile`` has it.
        persistent_elements_total: all of those together hold at most so many.
        scaling: of the loss, under fp16.
        skip_nonfinite: whether a step with a gradient that is not finite is skipped without loss scaling.
        gradient_clipping: largest norm; 0: none.
        predivide: gradients are smaller by this factor while they are reduced.
        optimizer: None: the configuration names none.
        scheduler: likewise.
        steps_per_print: None: never.
        wall_clock_breakdown: whether times of forward, backward and step are printed.
        drop_last: whether a last batch that is too small is left out.
        gather_on_save: whether ``save_16bit_model`` gathers a stage 3 model.
        timeout: seconds of every wait.
        interface: network interface of NCCL; None: NCCL chooses.
        dump_state: whether the table is printed.
        rows: what the table shows: key, value, where it comes from.
        moot: keys that were given and make no difference, with the reason.
    """

    batch: Batch
    stage: int
    precision: str | None
    reduce_dtype: str | None
    accumulate_dtype: str | None
    policy: str | None
    offload: str | None
    persistent_elements: int | None
    persistent_elements_total: int | None
    scaling: Scaling | None
    skip_nonfinite: bool
    gradient_clipping: float
    predivide: float
    optimizer: Component | None
    scheduler: Component | None
    steps_per_print: int | None
    wall_clock_breakdown: bool
    drop_last: bool
    gather_on_save: bool
    timeout: float
    interface: str | None
    dump_state: bool
    rows: tuple[tuple[str, str, str], ...]
    moot: Mapping[str, str]

    @property
    def clips_by_default(self) -> bool:
        """Whether gradients are clipped although the configuration does not say so."""
        return ("gradient_clipping", "default") in [(key, source) for key, _, source in self.rows]

    @property
    def shared_rows(self) -> list[tuple[str, str, str]]:
        """The rows that must be equal on all ranks: a network interface may have another name on another host."""
        return [row for row in self.rows if row[0] != "nccl_socket_ifname"]

    def __str__(self) -> str:
        widths = [max(len(row[column]) for row in self.rows) for column in range(2)]
        lines = [f"{key:{widths[0]}}  {value:{widths[1]}}  {source}" for key, value, source in self.rows]
        return "\n".join([*lines, *(f"{key} makes no difference: {why}" for key, why in self.moot.items())])


def resolve(config: str | os.PathLike[str] | Mapping[str, Any], facts: Facts | None = None) -> Settings:
    """The settings of a DeepSpeed configuration.

    Args:
        config: path of a JSON file, or a dictionary.
        facts: what ``auto`` values are resolved from; None: one rank and an fp32 model of unknown width.

    Raises:
        ConfigError: names the dotted key, and the numbers that disagree.
    """
    return _Resolver(read(config), facts or Facts()).settings()


class _Resolver:
    """Takes keys one by one, and remembers what each came to and why."""

    #: keys outside of these sections whose ``auto`` is the default; DeepSpeed drops every ``auto`` inside of them
    _DEFAULT_IF_AUTO = ("gradient_clipping",)
    _SECTIONS = ("fp16", "bf16", "zero_optimization", "activation_checkpointing", "aio", "data_types")

    def __init__(self, given: Given, facts: Facts) -> None:
        self.given = given
        self.facts = facts
        self.rows: list[tuple[str, str, str]] = []
        for name in given.auto:
            top = name.split(".")[0]
            resolvable = top in (*self._SECTIONS, "optimizer", "scheduler") and name not in (
                "zero_optimization.stage",
                "optimizer.type",
                "scheduler.type",
                "optimizer.params",
                "scheduler.params",
            )
            if not (resolvable or name in BATCH_KEYS or name in self._DEFAULT_IF_AUTO or KEYS[name].moot):
                raise ConfigError(f"{name} is 'auto', which nothing here can resolve; give a value")

    def take(self, name: str, auto: Any = None) -> Any:
        """The effective value of a key; ``auto`` is what that word stands for, None: the default."""
        value, source = self.given.get(name), "config" if name in self.given else "default"
        if name in self.given.auto:
            value, source = KEYS[name].default if auto is None else auto, "auto"
        self.show(name, value, source)
        return value

    def show(self, name: str, value: Any, source: str) -> None:
        """Put a row into the table."""
        text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
        self.rows.append((name, text, source))

    def settings(self) -> Settings:
        """Everything, in the order of the table."""
        facts = self.facts
        batch = self.batch()
        stage = self.take("zero_optimization.stage")
        fp16 = self.take("fp16.enabled", facts.dtype == "fp16")
        bf16 = self.take("bf16.enabled", facts.dtype == "bf16")
        if fp16 and bf16:
            raise ConfigError("fp16.enabled and bf16.enabled are both true; a model has one compute dtype")
        precision = "fp16" if fp16 else "bf16" if bf16 else None
        accumulate_dtype = self.accumulate_dtype(precision)
        reduce_dtype = self.reduce_dtype()
        scaling = self.scaling() if fp16 else None
        skip_nonfinite = self.take("bf16.check_grad_overflow") if bf16 else False
        clipping = self.take("gradient_clipping")
        predivide = float(batch.world if self.take("prescale_gradients") else self.take("gradient_predivide_factor"))
        compute = precision or facts.dtype
        policy = self.policy(stage, compute, reduce_dtype or compute)
        offload = self.offload(stage)
        zero = "zero_optimization."
        hidden = facts.hidden_size
        persistent = total = None
        if stage == 3:
            persistent = self.take(zero + "stage3_param_persistence_threshold", hidden and 10 * hidden)
            total = self.take(zero + "stage3_model_persistence_threshold")
        return Settings(
            batch=batch,
            stage=stage,
            precision=precision,
            reduce_dtype=reduce_dtype,
            accumulate_dtype=accumulate_dtype if batch.accumulation > 1 else None,
            policy=policy,
            offload=offload,
            persistent_elements=persistent,
            persistent_elements_total=total,
            scaling=scaling,
            skip_nonfinite=skip_nonfinite,
            gradient_clipping=clipping,
            predivide=predivide,
            optimizer=self.component("optimizer"),
            scheduler=self.component("scheduler"),
            gather_on_save=stage < 3 or self.take(zero + "stage3_gather_16bit_weights_on_model_save"),
            steps_per_print=self.take("steps_per_print"),
            wall_clock_breakdown=self.take("wall_clock_breakdown"),
            drop_last=self.take("dataloader_drop_last"),
            timeout=self.take("timeout"),
            interface=self.take("nccl_socket_ifname"),
            dump_state=self.given.get("dump_state"),
            rows=tuple(self.rows),
            moot=self.moot(stage),
        )

    def batch(self) -> Batch:
        """The three batch sizes; any two give the third, and one alone means no accumulation."""
        train, micro, steps = (None if name in self.given.auto else self.given.get(name) for name in BATCH_KEYS)
        batch = Batch.of(train, micro, steps, self.facts.world_size)
        for name, value in zip(BATCH_KEYS, (batch.train, batch.micro, batch.accumulation), strict=True):
            source = "auto" if name in self.given.auto else "config" if self.given.get(name) is not None else "derived"
            self.show(name, value, source)
        return batch

    def accumulate_dtype(self, precision: str | None) -> str | None:
        """What data_types says must be what happens; sums in fp32 over narrower gradients are the one choice."""
        own = self.facts.dtype
        params, grads = self.take("data_types.param_dtype"), self.take("data_types.grad_accum_dtype")
        for key, wanted, effective in (
            ("param_dtype", params, precision or own),
            ("grad_accum_dtype", grads, "fp32" if precision else own),
        ):
            widens = key == "grad_accum_dtype" and wanted == "fp32" and effective in ("fp16", "bf16")
            if wanted not in (None, effective) and not widens:
                raise ConfigError(
                    f"data_types.{key} is {wanted!r}, and it is {effective!r} here with these settings; pass {effective!r} or leave "
                    "it out"
                )
        return "fp32" if grads == "fp32" and precision is None and own in ("fp16", "bf16") else None

    def reduce_dtype(self) -> str | None:
        """The dtype of reductions; ``fp32_allreduce`` is an old way to ask for fp32."""
        dtype = self.take("communication_data_type")
        if self.given.get("fp32_allreduce"):
            if dtype not in (None, "fp32"):
                raise ConfigError(f"fp32_allreduce is true and communication_data_type is {dtype!r}; leave one out")
            self.take("fp32_allreduce")
            return "fp32"
        return dtype

    def scaling(self) -> Scaling:
        """Of an fp16 loss."""
        fixed = self.take("fp16.loss_scale")
        power = self.take("fp16.initial_scale_power")
        scaling = Scaling(
            dynamic=fixed == 0,
            init_scale=fixed or 2.0**power,
            window=self.take("fp16.loss_scale_window"),
            hysteresis=self.take("fp16.hysteresis"),
            consecutive_hysteresis=self.take("fp16.consecutive_hysteresis"),
            min_scale=self.take("fp16.min_loss_scale"),
        )
        if scaling.dynamic and scaling.min_scale > scaling.init_scale:
            raise ConfigError(
                f"fp16.min_loss_scale is {scaling.min_scale:g}, more than the first scale {scaling.init_scale:g} "
                f"(2 to the power of fp16.initial_scale_power {power}); lower it"
            )
        return scaling

    def policy(self, stage: int, gathered: str, reduced: str) -> str | None:
        """The schedule that bucket sizes (in elements) and the wish to overlap ask for.

        One bucket size serves gathers and reductions, so the smaller one holds: the keys are upper bounds. What DeepSpeed fetches
        ahead in stage 3 is the next bucket, hence ``stage3_prefetch_bucket_size`` is the size of a bucket of gathers.
        """
        zero = "zero_optimization."
        square = self.facts.hidden_size and self.facts.hidden_size**2
        overlap = self.take(zero + "overlap_comm")
        reduce = self.take(zero + "reduce_bucket_size", square)
        sizes = [] if reduce is None else [reduce * ITEM_BYTES[reduced]]
        keep, ahead = "", 1
        if stage == 3:
            fetch = self.take(zero + "stage3_prefetch_bucket_size", square and int(0.9 * square))
            live, reuse = (self.take(zero + f"stage3_max_{what}") for what in ("live_parameters", "reuse_distance"))
            if fetch == 0:
                ahead = 0
            elif fetch is not None:
                sizes.append(fetch * ITEM_BYTES[gathered])
            bounds = [bound for bound in (live, reuse) if bound is not None]
            if bounds:
                units = 1 if reuse is None else ANY_UNITS
                keep = f"keep{{units={units} mib={min(bounds) * ITEM_BYTES[gathered] / MIB:g}}}"
        elif (gather := self.take(zero + "allgather_bucket_size", square)) is not None:
            sizes.append(gather * ITEM_BYTES[gathered])
        if overlap is False:
            ahead = 0
        if not sizes and not keep and ahead:
            return None
        bucket = f"bucket{{mib={min(sizes) / MIB:g}}}" if sizes else "bucket"
        policy = ",".join(filter(None, [keep, bucket, f"prefetch{{lookahead={ahead}}}"]))
        self.show("schedule", policy, "derived")
        return policy

    def offload(self, stage: int) -> str | None:
        """What goes to the host, by the sections or by the old keys that meant the same."""
        kinds: dict[str, None] = {}
        for name, kind in OFFLOADS.items():
            if self.given.get(name) in ("cpu", True) and stage in KEYS[name].when:
                self.take(name)
                kinds[kind] = None
        ratio = self.given.get(_RATIO)
        if "optimizer" in kinds and ratio < 1:
            if "parameters" in kinds:
                raise ConfigError(
                    f"{_RATIO} is {ratio:g} and parameters are offloaded, whose states are all on the host then; leave it out"
                )
            self.take(_RATIO)
            del kinds["optimizer"]
            kinds |= {f"optimizer{{share={ratio:g}}}": None} if ratio else {}
        return "+".join(kinds) or None

    def component(self, name: str) -> Component | None:
        """The optimizer or scheduler that is named."""
        given = self.given
        kind = given.get(f"{name}.type")
        if kind is None:
            if given.get(f"{name}.params"):
                raise ConfigError(f"{name}.params is given without {name}.type; give the type")
            return None
        head = f"{name}.params."
        auto = frozenset(key[len(head) :] for key in given.auto if key.startswith(head))
        params = {key: value for key, value in given.get(f"{name}.params").items() if key not in auto}
        self.show(f"{name}.type", kind, "config")
        for key, value in params.items():
            self.show(head + key, value, "config")
        return Component(kind, params, auto)

    def moot(self, stage: int) -> dict[str, str]:
        """What was given and makes no difference."""
        found = {}
        for name in self.given.values:
            key = KEYS[name]
            if key.moot:
                found[name] = key.moot
            elif stage not in key.when:
                found[name] = f"it is read in stage {', '.join(map(str, key.when))} only, and the stage is {stage}"
        return found
