"""Every example runs, at a tiny size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--steps", "4", "--batch", "2", "--seq", "16", "--hidden", "32", "--layers", "2", "--max-mib", "1"]


def run(command: list[str], **variables: str) -> str:
    """Run Python with one thread on a CPU and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def train_lm(world_size: int, *options: str) -> dict[str, float]:
    """The final JSON line of a tiny training run."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else []
    output = run([*launch, str(EXAMPLES / "train_lm.py"), *TINY, "--check", "--json", *options])
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
def test_train_lm_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    result = train_lm(1, "--data", str(tmp_path), "--tied", "--backend", "eager")
    assert result["world_size"] == 1
    assert result["check_max_rel_diff"] < 1e-5
    assert result["bytes_per_rank"] == result["bytes_unsharded"]


@pytest.mark.dist
@pytest.mark.slow
def test_train_lm_on_two_ranks() -> None:
    result = train_lm(2, "--stage", "3", "--backend", "eager")
    assert (result["stage"], result["world_size"], result["steps"]) == (3, 2, 4)
    assert result["check_max_rel_diff"] < 1e-5
    assert result["last_loss"] < result["first_loss"]
    assert result["bytes_per_rank"] / result["bytes_unsharded"] < 0.52  # padding, and step counters, which are whole


def finetune(world_size: int, *options: str) -> list[float]:
    """The losses of the steps of the Hugging Face example."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"] if world_size > 1 else []
    output = run([*launch, str(EXAMPLES / "finetune_hf.py"), "--steps", "4", "--json", *options])
    return json.loads(output.splitlines()[-1])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("loader", ["torch", pytest.param("accelerate", marks=pytest.mark.wide)])
def test_finetune_hf(loader: str) -> None:
    """Accumulation, clipping and a schedule of transformers' on two ranks: the losses of plain PyTorch on one."""
    if loader == "accelerate":
        pytest.importorskip("accelerate")
    plain = finetune(1, "--plain", "--batch", "4")
    mine = finetune(2, "--batch", "2", *(["--accelerate"] if loader == "accelerate" else []))
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
def test_deepspeed_style(tmp_path: Path) -> None:
    """Three steps on two ranks, then three more in one process from its checkpoint."""
    tiny = ["--seq", "16", "--hidden", "32", "--layers", "1", "--backend", "eager", "--json", "--save", str(tmp_path)]
    script = str(EXAMPLES / "deepspeed_style.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = run([*launch, script, "--steps", "3", *tiny])
    assert "gradient_accumulation_steps" in output and "bf16.enabled" in output
    first = json.loads(output.splitlines()[-1])
    second = json.loads(run([script, "--steps", "6", *tiny]).splitlines()[-1])
    assert [(r["first_step"], r["last_step"]) for r in (first, second)] == [(0, 3), (3, 6)]
    assert second["last_loss"] < first["last_loss"] < 6.0
    assert second["lr"] > first["lr"] > 0


@pytest.mark.dist
@pytest.mark.slow
def test_resume(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(EXAMPLES / "resume.py")]
    whole = run([*launch, str(tmp_path / "whole")])
    assert whole.startswith("steps 0 to 20: loss ")
    assert run([*launch, str(tmp_path / "parts")], STEPS="8").startswith("steps 0 to 8: loss ")
    assert run([*launch, str(tmp_path / "parts")]) == whole.replace("steps 0 to", "steps 8 to")


@pytest.mark.slow
def test_write_a_policy() -> None:
    output = run([str(EXAMPLES / "write_a_policy.py"), "--world-size", "8", "--layers", "1"])
    rows = [line.split() for line in output.splitlines()[2:]]
    assert [row[:1] for row in rows[:4]] == [["8"]] * 4
    steps = {row[1]: float(row[2]) for row in rows[:4]}
    assert steps["write_a_policy.py:EarlyGathers{regions=2}"] < steps["none"]
