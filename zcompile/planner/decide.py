"""Chooses among stage, schedule, recomputation, losses in pieces and offloading: the fastest step that keeps a memory budget."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from zcompile.analysis.units import MIB
from zcompile.capture.joint import Captured
from zcompile.errors import BudgetError, PassError, PipelineError, PlanError, RankError, VerifyError
from zcompile.offloading import Offloading
from zcompile.planner.budget import close_in
from zcompile.planner.choice import Candidate, Choice, Decision, best_of_kinds, fastest, size
from zcompile.planner.space import Space
from zcompile.planner.variants import Variants
from zcompile.scheduled import Splits

#: what says that a combination cannot be had for a model
CANNOT = (PassError, PipelineError, PlanError, VerifyError)

#: how often the ranks are doubled to find how many would do
DOUBLINGS = 4

#: the smallest schedules of stage 3: a unit at a time, and each when it is needed
SMALLEST = ("keep{units=0},bucket{mib=0},prefetch", "none")

#: stage, recompute, loss_chunk, offload
Group = tuple[int, str | None, str, str]


@dataclass(frozen=True)
class Elsewhere:
    """What would be planned if nothing fits, to say what would.

    Attributes:
        rows: of the micro-batch; 0: they are not known.
        capture: the same step with fewer rows; None: it cannot be captured.
        changes: options that could not be chosen, by what they are called.
    """

    rows: int = 0
    capture: Callable[[int], Captured] | None = None
    changes: Mapping[str, Callable[[Choice], Choice]] | None = None


def decide(variants: Variants, space: Space, elsewhere: Elsewhere | None = None) -> Decision:
    """The fastest combination that keeps the limits.

    Each is scheduled with its passes, its peak predicted and its step simulated. Less memory is taken to cost time: a schedule that
    keeps less gathered, more recomputation, losses in pieces and offloading never make a step faster. So the first schedule that
    fits is the best of its group, and a group is not planned whose weaker relative is slower than what was found. It depends on
    sizes and the description of the machine alone.

    Raises:
        BudgetError: none does; says which comes nearest, and what would fit.
    """
    search = _Search(variants, space)
    search.run()
    chosen = fastest(search.planned)
    if chosen is None:
        raise refusal(search, variants, elsewhere or Elsewhere())
    limits = variants.limits
    notes = (*space.notes, *search.useless.values(), *_given_for_nothing(chosen, space))
    micro_batches = variants.config.gradient_accumulation_steps
    return Decision(limits.budget_bytes, limits.beside_bytes, chosen, tuple(search.planned), notes, micro_batches)


class _Search:
    """The combinations that were planned, and what each group took at least."""

    def __init__(self, variants: Variants, space: Space) -> None:
        self.variants = variants
        self.space = space
        self.useless: dict[str, str] = {}
        self._known: dict[Choice, Candidate | None] = {}
        self._fastest: dict[Group, float] = {}

    @property
    def planned(self) -> list[Candidate]:
        """In the order in which they were."""
        return [candidate for candidate in self._known.values() if candidate is not None]

    def plan(self, choice: Choice) -> Candidate | None:
        """A choice, planned once; None if it cannot be had for this model."""
        if choice not in self._known:
            try:
                self._known[choice] = self.variants.candidate(choice)
            except CANNOT:
                self._known[choice] = None
        return self._known[choice]

    def run(self) -> None:
        space = self.space
        for recompute, chunk in product(space.recomputes, space.loss_chunks):
            for stage, offload in product(space.stages, space.offloads):
                group = (stage, recompute, chunk, offload)
                if not self._is_useless(group) and self._may_win(self._bound(group)):
                    self._plan_group(group)
        if space.amounts:
            self._plan_amounts()
        if space.shares:
            self._plan_shares()

    def _policies(self, stage: int) -> list[str]:
        """Schedules of a stage, from the most memory to the least. Stages 1 and 2 keep everything anyway, 0 gathers nothing."""
        config = self.variants.config
        in_window = config.gradient_accumulation_steps > 1
        if not self.space.schedules or stage == 0 or self.variants.world_size == 1:
            return [config.policy]
        if stage < 3:
            return [config.policy, f"hold{{units=0}},{config.policy}"][: 1 + in_window]
        units = self.variants.num_units(Choice.of(config))
        powers = sorted({units, *(1 << i for i in range(units.bit_length()) if 1 << i < units)}, reverse=True)
        kept = ["prefetch" if n == 1 else f"keep{{units={n}}},prefetch" for n in powers]
        if in_window:  # what backward leaves to the next forward is there without activations
            kept = [f"keep{{units={n}}},hold{{first={units}}},prefetch" for n in (*powers, 0)] + ["prefetch"]
        return [*kept, "keep{units=0},prefetch", *SMALLEST]

    def _plan_group(self, group: Group) -> None:
        stage, recompute, chunk, offload = group
        choices = [Choice(stage, policy, recompute, chunk, offload) for policy in self._policies(stage)]

        def fits(choice: Choice) -> bool:
            candidate = self.plan(choice)
            return candidate is not None and candidate.fits

        if not fits(choices[0]):
            first = bisect.bisect_left(choices, True, lo=1, key=fits)
            if first < len(choices):
                self.plan(choices[first])
        found = [candidate for choice in choices if (candidate := self._known.get(choice)) is not None]
        self._fastest[group] = min((candidate.step_us for candidate in found), default=math.inf)
        for candidate in found[:1]:
            self._note_useless(group, candidate)

    # What need not be planned. ----------------------------------------------------------------------------------------

    def _bound(self, group: Group) -> float:
        """What a group takes at least: what its weaker relatives do."""
        return max((us for other, us in self._fastest.items() if self._is_weaker(other, group)), default=0.0)

    def _is_weaker(self, other: Group, group: Group) -> bool:
        space = self.space
        (stage, again, chunk, moved), (my_stage, my_again, my_chunk, my_moved) = other, group
        return (
            stage == my_stage
            and space.recomputes.index(again) <= space.recomputes.index(my_again)
            and space.loss_chunks.index(chunk) <= space.loss_chunks.index(my_chunk)
            and _parts(moved) <= _parts(my_moved)
            # less memory makes room for states
            and not (space.shares and _may_share(moved) and _may_share(my_moved))
        )

    def _may_win(self, bound_us: float) -> bool:
        best = fastest(self.planned)
        return best is None or best.step_us > bound_us

    def _is_useless(self, group: Group) -> bool:
        _, recompute, chunk, offload = group
        if chunk == "auto" and len(self.space.loss_chunks) > 1 and "loss_chunk auto" not in self.useless:
            stats = self.variants.losses
            if not stats["losses in pieces"]:
                why = "; ".join(stats) or "there is no cross-entropy of a linear layer"
                self.useless["loss_chunk auto"] = f"loss_chunk='auto' saves nothing: {why}"
        names = {f"offload {part}" for part in _parts(offload)} | {f"recompute {recompute}", f"loss_chunk {chunk}"}
        return not names.isdisjoint(self.useless)

    def _note_useless(self, group: Group, candidate: Candidate) -> None:
        """Remember what was chosen for nothing: what comes with it is the same without."""
        _, recompute, _, offload = group
        space, parts = self.space, _parts(offload)
        if recompute is not None and len(space.recomputes) > 1 and candidate.saved_bytes == candidate.most_bytes:
            self.useless[f"recompute {recompute}"] = (
                f"recompute='{recompute}' saves nothing: no list of blocks holds more that backward needs"
            )
        if len(space.offloads) > 1 and recompute is None:
            if parts == {"activations"} and not candidate.moved_bytes:
                self.useless["offload activations"] = "offload='activations' saves nothing: no activation is moved"
            if parts == {"optimizer"} and not candidate.state_bytes:
                self.useless["offload optimizer"] = "offload='optimizer' saves nothing: there are no states"

    # Any amount. ------------------------------------------------------------------------------------------------------

    def _plan_amounts(self) -> None:
        """Where saving what the split chooses does not fit and recomputing more does: nearly as much as fits."""
        limit = self.variants.limits.budget_bytes
        ends: list[tuple[float, Candidate]] = []
        for stage, chunk, offload in product(self.space.stages, self.space.loss_chunks, self.space.offloads):
            known = self._fastest.get((stage, None, chunk, offload))
            like = {(stage, mode, chunk, offload) for mode in self.space.recomputes[1:]}
            fitting = [c for c in self.planned if c.choice.kind in like and c.fits and c.saved_bytes < c.most_bytes]
            # at the schedule of the options, if that fits: what is saved is worth more than what is kept
            usual = [c for c in fitting if c.choice.policy == self.variants.config.policy] or fitting
            if known is not None and usual and self._without_fits(usual[0].choice) is False:
                ends.append((known, max(usual, key=lambda c: c.saved_bytes)))
        for bound_us, low in sorted(ends, key=lambda end: end[0]):
            if self._may_win(bound_us):
                close_in(
                    lambda saved, low=low: self._with_amount(low, saved),
                    limit,
                    low=float(low.saved_bytes),
                    high=float(low.most_bytes),
                    guess=low.saved_bytes + limit - low.peak_bytes,
                )

    def _without_fits(self, choice: Choice) -> bool | None:
        """Whether a choice without recomputation fits."""
        candidate = self.plan(replace(choice, recompute=None))
        return None if candidate is None else candidate.fits

    def _with_amount(self, like: Candidate, saved_bytes: float) -> Candidate:
        candidate = self.plan(replace(like.choice, recompute=max(round(saved_bytes / MIB, 4), 1e-4)))
        return like if candidate is None else candidate

    # Any share of the states. -----------------------------------------------------------------------------------------

    def _plan_shares(self) -> None:
        """Where states are on the host and there is room: as many of them on the device as have it."""
        for found in best_of_kinds(self.planned):
            if not found.fits or not _may_share(found.choice.offload):
                continue
            usual = (
                self.plan(replace(found.choice, policy=self.variants.config.policy)) if self.space.schedules else None
            )
            for candidate in dict.fromkeys((found, usual)):  # what is kept gathered has the room as well
                if candidate is not None and candidate.fits and candidate.state_bytes:
                    room = self.variants.limits.budget_bytes - candidate.peak_bytes
                    share = math.ceil(1000 * (1 - room / candidate.state_bytes)) / 1000
                    if 0 < share < 1:
                        offloading = candidate.choice.offloading.with_share(share)
                        self.plan(replace(candidate.choice, offload=str(offloading)))


def _parts(offload: str) -> set[str]:
    return set(Offloading.parse(offload or None).on_host)


def _may_share(offload: str) -> bool:
    """Whether a part of the optimizer's states may stay on the device."""
    return "optimizer" in _parts(offload) and "parameters" not in _parts(offload)


