"""One node, or the nodes of a module: what they read, who reads them, where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tlora_fx.inspect.columns import Columns
from tlora_fx.inspect.find import Place, nodes_by_key, numbered
from tlora_fx.inspect.legend import Line, wrapped
from tlora_fx.inspect.marks import Marks
from tlora_fx.inspect.program import NodeEntry, Program
from tlora_fx.inspect.text import flop_text
from tlora_fx.inspect.wording import cut, layers_label, scaled

WIDTH = 120
NAMES = ("id", "target", "shape", "FLOP/token")
LABEL = 11
# Room for the marks of jobs.
JOBS = 10
# Nodes of a module that are shown in full; of more, only the one that costs most.
FULL = 2
# Ancestors, arguments and users that are shown.
MANY = 12


def place_lines(program: Program, place: Place, width: int = WIDTH) -> list[Line]:
    """Everything that is known of a place; no line is wider than `width` but code."""
    marks = Marks(program.jobs)
    where = f"in {place.graph.name}"
    if place.graph.owner != "group":
        where = f"in the graph of {place.graph.owner}, {place.graph.name}"
    layers = numbered(place.graph)
    where += f", the code of {layers_label(layers)}" if layers else ""
    lines: list[Line] = [[(cut(f"{place.name}   {where}", width), "title")]]
    if len(place.nodes) > 1:
        lines += [[], *_table(place.nodes, marks, width)]
    for node in _shown(place.nodes):
        lines += [[], *_node_lines(program, place, node, marks, width)]
    return lines


def _shown(nodes: Sequence[NodeEntry]) -> list[NodeEntry]:
    if len(nodes) <= FULL:
        return list(nodes)
    last_first = reversed(nodes)
    return [max(last_first, key=lambda n: (n.flop_per_token or 0, n.flop_per_length, n.launches))]


def _table(nodes: Sequence[NodeEntry], marks: Marks, width: int) -> Iterator[Line]:
    rows = [_cells(node) for node in nodes]
    columns = Columns.fitting([NAMES, *rows], width, JOBS, numbers=(3,), dispensable=(3, 2))
    yield [(columns.text(NAMES) + "jobs", "title")]
    for node, cells in zip(nodes, rows, strict=True):
        first, *rest = wrapped(marks.who(node), columns.end, width)
        yield [(columns.text(cells), marks.style(node)), *first]
        yield from rest


def _cells(node: NodeEntry) -> tuple[str, ...]:
    return (cut(node.id, 40), cut(_target(node), 36), value_text(node), cost_text(node))


def value_text(node: NodeEntry) -> str:
    """Shape and dtype of a node's value: "[1, T, 128] f32"."""
    return f"[{', '.join(map(str, node.shape))}] {node.dtype}" if node.dtype else ""


def cost_text(node: NodeEntry) -> str:
    """What a node costs a token."""
    return flop_text(node.flop_per_token, node.flop_per_length, node.flop_per_row)


def _target(node: NodeEntry) -> str:
    return node.kind if node.kind in ("tensor", "input") else node.target.removesuffix(".default")


def _node_lines(
    program: Program, place: Place, node: NodeEntry, marks: Marks, width: int
) -> Iterator[Line]:
    by_id = {other.id: other for other in place.graph.nodes}
    users = [other for other in place.graph.nodes if node.id in other.inputs]
    for line in node.code.splitlines() or [node.id]:
        yield [(line, marks.style(node))]
    times = len(place.graph.layers) or 1
    facts = [
        ("kind", f"{node.kind} {node.target}"),
        ("value", value_text(node)),
        ("role", node.role + (f", for {marks.told(node.jobs)}" if node.jobs else "")),
        ("site", node.site),
        ("FLOP/token", cost_text(node) if node.kind in ("call", "layer") else ""),
        ("bytes", scaled(node.bytes, "B") if node.bytes else ""),
        ("runs", f"{times} times, once a layer" if times > 1 else ""),
        ("source", node.source),
        ("not lowered", node.note),
    ]
    for label, told in facts:
        if told:
            yield from _labelled(label, [(word, "") for word in told.split()], width)
    yield from _others("reads", [by_id[name] for name in node.inputs], marks, width)
    yield from _others("read by", users, marks, width)
    yield from _provenance(program, node, width)


def _labelled(label: str, line: Line, width: int) -> Iterator[Line]:
    start = LABEL + 4
    first, *rest = wrapped(line, start, width)
    yield [(f"  {label:<{LABEL}}  ", "dim"), *first]
    yield from rest


def _others(label: str, nodes: Sequence[NodeEntry], marks: Marks, width: int) -> Iterator[Line]:
    """Arguments or users, a line each."""
    size = max((len(node.id) for node in nodes[:MANY]), default=0)
    for place, node in enumerate(nodes[:MANY]):
        told = "  ".join(filter(None, (_target(node), value_text(node), node.module)))
        room = max(8, width - LABEL - size - 6)
        head = f"  {label if not place else '':<{LABEL}}  "
        yield [
            (head, "dim"),
            (f"{node.id:<{size}}", marks.style(node)),
            (f"  {cut(told, room)}", ""),
        ]
    if len(nodes) > MANY:
        yield [(f"  {'':<{LABEL}}  and {len(nodes) - MANY} more", "dim")]


def _provenance(program: Program, node: NodeEntry, width: int) -> Iterator[Line]:
    """The node's key, who made it, and of what, back to the trace."""
    if not node.key:
        return
    yield from _labelled("key", [(cut(node.key, width - LABEL - 4), "")], width)
    lines = list(_chain(program, node))
    for place, (depth, told, by) in enumerate(lines[:MANY]):
        head = f"  {'made by' if not place else '':<{LABEL}}  "
        text = "  " * depth + (f"{by}, of" if depth == 0 and len(lines) > 1 else by)
        text = told if depth else text
        yield [(head, "dim"), (cut(text, width - len(head)), "")]
    if len(lines) > MANY:
        yield [(f"  {'':<{LABEL}}  and {len(lines) - MANY} more", "dim")]


def _chain(program: Program, node: NodeEntry) -> Iterator[tuple[int, str, str]]:
    """Depth, what is told, and the maker of a node and of all that it was made from."""
    alive = nodes_by_key(program)
    yield 0, "", node.made_by
    seen = {node.key}
    stack = [(1, key) for key in reversed(node.made_from)]
    while stack:
        depth, key = stack.pop()
        past = alive.get(key) or program.history.get(key)
        again = " (see above)" if key in seen else ""
        by = past.made_by if past is not None else "?"
        yield depth, f"{'  ' * (depth - 1)}{by}: {key}{again}", by
        if past is not None and key not in seen:
            stack += [(depth + 1, source) for source in reversed(past.made_from)]
        seen.add(key)
