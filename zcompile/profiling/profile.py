"""A profile: what coming training steps take on this rank, taken while the user's loop goes on."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcompile.analysis.structure import region_key
from zcompile.errors import ConfigError, ProfileError
from zcompile.profiling.advice import Advice, advise
from zcompile.profiling.measured import SHARES, MeasuredStep, measured
from zcompile.profiling.ranks import Ranks, gather
from zcompile.program import StepProgram
from zcompile.report import DeviceMemory
from zcompile.runtime.profiling.profiler import Profiler

if TYPE_CHECKING:
    from zcompile.planner.plan import Plan
    from zcompile.profiling.compare import Comparison
    from zcompile.session import Session


class Profile:
    """What training steps take on this rank: ``profile = model.profile(steps=3)``, and the loop goes on as ever.

    A step lasts from its first forward to the first forward after its update, so steps that follow each other leave no time out:
    with loading data, with all micro-batches whose gradients add up, and with the update. The first step after ``profile()`` shows
    memory and is not timed; a step in which something is compiled is left out as well. When the last one has ended (at the forward
    behind it, so after ``steps + 1`` steps and one forward) ``done`` is true, and the model runs as before, at no cost. ``stop()``,
    or the end of ``with model.profile(steps=3) as profile:``, ends it there and then.

    Results are the same bits with and without it. On a GPU, moments are CUDA events on the stream that computes, around every
    region, start and wait; the ends of collectives come from streams that wait for NCCL's works or for the copy engines. Inside a
    region the device may wait for the host too, which counts as computation. A collective begins where its start stands in the
    stream of computation, or when the one before it in its own stream has ended. Between programs (loss, clipping, optimizer, data)
    the time counts as the device's work if it still had some at the end, else as waiting for the host. On the CPU everything is
    the host's clock: a wait is exposed as a whole, and what lies outside of programs and updates counts as the host's.
    With ``cuda_graphs`` steps are issued meanwhile, as nothing is seen of what happens inside a replay: the host's share is that of
    issued steps.

    Attributes:
        num_steps: how many were asked for.
        rank: this rank.
        world_size: ranks.
    """

    def __init__(self, session: Session, num_steps: int) -> None:
        self.num_steps = num_steps
        self._session = session
        self._profiler = Profiler(session.runner, num_steps)
        mesh = session.runner.shards.mesh
        self.rank, self.world_size = mesh.rank, mesh.size

    @classmethod
    def take(cls, session: Session, num_steps: int) -> Profile:
        """One that watches from the next training forward on; see ``CompiledModule.profile``."""
        if not isinstance(num_steps, int) or isinstance(num_steps, bool) or num_steps < 1:
            raise ConfigError(f"profile is asked for {num_steps!r} steps; pass a whole number of at least 1")
        if session.runner.executor.observer is not None:
            raise ProfileError(
                "profile is asked for while another one of the same model is being taken; let it end, or call its stop()"
            )
        profile = cls(session, num_steps)
        profile._profiler.arm()
        return profile

    # While it is taken. -----------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether nothing is recorded any more."""
        return not self._profiler.is_armed

    @property
    def missing(self) -> int:
        """How many steps have not been timed."""
        return self.num_steps - len(self._profiler.steps)

    def stop(self) -> None:
        """Record no more. The step that runs counts if it had its backward; it ends here."""
        self._profiler.stop()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stop()
        else:  # the device may never come to the end of what it was given
            self._profiler.abandon()

    # What came out. ---------------------------------------------------------------------------------------------------

    @cached_property
    def _steps(self) -> tuple[MeasuredStep, ...]:
        return tuple(measured(raw, on_host=self._profiler.on_host) for raw in self._profiler.read())

    @property
    def steps(self) -> tuple[MeasuredStep, ...]:
        """The steps that were timed.

        Raises:
            ProfileError: there are none yet, or it is not done.
        """
        if not self.done or not self._profiler.steps:
            raise ProfileError(f"{self.state}; run on, or call stop() after a step")
        return self._steps

    @property
    def state(self) -> str:
        """How far it is, in words."""
        found = len(self._profiler.steps)
        text = f"profile has {found} of {self.num_steps} steps"
        if not self.done:
            memory = "one that shows memory, " * (self._profiler.first is None)
            text += f"; missing: {memory}{self.missing} more and the forward after them"
            if self._profiler.num_backwards > 1:
                text += (
                    f"; the one that runs has {self._profiler.num_backwards} backwards, and no update or zero_grad yet"
                )
        return "; ".join([text, *self._left_out()])

    def _left_out(self) -> list[str]:
        counts = Counter(self._profiler.dropped)
        return [f"{count} step{'s' * (count > 1)} left out: {why}" for why, count in counts.items()]

    @property
    def step_us(self) -> float:
        """The mean time of a step, in microseconds."""
        return sum(step.step_us for step in self.steps) / len(self.steps)

    @property
    def shares(self) -> dict[str, float]:
        """Mean microseconds of a step by where they go; they add up to ``step_us``. ``SHARES`` says what each means."""
        return {name: sum(step.shares[name] for step in self.steps) / len(self.steps) for name in SHARES}

    @property
    def memory(self) -> tuple[tuple[str, str, int], ...]:
        """Bytes alive behind each instruction of a step, with its phase and label: what torch's allocator has handed out on a GPU,
        on the CPU what the values of the running program hold."""
        first = self._profiler.first
        return () if first is None else tuple(first.memory)

    @cached_property
    def device(self) -> DeviceMemory | None:
        """The device's memory at the first look; None on the CPU."""
        return DeviceMemory.of(self._session.runner.shards.mesh.device)

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What to change, the most urgent first."""
        device = self._session.runner.shards.mesh.device
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        return advise(
            self.steps,
            self._session.config,
            self.device,
            total_bytes=total,
            world_size=self.world_size,
            replays=self._profiler.paused_replays,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know."""
        notes = self._left_out()
        if self.done and self.missing:
            notes.append(f"stopped after {len(self._profiler.steps)} of {self.num_steps} steps")
        if self._profiler.paused_replays:
            notes.append("steps were issued and not replayed as CUDA graphs, inside which nothing can be seen")
        return tuple(notes)

    def region_times(self) -> dict[str, float]:
        """Mean microseconds of a call of each distinct region, by the key of its structure: what ``zcompile.plan(measured=...)``
        takes. Those of backwards inside ``no_sync`` are left out: their graph is not kept."""
        keys: dict[tuple[int, str, str], str | None] = {}
        sums: dict[str, list[float]] = {}
        for span in (span for step in self.steps for span in step.spans if span.region is not None):
            assert span.region is not None
            program, name = span.region
            where = (id(program), span.phase, name)
            if where not in keys:
                keys[where] = self._key(program, span.phase, name)
            if key := keys[where]:
                found = sums.setdefault(key, [0.0, 0.0])
                found[0] += span.us
                found[1] += 1
        return {key: us / count for key, (us, count) in sums.items()}

    def _key(self, program: StepProgram, phase: str, name: str) -> str | None:
        built = self._session.built(program)
        graph = None if built is None else built.graphs.forward if phase == "forward" else built.graphs.backward
        region = None if graph is None else graph.regions.get(name)
        return None if region is None else region_key(region)

    # Beside others. ---------------------------------------------------------------------------------------------------

    def gather(self) -> Ranks:
        """The accounts of all ranks, the slowest named. Collective.

        Raises:
            ProfileError: on every rank, if any of them has no steps.
        """
        mine = self.shares if self.done and self._profiler.steps else None
        return gather(self._session.runner.shards.mesh, mine)

    def compare(self, plan: Plan) -> Comparison:
        """What was measured beside what a plan predicts, by kind and by name."""
        from zcompile.profiling.compare import compare

        return compare(self, plan)

    # Written down. ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._session.name

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        from zcompile.profiling.export import profile_dict

        return profile_dict(self)

    def to_json(self, path: str | Path | None = None) -> str:
        """``to_dict`` as JSON; also written to a file when a path is given."""
        text = json.dumps(self.to_dict(), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def to_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto: the streams of the device, what the host issued when, and memory."""
        from zcompile.profiling.export import trace_events

        Path(path).write_text(json.dumps(trace_events(self)))

    def __str__(self) -> str:
        from zcompile.profiling.export import lines

        return "\n".join(lines(self)) if self.done and self._profiler.steps else self.state

    def __repr__(self) -> str:
        return f"<{self.state}>"
