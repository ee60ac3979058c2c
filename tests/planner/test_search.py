"""Searches: the optimum against a search without bounds, and every policy against the optimum."""

import itertools
import math

import pytest

from tests.planner.networks import traced
from zcompile import passes
from zcompile.errors import PlanError
from zcompile.planner.hardware import hardware
from zcompile.planner.issue import Costs
from zcompile.planner.search import _partitions, _Search, best_policy, optimum
from zcompile.planner.simulate import REPLAY_SHARE, simulate

H200 = hardware("h200")
SPECS = [
    "none",
    "prefetch",
    "keep",
    "prefetch{lookahead=2}",
    "keep{units=4},bucket{mib=0},prefetch{lookahead=3}",
    "bucket{mib=512},prefetch{lookahead=1}",
]


def everything(search: _Search, kept: frozenset[str], chain_index: int) -> list[tuple[float, float]]:
    """Time of device and host of every grouping and placement, without any bound."""
    chain = search.chains[chain_index]
    gathers = [g for g in chain.gathers if chain.phase == "forward" or not g.params <= kept]
    found = []
    for sizes in _partitions([g.bucket for g in gathers]):
        firsts = [gathers[sum(sizes[:i])].first for i in range(len(sizes))]
        for starts in itertools.product(*(range(2 * first + 2) for first in firsts)):
            if list(starts) == sorted(starts):
                for reductions in _partitions([b for b, _ in chain.reductions]):
                    found.append(search._evaluate(chain, gathers, sizes, reductions, starts))
    return found


@pytest.mark.parametrize("world_size", [2, 64])
def test_branch_and_bound_finds_what_a_search_of_everything_finds(world_size: int) -> None:
    base = traced(layers=2).unscheduled(world_size)
    costs = Costs(H200)
    found = optimum(base, costs)
    search = _Search(base.step, costs, math.inf)
    update = simulate(base.step, H200, world_size, costs=costs).events[-1]
    update_us, update_host = update.end_us - update.start_us, H200.host.step_us
    keepable = [g.params for g in search.chains[1].gathers]
    best = math.inf
    for n in range(len(keepable) + 1):
        for subset in itertools.combinations(keepable, n):
            kept: frozenset[str] = frozenset().union(*subset)
            for a, b in itertools.product(*(everything(search, kept, i) for i in (0, 1))):
                best = min(best, max(a[0] + b[0] + update_us, REPLAY_SHARE * (a[1] + b[1]) + update_host))
    assert found.step_us == pytest.approx(best, rel=1e-9)
    assert found.tried < search.tried / 2


@pytest.mark.parametrize("world_size", [2, 64])
def test_no_policy_beats_the_optimum_and_auto_comes_near(world_size: int) -> None:
    base = traced().unscheduled(world_size)
    costs = Costs(H200)
    best = optimum(base, costs).step_us
    times = {s: simulate(base.schedule(passes.schedule(s)), H200, world_size, costs=costs).step_us for s in SPECS}
    assert min(times.values()) >= best * (1 - 1e-9)
    auto = best_policy(base, costs, lambda step: 0)
    found = simulate(base.schedule(auto), H200, world_size, costs=costs).step_us
    assert best * (1 - 1e-9) <= found <= min(best * 1.05, times["prefetch"])
    assert auto == best_policy(base, Costs(H200), lambda step: 0)  # decided by numbers that every rank has


def test_auto_takes_what_fits_and_the_least_where_nothing_does() -> None:
    base = traced().unscheduled(64)

    def kept_bytes(step: object) -> int:
        return str(step).count("= kept ") * H200.device_memory_bytes

    assert "keep{units=1 " in ",".join(map(str, best_policy(base, Costs(H200), kept_bytes)))
    (keep, *_) = best_policy(base, Costs(H200), lambda step: kept_bytes(step) + H200.device_memory_bytes + 1)
    assert str(keep) == "keep{units=0 mib=none}"


def test_a_memory_limit_makes_the_optimum_no_better_and_may_leave_nothing() -> None:
    base = traced().unscheduled(64)
    free, tight = optimum(base, Costs(H200)), optimum(base, Costs(H200), limit_bytes=70 << 20)
    assert free.kept and free.step_us <= tight.step_us
    assert tight.forward.gathers != free.forward.gathers or tight.kept != free.kept
    with pytest.raises(PlanError, match="no schedule keeps gathered parameters within 1000 bytes"):
        optimum(base, Costs(H200), limit_bytes=1000)


def test_large_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcompile.planner.search.MAX_COLLECTIVES", 2)
    with pytest.raises(PlanError, match="forward has 4 gathers and the search for the optimum takes at most 2"):
        optimum(traced().unscheduled(2), Costs(H200))
