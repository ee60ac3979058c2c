"""What takes the memory of a device that has no room left, and which changes would save most of it."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from zcompile import compat
from zcompile.errors import OutOfMemoryError
from zcompile.placement import choose_shard_dim
from zcompile.program import Program, Release, Start, StepProgram, TensorType
from zcompile.report import device_state_bytes, state_bytes
from zcompile.runtime.optim.optimizer_guard import optimizers_of
from zcompile.runtime.sharding.shards import ParameterShards
from zcompile.session import Session

#: how many changes are proposed
NUM_ADVICE = 3
#: how many buckets stage 3 has gathered at once under the default policy: in use, prefetched, kept for the backward
STAGE_3_BUCKETS = 3
#: less is not worth a word
MIN_SAVING = 1 / 100

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class DeviceMemory(NamedTuple):
    """What torch's allocator and the driver say, in bytes."""

    allocated: int
    reserved: int
    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a CUDA device now; None of any other."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, total)


@dataclass(frozen=True)
class Anatomy:
    """Bytes on this rank by kind. What the device alone knows is 0 on a CPU.

    Attributes:
        parameters: shards, or replicas.
        gradients: that are alive.
        optimizer: state of the optimizers that step these parameters.
        gathered: full parameters, in use or ready for the next gather.
        activations: everything else that is allocated: saved and temporary activations, and what is not this model's.
        unallocated: reserved by torch's allocator, in pieces that nobody uses now.
        outside: on the device and not in torch's allocator: contexts, NCCL, memory shared between GPUs, other processes.
        free: what the driver could still give.
        total: the device.
        requested: what could not be had.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    unallocated: int
    outside: int
    free: int
    total: int
    requested: int


def anatomy(session: Session, error: BaseException) -> Anatomy:
    """What takes the memory now."""
    runner = session.runner
    parameters, _, gradients, _ = state_bytes(runner.shards)
    optimizer = device_state_bytes(runner.shards, optimizers_of(runner.shards))
    hosting = runner.shards.hosting
    if hosting.parameters:
        parameters = gradients = 0
    buffers = runner.executor.buffers
    gathered = buffers.held_bytes
    device = device_memory(runner.shards.mesh.device)
    allocated, reserved, free, total = device or (0, 0, 0, 0)
    return Anatomy(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        gathered=gathered,
        activations=max(0, allocated - parameters - gradients - optimizer - gathered),
        unallocated=reserved - allocated,
        outside=max(0, total - free - reserved),
        free=free,
        total=total,
        requested=requested_bytes(str(error)),
    )


def explain(error: torch.OutOfMemoryError, what: str, session: Session) -> OutOfMemoryError:
    """The error to raise for the device's own.

    Args:
        error: torch's.
        what: was done after the latest call of the model; nothing if it happened in that call.
        session: of the model.
    """
    mesh, now = session.runner.shards.mesh, anatomy(session, error)
    wanted = f"tried to allocate {size(now.requested)}, " if now.requested else ""
    room = f"{size(now.free)} of {size(now.total)} are free" if now.total else "nothing is left"
    where = f"{what} after " * bool(what) + session.runner.agreement.name_call()
    lines = [f"[rank {mesh.rank} of {mesh.size}] {mesh.device} is out of memory in {where}: {wanted}{room}"]
    rows = [
        ("parameters", now.parameters),
        ("gradients", now.gradients),
        ("optimizer state", now.optimizer),
        ("gathered parameters", now.gathered),
        ("activations and all else", now.activations),
        ("reserved, not allocated", now.unallocated),
        ("outside torch's allocator", now.outside),
    ]
    lines += [f"  {name:26}{size(value):>12}" for name, value in rows if value or now.total]
    found = advice(session, now)
    if found:
        lines.append("what would save most on this rank (estimated):")
        lines += [f"  {size(saved):>12}  {text}" for saved, text in found]
    explained = OutOfMemoryError("\n".join(lines))
    explained.anatomy, explained.advice = asdict(now), found
    return explained


def advice(session: Session, now: Anatomy) -> list[tuple[int, str]]:
    """The most effective changes with what each would save, from the sizes of this model and its latest step."""
    config, shards, world = session.config, session.runner.shards, session.runner.shards.mesh.size
    peak, largest = (0, 0) if session.latest is None else gathered_bytes(session.latest.program)
    gathered = max(now.gathered, peak)
    found: list[tuple[int, str]] = []
    if now.activations:
        saved = (now.activations + now.requested) // 2
        found.append((saved, "half the micro-batch (activations x 1/2), with twice the gradient accumulation"))
    if world > 1:
        states = sharded_states(shards, now)
        if config.stage == 0:
            saved = states - -(-states // world) - STAGE_3_BUCKETS * largest
            found.append((saved, f"stage=3 instead of 0: states divided by {world}"))
        elif config.stage < 3:
            found.append((gathered - STAGE_3_BUCKETS * largest, f"stage=3 instead of {config.stage}"))
        elif config.policy != "none":
            found.append(
                (gathered - largest, 'policy="none": nothing is gathered ahead of its use or kept for backward')
            )
        if config.stage > 0:
            found.append((states // 2, f"{2 * world} ranks instead of {world}: half the states on each"))
    if config.offload is None:
        what = (
            'offload="optimizer", with zcompile.optim.AdamW: its states on the host, which takes the time of their way'
        )
        found.append((now.optimizer, what))
    if config.compute_dtype is None and _mostly_float32(shards):
        found.append(
            ((gathered + now.activations) // 2, 'precision="bf16": half the activations and gathered parameters')
        )
    if now.unallocated and not compat.expands_segments():
        found.append(
            (now.unallocated, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less lost between allocations")
        )
    least = MIN_SAVING * sum((now.parameters, now.gradients, now.optimizer, now.gathered, now.activations))
    return sorted((one for one in found if one[0] > least), reverse=True)[:NUM_ADVICE]


def sharded_states(shards: ParameterShards, now: Anatomy) -> int:
    """Bytes here of the states of those parameters that stage 3 divides."""
    specs = shards.specs.values()
    total = sum(s.padded_local_bytes for s in specs)
    divided = sum(
        s.padded_local_bytes
        for s in specs
        if choose_shard_dim(s.shape, s.dtype, s.world_size, stage=3, ignored=False) is not None
    )
    return int((now.parameters + now.gradients + now.optimizer) * divided / total) if total else 0


def gathered_bytes(step: StepProgram) -> tuple[int, int]:
    """(most bytes of gathered parameters at once, bytes of the largest collective) of a step."""
    programs = [step.forward.program] + ([] if step.backward is None else [step.backward.program])
    live = peak = largest = 0
    for program in programs:
        sizes = _slot_bytes(program)
        for ins in program.instructions:
            if isinstance(ins, Start):
                num_bytes = sum(map(_num_bytes, ins.types))
                largest = max(largest, num_bytes)
                live += num_bytes if ins.op == "all_gather" else 0
                peak = max(peak, live)
            elif isinstance(ins, Release):
                live -= sum(sizes.get(slot, 0) for slot in ins.slots)
    return peak, largest


def _slot_bytes(program: Program) -> dict[int, int]:
    """Bytes of each gathered parameter of a program, by slot."""
    gathers = [ins for ins in program.instructions if isinstance(ins, Start) and ins.op == "all_gather"]
    return {slot: _num_bytes(kind) for ins in gathers for slot, kind in zip(ins.outputs, ins.types, strict=True)}


def _num_bytes(kind: TensorType) -> int:
    return math.prod(kind.shape) * kind.dtype.itemsize


def _mostly_float32(shards: ParameterShards) -> bool:
    specs = shards.specs.values()
    return 2 * sum(s.num_bytes for s in specs if s.dtype is torch.float32) > sum(s.num_bytes for s in specs)


def requested_bytes(message: str) -> int:
    """The size in torch's message; 0 if there is none."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def size(num_bytes: int) -> str:
    """Bytes for people: ``"1.50 GiB"``."""
    for name, unit in reversed(_UNITS.items()):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}" if unit > 1 else f"{num_bytes} bytes"
    return "0"
