"""Model states: the ZeRO paper's table, zcompile's own accounting, and bad numbers."""

import json

import pytest
import sympy

from zcompile.__main__ import main
from zcompile.errors import PlanError
from zcompile.placement import ParamSpec
from zcompile.planner import states
from zcompile.planner.states import WORLD, ByteCosts, shard_formula, table

P = sympy.Symbol("P", positive=True)


def test_the_table_of_the_zero_paper() -> None:
    """Rajbhandari et al., ZeRO (2020), figure 1: 7.5e9 parameters on 64 ranks, 2 + 2 + 12 bytes."""
    rows = table(7.5e9, 64, ByteCosts(), precision="bf16", optimizer="adamw")
    assert [round(row["bytes"] / 1e9, 1) for row in rows] == [120.0, 31.4, 16.6, 1.9]
    assert [round(row["zcompile_bytes"] / 1e9, 1) for row in rows] == [120.0, 16.9, 16.9, 1.9]


def test_other_byte_costs() -> None:
    """Megatron's distributed optimizer: 6 + 12/d with fp32 gradients at stage 1."""
    stage_1 = table(1, 4, ByteCosts(2, 4, 12), precision="bf16", optimizer="adamw")[1]
    assert sympy.simplify(sympy.sympify(stage_1["formula"], {"W": WORLD, "P": P}) - P * (6 + 12 / WORLD)) == 0
    fp32 = table(100, 2, ByteCosts(4, 4, 4), precision=None, optimizer="momentum")
    assert [row["zcompile_bytes"] for row in fp32] == [1200, 1000, 1000, 600]


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--params", "7.5e9", "--world-size", "64"]) == 0
    out = capsys.readouterr().out
    assert all(number in out for number in ("120.0", "31.4", "16.6", "1.9"))
    assert (
        main(["memory", "--params", "1e9", "--world-size", "8", "--bytes", "fp32", "--gradient-bytes", "2", "--json"])
        == 0
    )
    read = json.loads(capsys.readouterr().out)
    assert [row["bytes"] for row in read["stages"]] == [14 * 10**9, 7 * 10**9, 5.25e9, 1.75e9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "-1", "--world-size", "8"], "number of parameters is -1.0; it must be positive"),
        (["--params", "nan", "--world-size", "8"], "number of parameters is nan; it must be positive"),
        (["--params", "1e9", "--world-size", "0"], "world size is 0; it must be at least 1"),
        (["--params", "1e9", "--world-size", "8", "--gradient-bytes", "-2"], "gradient bytes are -2.0; they must be"),
    ],
)
def test_bad_numbers(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_unknown_optimizer_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="optimizer 'adagrad' is not known; the known ones are adamw, adam"):
        states.num_states("adagrad")


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_a_formula_counts_padding(world: int) -> None:
    import torch

    def spec(shape: tuple[int, ...], dim: int | None) -> ParamSpec:
        return ParamSpec("w", (), shape, torch.float32, True, dim, world)

    specs = [spec((13, 5), 0), spec((6, 14), 1), spec((3,), None)]
    formula = shard_formula((s, 4) for s in specs)
    assert states.evaluate(formula, world) == states.parameter_bytes(specs)
