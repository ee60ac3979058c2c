"""Gradient memory that comes with a backward and goes with its gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.runtime.models import Odd, full_gradients, reduced, set_gradients, shard
from zcompile.runtime.communication.mesh import Mesh
from zcompile.runtime.offload import hosting
from zcompile.runtime.optim.norm import clip_grad_norm_
from zcompile.runtime.optim.optimizer import AdamW
from zcompile.runtime.sharding import gradients
from zcompile.runtime.sharding.arenas import aligned_empty
from zcompile.runtime.sharding.placed import local_of
from zcompile.runtime.sharding.shards import ParameterShards

small_and_large = pytest.mark.parametrize("keep_bytes", [1 << 20, 0], ids=["small", "large"], indirect=True)


@pytest.fixture(params=[False, True], ids=["plain", "dtensor"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """One rank, without and with a process group."""
    if request.param:
        request.getfixturevalue("one_rank")
    return Mesh.create(device="cpu")


@pytest.fixture
def keep_bytes(request: pytest.FixtureRequest, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, which are kept or not."""
    monkeypatch.setattr(gradients, "KEEP_BYTES", request.param)


def made(mesh: Mesh) -> tuple[Odd, ParameterShards]:
    torch.manual_seed(0)
    model = Odd()
    return model, shard(model, mesh)


def backward(shards: ParameterShards, values: dict[str, Tensor]) -> None:
    """What a backward does: reductions into gradient memory where there is no ``.grad``, then accumulation."""
    out = []
    for name, value in zip(*reduced(shards, values), strict=True):
        if shards.parameter(name).grad is None:
            out.append(shards.grad_local(name).copy_(value))
        else:
            out.append(value)
    shards.accumulate_many(list(values), out)


def zero_grad(shards: ParameterShards) -> None:
    for parameter in shards.parameters:
        parameter.grad = None


def grad(shards: ParameterShards, name: str) -> Tensor:
    value = shards.parameter(name).grad
    assert value is not None
    return value


def check(shards: ParameterShards, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        assert torch.equal(local_of(grad(shards, name)), value), name


# Who holds a gradient. ------------------------------------------------------------------------------------------------


def saved_for_backward(g: Tensor) -> Any:
    x = torch.ones_like(g).requires_grad_()
    return x, (g * x).sum()


def from_backward(kept: Any) -> Tensor:
    x, total = kept
    total.backward()
    return x.grad


def as_grad_of_another(g: Tensor) -> Any:
    other = nn.Parameter(torch.zeros_like(g))
    other.grad = g
    return other


#: ways to keep a gradient, and its values from what was kept
KEEPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda g: g, lambda kept: kept),
    "in a list": (lambda g: [g], lambda kept: kept[0]),
    "detached": (lambda g: g.detach(), lambda kept: kept),
    "local": (local_of, lambda kept: kept),
    "a view of the local": (lambda g: local_of(g).view(-1), lambda kept: kept),
    "a view": (lambda g: g.unsqueeze(0), lambda kept: kept),
    "as numpy": (lambda g: local_of(g).numpy(), lambda kept: torch.from_numpy(kept)),
    "the .grad of another": (as_grad_of_another, lambda kept: kept.grad),
    "saved for a backward": (saved_for_backward, from_backward),
}


@small_and_large
@pytest.mark.parametrize("way", KEEPS)
def test_a_gradient_that_is_held_keeps_its_values(mesh: Mesh, keep_bytes: None, way: str) -> None:
    model, shards = made(mesh)
    keep, read = KEEPS[way]
    for with_forward in (True, False):
        zero_grad(shards)
        first, second = full_gradients(model, 0), full_gradients(model, 1)
        backward(shards, first)
        kept = {name: keep(grad(shards, name)) for name in first if name != "up.bias" and first[name].numel()}
        zero_grad(shards)
        if with_forward:
            shards.drop_gradients()
        backward(shards, second)
        check(shards, second)
        for name, value in kept.items():
            assert torch.equal(local_of(read(value)).view(-1), first[name].view(-1)), name
        assert clip_grad_norm_(shards, mesh, 1e9).isclose(torch.cat([g.view(-1) for g in second.values()]).norm())