def _given_for_nothing(chosen: Candidate, space: Space) -> list[str]:
    """Options that the caller gave and that save nothing."""
    choice, notes = chosen.choice, []
    if len(space.recomputes) == 1 and choice.recompute is not None and chosen.saved_bytes == chosen.most_bytes:
        notes.append(f"recompute='{choice.recompute}', which was given, saves nothing")
    if len(space.loss_chunks) == 1 and choice.loss_chunk != "none" and not chosen.pieces:
        notes.append(f"loss_chunk='{choice.loss_chunk}', which was given, saves nothing")
    if len(space.offloads) == 1:
        moved = {"activations": chosen.moved_bytes, "optimizer": chosen.state_bytes}
        nothing = [part for part in sorted(_parts(choice.offload)) if not moved.get(part, 1)]
        notes += [f"offload='{part}', which was given, saves nothing" for part in nothing]
    return notes


# Nothing fits. --------------------------------------------------------------------------------------------------------


def refusal(search: _Search, variants: Variants, elsewhere: Elsewhere) -> BudgetError:
    """The error that says how near it comes, and what would fit: each planned."""
    limits, planned = variants.limits, search.planned
    nearest = sorted(best_of_kinds(planned), key=lambda c: c.peak_bytes)
    least = nearest[0]
    changes: list[str] = []
    timed = "step" if variants.config.gradient_accumulation_steps == 1 else "a micro-batch"

    def tell(what: str, other: Variants, choice: Choice, world_size: int | None = None) -> bool:
        try:
            found = other.candidate(choice, world_size)
        except CANNOT:
            return False
        if found.fits:
            changes.append(f"{what}: peak {size(found.peak_bytes)}, {timed} {found.step_us / 1000:.2f} ms")
        return found.fits

    if least.choice.loss_chunk in ("none", "auto"):
        tell("loss_chunk='256MiB', with None for logits", variants, replace(least.choice, loss_chunk="256MiB"))
    for name, change in (elsewhere.changes or {}).items():
        tell(name, variants, change(least.choice))
    for double in range(1, DOUBLINGS + 1 if least.choice.stage else 1):
        world = variants.world_size << double
        if tell(f"{world} ranks instead of {variants.world_size}", variants, least.choice, world):
            break
    for rows in _fewer_rows(least, variants, elsewhere):
        tell(f"micro-batch {rows.number} instead of {elsewhere.rows}", rows.variants, least.choice)
    need = next((c for c in nearest if limits.host_bytes is None or c.host_bytes <= limits.host_bytes), least)
    changes.append(f"memory_budget={need.peak_bytes} ({size(need.peak_bytes)}), with {need.choice}")
    beyond = ""
    if limits.host_bytes is not None and least.host_bytes > limits.host_bytes:
        beyond = f" and {size(least.host_bytes)} of host memory, of which there are {size(limits.host_bytes)}"
    if limits.device_bytes is not None and least.peak_bytes <= limits.budget_bytes:
        beyond += f", which with its reserve is more than the device's {size(limits.device_bytes)}"
    said = "".join(f"; {note}" for note in (*search.space.notes, *search.useless.values()))
    return BudgetError.of(
        f"memory_budget is {size(limits.budget_bytes)} and the least of {len(planned)} combinations that were planned takes "
        f"{size(least.peak_bytes)}{beyond}: {least.choice}; what would fit: {'; '.join(changes)}{said}",
        least.peak_bytes,
        changes,
    )


