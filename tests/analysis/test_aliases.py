"""Shared memory through views, lists, waits and regions; what values were computed from."""

from zcompile.analysis.aliases import Aliases, is_view
from zcompile.analysis.flow import Result
from zcompile.analysis.reads import Copies, Reads
from zcompile.ir.graph import Graph
from zcompile.ir.text import parse_graph

TEXT = """
graph toy.forward  axis dp=2
  inputs:
    %w: f32[4, 8] = param 'w' shard(0) of [8, 8]
    %v: f32[2, 8] = param 'v' shard(0) of [4, 8]
    %x: f32[4, 8] = input 0
  region r(%a: f32[8, 8], %b: f32[4, 8]):
    %t: f32[8, 8]{1, 8} = aten.t(%a)
    %mm: f32[4, 8] = aten.mm(%b, %t)
    %row: f32[2, 8] = aten.slice.Tensor(%mm, 0, 0, 2)
    %c: f32[8, 8] = aten.clone(%t)
    return %t, %mm, %row, %c, %b
  body:
    %g: bucket = zc.all_gather([%w, %v], 'dp', 2)
    %wf: f32[8, 8], %vf: f32[4, 8] = zc.wait(%g)
    %wt: f32[8, 8]{1, 8} = aten.t(%wf)
    %flat: f32[64] = aten._unsafe_view(%wf, [64])
    %top: f32[2, 8], %bottom: f32[2, 8] = aten.split.Tensor(%vf, 2)
    %copy: f32[8, 8] = aten.clone(%wt)
    %rt: f32[8, 8]{1, 8}, %rm: f32[4, 8], %rr: f32[2, 8], %rc: f32[8, 8], %rb: f32[4, 8] = call r(%wt, %x)
    %mean: f32[4, 8] = aten.add.Tensor(%rm, %vf)
    %s: f32[] = aten.sum(%rt)
    zc.release([%wf, %vf])
  return output 0 %mean, output 1 %s
"""


def parsed() -> tuple[Graph, dict[str, object]]:
    graph = parse_graph(TEXT)
    return graph, {n.name: n for n in graph.fx.nodes}


def owners(name: str) -> set[str]:
    """The names of the values that own the memory of ``name``."""
    graph, by_name = parsed()
    aliases = Aliases.of_graph(graph)
    found = set()
    for storage in aliases.of(by_name[name]):  # type: ignore[arg-type]
        picks = [u.name for u in storage.node.users if u.args[1:] == (storage.slot,)]
        found.add(picks[0] if picks else storage.node.name)
    return found


def test_who_shares_memory() -> None:
    for view in ("wf", "wt", "flat", "rt"):
        assert owners(view) == {"wf"}, view
    for view in ("vf", "top", "bottom"):
        assert owners(view) == {"vf"}, view
    assert owners("copy") == {"copy"}
    assert owners("rm") == owners("rr") == {"rm"}  # a view of a region's own result
    assert owners("rc") == {"rc"}
    assert owners("rb") == {"x"}  # a region that returns its input
    assert owners("mean") == {"mean"}


def test_last_readers() -> None:
    graph, by_name = parsed()
    aliases = Aliases.of_graph(graph)
    last = {s.node.name + str(s.slot): n.name for s, n in aliases.last_readers.items()}
    assert last["wait0"] == "s"  # through the transposed view that the region returns; the release does not count
    assert last["wait1"] == "mean"
    assert last["x0"] == "r"
    assert last["mean0"] == "output"
    assert aliases.may_share(by_name["wt"], by_name["flat"])  # type: ignore[arg-type]
    assert not aliases.may_share(by_name["wt"], by_name["copy"])  # type: ignore[arg-type]
    assert [n.name for n in graph.body if is_view(n)] == ["wt", "flat"]


def test_reads() -> None:
    graph, by_name = parsed()
    through = Reads.of_graph(graph, through_waits=True)
    cut = Reads.of_graph(graph, through_waits=False)

    def names(reads: Reads, name: str) -> list[str]:
        return [leaf.node.name + str(leaf.slot) for leaf in reads.leaves_of(by_name[name])]  # type: ignore[arg-type]

    assert names(through, "vf") == ["v0"] and names(cut, "vf") == ["wait1"]
    assert names(through, "rt") == ["w0"]  # a region's results are told apart
    assert names(through, "rm") == ["w0", "x0"]
    assert names(through, "rb") == ["x0"]
    assert names(through, "mean") == ["w0", "v0", "x0"]
    assert names(cut, "mean") == ["x0", "wait0", "wait1"]
    waits = cut.mask(leaf for leaf in cut.leaves if leaf.node.name == "wait")
    assert cut.mask([Result(by_name["mean"], 0)]) == 0  # type: ignore[arg-type]
    both = cut.of(by_name["mean"]) & waits  # type: ignore[arg-type]
    assert [(leaf.node.name, leaf.slot) for leaf in cut.leaves_in(both)] == [("wait", 0), ("wait", 1)]
    assert cut.first(both).slot == 0 and cut.first(both & (both - 1)).slot == 1


def test_copies() -> None:
    graph, by_name = parsed()
    copies = Copies(graph.fx, graph.regions)

    def repeats(name: str) -> str | None:
        result = copies.of(by_name[name])  # type: ignore[arg-type]
        return None if result is None else result.node.name + str(result.slot)

    assert repeats("copy") == repeats("rc") == repeats("rt") == repeats("flat") == "wait0"
    assert repeats("rb") == "x0"
    assert repeats("top") is None and repeats("mean") is None and repeats("s") is None