def test_the_same_as_plain_pytorch_when_one_gradient_is_taken(mesh: Mesh) -> None:
    """``g = p.grad; p.grad = None`` while the others accumulate."""
    model, shards = made(mesh)
    plain = Odd()
    first, second = full_gradients(plain, 0), full_gradients(plain, 1)
    set_gradients(plain, first)
    backward(shards, first)
    taken = {}
    for each in (model, plain):
        taken[each] = each.up.weight.grad
        each.up.weight.grad = None
    shards.drop_gradients()
    backward(shards, second)
    for name, value in second.items():
        parameter = plain.get_parameter(name)
        parameter.grad = value if parameter.grad is None else parameter.grad + value
    assert torch.equal(local_of(taken[model]), taken[plain])
    check(shards, {name: plain.get_parameter(name).grad for name in second})
    norm = nn.utils.clip_grad_norm_(list(plain.parameters()), 0.1)
    torch.testing.assert_close(clip_grad_norm_(shards, mesh, 0.1), norm)
    ours = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    plain.load_state_dict({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()})
    ours.step()
    theirs.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(shards.local(name), value.detach())


def test_a_gradient_that_was_given_other_memory_is_replaced() -> None:
    model, shards = made(Mesh.create(device="cpu"))
    backward(shards, full_gradients(model, 0))
    grad(shards, "up.weight").data = torch.ones(13, 6)
    zero_grad(shards)
    backward(shards, full_gradients(model, 1))
    check(shards, full_gradients(model, 1))


USES: dict[str, Callable[[Odd, ParameterShards, Mesh], Any]] = {
    "nothing": lambda model, shards, mesh: None,
    "looked at": lambda model, shards, mesh: [str(p.grad) for p in model.parameters()],
    "torch's clipping": lambda model, shards, mesh: nn.utils.clip_grad_norm_(
        [p for p in model.parameters() if p.numel()], 1.0
    ),
    "our clipping": lambda model, shards, mesh: clip_grad_norm_(shards, mesh, 1.0),
    "torch's optimizer": lambda model, shards, mesh: torch.optim.AdamW(model.parameters()).step(),
    "local": lambda model, shards, mesh: [local_of(p.grad).sum() for p in model.parameters() if p.grad is not None],
    "numpy": lambda model, shards, mesh: [
        local_of(p.grad).numpy().sum() for p in model.parameters() if p.grad is not None
    ],
    "storage": lambda model, shards, mesh: [
        local_of(p.grad).untyped_storage().nbytes() for p in model.parameters() if p.grad is not None
    ],
    "accumulated": lambda model, shards, mesh: backward(shards, full_gradients(Odd(), 3)),
}


@pytest.mark.parametrize("use", USES)
def test_what_nobody_holds_is_used_again(mesh: Mesh, use: str) -> None:
    model, shards = made(mesh)
    values = full_gradients(model, 0)
    backward(shards, values)
    before = {name: id(grad(shards, name)) for name in values}
    addresses = {name: shards.grad_local(name).data_ptr() for name in values}
    for step in range(3):
        USES[use](model, shards, mesh)
        zero_grad(shards)
        shards.drop_gradients()
        values = full_gradients(model, step)
        backward(shards, values)
        check(shards, values)
    assert {name: id(grad(shards, name)) for name in values} == before
    assert {name: shards.grad_local(name).data_ptr() for name in values} == addresses


def test_our_optimizer_holds_no_gradient(mesh: Mesh) -> None:
    model, shards = made(mesh)
    optimizer = AdamW(model.parameters())
    backward(shards, full_gradients(model, 0))
    before = id(grad(shards, "up.weight"))
    for step in range(3):
        optimizer.step()
        optimizer.zero_grad()
        backward(shards, full_gradients(model, step))
        assert id(grad(shards, "up.weight")) == before


