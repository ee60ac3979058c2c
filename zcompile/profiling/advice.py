"""What a profile says about a training loop, in plain words, each with the numbers that led to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zcompile.config import Config
from zcompile.profiling.measured import COMPUTATION, COPIES, EXPOSED, HOST, OPTIMIZER, OTHER, MeasuredStep, sums
from zcompile.report import DeviceMemory

GIB = 2**30

#: more of a step than this waits for collectives: move less, or less often
EXPOSED_SHARE = 0.30
#: less of the device's memory than this is used: there is room to trade for time
MEMORY_SHARE = 0.80
#: less of a step than this is work of the device, ...
BUSY_SHARE = 0.70
#: ... and more than this waits for the host: give it less to do
HOST_SHARE = 0.10


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Attributes:
        about: ``communication``, ``memory`` or ``host``.
        share: the measured share that led to it: of the step, or of the device's memory.
        limit: what it is compared with.
        text: what was found and what to do.
    """

    about: str
    share: float
    limit: float
    text: str

    def __str__(self) -> str:
        return f"{self.about}: {self.text}"


def advise(
    steps: Sequence[MeasuredStep],
    config: Config,
    memory: DeviceMemory | None,
    *,
    total_bytes: int = 0,
    world_size: int = 1,
    replays: bool = False,
) -> tuple[Advice, ...]:
    """What to change, the most urgent first.

    Args:
        steps: at least one.
        config: how the model is compiled.
        memory: of the device; None on the CPU.
        total_bytes: of the device's memory; 0 on the CPU.
        world_size: ranks.
        replays: whether steps are replayed as CUDA graphs when no profile is taken.
    """
    mean = {name: sum(step.shares[name] for step in steps) / len(steps) for name in steps[0].shares}
    step_us = sum(step.step_us for step in steps) / len(steps)
    found = [
        *_communication(steps, config, mean[EXPOSED], step_us),
        *_host(steps, config, mean, step_us, replays),
        *_memory(config, memory, total_bytes, world_size),
    ]
    return tuple(found)


def _communication(
    steps: Sequence[MeasuredStep], config: Config, exposed_us: float, step_us: float
) -> Iterator[Advice]:
    share = exposed_us / step_us
    if share <= EXPOSED_SHARE:
        return
    waits = (span for step in steps for span in step.spans if span.share == EXPOSED)
    label, most = next(iter(sums(waits, lambda span: span.label).items()))
    changes = ["send larger buckets (policy='bucket{mib=256},prefetch{lookahead=2}')"]
    if config.stage == 3:
        changes.append(
            "gather less often (policy='keep{units=4},bucket,prefetch' keeps weights from forward to backward)"
        )
    changes.append("accumulate over more micro-batches inside model.no_sync() before each update")
    if config.precision is None:
        changes.append("send half as much (precision='bf16')")
    elif config.reduce_dtype is None:
        changes.append(f"reduce in fewer bits (reduce_dtype='{config.precision}')")
    yield Advice(
        "communication",
        share,
        EXPOSED_SHARE,
        f"computation waits for collectives {share:.0%} of the step ({_ms(exposed_us)} of {_ms(step_us)}), most for "
        f"'{label}' ({_ms(most / len(steps))}); {', or '.join(changes)}",
    )


def _host(
    steps: Sequence[MeasuredStep], config: Config, mean: dict[str, float], step_us: float, replays: bool
) -> Iterator[Advice]:
    busy = sum(mean[name] for name in (COMPUTATION, COPIES, OPTIMIZER, OTHER)) / step_us
    share = mean[HOST] / step_us
    if busy >= BUSY_SHARE or share <= HOST_SHARE:
        return
    gaps = (span for step in steps for span in step.spans if span.share == HOST)
    place, most = next(iter(sums(gaps, lambda span: span.phase).items()))
    changes = []
    if place == "between":
        where = "between the programs"
        changes.append("look for what the loop does there: loading data, .item(), logging")
    else:
        where = f"in the {place}"
    if replays:
        where += ", of issued steps: replayed ones, as when no profile is taken, wait less"
    else:
        changes.append("let steps be replayed on a GPU (cuda_graphs=True)")
    if config.backend == "eager":
        changes.append("fuse (backend='inductor')")
    changes.append("give each step more to do (a larger micro-batch)")
    yield Advice(
        "host",
        share,
        HOST_SHARE,
        f"the device works {busy:.0%} of the step and waits for the host {share:.0%} ({_ms(mean[HOST])} of {_ms(step_us)}), most of "
        f"it {where} ({_ms(most / len(steps))}); {', or '.join(changes)}",
    )


def _memory(config: Config, memory: DeviceMemory | None, total_bytes: int, world_size: int) -> Iterator[Advice]:
    if memory is None:
        return
    used = memory.peak_allocated + memory.outside
    share = used / total_bytes
    if share >= MEMORY_SHARE:
        return
    changes = ["a larger micro-batch"]
    if config.stage == 3 and world_size > 1:
        changes.append("weights that stay gathered from forward to backward (policy='keep{units=4},bucket,prefetch')")
    if config.recompute is not None:
        changes.append("less computed again (a larger recompute= budget)")
    yield Advice(
        "memory",
        share,
        MEMORY_SHARE,
        f"{share:.0%} of the device is used at the peak ({used / GIB:.1f} of {total_bytes / GIB:.1f} GiB); there is room for "
        f"{', or '.join(changes)}",
    )


def _ms(us: float) -> str:
    return f"{us / 1000:.2f} ms"
