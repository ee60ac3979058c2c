"""Searches for schedules: the best spec of the schedule passes, and for small steps the best order and grouping there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

from torch import fx

from zcompile import ops
from zcompile.analysis.schedule import Collective, collectives, is_gather
from zcompile.errors import PlanError
from zcompile.ir import calls, meta
from zcompile.ir.graph import Graph, Param, Step
from zcompile.passes.schedule.bucket import Bucket as BucketPass
from zcompile.passes.schedule.keep import Keep
from zcompile.passes.schedule.prefetch import Prefetch
from zcompile.pipeline import Pass
from zcompile.planner.engine import run
from zcompile.planner.issue import Costs, bucket_of, local_params
from zcompile.planner.jobs import Bucket, Issuer
from zcompile.planner.simulate import REPLAY_SHARE, can_replay, simulate
from zcompile.planner.unscheduled import Unscheduled

# The best spec. -------------------------------------------------------------------------------------------------------

_LOOKAHEADS = (0, 1, 2, 3)
_BUCKETS_MIB = (0, 32, 64, 128, 256, 512)


def best_policy(base: Unscheduled, costs: Costs, peak_bytes: Callable[[Step], int]) -> tuple[Pass[Any], ...]:
    """The fastest ``keep``, ``bucket`` and ``prefetch`` that fit the device; the one with least memory where none fits.

    One option after the other is set to its best value, until none changes. It depends on sizes and the description of the machine
    only, so every rank finds the same, and ties go to the smaller value.

    Args:
        base: the step before its policy.
        costs: on a machine.
        peak_bytes: the memory that a scheduled step takes.
    """
    limit = costs.hardware.device_memory_bytes
    scores: dict[tuple[int, float, int], tuple[float, float]] = {}

    def score(keep: int, mib: float, lookahead: int) -> tuple[float, float]:
        """Bytes too many, then time. Of what is slower than the best that fits, the memory does not matter."""
        key = (keep, mib, lookahead)
        if key not in scores:
            step = base.candidate(_passes(*key))
            us = simulate(step, costs.hardware, base.world_size, costs=costs).step_us
            fastest = min((s[1] for s in scores.values() if s[0] == 0), default=math.inf)
            scores[key] = (math.inf if us >= fastest else max(peak_bytes(step) - limit, 0), us)
        return scores[key]

    units = len({p.unit for g in base.step.graphs for _, p in g.params()})
    values: tuple[Sequence[float], ...] = (_powers(units), _BUCKETS_MIB, _LOOKAHEADS)
    best: list[float] = [1 if units else 0, 32, 1]
    while True:
        before = list(best)
        for position, options in reversed(list(enumerate(values))):
            tried = [(*best[:position], option, *best[position + 1 :]) for option in options]
            best = list(min(tried, key=lambda t: score(int(t[0]), t[1], int(t[2]))))
        if best == before:
            return _passes(int(best[0]), best[1], int(best[2]))


def _passes(keep: int, mib: float, lookahead: int) -> tuple[Pass[Any], ...]:
    return (Keep(units=keep), BucketPass(mib=mib), Prefetch(lookahead=lookahead))


def _powers(most: int) -> list[int]:
    """0, 1, 2, 4, ... and the number itself."""
    return sorted({0, most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


# The best schedule of a small step. -----------------------------------------------------------------------------------

#: a search looks at every grouping and order; more collectives of a kind in a graph than this would take it too long
MAX_COLLECTIVES = 6


@dataclass(frozen=True)
class Optimum:
    """The best schedule there is, of those that start gathers in the order in which they are needed.

    Attributes:
        step_us: its time.
        kept: parameters that stay gathered from forward to backward.
        forward: how forward gathers and reduces.
        backward: how backward does.
        tried: how many schedules were simulated.
    """

    step_us: float
    kept: tuple[str, ...]
    forward: Plan
    backward: Plan | None
    tried: int


@dataclass(frozen=True)
class Plan:
    """The collectives of one graph.

    Attributes:
        gathers: for each bucket of gathers, how many units it carries and the slot where it starts: ``2 r`` is right behind region
            ``r - 1``, ``2 r + 1`` behind the reductions that start there.
        reductions: for each bucket of reductions, how many units it carries.
        device_us: the time of the graph.
        host_us: of the host.
    """

    gathers: tuple[tuple[int, int], ...]
    reductions: tuple[int, ...]
    device_us: float
    host_us: float


def optimum(base: Unscheduled, costs: Costs, *, limit_bytes: float = math.inf) -> Optimum:
    """Search every set of kept units, every grouping of neighbours and every start, by branch and bound.

    Computation keeps its order, and waits stand as late as they can: before the region that reads a gather, at the end for
    reductions. A branch ends where it takes longer than the best already without the gathers that are not placed yet: less to move
    never makes a run longer.

    Args:
        base: the step before its policy, with few units.
        costs: on a machine.
        limit_bytes: most bytes of gathered parameters at once.

    Raises:
        PlanError: the step has too many units.
    """
    search = _Search(base.step, costs, limit_bytes)
    update = Issuer(costs.hardware)
    if base.step.backward is not None:
        update.update(local_params(base.step))
    last_us = sum(j.duration_us for j in update.jobs), sum(j.host_us for j in update.jobs)
    # a step that the host would hold up is replayed, and then it holds up no more than so much
    share = REPLAY_SHARE if can_replay(base.step, costs.hardware) else 1.0
    forward, backward = search.chains[0], search.chains[1] if len(search.chains) > 1 else None
    keepable = [] if backward is None else [g.params for g in backward.gathers if g.params <= forward.names]
    best: Optimum | None = None
    subsets = itertools.chain.from_iterable(itertools.combinations(keepable, n) for n in range(len(keepable) + 1))
    for subset in subsets:
        kept: frozenset[str] = frozenset().union(*subset)
        first = search.front(forward, kept)
        second = [Plan((), (), 0.0, 0.0)] if backward is None else search.front(backward, kept)
        for a, b in itertools.product(first, second):
            us = max(a.device_us + b.device_us + last_us[0], share * (a.host_us + b.host_us) + last_us[1])
            if best is None or us < best.step_us:
                best = Optimum(us, tuple(sorted(kept)), a, None if backward is None else b, search.tried)
    if best is None:
        raise PlanError(
            f"no schedule keeps gathered parameters within {limit_bytes:.0f} bytes; allow more, or cut smaller units"
        )
    return replace(best, tried=search.tried)


@dataclass(frozen=True)
class _Gather:
    """A gather: what it carries, for which parameters, the region that first reads it and the one behind which it is released."""

    bucket: Bucket
    params: frozenset[str]
    first: int
    last: int


@dataclass
class _Chain:
    """One graph as a chain of regions with the collectives between them."""

    phase: str
    regions: list[tuple[str, float, float]] = field(default_factory=list)
    gathers: list[_Gather] = field(default_factory=list)
    reductions: list[tuple[Bucket, int]] = field(default_factory=list)  # with the number of regions before

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(g.params for g in self.gathers))


class _Search:
    def __init__(self, step: Step, costs: Costs, limit_bytes: float) -> None:
        self.hardware = costs.hardware
        self.limit_bytes = limit_bytes
        self.tried = 0
        self.chains = [_chain(graph, costs) for graph in step.graphs]
        for chain in self.chains:
            for kind, found in (("gathers", chain.gathers), ("reductions", chain.reductions)):
                if len(found) > MAX_COLLECTIVES:
                    raise PlanError(
                        f"{chain.phase} has {len(found)} {kind} and the search for the optimum takes at most {MAX_COLLECTIVES}; "
                        "ask for it on fewer layers"
                    )

    def front(self, chain: _Chain, kept: frozenset[str]) -> list[Plan]:
        """The plans of which none is faster for the device without being slower for the host; empty when none fits."""
        held = [g for g in chain.gathers if g.params <= kept]
        gathers = chain.gathers if chain.phase == "forward" else [g for g in chain.gathers if not g.params <= kept]
        found: list[Plan] = []
        for sizes in _partitions([g.bucket for g in gathers]):
            for reductions in _partitions([b for b, _ in chain.reductions]):
                self._place(chain, gathers, held, sizes, reductions, (), found)
        return found

    def _place(
        self,
        chain: _Chain,
        gathers: list[_Gather],
        held: list[_Gather],
        sizes: tuple[int, ...],
        reductions: tuple[int, ...],
        starts: tuple[int, ...],
        found: list[Plan],
    ) -> None:
        """Choose where the next bucket of gathers starts, its latest slot first."""
        device_us, host_us = self._evaluate(chain, gathers, sizes, reductions, starts)
        if any(p.device_us <= device_us and p.host_us <= host_us for p in found):
            return
        if len(starts) == len(sizes):
            found[:] = [p for p in found if p.device_us < device_us or p.host_us < host_us]
            found.append(Plan(tuple(zip(sizes, starts, strict=True)), reductions, device_us, host_us))
            return
        latest = 2 * gathers[sum(sizes[: len(starts)])].first + 1
        for slot in range(latest, (starts[-1] if starts else 0) - 1, -1):
            if slot % 2 == 0 and not any(at == slot // 2 for _, at in chain.reductions) and slot + 1 <= latest:
                continue  # nothing stands between this slot and the next
            placed = (*starts, slot)
            if self._gathered_bytes(chain, gathers, held, sizes, placed) <= self.limit_bytes:
                self._place(chain, gathers, held, sizes, reductions, placed, found)

    def _gathered_bytes(
        self,
        chain: _Chain,
        gathers: list[_Gather],
        held: list[_Gather],
        sizes: tuple[int, ...],
        starts: tuple[int, ...],
    ) -> int:
        """The most bytes of gathered parameters at once, of what is placed so far and what is kept."""
        spans = []
        for index, slot in enumerate(starts):
            for g in gathers[sum(sizes[:index]) : sum(sizes[: index + 1])]:
                last = len(chain.regions) if g in held else g.last
                spans.append((slot // 2, last, g.bucket.full_bytes))
        if chain.phase != "forward":
            spans += [(0, g.last, g.bucket.full_bytes) for g in held]
        return max((sum(b for s, e, b in spans if s <= r <= e) for r in range(len(chain.regions) + 1)), default=0)

    def _evaluate(
        self,
        chain: _Chain,
        gathers: list[_Gather],
        sizes: tuple[int, ...],
        reductions: tuple[int, ...],
        starts: tuple[int, ...],
    ) -> tuple[float, float]:
        """Time of device and host; of buckets that are not placed yet, only the host's part."""
        self.tried += 1
        issuer, later = Issuer(self.hardware), Issuer(self.hardware)
        issuer.phase = chain.phase
        firsts = [sum(sizes[:i]) for i in range(len(sizes))]
        groups = [gathers[f : f + n] for f, n in zip(firsts, sizes, strict=True)]
        buckets = [reduce(add, (g.bucket for g in group)) for group in groups]
        for index in range(len(starts), len(groups)):
            later.start(f"gather_{index}", buckets[index])
        reduced = list(_joined_reductions(chain, reductions))
        jobs: dict[int, int] = {}
        for region in range(len(chain.regions) + 1):
            for slot in (2 * region, 2 * region + 1):
                for index, start in enumerate(starts):
                    if start == slot:
                        jobs[index] = issuer.start(f"gather_{index}", buckets[index])
                for bucket, at in reduced:
                    if slot % 2 == 0 and at == region:
                        issuer.start(f"reduce_{region}", bucket)
            issuer.wait(job for index, job in jobs.items() if groups[index][0].first == region)
            if region < len(chain.regions):
                name, us, host_us = chain.regions[region]
                issuer.compute(name, "region", us, host_us)
        return run(issuer.jobs, math.inf).end_us, sum(j.host_us for j in (*issuer.jobs, *later.jobs))


