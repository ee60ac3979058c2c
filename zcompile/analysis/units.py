"""The unit plan: which parameters are needed together, and the regions that their first uses cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from zcompile.analysis.chains import param_chains
from zcompile.ir import meta
from zcompile.ir.graph import Graph, Param

MIB = 1 << 20


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together and bound a region.

    Attributes:
        name: the module path that the parameters share, such as ``layers.3``; several paths joined by ``+``.
        params: canonical names, in order of first use.
        num_bytes: bytes of the full parameters in the dtype of the graph.
        repeated: whether it is one block of a list of blocks.
    """

    name: str
    params: tuple[str, ...]
    num_bytes: int
    repeated: bool


def unit_key(param: str) -> tuple[str, bool]:
    """The module path that names a parameter's unit, and whether that is a block of a list.

    The path ends with the first index: ``model.layers.3.mlp.experts.0.up.weight`` belongs to ``model.layers.3``.
    A parameter outside of every list belongs to the module that owns it.
    """
    parts = param.split(".")
    for position, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: position + 1]), True
    return ".".join(parts[:-1]) or param, False


#: a module outside of every list joins a neighbour that is this many times larger (or smaller) than itself
JOIN_RATIO = 16


def plan_units(params: Iterable[tuple[str, int]], min_bytes: int) -> list[Unit]:
    """Group parameters into units.

    Parameters of one block form a unit. Others form one for each owning module; of two neighbours in order of first use that
    are not blocks, one that is tiny beside the other joins it (a final norm and the head). Neighbours of one kind are joined
    until a unit has ``min_bytes``.

    Args:
        params: name and full bytes of each parameter, in order of first use.
        min_bytes: smallest size worth a collective of its own.
    """
    groups: dict[tuple[str, bool], list[tuple[str, int]]] = {}
    for name, size in params:
        groups.setdefault(unit_key(name), []).append((name, size))
    units: list[Unit] = []
    for (key, repeated), members in groups.items():
        unit = Unit(key, tuple(n for n, _ in members), sum(s for _, s in members), repeated)
        last = units[-1] if units else None
        if last is not None and last.repeated == repeated and (last.num_bytes < min_bytes or _tiny_beside(last, unit)):
            units[-1] = Unit(
                f"{last.name}+{unit.name}", last.params + unit.params, last.num_bytes + unit.num_bytes, repeated
            )
        else:
            units.append(unit)
    return units


def _tiny_beside(a: Unit, b: Unit) -> bool:
    small, large = sorted((a.num_bytes, b.num_bytes))
    return not a.repeated and small * JOIN_RATIO <= large


def params_by_first_use(graph: Graph) -> list[Param]:
    """The parameters of a graph in the order in which they are first needed: used by something that is not a chain."""
    chains = param_chains(graph.fx)
    found: dict[str, Param] = {}
    for node in graph.body:
        if node in chains:
            continue
        for root in _roots(node, chains):
            origin = meta.origin(root)
            assert isinstance(origin, Param)
            found.setdefault(origin.name, origin)
    return list(found.values())


def needed_units(node: fx.Node, chains: Mapping[fx.Node, fx.Node]) -> list[str]:
    """The units whose parameters a node reads, directly or through chains."""
    units = []
    for root in _roots(node, chains):
        origin = meta.origin(root)
        assert isinstance(origin, Param)
        units.append(origin.unit)
    return units


def _roots(node: fx.Node, chains: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    roots = []
    for source in node.all_input_nodes:
        root = source if isinstance(meta.origin(source), Param) else chains.get(source)
        if root is not None:
            roots.append(root)
    return roots
