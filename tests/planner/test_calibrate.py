"""Calibration: what it writes is a description of this machine, in one process and on two ranks."""

import os
from pathlib import Path

import pytest
import torch

from zcompile.__main__ import main
from zcompile.planner import calibrate
from zcompile.planner.hardware import hardware


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_SIDES", {"cpu": (16, 64, 128), "cuda": (256, 1024)})
    monkeypatch.setattr(calibrate, "_COPIES", {"cpu": (1 << 12, 1 << 16, 1 << 20), "cuda": (1 << 17, 1 << 27)})
    monkeypatch.setattr(calibrate, "_LARGE", {"cpu": 1 << 18, "cuda": 1 << 26})
    monkeypatch.setattr(calibrate, "_SECONDS", 0.01)
    monkeypatch.setattr(calibrate, "_SUSTAINED", {"cpu": 0.01, "cuda": 0.1})


def test_a_calibration_describes_this_machine(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.json"
    assert main(["doctor", "--calibrate", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    found = hardware(path)
    assert (
        found.name == "here"
        and "Measured by doctor --calibrate" in found.sources
        and "Taken over from" in found.sources
    )
    if not torch.cuda.is_available():
        assert found.device_memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert [size for size, _ in found.efficiency["matmul"]] == [2.0 * n**3 for n in (16, 64, 128)]
        assert max(share for _, share in found.efficiency["matmul"]) == 1
        assert 1e8 < found.peak_flops["f32"] < 1e14 and 1e8 < found.memory_bytes_per_s < 1e13
        assert 0.01 < found.kernel_us < 1e4
        assert 1e8 < found.host_link.bytes_per_s < 1e13 and found.host_link.latency_us < 1e4
        assert 1e8 < found.host_bytes_per_s < 1e13
        assert 0 < found.host_memory_bytes <= found.device_memory_bytes


def test_a_clock_measures_what_work_takes() -> None:
    clock = calibrate.Clock(torch.device("cpu"))
    small, large = torch.zeros(64, 64), torch.zeros(512, 512)
    assert clock.us(lambda: large @ large, 0.02) > 2 * clock.us(lambda: small @ small, 0.02)


@pytest.mark.parametrize("where", ["nowhere/here.json", "."])
def test_places_that_cannot_be_written_are_refused_before_measuring(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--calibrate", str(tmp_path / where)]) == 1
    assert "cannot be written" in capsys.readouterr().err
