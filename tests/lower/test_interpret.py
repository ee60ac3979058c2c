"""The reference interpreter: real models give eager PyTorch's numbers, wrong schedules give NaN or an error."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.ir.captured import MODELS, joint_graph
from zcompile.errors import ConfigError, MeshError, VerifyError
from zcompile.ir import meta
from zcompile.ir.graph import Buffer, Input, Output, Param
from zcompile.ir.text import describe, parse_graph, parse_step
from zcompile.lower.interpret import average, build, interpret, lockstep, lockstep_step, unshard


@pytest.mark.parametrize("case", MODELS)
def test_joint_graphs_compute_what_eager_pytorch_does(case: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[case][0](), MODELS[case][1]()
    x = torch.randint(0, 17, x.shape) if x.dtype == torch.int64 else torch.randn_like(x)
    graph = joint_graph(case)
    inputs = []
    for node in graph.inputs:
        origin = meta.origin(node)
        if isinstance(origin, (Param, Buffer)):
            owner, _, name = origin.name.rpartition(".")
            inputs.append(getattr(model.get_submodule(owner), name).detach().clone())
        else:
            inputs.append(x if isinstance(origin, Input) else torch.ones(()))
    by_name = {node.name: t for node, t in zip(graph.inputs, inputs, strict=True)}
    torch.manual_seed(3)
    results = interpret(graph.fx, inputs)
    (in_lockstep,) = lockstep(graph, [by_name], seed=3)
    torch.manual_seed(3)
    loss = model(x)
    loss.backward()
    grads = dict(model.named_parameters())
    for result, same, (_, role) in zip(results, in_lockstep, graph.outputs, strict=True):
        assert torch.equal(result, same)
        kind, name = describe(role).split(" ")[0], getattr(role, "name", "")
        if kind == "mutation":
            torch.testing.assert_close(result, model.get_buffer(name))
        else:
            want = loss if isinstance(role, Output) else grads[name].grad
            assert want is not None
            # What is added up in bfloat16 is off by roundings of its largest terms, in an order that depends on threads.
            absolute = 2**-7 * want.abs().max().item() if want.dtype == torch.bfloat16 else 1e-5
            relative = 0.016 if want.dtype == torch.bfloat16 else 1.3e-6
            torch.testing.assert_close(result, want, rtol=relative, atol=absolute)


def test_values_are_freed_after_their_last_use() -> None:
    graph = parse_graph("""\
graph m.forward
  inputs:
    %x: f32[4] = input 0
    %unused: f32[4] = input 1
  body:
    %a: f32[4] = aten.neg(%x)
    %b: f32[4] = aten.exp(%a)
    %c: f32[4] = aten.mul.Tensor(%b, inf)
    %dead: f32[4] = aten.sin(%c)
    %d: f32[4] = aten.cat([%c, %c])
  return output 0 %c""")
    alive: list[int] = []
    args = [torch.ones(4), torch.ones(4)]
    refs = [weakref.ref(t) for t in args]
    run = build(graph.fx)
    names = {k: v for k, v in run.__globals__.items() if v is torch.ops.aten.exp.default}

    def spy(tensor: Tensor) -> Tensor:
        gc.collect()
        alive.extend(r() is not None for r in refs)
        return torch.exp(tensor)

    run.__globals__[next(iter(names))] = spy
    (result,) = run(args)
    assert args == [] and alive == [False, False] and result.isinf().all()


def test_collectives_are_exact() -> None:
    graph = parse_graph("""\
