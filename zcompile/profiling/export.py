"""A profile as text, as data, and as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zcompile.planner.export import Slice, chrome_trace
from zcompile.planner.jobs import COMPUTE
from zcompile.profiling.measured import EXPOSED, Span

if TYPE_CHECKING:
    from zcompile.profiling.profile import Profile

#: rows of a table of regions or collectives; what is beyond is summed up
MOST = 8

MIB, GIB = 2**20, 2**30


def profile_dict(profile: Profile) -> dict[str, Any]:
    """Everything of a profile, in types that JSON has."""
    steps = [
        {
            "step_us": step.step_us,
            "micro_batches": step.micro_batches,
            "shares_us": step.shares,
            "spans": [_span(span) for span in step.spans],
        }
        for step in profile.steps
    ]
    return {
        "model": profile.model,
        "rank": profile.rank,
        "world_size": profile.world_size,
        "step_us": profile.step_us,
        "shares_us": profile.shares,
        "steps": steps,
        "memory": [{"phase": phase, "label": label, "bytes": num_bytes} for phase, label, num_bytes in profile.memory],
        "device": None if profile.device is None else asdict(profile.device),
        "region_times": profile.region_times(),
        "advice": [asdict(advice) for advice in profile.advice],
        "notes": list(profile.notes),
    }


def _span(span: Span) -> dict[str, Any]:
    shown = {name: value for name, value in vars(span).items() if name != "region"}
    return {**shown, "issued_us": None if span.issued_us is None else list(span.issued_us)}


def trace_events(profile: Profile) -> dict[str, Any]:
    """A profile as ``chrome_trace``: the streams of the device, the host, and memory at the times of the first step."""
    process = f"{profile.model}, rank {profile.rank} of {profile.world_size}"
    return chrome_trace(process, _slices(profile), _memory(profile), profile.rank)


def _slices(profile: Profile) -> Iterator[Slice]:
    origin = profile.steps[0].begin_us
    host: list[Slice] = []
    for number, step in enumerate(profile.steps):
        begin = step.begin_us - origin
        host.append(Slice(f"step {number + 1}", "steps", "step", begin, begin + step.step_us, dict(step.shares)))
        for span in step.spans:
            name, args = span.label or span.name, {"phase": span.phase, "node": span.name, "bytes": span.bytes}
            yield Slice(name, span.stream, span.kind, begin + span.start_us, begin + span.end_us, args)
            if span.issued_us is not None and span.kind != "release":
                first, last = span.issued_us
                host.append(Slice(name, "host", span.kind, begin + first, begin + last, args))
    yield from host


def _memory(profile: Profile) -> Iterator[tuple[float, dict[str, float]]]:
    """Bytes alive behind each instruction; times are those of the same instruction in the first timed step."""
    runs = [
        s
        for s in profile.steps[0].spans
        if s.stream == COMPUTE and s.phase in ("forward", "backward") and s.kind != "gap"
    ]
    sizes = [entry for entry in profile.memory if entry[0] != "evaluation"]
    for span, (_, label, num_bytes) in zip(runs, sizes, strict=False):
        if span.label != label:  # the step that shows memory ran something else
            return
        yield span.end_us, {"alive": num_bytes / MIB}


# Text. ----------------------------------------------------------------------------------------------------------------


def lines(profile: Profile) -> list[str]:
    """The lines that ``print`` shows."""
    steps, shares = profile.steps, profile.shares
    times = [step.step_us for step in steps]
    batches = sorted({step.micro_batches for step in steps})
    found = [
        f"{profile.model}, rank {profile.rank} of {profile.world_size}: {len(steps)} step{'s' * (len(steps) > 1)} of "
        f"{_ms(profile.step_us)} ms ({_ms(min(times))} to {_ms(max(times))}), {' or '.join(map(str, batches))} "
        f"micro-batch{'es' * (batches != [1])} each",
        "",
        f"{'a step':24}{'ms':>10}{'share':>8}",
        *(f"{name:24}{_ms(us):>10}{us / profile.step_us:>8.1%}" for name, us in shares.items() if us),
        f"{'together':24}{_ms(sum(shares.values())):>10}{sum(shares.values()) / profile.step_us:>8.1%}",
    ]
    spans = [span for step in steps for span in step.spans]
    exposed: dict[str, float] = {}
    for span in (span for span in spans if span.share == EXPOSED):
        exposed[span.label] = exposed.get(span.label, 0.0) + span.us / len(steps)
    for title, chosen in (
        ("regions", [s for s in spans if s.kind == "region"]),
        ("collectives", [s for s in spans if s.stream != COMPUTE]),
    ):
        if chosen:
            found += ["", *_table(title, chosen, len(steps), exposed if title == "collectives" else None)]
    found += ["", *_memory_lines(profile)]
    if profile.notes:
        found += ["", *(f"note: {note}" for note in profile.notes)]
    advice = profile.advice
    if advice:
        found += ["", "to make it faster:", *(f"  {one}" for one in advice)]
    else:
        found += ["", "nothing to change stands out"]
    return found


def _table(title: str, spans: Iterable[Span], num_steps: int, exposed: dict[str, float] | None) -> list[str]:
    """Time of a step by label, the longest first."""
    sums: dict[str, list[float]] = {}
    for span in spans:
        row = sums.setdefault(span.label, [0.0, 0.0, 0.0])
        row[0] += 1 / num_steps
        row[1] += span.us / num_steps
        row[2] += span.bytes / num_steps
    width = max(len(title), 44)
    extra = "" if exposed is None else f"{'exposed':>10}{'MiB':>10}"
    rows = [f"{title:{width}}{'calls':>8}{'ms':>10}{extra}"]
    order = sorted(sums, key=lambda label: -(sums[label][1] if exposed is None else exposed.get(label, 0.0)))
    shown, rest = order[:MOST], order[MOST:]
    for label, labels in [
        *((_cut(label, width), [label]) for label in shown),
        *([(f"{len(rest)} more", rest)] if rest else []),
    ]:
        calls, us, num_bytes = (sum(sums[name][i] for name in labels) for i in range(3))
        row = f"{label:{width}}{calls:>8.0f}{_ms(us):>10}"
        if exposed is not None:
            row += f"{_ms(sum(exposed.get(name, 0.0) for name in labels)):>10}{num_bytes / MIB:>10.2f}"
        rows.append(row)
    return rows


def _memory_lines(profile: Profile) -> Iterator[str]:
    if profile.memory:
        phase, label, num_bytes = max(profile.memory, key=lambda entry: entry[2])
        what = "in the program's values" if profile.device is None else "allocated"
        yield f"memory: {num_bytes / MIB:.2f} MiB {what} behind {label} ({phase}), the most behind any instruction"
    if profile.device is not None:
        peaks = profile.device
        yield (
            f"of the device: peak {peaks.peak_allocated / GIB:.2f} GiB allocated, {peaks.peak_reserved / GIB:.2f} reserved, "
            f"{peaks.outside / GIB:.2f} outside"
        )


def _cut(label: str, width: int) -> str:
    return label if len(label) < width else f"{label[: width - 4]}..."


def _ms(us: float) -> str:
    return f"{us / 1000:.2f}"
