"""Every example runs, at a tiny size: those that README shows with torchrun really under it, others in forked processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import Programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--steps", "4", "--batch", "2", "--seq", "16", "--hidden", "32", "--layers", "2", "--max-mib", "1"]


def run(command: list[str]) -> str:
    """Run Python with one thread on a CPU and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_train_lm_in_one_process(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    options = ["--check", "--json", "--data", str(tmp_path), "--tied", "--backend", "eager"]
    result = json.loads(programs(EXAMPLES / "train_lm.py", *TINY, *options).splitlines()[-1])
    assert result["world_size"] == 1
    assert result["check_max_rel_diff"] < 1e-5
    assert result["bytes_per_rank"] == result["bytes_unsharded"]


@pytest.mark.dist
@pytest.mark.slow
def test_train_lm_on_two_ranks() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(EXAMPLES / "train_lm.py")]
    result = json.loads(
        run([*launch, *TINY, "--check", "--json", "--stage", "3", "--backend", "eager"]).splitlines()[-1]
    )
    assert (result["stage"], result["world_size"], result["steps"]) == (3, 2, 4)
    assert result["check_max_rel_diff"] < 1e-5
    assert result["last_loss"] < result["first_loss"]
    assert result["bytes_per_rank"] / result["bytes_unsharded"] < 0.52  # padding, and step counters, which are whole


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", pytest.param("accelerate", marks=pytest.mark.wide)])
def test_finetune_hf(programs: Programs, loader: str) -> None:
    """Accumulation, clipping and a schedule of transformers' on two ranks: the losses of plain PyTorch on one."""
    if loader == "accelerate":
        pytest.importorskip("accelerate")

    def losses(ranks: int, *options: str) -> list[float]:
        text = programs(EXAMPLES / "finetune_hf.py", "--steps", "4", "--json", *options, ranks=ranks)
        return json.loads(text.splitlines()[-1])

    plain = losses(0, "--plain", "--batch", "4")
    mine = losses(2, "--batch", "2", *(["--accelerate"] if loader == "accelerate" else []))
    assert mine == pytest.approx(plain, rel=1e-5) and len(plain) == 4


@pytest.mark.dist
@pytest.mark.slow
def test_inspect_graph() -> None:
    output = run([str(EXAMPLES / "inspect_graph.py")])
    for name in ("shard", "unshard", "reduce", "prefetch"):
        assert f"{name}{{" in output
    assert "zc.all_gather" in output and "zc.reduce_scatter" in output


@pytest.mark.dist
@pytest.mark.slow
def test_deepspeed_style(programs: Programs, tmp_path: Path) -> None:
    """Three steps on two ranks, then three more in one process from its checkpoint."""
    tiny = ["--seq", "16", "--hidden", "32", "--layers", "1", "--backend", "eager", "--json", "--save", str(tmp_path)]
    output = programs(EXAMPLES / "deepspeed_style.py", "--steps", "3", *tiny, ranks=2)
    assert "gradient_accumulation_steps" in output and "bf16.enabled" in output
    first = json.loads(output.splitlines()[-1])
    second = json.loads(programs(EXAMPLES / "deepspeed_style.py", "--steps", "6", *tiny).splitlines()[-1])
    assert [(r["first_step"], r["last_step"]) for r in (first, second)] == [(0, 3), (3, 6)]
    assert second["last_loss"] < first["last_loss"] < 6.0
    assert second["lr"] > first["lr"] > 0


@pytest.mark.dist
@pytest.mark.slow
def test_resume(programs: Programs, tmp_path: Path) -> None:
    def resume(folder: str, **variables: str) -> str:
        return programs(EXAMPLES / "resume.py", str(tmp_path / folder), ranks=2, variables=variables)

    whole = resume("whole")
    assert whole.startswith("steps 0 to 20: loss ")
    assert resume("parts", STEPS="8").startswith("steps 0 to 8: loss ")
    assert resume("parts") == whole.replace("steps 0 to", "steps 8 to")


@pytest.mark.slow
def test_write_a_policy(programs: Programs) -> None:
    output = programs(EXAMPLES / "write_a_policy.py", "--world-size", "8", "--layers", "1")
    rows = [line.split() for line in output.splitlines()[2:]]
    assert [row[:1] for row in rows[:4]] == [["8"]] * 4
    steps = {row[1]: float(row[2]) for row in rows[:4]}
    assert steps["write_a_policy.py:EarlyGathers{regions=2}"] < steps["none"]
