"""What tells two programs apart: nodes are lined up by their provenance.

A node that both have under one key is kept, or changed where it calls something else or reads
other nodes. A node that only the second has replaces those of the first that it was made from, back
to the trace; what is left over was added or removed. So a pass, two passes, two pipelines and two
job files are compared in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tlora_fx.inspect.find import numbered
from tlora_fx.inspect.program import SCHEMA, GraphEntry, NodeEntry, Program
from tlora_fx.version import __version__

# What is a change of a node that keeps its key; its name and what passes noted are none.
COMPARED = (
    "target",
    "shape",
    "dtype",
    "role",
    "jobs",
    "flop_per_token",
    "flop_per_length",
    "bytes",
)


@dataclass(frozen=True, slots=True)
class Sums:
    """A whole program, every layer counted.

    nodes              calls of operators
    launches           those that compute
    flop_per_token     forward, None where a part is unknown
    flop_per_length    forward, per token and token of its sequence
    flop_per_row       forward, once a row
    bytes              of all tensors that are read, each once a layer
    """

    nodes: int
    launches: int
    flop_per_token: float | None
    flop_per_length: float
    flop_per_row: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """What became of some nodes of one module.

    what      "added", "removed", "changed" or "replaced"
    graph     where it is now, or where it was
    layers    paths of the layers that run it
    before    nodes of the first program
    after     nodes of the second
    """

    what: str
    graph: str
    layers: list[str]
    module: str
    before: list[NodeEntry]
    after: list[NodeEntry]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two programs, lined up.

    first, second    what they are called
    kept             nodes that are the same in both
    """

    schema: int
    version: str
    first: str
    second: str
    jobs: list[str]
    before: Sums
    after: Sums
    kept: int
    changes: list[Change]


def difference(first: Program, second: Program, names: tuple[str, str]) -> Difference:
    """Line two programs up."""
    aligned = _Aligned(first, second)
    changes = [*aligned.replaced(), *aligned.changed, *aligned.left_over()]
    order = {(name, module): place for place, (name, module) in enumerate(_places(first, second))}
    changes.sort(key=lambda change: order[change.graph, change.module])
    jobs = list(dict.fromkeys([*first.jobs, *second.jobs]))
    return Difference(
        SCHEMA, __version__, *names, jobs, sums(first), sums(second), aligned.kept, changes
    )


def sums(program: Program) -> Sums:
    """The totals of a program."""
    nodes = [(max(1, len(g.layers)), node) for g in program.graphs for node in g.nodes]
    known = all(node.flop_per_token is not None for _, node in nodes)
    return Sums(
        nodes=sum(times for times, node in nodes if node.kind == "call"),
        launches=sum(times * node.launches for times, node in nodes),
        flop_per_token=sum(n * (node.flop_per_token or 0) for n, node in nodes) if known else None,
        flop_per_length=sum(times * node.flop_per_length for times, node in nodes),
        flop_per_row=sum(times * node.flop_per_row for times, node in nodes),
        bytes=sum(times * node.bytes for times, node in nodes),
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node and its graph."""

    node: NodeEntry
    graph: GraphEntry


class _Aligned:
    """Two programs, node by node."""

    def __init__(self, first: Program, second: Program) -> None:
        self.first, self.second = first, second
        before, after = _by_key(first), _by_key(second)
        self.before = {key: seen for key, seen in before.items() if key not in after}
        self.after = {key: seen for key, seen in after.items() if key not in before}
        both = [(before[key], after[key]) for key in before if key in after]
        self.kept = sum(_same(one.node, two.node) for one, two in both)
        self.changed = [
            _change("changed", [one], [two]) for one, two in both if not _same(one.node, two.node)
        ]

    def replaced(self) -> Iterator[Change]:
        """New nodes with what they were made from; nodes that share a source come together."""
        groups: list[tuple[set[str], list[_Seen]]] = []
        for key, seen in self.after.items():
            sources = set(self._sources(key))
            if not sources:
                continue
            apart = []
            members = [seen]
            for others, nodes in groups:
                if others & sources:
                    sources |= others
                    members = nodes + members
                else:
                    apart.append((others, nodes))
            groups = [*apart, (sources, members)]
        for sources, members in groups:
            gone = [seen for key, seen in self.before.items() if key in sources]
            yield _change("replaced", gone, members)
            self._forget(sources, members)

    def left_over(self) -> Iterator[Change]:
        """What only one of them has, by module."""
        for what, nodes in (("removed", self.before), ("added", self.after)):
            modules: dict[tuple[str, str], list[_Seen]] = {}
            for seen in nodes.values():
                modules.setdefault((_name(seen.graph), _module(seen.node)), []).append(seen)
            for members in modules.values():
                gone, new = (members, []) if what == "removed" else ([], members)
                yield _change(what, gone, new)

    def _sources(self, key: str) -> Iterator[str]:
        """Keys of the first program's lost nodes that a node was made from, back to the trace."""
        seen = {key}
        stack = list(self.after[key].node.made_from)
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if source in self.before:
                yield source
            stack += _made_from(self.second, self.after, source)

    def _forget(self, sources: Iterable[str], members: Iterable[_Seen]) -> None:
        for key in sources:
            self.before.pop(key, None)
        for seen in members:
            self.after.pop(seen.node.key, None)


def _made_from(program: Program, alive: dict[str, _Seen], key: str) -> list[str]:
    if key in alive:
        return alive[key].node.made_from
    past = program.history.get(key)
    return past.made_from if past is not None else []


def _by_key(program: Program) -> dict[str, _Seen]:
    """Nodes that call or read something; one that has no key of its own goes by its name."""
    found: dict[str, _Seen] = {}
    for graph in program.graphs:
        for node in graph.nodes:
            if node.kind in ("call", "tensor", "layer"):
                key = node.key or f"{graph.owner}/{graph.name}:{node.id}"
                found.setdefault(key, _Seen(node, graph))
    return found


def _same(one: NodeEntry, two: NodeEntry) -> bool:
    same_target = one.target == two.target
    if one.kind == "tensor":
        # Inside a block a tensor's name is told from the layer on.
        same_target = one.target.endswith(two.target) or two.target.endswith(one.target)
    return same_target and all(getattr(one, name) == getattr(two, name) for name in COMPARED)


def _change(what: str, gone: list[_Seen], new: list[_Seen]) -> Change:
    seen = (new or gone)[0]
    before, after = [one.node for one in gone], [one.node for one in new]
    return Change(what, _name(seen.graph), numbered(seen.graph), _module(seen.node), before, after)


def _places(first: Program, second: Program) -> Iterator[tuple[str, str]]:
    """Graphs and modules in the order in which they run; what only the first has comes behind."""
    seen: set[tuple[str, str]] = set()
    for program in (second, first):
        for graph in program.graphs:
            for node in graph.nodes:
                place = (_name(graph), _module(node))
                if place not in seen:
                    seen.add(place)
                    yield place


def _name(graph: GraphEntry) -> str:
    return graph.name if graph.owner == "group" else f"{graph.owner}, {graph.name}"


def _module(node: NodeEntry) -> str:
    """Where a node belongs; calls of layers belong together."""
    if node.kind == "layer" and node.module.rpartition(".")[2].isdigit():
        return node.module.rpartition(".")[0]
    return node.site or node.module
