"""Which nodes a pass, or one rewrite of it, took away, made, and gave other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tlora_fx.fingerprint import named_graphs, owners
from tlora_fx.ir.graph import GroupGraph
from tlora_fx.provenance import origin_of

SHOWN = 8
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Touched:
    """A node that a rewrite touched.

    kind      "gone", "made" or "other arguments"
    place     graph and name: "layers_0_3.linear_7", or "job a, linear_7" before jobs are fused
    target    what it calls
    source    the line of model code, "" where there is none
    """

    kind: str
    place: str
    target: str
    source: str

    def __str__(self) -> str:
        told = "  ".join(part for part in (self.place, self.target, self.source) if part)
        return f"  {self.kind:<15}  {told}"


def touched(before: GroupGraph, after: GroupGraph) -> list[Touched]:
    """The nodes in which two states differ, by their keys.

    A node that reads what was replaced is not told, only what replaced it.
    """
    one, two = dict(_keyed(before)), dict(_keyed(after))
    both = one.keys() & two.keys()
    found = [_told("gone", key, *node) for key, node in one.items() if key not in two]
    found += [_told("made", key, *node) for key, node in two.items() if key not in one]
    for key, node in two.items():
        if key in both and _code(key, one[key][1], both) != _code(key, node[1], both):
            found.append(_told("other arguments", key, *node))
    return found


def lines(nodes: list[Touched]) -> list[str]:
    """Some nodes of each kind, a line each."""
    told: list[str] = []
    for kind in dict.fromkeys(node.kind for node in nodes):
        members = [node for node in nodes if node.kind == kind]
        told.extend(str(node) for node in members[:SHOWN])
        if len(members) > SHOWN:
            told.append(f"  {kind:<15}  and {len(members) - SHOWN} more")
    return told


def _keyed(group: GroupGraph) -> Iterator[tuple[Key, tuple[str, fx.Node]]]:
    for owner in owners(group):
        subject = ""
        if not isinstance(owner, GroupGraph):
            subject = f"job {owner.name}, " if owner.name else "base, "
        for where, graph in named_graphs(owner):
            for node in graph.nodes:
                origin = origin_of(node)
                if origin is not None and node.op != "output":
                    yield (subject, origin.key), (where, node)


def _code(key: Key, node: fx.Node, both: set[Key]) -> str:
    """What a node calls with what; nodes by their keys, those of one state only without."""

    def named(given: fx.Node) -> str:
        origin = origin_of(given)
        known = origin is not None and (key[0], origin.key) in both
        return f"%{origin.key}" if origin is not None and known else "%"

    return str((str(node.target), *fx.map_arg((node.args, node.kwargs), named)))


def _told(kind: str, key: Key, where: str, node: fx.Node) -> Touched:
    place = f"{where}.{node.name}" if where else node.name
    source = str(node.meta.get("source") or "")
    return Touched(kind, key[0] + place, str(node.target), source)