graph m.forward  axis dp=2
  inputs:
    %w: f32[2, 3] = param 'w' shard(0) of [3, 3]
    %v: f32[3, 2] = param 'v' shard(1) of [3, 3]
    %g: f32[4] = input 0
  body:
    %w_full: f32[3, 3] = zc.unshard(%w, 'dp', 2, 0, [3, 3])
    %v_full: f32[3, 3] = zc.unshard(%v, 'dp', 2, 1, [3, 3])
    %b: bucket = zc.all_gather([%w, %v], 'dp', 2)
    %w_raw: f32[4, 3], %v_raw: f32[6, 2] = zc.wait(%b)
    %r: bucket = zc.reduce_scatter([%g], 'dp', 2)
    %g_shard: f32[2] = zc.wait(%r)
    %a: bucket = zc.all_reduce([%g], 'dp', 2)
    %g_mean: f32[4] = zc.wait(%a)
  return output 0 %w_full, output 1 %v_full, output 2 %w_raw, output 3 %v_raw, output 4 %g_shard, output 5 %g_mean""")
    full = torch.arange(9.0).view(3, 3)
    padded = torch.nn.functional.pad(full, (0, 1, 0, 1), value=-1)
    inputs = [
        {
            "w": padded[2 * rank : 2 * rank + 2, :3],
            "v": padded[:3, 2 * rank : 2 * rank + 2],
            "g": torch.arange(4.0) + 2 * rank,
        }
        for rank in range(2)
    ]
    for rank, (w_full, v_full, w_raw, v_raw, g_shard, g_mean) in enumerate(lockstep(graph, inputs)):
        assert torch.equal(w_full, full) and torch.equal(v_full, full)
        assert torch.equal(w_raw, padded[:, :3])
        assert torch.equal(v_raw, torch.cat([padded[:3, :2], padded[:3, 2:]]))
        mean = torch.arange(4.0) + 1
        assert torch.equal(g_mean, mean) and torch.equal(g_shard, mean[2 * rank : 2 * rank + 2])


def test_unshard_and_average() -> None:
    full = torch.arange(30.0).view(5, 6)
    for dim in (0, 1):
        padded = torch.nn.functional.pad(full, (0, 3, 0, 3))
        shards = [padded.narrow(dim, rank * 2, 2).narrow(1 - dim, 0, full.shape[1 - dim]) for rank in range(3)]
        assert torch.equal(unshard(shards, dim, (5, 6)), full)
    third = torch.full((1,), 1 / 3, dtype=torch.bfloat16)
    assert torch.equal(average([third, third, third]), third)
    assert average([torch.ones(1, dtype=torch.complex64)] * 2).dtype == torch.complex64


SCHEDULE = """\
graph m.forward  axis dp=2
  inputs:
    %w: f32[2] = param 'w' shard(0) of [4]
    %x: f32[4] = input 0
  region layer(%a: f32[4], %b: f32[4]):
    %y: f32[4] = aten.mul.Tensor(%a, %b)
    return %y
  body:
    %b: bucket = zc.all_gather([%w], 'dp', 2)
    %w_full: f32[4] = zc.wait(%b)
    %y: f32[4] = call layer(%x, %w_full)
    zc.release([%w_full])
  return output 0 %y"""
INPUTS = [{"w": torch.full((2,), 1.0 + rank), "x": torch.full((4,), 1.0 + rank)} for rank in range(2)]


def test_a_schedule_runs() -> None:
    first, second = lockstep(parse_graph(SCHEDULE), INPUTS)
    assert first[0].tolist() == [1, 1, 2, 2] and second[0].tolist() == [2, 2, 4, 4]


def test_use_after_release_gives_nan() -> None:
    early = SCHEDULE.replace("    zc.release([%w_full])\n", "").replace(
        "    %y: f32[4] = call", "    zc.release([%w_full])\n    %y: f32[4] = call"
    )
    assert lockstep(parse_graph(early), INPUTS)[0][0].isnan().all()


def test_sends_that_are_released_before_the_wait_give_nan() -> None:
    early = SCHEDULE.replace("    %w_full:", "    zc.release([%w])\n    %w_full:", 1)
    assert lockstep(parse_graph(early), INPUTS)[0][0].isnan().all()
    assert INPUTS[0]["w"].tolist() == [1, 1], "inputs are copied"


def test_misuse_is_explained() -> None:
    unwaited = SCHEDULE.replace("zc.wait(%b)", "operator.getitem(%b, 0)")
    with pytest.raises(VerifyError, match=r"%w_full reads %b before its wait; read the results of zc\.wait"):
        lockstep(parse_graph(unwaited), INPUTS)
    with pytest.raises(MeshError, match="%b runs over axis dp=2 but there are 3 ranks"):
        lockstep(parse_graph(SCHEDULE), [*INPUTS, INPUTS[0]])
    with pytest.raises(ConfigError, match=r"rank 1 of graph m\.forward lacks x; pass one tensor for each placeholder"):
        lockstep(parse_graph(SCHEDULE), [INPUTS[0], {"w": torch.ones(2)}])
    with pytest.raises(VerifyError, match=r"%w \(param 'w'\) is f32\[2\] in the graph but f32\[3\] on rank 0"):
        lockstep(parse_graph(SCHEDULE), [{"w": torch.ones(3), "x": torch.ones(4)}] * 2)
    with pytest.raises(VerifyError, match=r"%y \(aten.neg\) is f32\[3\] in the graph but f32\[4\] on rank 0"):
        text = "graph m.forward\ninputs:\n%x: f32[4] = input 0\nbody:\n%y: f32[3] = aten.neg(%x)\nreturn output 0 %y"
        lockstep(parse_graph(text), [{"x": torch.ones(4)}])


STEP = """\
graph m.forward  axis dp=2
  inputs:
    %w: f32[2] = param 'w' shard(0) of [4]
    %x: f32[4] = input 0
  body:
    %b: bucket = zc.all_gather([%w], 'dp', 2)
    %full: f32[4] = zc.wait(%b)
    %y: f32[4], %mask: b8[4] = aten.native_dropout(%x, 0.5, True)
    %z: f32[4] = aten.mul.Tensor(%y, %full)
  return output 0 %z, saved 'y' %y, saved 'mask' %mask, kept 'w' %full
graph m.backward  axis dp=2
  inputs:
    %y: f32[4] = saved 'y'
    %m: b8[4] = saved 'mask'
    %full: f32[4] = kept 'w'
    %t: f32[4] = tangent 0
  body:
    %gy: f32[4] = aten.mul.Tensor(%t, %full)
    zc.release([%full])
    %gx: f32[4] = aten.native_dropout_backward(%gy, %m, 2.0)
    %gw: f32[4] = aten.mul.Tensor(%t, %y)
    %r: bucket = zc.reduce_scatter([%gw], 'dp', 2)
    %g: f32[2] = zc.wait(%r)
  return grad 'w' %g, input_grad 0 %gx"""


def test_a_step_carries_saved_and_kept_values() -> None:
    inputs = [
        {"param 'w'": torch.full((2,), 2.0), "input 0": torch.ones(4), "tangent 0": torch.ones(4)} for _ in range(2)
    ]
    results = lockstep_step(parse_step(STEP), inputs, seed=1)
    masks = [r["saved 'mask'"] for r in results]
    assert not torch.equal(*masks), "ranks draw different random numbers"
    mean = sum(m.float() * 2 for m in masks) / 2
    for rank, r in enumerate(results):
        assert torch.equal(r["output 0"], masks[rank] * 4.0) and torch.equal(r["input_grad 0"], masks[rank] * 4.0)
        assert torch.equal(r["grad 'w'"], mean[2 * rank : 2 * rank + 2])
        assert r["kept 'w'"].isnan().all()
    again = lockstep_step(parse_step(STEP), inputs, seed=1)
    assert all(torch.equal(a["output 0"], b["output 0"]) for a, b in zip(results, again, strict=True))