def _joined_reductions(chain: _Chain, sizes: tuple[int, ...]) -> Iterator[tuple[Bucket, int]]:
    first = 0
    for size in sizes:
        group = chain.reductions[first : first + size]
        yield reduce(add, (b for b, _ in group)), group[-1][1]
        first += size


def _partitions(buckets: list[Bucket]) -> Iterator[tuple[int, ...]]:
    """Every way to join neighbours of one kind: the sizes of the groups."""
    if not buckets:
        yield ()
        return
    for cuts in itertools.product((True, False), repeat=len(buckets) - 1):
        sizes = [1]
        for cut, left, right in zip(cuts, buckets, buckets[1:], strict=False):
            if cut:
                sizes.append(1)
            elif (left.op, left.size) != (right.op, right.size):
                break
            else:
                sizes[-1] += 1
        else:
            yield tuple(sizes)


def _chain(graph: Graph, costs: Costs) -> _Chain:
    chain = _Chain(graph.direction.value)
    before: dict[fx.Node, int] = {}
    for node in graph.fx.nodes:
        before[node] = len(chain.regions)
        if node.target is ops.region_call:
            region = graph.regions[calls.region(node)[0]]
            chain.regions.append((node.name, costs.region(region).device_us, costs.host_us(region)))
    for c in collectives(graph):
        if is_gather(c.start):
            names = [origin.name for s in c.shards if isinstance(origin := meta.origin(s), Param)]
            chain.gathers.append(_Gather(bucket_of(c.start), frozenset(names), before[c.wait], _last(c, before)))
        else:
            chain.reductions.append((bucket_of(c.start), before[c.start]))
    return chain


def _last(c: Collective, before: dict[fx.Node, int]) -> int:
    """The last region that may read what a gather gave."""
    ends = [before[user] - 1 for result in c.results for user in result.users if user.target is ops.release]
    return max(ends, default=max(before.values()))