@dataclass(frozen=True)
class _Rows:
    """A smaller micro-batch, captured."""

    number: int
    variants: Variants
    peak_bytes: int


def _fewer_rows(least: Candidate, variants: Variants, elsewhere: Elsewhere) -> list[_Rows]:
    """Nearly the largest micro-batch that fits, if one does: the peak is mostly a line over rows, of which half of them are a point."""
    budget = variants.limits.budget_bytes

    def captured(number: int) -> _Rows | None:
        try:
            assert elsewhere.capture is not None
            other = replace(variants, splits=Splits(elsewhere.capture(number), variants.splits.verifier), _bases={})
            return _Rows(number, other, other.candidate(least.choice).peak_bytes)
        except RankError:
            raise
        except Exception:  # whatever forward raises that does not take so few rows, or has them in another place
            return None

    if elsewhere.capture is None or elsewhere.rows < 2 or (half := captured(elsewhere.rows // 2)) is None:
        return []
    of_row = (least.peak_bytes - half.peak_bytes) / (elsewhere.rows - half.number)
    most = int(half.number + (budget - half.peak_bytes) / of_row) if of_row > 0 else 0
    found = half if half.peak_bytes <= budget else None
    for number in (most, most // 2, most // 4):
        if not (found.number if found else 0) < number < elsewhere.rows:
            break
        other = captured(number)
        if other is not None and other.peak_bytes <= budget:
            return [other]
    return [found] if found else []
