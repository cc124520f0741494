"""Find nodes of a program by what people call them: a module's path, a node's name, or its key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tlora_fx.errors import NodeNotFound
from tlora_fx.inspect.program import Ancestor, GraphEntry, NodeEntry, Program

SHOWN = 3
#: Modules that are named where nothing comes near.
SOME = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Nodes of one graph that a name stands for.

    name     in full: the path in the base, or "graph:node"
    graph    where they are
    nodes    in the order in which they run
    """

    name: str
    graph: GraphEntry
    nodes: list[NodeEntry]


@dataclass(frozen=True, slots=True)
class Found:
    """A place as plain data.

    graph       name of the graph
    owner       "base", "job NAME" or "group"
    layers      paths of the layers that run the graph
    ancestry    what the nodes were made from, back to the trace, by key
    """

    name: str
    graph: str
    owner: str
    layers: list[str]
    nodes: list[NodeEntry]
    ancestry: dict[str, Ancestor]


def as_data(program: Program, place: Place) -> Found:
    """A place with everything that its nodes came from."""
    alive = nodes_by_key(program)
    ancestry: dict[str, Ancestor] = {}
    stack = [key for node in place.nodes for key in node.made_from]
    while stack:
        key = stack.pop()
        node = alive.get(key)
        past = Ancestor(node.target, node.made_by, node.made_from) if node else None
        past = past or program.history.get(key)
        if past is not None and key not in ancestry:
            ancestry[key] = past
            stack += past.made_from
    graph = place.graph
    return Found(place.name, graph.name, graph.owner, graph.layers, place.nodes, ancestry)


def find(program: Program, wanted: str) -> list[Place]:
    """Everything that goes by a name, one place for each graph.

    wanted    a provenance key; a node's name, alone or as "graph:name"; a module or tensor of the
              base, in full or its last parts, with any layer's number
    raises    NodeNotFound, naming what comes nearest
    """
    found = _single(program, wanted, "key") or _modules(program, wanted)
    found = found or _single(program, wanted, "id")
    if not found:
        names = {name for name, *_ in _names(program)}
        close = difflib.get_close_matches(wanted, names, n=SHOWN, cutoff=0.6)
        raise NodeNotFound(
            "there is no such node",
            node=wanted,
            state=program.state,
            nearest=", ".join(close) or None,
            modules=None if close else _some_modules(program),
            help="name a module such as layers.0.mlp.up_proj, or a node as the code names it",
        )
    return found


def _some_modules(program: Program) -> str:
    """The first modules with weights that end differently, those of layers before the others."""
    ends: dict[str, str] = {}
    for graph in sorted(program.graphs, key=lambda graph: not numbered(graph)):
        layer = next(iter(numbered(graph)), "")
        for node in graph.nodes:
            end = node.module.rpartition(".")[2]
            if end and node.kind == "tensor" and not end.isdecimal():
                ends.setdefault(end, ".".join(filter(None, (layer, node.module))))
    names = list(ends.values())
    more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
    return ", ".join(names[:SOME]) + more


def _single(program: Program, wanted: str, by: Literal["key", "id"]) -> list[Place]:
    """Nodes of this key, or of this name in the code, alone or as "graph:name"."""
    return [
        Place(f"{graph.name}:{node.id}", graph, [node])
        for graph in program.graphs
        for node in graph.nodes
        if wanted in ((node.key,) if by == "key" else (node.id, f"{graph.name}:{node.id}"))
    ]


def nodes_by_key(program: Program) -> dict[str, NodeEntry]:
    """Every node by its provenance key."""
    return {node.key: node for graph in program.graphs for node in graph.nodes}


def _modules(program: Program, wanted: str) -> list[Place]:
    """Places of a module or tensor; the whole path is preferred to its last parts."""
    exact: dict[tuple[int, str], Place] = {}
    ending: dict[tuple[int, str], Place] = {}
    for full, graph, inside in _names(program):
        key = (id(graph), inside)
        if full == wanted and key not in exact:
            exact[key] = Place(full, graph, _inside(graph, inside))
        elif full.endswith(f".{wanted}"):
            name = inside if key in ending else full
            ending[key] = Place(name, graph, _inside(graph, inside))
    return list((exact or ending).values())


def _names(program: Program) -> Iterator[tuple[str, GraphEntry, str]]:
    """What modules, tensors and nodes are called: in full, the graph, and the name inside it."""
    for graph in program.graphs:
        inside = dict.fromkeys(
            name
            for node in graph.nodes
            for name in (*_parents(node.module), node.site, _tensor(node))
        )
        for layer in numbered(graph) or [""]:
            for name in inside:
                full = ".".join(filter(None, (layer, name)))
                if full:
                    yield full, graph, name


def numbered(graph: GraphEntry) -> list[str]:
    """The layers that run a graph; none for root and head, whose modules have full paths."""
    return [layer for layer in graph.layers if layer.rpartition(".")[2].isdigit()]


def _parents(module: str) -> Iterator[str]:
    """A module's path, and those of the modules that it lies in: "mlp.up_proj", "mlp"."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _tensor(node: NodeEntry) -> str:
    return node.target if node.kind == "tensor" else ""


def _inside(graph: GraphEntry, name: str) -> list[NodeEntry]:
    """A module's own nodes with what jobs have there; where it has none, those of its children."""
    own = [node for node in graph.nodes if name and name in (node.module, node.site, _tensor(node))]
    if own:
        return own
    below = f"{name}." if name else ""
    return [node for node in graph.nodes if node.module.startswith(below) and node.kind != "input"]