# Memory that goes. ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("ours", [True, False])
def test_memory_goes_when_no_gradient_is_left_and_a_forward_begins(mesh: Mesh, ours: bool) -> None:
    model, shards = made(mesh)
    optimizer = (AdamW if ours else torch.optim.AdamW)([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        shards.drop_gradients()
        assert shards.gradient_arenas() == {} and shards.gradients.live_bytes() == 0
        backward(shards, full_gradients(model, step))
        memory = [StorageWeakRef(arena.untyped_storage()) for arena in shards.gradient_arenas().values()]
        assert len(memory) > 2
        assert shards.gradients.live_bytes() == sum(
            s.padded_local_bytes for s in shards.specs.values() if s.requires_grad
        )
        clip_grad_norm_(shards, mesh, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert not any(m.expired() for m in memory)
        shards.drop_gradients()
        assert all(m.expired() for m in memory), "nobody keeps what was dropped"


@pytest.mark.usefixtures("large")
def test_chunks_go_one_by_one(mesh: Mesh) -> None:
    model, shards = made(mesh)
    assert shards.gradient_arenas() == {}
    backward(shards, {"norm.bias": full_gradients(model, 0)["norm.bias"]})
    (first,) = shards.gradient_arenas()  # the chunk of the only gradient
    backward(shards, full_gradients(model, 1))
    for name in shards.specs:
        if name != "up.weight":
            shards.parameter(name).grad = None
    shards.drop_gradients()
    (left,) = shards.gradient_arenas()
    place = shards.layout.places[shards.index("up.weight")]
    assert place is not None and left == place.key != first
    assert shards.gradients.live_bytes() == sum(
        shards.spec(i).padded_local_bytes for i in shards.layout.members[place.key]
    )
    backward(shards, full_gradients(model, 2))  # onto up.weight, anew for the others
    expected = full_gradients(model, 2)
    expected["up.weight"] += full_gradients(model, 1)["up.weight"]
    check(shards, expected)


@pytest.mark.usefixtures("large")
def test_memory_stays_while_gradients_are_set(mesh: Mesh) -> None:
    model, shards = made(mesh)
    backward(shards, full_gradients(model, 0))
    before = shards.gradient_arenas()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    shards.drop_gradients()
    after = shards.gradient_arenas()
    assert before.keys() == after.keys() and all(before[key] is after[key] for key in before)


@pytest.mark.usefixtures("large")
def test_memory_of_a_parameter_that_was_thawed_goes_too(mesh: Mesh) -> None:
    model, shards = made(mesh)
    model.frozen.requires_grad_()
    values = {"frozen": torch.randn(9, 3)}
    backward(shards, values)
    check(shards, values)
    assert shards.gradients.live_bytes() == 9 * 3 * 4 and shards.gradient_arenas() == {}
    memory = StorageWeakRef(local_of(grad(shards, "frozen")).untyped_storage())
    zero_grad(shards)
    shards.drop_gradients()
    assert memory.expired() and shards.gradients.live_bytes() == 0


def test_a_gradient_of_the_users_counts_as_alive(mesh: Mesh) -> None:
    model, shards = made(mesh)
    model.up.weight.grad = torch.ones_like(model.up.weight)
    assert shards.gradients.live_bytes() == model.up.weight.numel() * 4


def test_a_small_model_keeps_its_memory(mesh: Mesh) -> None:
    model, shards = made(mesh)
    backward(shards, full_gradients(model, 0))
    (arena,) = shards.gradient_arenas().values()
    zero_grad(shards)
    shards.drop_gradients()
    (after,) = shards.gradient_arenas().values()
    assert after is arena and shards.gradients.live_bytes() > 0


@pytest.mark.usefixtures("large")
def test_nothing_is_held_after_the_model(mesh: Mesh) -> None:
    model, shards = made(mesh)
    backward(shards, full_gradients(model, 0))
    memory = [StorageWeakRef(arena.untyped_storage()) for arena in shards.gradient_arenas().values()]
    del model, shards
    gc.collect()
    assert all(m.expired() for m in memory)


# Memory with anything in it. ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [(), ("up.weight", "scale"), ("embed.weight", "wide.weight", "norm.bias")])
@small_and_large
def test_nothing_reads_memory_that_no_gradient_was_written_to(
    mesh: Mesh, keep_bytes: None, skip: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def garbage(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return aligned_empty(numel, dtype, device).fill_(float("nan"))

    monkeypatch.setattr(hosting, "aligned_empty", garbage)
    model, shards = made(mesh)
    torch.manual_seed(0)
    plain = Odd()
    ours = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.1, foreach=False)
    for step in range(3):
        values = full_gradients(plain, step, skip=skip)
        set_gradients(plain, values)
        backward(shards, values)
        for order in (2.0, float("inf"), 0.0, -1.0):
            expected = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.numel()], 0.5, order)
            torch.testing.assert_close(clip_grad_norm_(shards, mesh, 0.5, order), expected)
        assert all(not hole.any() for key in shards.gradient_arenas() for hole in shards.holes(key))
        ours.step()
        theirs.step()
        ours.zero_grad()
        shards.drop_gradients()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(shards.local(name), value.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("large")
def test_a_plan_of_the_optimizer_outlives_its_gradients(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """New gradient memory in every step is no reason to sort the parameters anew."""
    model, shards = made(mesh)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    plans = []
    make = optimizer._make_plan
    monkeypatch.setattr(optimizer, "_make_plan", lambda group: plans.append(make(group)) or plans[-1])
    for step in range(3):
        backward(shards, full_gradients(model, step, skip=("nothing",)))
        optimizer.step()
        optimizer.zero_grad()
        shards.drop_gradients()
    assert len(plans) == 1 and len(plans[0].flat) > 2
