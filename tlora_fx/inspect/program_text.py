"""A program as text: its code with shapes inline, and the nodes that go by a name.

A name is what people call a node: a module's path, a node's name in the code, or its provenance
key. A node is shown with what it reads, who reads it, and where it comes from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tlora_fx.errors import NodeNotFound, first_of
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.schema import Ancestor, GraphEntry, NodeEntry, Program
from tlora_fx.inspect.wording import (
    Columns,
    Line,
    cut,
    flop_text,
    labelled,
    layers_label,
    plain_text,
    plural,
    scaled,
    words,
)

WIDTH = 120
INDENT = "    "
TITLES = ("id", "target", "shape", "FLOP/token")
LABEL = 11
# Columns that the marks of jobs need.
JOBS_WIDTH = 10
# Nodes of a module that are shown in full; of more, only the one that costs most.
FULL = 2
# Ancestors, arguments and users that are shown.
MAX_LINES = 12
# Near names and, where nothing comes near, modules that an error names.
NEAREST = 3
SOME_MODULES = 8


@dataclass(frozen=True, slots=True)
class NodeMatch:
    """Nodes of one graph that a name stands for.

    name        in full: the path in the base, or "graph:node"
    ancestry    what the nodes were made from, back to the trace, by key
    """

    name: str
    graph: str
    owner: str
    layers: list[str]
    nodes: list[NodeEntry]
    ancestry: dict[str, Ancestor] = field(default_factory=dict)


def find(program: Program, name: str) -> list[NodeMatch]:
    """Everything that goes by a name, one match for each graph.

    name      a provenance key; a node's name, alone or as "graph:name"; a module or tensor of the
              base, in full or its last parts, with any layer's number
    raises    NodeNotFound, naming what comes nearest
    """
    matches = _single(program, name, "key") or _modules(program, name)
    matches = matches or _single(program, name, "id")
    if not matches:
        names = {name for name, *_ in _names(program)}
        nearest = difflib.get_close_matches(name, names, n=NEAREST, cutoff=0.6)
        raise NodeNotFound(
            "there is no such node",
            node=name,
            state=program.state,
            nearest=", ".join(nearest) or None,
            modules=None if nearest else _some_modules(program),
            help="name a module such as layers.0.mlp.up_proj, or a node as the code names it",
        )
    return [replace(match, ancestry=_ancestry(program, match.nodes)) for match in matches]


def _some_modules(program: Program) -> str:
    """The first modules with weights that end differently, those of layers before the others."""
    ends: dict[str, str] = {}
    for graph in sorted(program.graphs, key=lambda graph: not graph.numbered_layers):
        layer = next(iter(graph.numbered_layers), "")
        for node in graph.nodes:
            end = node.module.rpartition(".")[2]
            if end and node.kind == "tensor" and not end.isdecimal():
                ends.setdefault(end, ".".join(filter(None, (layer, node.module))))
    return first_of(list(ends.values()), SOME_MODULES)


def _single(program: Program, name: str, by: Literal["key", "id"]) -> list[NodeMatch]:
    """Nodes of this key, or of this name in the code, alone or as "graph:name", "graph.name"."""
    return [
        _match(f"{graph.name}:{node.id}", graph, [node])
        for graph, node in program.nodes()
        if name in ((node.key,) if by == "key" else _ids(graph, node))
    ]


def _ids(graph: GraphEntry, node: NodeEntry) -> Iterator[str]:
    """What code, errors and graph files call a node; these have no dots in a tensor's name."""
    for own in (node.id, re.sub(r"\W", "_", node.id)):
        yield from (own, f"{graph.name}:{own}", f"{graph.name}.{own}")


def _match(name: str, graph: GraphEntry, nodes: list[NodeEntry]) -> NodeMatch:
    return NodeMatch(name, graph.name, graph.owner, graph.layers, nodes)


def _modules(program: Program, name: str) -> list[NodeMatch]:
    """Matches of a module or tensor; the whole path is preferred to its last parts."""
    exact: dict[tuple[int, str], NodeMatch] = {}
    ending: dict[tuple[int, str], NodeMatch] = {}
    for full, graph, inside in _names(program):
        key = (id(graph), inside)
        if full == name and key not in exact:
            exact[key] = _match(full, graph, _inside(graph, inside))
        elif full.endswith(f".{name}"):
            ending[key] = _match(inside if key in ending else full, graph, _inside(graph, inside))
    return list((exact or ending).values())


def _names(program: Program) -> Iterator[tuple[str, GraphEntry, str]]:
    """What modules, tensors and nodes are called: in full, the graph, and the name inside it."""
    for graph in program.graphs:
        inside = dict.fromkeys(
            name
            for node in graph.nodes
            for name in (*_parents(node.module), node.site, _tensor(node))
        )
        for layer in graph.numbered_layers or [""]:
            for name in inside:
                full = ".".join(filter(None, (layer, name)))
                if full:
                    yield full, graph, name


