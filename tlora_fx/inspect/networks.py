"""A program as a graph of networkx, and as GraphML and DOT."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import networkx as nx

from tlora_fx.durable import replace_file
from tlora_fx.errors import DumpNotWritable
from tlora_fx.inspect.find import numbered
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.palette import CALM, colour_of
from tlora_fx.inspect.program import GraphEntry, NodeEntry, Program

INK = "#1F2933"
PALE = "#E4E7EB"


def to_networkx(program: Program) -> nx.MultiDiGraph:
    """Every node of a program, with an edge from what is read to what reads it.

    Nodes are called "graph:id" ("layers_0_3:q_proj"; "job a/root:q_proj" before jobs are fused).
    They carry every field of `NodeEntry`, and `graph`, `owner`, `layers` (paths of the layers that
    run the node's graph) and, where a node calls a layer, `block`: the graph that the layer runs.
    An edge's `place` is the input's place among the node's inputs. The graph carries the program's
    own fields. Layers that share code are there once.
    """
    made = nx.MultiDiGraph(
        base=program.base, state=program.state, form=program.form, jobs=list(program.jobs)
    )
    for graph in program.graphs:
        name = graph_name(graph)
        blocks = _blocks_of(program, graph.owner)
        for node in graph.nodes:
            fields = {item.name: getattr(node, item.name) for item in dataclasses.fields(node)}
            fields |= {"graph": name, "owner": graph.owner, "layers": list(graph.layers)}
            if node.kind == "layer":
                fields["block"] = blocks.get(node.target, "")
            made.add_node(f"{name}:{node.id}", **fields)
        for node in graph.nodes:
            for place, source in enumerate(node.inputs):
                made.add_edge(f"{name}:{source}", f"{name}:{node.id}", place=place)
    return made


def graph_name(graph: GraphEntry) -> str:
    """What a graph is called among those of all owners."""
    return graph.name if graph.owner == "group" else f"{graph.owner}/{graph.name}"


def render_graphml(program: Program) -> bytes:
    """The graph as GraphML; lists are joined by commas, an unknown cost is left out."""
    made = to_networkx(program)
    made.graph["jobs"] = ", ".join(made.graph["jobs"])
    for _, fields in made.nodes(data=True):
        for name, value in list(fields.items()):
            if isinstance(value, list):
                fields[name] = ", ".join(map(str, value))
            elif value is None:
                del fields[name]
    out = BytesIO()
    nx.write_graphml(made, out)
    return out.getvalue()


def render_dot(program: Program) -> str:
    """The graph in the language of Graphviz: a cluster a graph, nodes coloured by role and job.

    Tensors are left out, as in the code.
    """
    marks = Marks(program.jobs)
    lines = ["digraph program {", '  node [shape=box, style=filled, fontname="monospace"];']
    for number, graph in enumerate(program.graphs):
        lines.append(f"  subgraph cluster_{number} {{")
        times = f" ×{len(graph.layers)}" if len(numbered(graph)) > 1 else ""
        lines.append(f"    label={_quoted(graph_name(graph) + times)};")
        lines += [f"    {line}" for line in _dot_graph(graph, marks)]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def write_graphml(program: Program, path: Path) -> None:
    """Write the graph as GraphML.

    raises    DumpNotWritable
    """
    _write(path, render_graphml(program))


def write_dot(program: Program, path: Path) -> None:
    """Write the graph for Graphviz.

    raises    DumpNotWritable
    """
    _write(path, render_dot(program).encode())


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise DumpNotWritable(
            "the graph cannot be written",
            file=path,
            found=error,
            help="name another file, or make room on the disk",
        ) from error


def _dot_graph(graph: GraphEntry, marks: Marks) -> Iterator[str]:
    name = graph_name(graph)
    shown = {node.id for node in graph.nodes if node.kind != "tensor"}
    for node in graph.nodes:
        if node.id not in shown:
            continue
        value = f"[{', '.join(map(str, node.shape))}] {node.dtype}" if node.dtype else ""
        label = "\\n".join(filter(None, (node.id, node.target if node.code else "", value)))
        fill, ink = _colours(node, marks)
        text = f"label={_quoted(label)}, fillcolor={_quoted(fill)}, fontcolor={_quoted(ink)}"
        yield f"{_quoted(f'{name}:{node.id}')} [{text}];"
    for node in graph.nodes:
        for source in node.inputs:
            if source in shown:
                yield f"{_quoted(f'{name}:{source}')} -> {_quoted(f'{name}:{node.id}')};"


def _colours(node: NodeEntry, marks: Marks) -> tuple[str, str]:
    """What a node is filled with, and what is written on it."""
    style = marks.style(node)
    if style.startswith("job "):
        return colour_of(style), INK
    return (CALM, INK) if style in ("shared", "adapters", "loss") else (PALE, INK)


def _blocks_of(program: Program, owner: str) -> dict[str, str]:
    """The graph that each layer of an owner runs."""
    return {
        layer: graph.name
        for graph in program.graphs
        if graph.owner == owner
        for layer in graph.layers
    }


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace("\\\\n", "\\n").replace('"', '\\"') + '"'
