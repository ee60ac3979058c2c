"""What changes only the order of communication, or nothing at all, gives the very same bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.dist.pool import Pools
from tests.dist.training import Trained, assert_same_bits, train_case
from zcompile.analysis.schedule import collectives, is_reduction
from zcompile.ir.graph import Step
from zcompile.pipeline import Stats, StepPass

pytestmark = pytest.mark.dist

SHARES_CAPTURES = True

#: bytes of the largest weight of ``deep``'s blocks, and of a whole block: bucket sizes at which a size check is off by one
WEIGHT_MIB = 45 * 20 * 4 / 2**20
BLOCK_MIB = (2 * 45 * 20 + 45 + 3 * 20) * 4 / 2**20


@functools.cache
def base(name: str, stage: int) -> Trained:
    """The run that others are compared with; one for each pool."""
    return train_case(name, stage=stage, steps=6, verify="off")[0]


def same_bits(name: str = "deep", stage: int = 3, base_stage: int | None = None, **options: Any) -> None:
    """Train with other options; the result must not change."""
    reference = base(name, stage if base_stage is None else base_stage)
    other, _, _ = train_case(name, stage=stage, steps=6, **{"verify": "off", **options})
    assert_same_bits(other, reference)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "prefetch{lookahead=0}",
        "prefetch{lookahead=1}",
        "prefetch{lookahead=2}",
        "prefetch{lookahead=4}",
        "bucket{mib=0},prefetch{lookahead=2}",
        "bucket{mib=0.0001},prefetch{lookahead=1}",
        f"bucket{{mib={WEIGHT_MIB}}},prefetch{{lookahead=1}}",
        f"bucket{{mib={BLOCK_MIB}}},prefetch{{lookahead=1}}",
        f"bucket{{mib={2 * BLOCK_MIB}}},prefetch{{lookahead=4}}",
        "bucket{mib=1000}",
        "bucket{mib=0},prefetch{lookahead=4 limit_mib=0.01}",
        "keep{units=0},prefetch",
        "keep{units=1},bucket{mib=0},prefetch",
        "keep{units=2},bucket{mib=0},prefetch{lookahead=2}",
        "keep{units=1000},prefetch{lookahead=4}",
        f"keep{{units=1000 mib={2 * BLOCK_MIB}}},bucket{{mib=0}},prefetch{{lookahead=4}}",
        "prefetch{lookahead=4},keep{units=3},bucket{mib=0}",
    ],
)
def test_policies(ranks: Pools, world: int, policy: str) -> None:
    if world == 3 and "lookahead=4" not in policy and "mib=0." not in policy:
        pytest.skip("two ranks have shown it")
    ranks(world, same_bits, policy=policy)


@dataclass(frozen=True)
class LateReductions(StepPass):
    """A policy of a user's: reductions are waited for at the end, gathers stay where they are."""

    name: ClassVar[str] = "late-reductions"

    def run(self, target: Step, stats: Stats) -> None:
        for graph in target.graphs:
            for reduction in collectives(graph, is_reduction):
                for node in (reduction.wait, *reduction.results):
                    graph.output.prepend(node)
                stats["waits moved"] += 1


def policy_of_ones_own(**options: Any) -> None:
    reference = base("deep", 3)
    other, model, _ = train_case("deep", stage=3, steps=6, policy=LateReductions(), poison=True, **options)
    assert_same_bits(other, reference)
    assert model.history["late-reductions"].stats["waits moved"] > 0
    assert "prefetch" not in str(model.pipeline) and "late-reductions" in str(model.pipeline)


def test_policies_of_ones_own(ranks: Pools) -> None:
    ranks(2, policy_of_ones_own)


def policies_of_a_transformer() -> None:
    same_bits("llama_tied", policy="bucket{mib=0},prefetch{lookahead=2}")
    same_bits("llama_tied", policy="prefetch{lookahead=0}")
    same_bits("llama_tied", policy="keep{units=0},bucket{mib=0},prefetch{lookahead=1}")
    same_bits("llama_tied", policy="keep{units=2},bucket{mib=0},prefetch{lookahead=1}")


def test_policies_of_a_transformer(ranks: Pools) -> None:
    ranks(2, policies_of_a_transformer)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_sharded_stages(ranks: Pools, stage: int, world: int) -> None:
    ranks(world, same_bits, stage=stage, base_stage=3, policy="bucket{mib=0},prefetch{lookahead=2}")


@pytest.mark.parametrize("verify", ["full", "fast", "off"])
def test_verifier_and_repeated_runs(ranks: Pools, verify: str) -> None:
    ranks(2, same_bits, verify=verify)


@pytest.mark.parametrize("name", ["mlp"])
def test_repeated_runs_with_random_numbers(ranks: Pools, name: str) -> None:
    ranks(2, same_bits, name=name)


@pytest.mark.parametrize(
    "policy", ["bucket{mib=0},prefetch{lookahead=2}", "keep{units=3},bucket{mib=0},prefetch{lookahead=1}", "none"]
)
@pytest.mark.parametrize("stage", [2, 3])
def test_poison(ranks: Pools, policy: str, stage: int) -> None:
    """Released buffers are filled with NaN: nothing reads them."""
    ranks(2, same_bits, stage=stage, base_stage=3, policy=policy, poison=True)