def _parents(module: str) -> Iterator[str]:
    """A module's path, and those of the modules that it lies in: "mlp.up_proj", "mlp", ""."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _tensor(node: NodeEntry) -> str:
    return node.target if node.kind == "tensor" else ""


def _inside(graph: GraphEntry, name: str) -> list[NodeEntry]:
    """A module's own nodes with what jobs have there; where it has none, those of its children."""
    nodes = [
        node for node in graph.nodes if name and name in (node.module, node.site, _tensor(node))
    ]
    if nodes:
        return nodes
    below = f"{name}." if name else ""
    return [node for node in graph.nodes if node.module.startswith(below) and node.kind != "input"]


def _ancestry(program: Program, nodes: Sequence[NodeEntry]) -> dict[str, Ancestor]:
    """Everything that nodes were made from, alive or gone, by key."""
    alive = {
        node.key: Ancestor(node.target, node.made_by, node.made_from) for _, node in program.nodes()
    }
    ancestry: dict[str, Ancestor] = {}
    stack = [key for node in nodes for key in node.made_from]
    while stack:
        key = stack.pop()
        past = alive.get(key) or program.history.get(key)
        if past is not None and key not in ancestry:
            ancestry[key] = past
            stack += past.made_from
    return ancestry


def match_lines(program: Program, match: NodeMatch, width: int = WIDTH) -> list[Line]:
    """Everything that is known of a match; no line is wider than `width` but code."""
    marks = Marks(program.jobs)
    graph = next(g for g in program.graphs if (g.owner, g.name) == (match.owner, match.graph))
    group = graph.owner == "group"
    where = f"in {graph.name}" if group else f"in the graph of {graph.title()}"
    layers = graph.numbered_layers
    where += f", the code of {layers_label(layers)}" if layers else ""
    lines: list[Line] = [[(cut(f"{match.name}   {where}", width), "title")]]
    if len(match.nodes) > 1:
        lines += [[], *_table(match.nodes, marks, width)]
    for node in _shown(match.nodes):
        lines += [[], *_node_lines(graph, node, marks, width)]
        lines += _provenance(match, node, width)
    return lines


def _shown(nodes: Sequence[NodeEntry]) -> list[NodeEntry]:
    if len(nodes) <= FULL:
        return list(nodes)
    last_first = reversed(nodes)
    return [max(last_first, key=lambda n: (n.flop_per_token or 0, n.flop_per_length, n.launches))]


def _table(nodes: Sequence[NodeEntry], marks: Marks, width: int) -> Iterator[Line]:
    rows = [
        (cut(node.id, 40), cut(_target(node), 36), node.value_text, _cost(node)) for node in nodes
    ]
    columns = Columns.fitting([TITLES, *rows], width, JOBS_WIDTH, numbers=(3,), dispensable=(3, 2))
    yield [(columns.text(TITLES) + "jobs", "title")]
    for node, cells in zip(nodes, rows, strict=True):
        label = (columns.text(cells), marks.style(node))
        yield from labelled(label, marks.who(node), columns.end, width)


def _cost(node: NodeEntry) -> str:
    return flop_text(node.flop_per_token, node.flop_per_length, node.flop_per_row)


def _target(node: NodeEntry) -> str:
    return node.kind if node.kind in ("tensor", "input") else node.target.removesuffix(".default")


def _node_lines(graph: GraphEntry, node: NodeEntry, marks: Marks, width: int) -> Iterator[Line]:
    by_id = {other.id: other for other in graph.nodes}
    for line in node.code.splitlines() or [node.id]:
        yield [(line, marks.style(node))]
    times = len(graph.layers) or 1
    facts = {
        "kind": f"{node.kind} {node.target}",
        "value": node.value_text,
        "role": node.role + (f", for {marks.names(node.jobs)}" if node.jobs else ""),
        "site": node.site,
        "FLOP/token": _cost(node) if node.kind in ("call", "layer") else "",
        "bytes": scaled(node.bytes, "B") if node.bytes else "",
        "runs": f"{times} times, once a layer" if times > 1 else "",
        "source": node.source,
        "not lowered": node.note,
        **{name: str(value) for name, value in node.notes.items()},
    }
    for name, text in facts.items():
        if text:
            yield from labelled(_label(name), words(text, ""), LABEL + 4, width)
    yield from _others("reads", [by_id[name] for name in node.inputs], marks, width)
    users = [other for other in graph.nodes if node.id in other.inputs]
    yield from _others("read by", users, marks, width)


def _label(name: str) -> tuple[str, str]:
    return (f"  {name:<{LABEL}}  ", "dim")


