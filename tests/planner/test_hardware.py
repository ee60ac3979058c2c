"""Descriptions of machines: those that come along, files, and what is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from zcompile.errors import PlanError
from zcompile.planner.hardware import Hardware, hardware, known_hardware


@pytest.mark.parametrize("name", known_hardware())
def test_every_description_reads_and_says_where_its_numbers_come_from(name: str, tmp_path: Path) -> None:
    machine = hardware(name)
    assert machine.name == name and len(machine.sources) > 100
    machine.save(tmp_path / "copy.json")
    assert hardware(tmp_path / "copy.json") == machine
    for kind in machine.efficiency:
        assert all(0 < machine.efficiency_at(kind, 10.0**e) <= 1 for e in range(16))
    assert machine.usable_bytes == machine.device_memory_bytes - machine.reserve_bytes > 0
    assert (
        machine.flops_per_s("bf16") == machine.peak_flops["bf16"]
        and machine.flops_per_s("i8") == machine.peak_flops["f32"]
    )


def test_known_names() -> None:
    assert known_hardware() == ["a100-40", "a100-80", "cpu-2core", "h100", "h200", "mi300x", "rtx4090"]
    assert hardware(hardware("h100")) is not None


def test_efficiency_is_interpolated_in_the_logarithm_and_constant_outside() -> None:
    machine = dataclasses.replace(
        hardware("h100"), efficiency={**hardware("h100").efficiency, "matmul": ((1e2, 0.2), (1e4, 0.6))}
    )
    assert [machine.efficiency_at("matmul", s) for s in (1, 1e2, 1e3, 1e4, 1e9)] == pytest.approx(
        [0.2, 0.2, 0.4, 0.6, 0.6]
    )


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"hardware 'h900' is not known; the known ones are a100-40, .*--calibrate"):
        hardware("h900")


def change(tmp_path: Path, **changes: object) -> Path:
    fields = dataclasses.asdict(hardware("h100")) | changes
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({key: value for key, value in fields.items() if value != "gone"}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes_per_s": -1}, "has memory_bytes_per_s -1; it must be a number that is not negative"),
        ({"memory_bytes_per_s": 0}, "has memory_bytes_per_s 0; it must be positive"),
        ({"device_memory_bytes": float("nan")}, "device_memory_bytes nan"),
        ({"peak_flops": {"bf16": 1.0}}, "needs positive peak_flops, of f32 at least"),
        ({"efficiency": {}}, "has no efficiency of 'matmul'"),
        ({"node": {"latency_us": 1}}, "is no description of hardware"),
        ({"node": {"latency_us": -1, "bytes_per_s": 1}}, "has node.latency_us -1"),
        ({"host": "gone"}, "it has no 'host'"),
        ({"colour": "red"}, "is no description of hardware: .*colour"),
        ({"kernel_us": "fast"}, "is no description of hardware"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        hardware(change(tmp_path, **changes))


def test_growing_shares_and_sizes_are_checked(tmp_path: Path) -> None:
    wrong = dataclasses.asdict(hardware("h100"))["efficiency"] | {"memory": [[10, 0.5], [5, 0.6]]}
    with pytest.raises(PlanError, match="sizes must grow, shares lie in"):
        hardware(change(tmp_path, efficiency=wrong))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe\x00"])
def test_files_that_are_no_json_objects_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"hardware file '.*machine.json'"):
        hardware(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        hardware(str(tmp_path / "nowhere.json"))
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        hardware(tmp_path)


def test_it_is_a_value() -> None:
    assert isinstance(hardware("h100"), Hardware)
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware("h100").name = "other"  # type: ignore[misc]
