"""A program as a graph of networkx, and as GraphML and DOT."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from io import BytesIO

import networkx as nx

from tlora_fx.inspect.marks import CALM, Marks, colour_of
from tlora_fx.inspect.schema import GraphEntry, NodeEntry, Program

INK = "#1F2933"
PALE = "#E4E7EB"


def to_networkx(program: Program) -> nx.MultiDiGraph:
    """Every node of a program, with an edge from what is read to what reads it.

    Nodes are called "graph:id" ("layers_0_3:q_proj"; "job a/root:q_proj" before jobs are fused).
    They carry every field of `NodeEntry`, and `graph`, `owner`, `layers` (paths of the layers that
    run the node's graph) and, where a node calls a layer, `block`: the graph that the layer runs.
    An edge's `place` is the input's index among the node's inputs. The graph carries the program's
    own fields. Layers that share code are there once.
    """
    network = nx.MultiDiGraph(
        base=program.base, state=program.state, form=program.form, jobs=list(program.jobs)
    )
    blocks = {(g.owner, layer): g.name for g in program.graphs for layer in g.layers}
    for graph in program.graphs:
        name = graph.title("/")
        for node in graph.nodes:
            fields = {item.name: getattr(node, item.name) for item in dataclasses.fields(node)}
            fields |= {"graph": name, "owner": graph.owner, "layers": list(graph.layers)}
            if node.kind == "layer":
                fields["block"] = blocks.get((graph.owner, node.target), "")
            network.add_node(f"{name}:{node.id}", **fields)
        for node in graph.nodes:
            for index, source in enumerate(node.inputs):
                network.add_edge(f"{name}:{source}", f"{name}:{node.id}", place=index)
    return network


def render_graphml(program: Program) -> str:
    """The graph as GraphML; lists are joined by commas, an unknown cost is left out."""
    network = to_networkx(program)
    network.graph["jobs"] = ", ".join(network.graph["jobs"])
    for _, fields in network.nodes(data=True):
        for name, value in list(fields.items()):
            if isinstance(value, dict):
                del fields[name]
                fields.update({f"{name}.{key}": noted for key, noted in value.items()})
            elif isinstance(value, list):
                fields[name] = ", ".join(map(str, value))
            elif value is None:
                del fields[name]
    out = BytesIO()
    nx.write_graphml(network, out)
    return out.getvalue().decode()


def render_dot(program: Program) -> str:
    """The graph for Graphviz: a cluster a graph, nodes coloured by role and job, no tensors."""
    marks = Marks(program.jobs)
    lines = ["digraph program {", '  node [shape=box, style=filled, fontname="monospace"];']
    for number, graph in enumerate(program.graphs):
        lines.append(f"  subgraph cluster_{number} {{")
        times = f" ×{len(graph.layers)}" if len(graph.numbered_layers) > 1 else ""
        lines.append(f"    label={_quoted(graph.title('/') + times)};")
        lines += [f"    {line}" for line in _dot_graph(graph, marks)]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_graph(graph: GraphEntry, marks: Marks) -> Iterator[str]:
    name = graph.title("/")
    shown = {node.id for node in graph.nodes if node.kind != "tensor"}
    for node in graph.nodes:
        if node.id not in shown:
            continue
        target = node.target if node.code else ""
        label = "\\n".join(filter(None, (node.id, target, node.value_text)))
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


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace("\\\\n", "\\n").replace('"', '\\"') + '"'
