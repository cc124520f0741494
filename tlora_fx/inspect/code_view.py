"""The readable program with shapes inline: `ssm.py` in colours, and the graphs of any state."""

from __future__ import annotations

from collections.abc import Iterator

from tlora_fx.inspect.find import numbered
from tlora_fx.inspect.legend import Line
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.program import GraphEntry, NodeEntry, Program
from tlora_fx.inspect.wording import layers_label, plural

INDENT = "    "


def source_lines(source: str, program: Program) -> list[Line]:
    """`ssm.py`, every statement coloured by whom it serves.

    source     text of ssm.py
    program    of the same model
    """
    marks = Marks(program.jobs)
    graphs = {_class_name(graph): graph for graph in program.graphs}
    styles: Iterator[tuple[str, str]] = iter(())
    text, style = "", ""
    lines: list[Line] = []
    for line in source.splitlines():
        if line.startswith("class "):
            graph = graphs.get(line.removeprefix("class ").partition("(")[0])
            styles = _statements(graph, marks) if graph else iter(())
            text, style = next(styles, ("", ""))
        found = bool(text) and line.strip() == text
        lines.append([(line, style if found else _plain_style(line))])
        if found:
            text, style = next(styles, ("", ""))
    return lines


def program_lines(program: Program) -> list[Line]:
    """The graphs of any state as classes; what is not fused yet, each owner's after the other."""
    marks = Marks(program.jobs)
    lines: list[Line] = [[(_headline(program), "title")]]
    for graph in program.graphs:
        lines += [[], *_graph_lines(graph, marks)]
    return lines


def render_program(program: Program) -> str:
    """The same as plain text."""
    lines = ("".join(text for text, _ in line).rstrip() for line in program_lines(program))
    return "\n".join(lines) + "\n"


def _headline(program: Program) -> str:
    nodes = sum(len(graph.nodes) for graph in program.graphs)
    parts = [f"after {program.state}" if program.state != "trace" else "as traced", program.base]
    parts += [plural(len(program.jobs), "job"), plural(nodes, "node")]
    return "   ".join(part for part in parts if part)


def _graph_lines(graph: GraphEntry, marks: Marks) -> Iterator[Line]:
    name = graph.name if graph.owner == "group" else f"{graph.owner}, {graph.name}"
    layers = f"   {layers_label(graph.layers)}" if numbered(graph) else ""
    yield [(f"{name}{layers}", "title")]
    inputs = [node for node in graph.nodes if node.kind == "input"]
    yield [(f"{INDENT}takes {', '.join(node.id for node in inputs)}", "dim")]
    place = ""
    for node in graph.nodes:
        if not node.code:
            continue
        here = _place(node)
        if here != place and node.kind == "call":
            place = here
            yield [(f"{INDENT}# {here}", "dim")]
        for line in node.code.splitlines():
            yield [(INDENT + line, marks.style(node))]


def _place(node: NodeEntry) -> str:
    """Where a node comes from, as ssm.py says it."""
    if node.role == "adapter" and len(node.jobs) == 1:
        return f"{node.site or node.module or 'between modules'}, job {node.jobs[0]} alone"
    return node.module or "between modules"


def _class_name(graph: GraphEntry) -> str:
    return graph.name[0].upper() + graph.name[1:]


def _statements(graph: GraphEntry, marks: Marks) -> Iterator[tuple[str, str]]:
    """Every line of code of a graph in its order, with its style."""
    for node in graph.nodes:
        for line in node.code.splitlines():
            yield line.strip(), marks.style(node)


def _plain_style(line: str) -> str:
    text = line.strip()
    if text.startswith("#"):
        return "dim"
    return "title" if text.startswith(("class ", "def ")) else ""