def _others(label: str, nodes: Sequence[NodeEntry], marks: Marks, width: int) -> Iterator[Line]:
    size = max((len(node.id) for node in nodes[:MAX_LINES]), default=0)
    for index, node in enumerate(nodes[:MAX_LINES]):
        text = "  ".join(filter(None, (_target(node), node.value_text, node.module)))
        shown = cut(text, max(8, width - LABEL - size - 6))
        name = (f"{node.id:<{size}}", marks.style(node))
        yield [_label("" if index else label), name, (f"  {shown}", "")]
    yield from _more(nodes)


def _more(items: Sequence[object]) -> Iterator[Line]:
    if len(items) > MAX_LINES:
        yield [(f"  {'':<{LABEL}}  and {len(items) - MAX_LINES} more", "dim")]


def _provenance(match: NodeMatch, node: NodeEntry, width: int) -> Iterator[Line]:
    """The node's key, who made it, and of what, back to the trace."""
    if not node.key:
        return
    text_width = width - LABEL - 4
    yield [_label("key"), (cut(node.key, text_width), "")]
    ancestors = list(_ancestor_texts(match, node))
    lines = [node.made_by + (", of" if ancestors else ""), *ancestors]
    for index, text in enumerate(lines[:MAX_LINES]):
        yield [_label("" if index else "made by"), (cut(text, text_width), "")]
    yield from _more(lines)


def _ancestor_texts(match: NodeMatch, node: NodeEntry) -> Iterator[str]:
    """What a node was made from, each behind what was made from it, deeper by its depth."""
    seen = {node.key}
    stack = [(1, key) for key in reversed(node.made_from)]
    while stack:
        depth, key = stack.pop()
        past = match.ancestry.get(key)
        again = " (see above)" if key in seen else ""
        by = past.made_by if past is not None else "?"
        yield "  " * (depth - 1) + f"{by}: {key}{again}"
        if past is not None and key not in seen:
            stack += [(depth + 1, source) for source in reversed(past.made_from)]
        seen.add(key)


def source_lines(source: str, program: Program) -> list[Line]:
    """`ssm.py` from its text, every statement coloured by whom it serves."""
    marks = Marks(program.jobs)
    graphs = {graph.name[0].upper() + graph.name[1:]: graph for graph in program.graphs}
    styles: Iterator[tuple[str, str]] = iter(())
    text, style = "", ""
    lines: list[Line] = []
    for line in source.splitlines():
        if line.startswith("class "):
            graph = graphs.get(line.removeprefix("class ").partition("(")[0])
            styles = _statements(graph, marks) if graph else iter(())
            text, style = next(styles, ("", ""))
        matches = bool(text) and line.strip() == text
        lines.append([(line, style if matches else _plain_style(line))])
        if matches:
            text, style = next(styles, ("", ""))
    return lines


def _statements(graph: GraphEntry, marks: Marks) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        for line in node.code.splitlines():
            yield line.strip(), marks.style(node)


def _plain_style(line: str) -> str:
    text = line.strip()
    if text.startswith("#"):
        return "dim"
    return "title" if text.startswith(("class ", "def ")) else ""


def render_program(program: Program) -> str:
    """The code of any state as plain text."""
    return plain_text(program_lines(program))


def program_lines(program: Program) -> list[Line]:
    """The graphs of any state as classes; what is not fused yet, each owner's after the other."""
    marks = Marks(program.jobs)
    nodes = sum(len(graph.nodes) for graph in program.graphs)
    parts = [f"after {program.state}" if program.state != "trace" else "as traced", program.base]
    parts += [plural(len(program.jobs), "job"), plural(nodes, "node")]
    lines: list[Line] = [[("   ".join(filter(None, parts)), "title")]]
    for graph in program.graphs:
        lines += [[], *_graph_lines(graph, marks)]
    return lines


def _graph_lines(graph: GraphEntry, marks: Marks) -> Iterator[Line]:
    layers = f"   {layers_label(graph.layers)}" if graph.numbered_layers else ""
    yield [(f"{graph.title()}{layers}", "title")]
    inputs = [node.id for node in graph.nodes if node.kind == "input"]
    yield [(f"{INDENT}takes {', '.join(inputs)}", "dim")]
    module = ""
    for node in graph.nodes:
        if not node.code:
            continue
        if node.kind == "call" and (here := _module_comment(node)) != module:
            module = here
            yield [(f"{INDENT}# {here}", "dim")]
        for line in node.code.splitlines():
            yield [(INDENT + line, marks.style(node))]


def _module_comment(node: NodeEntry) -> str:
    if node.role == "adapter" and len(node.jobs) == 1:
        return f"{node.site or node.module or 'between modules'}, job {node.jobs[0]} alone"
    return node.module or "between modules"
