"""One fx graph as data, and back, with the shapes that its values have."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.codec import Decoder, Encoder
from tlora_fx.graph_file.targets import target_of, target_text
from tlora_fx.ir.shapes import RUN, remember_runs

VALUE = "val"
# Methods would be looked up by name on whatever comes; traced graphs have none.
OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")
# Paths of tensors and layers: they become attributes of the generated code.
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")


def graph_data(graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> dict[str, Any]:
    """A graph as data.

    left_out    tags that cannot be kept are added here: "add_1: hint (my_package.Hint)"
    raises      GraphNotStorable, naming the node
    """
    return _Out(graph, encoder, left_out).data()


class _Out:
    def __init__(self, graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> None:
        self.graph, self.encoder, self.left_out = graph, encoder, left_out
        self.places = {node: place for place, node in enumerate(graph.nodes)}
        self.erased: dict[fx.Node, int] = {}
        self.erased_data: list[Any] = []

    def data(self) -> dict[str, Any]:
        nodes = [self._node(node) for node in self.graph.nodes]
        names = self.graph._graph_namespace
        live = {node.name for node in self.graph.nodes}
        return {
            "nodes": nodes,
            "erased": self.erased_data,
            # Names that were given and taken back, so that later passes make the same new ones.
            "names": sorted(names._used_names - live),
            "counts": dict(names._base_count),
        }

    def _node(self, node: fx.Node) -> dict[str, Any]:
        data: dict[str, Any] = {"op": node.op, "name": node.name, "target": _target_out(node)}
        try:
            data["args"] = self.encoder.encode(list(node.args), self._argument)
            if node.kwargs:
                data["kwargs"] = self.encoder.encode(dict(node.kwargs), self._argument)
        except GraphNotStorable as error:
            error.add_note(f"in the arguments of {node.name}")
            raise
        data["meta"] = self._meta(node)
        return data

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for tag, value in node.meta.items():
            if tag == RUN:
                continue
            try:
                found[tag] = self.encoder.encode(value, self._mentioned)
            except GraphNotStorable as error:
                if tag == VALUE:
                    error.add_note(f"in the value of {node.name}")
                    raise
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                self.left_out.append(f"{node.name}: {tag} ({kind})")
        return found

    def _argument(self, node: fx.Node) -> Any:
        if node not in self.places:
            raise GraphNotStorable(
                "a node reads a node of another graph", found=node.name, help="lint the graph"
            )
        return {"node": self.places[node]}

    def _mentioned(self, node: fx.Node) -> Any:
        """A node in a tag: one of the graph, or one that a pass erased and still tells of."""
        if node in self.places:
            return {"node": self.places[node]}
        if node not in self.erased:
            target = _target_out(node)
            self.erased[node] = len(self.erased_data)
            self.erased_data.append({})
            data = {"op": node.op, "name": node.name, "target": target, "args": []}
            self.erased_data[self.erased[node]] = {**data, "meta": self._meta(node)}
        return {"erased": self.erased[node]}


def _target_out(node: fx.Node) -> str:
    """What a node calls or names.

    raises    GraphNotStorable for what could not be read back
    """
    if node.op == "call_function":
        return target_text(node.target, node.name)
    if not _fits(node.op, node.target):
        raise GraphNotStorable(
            "a graph holds a node that a graph file cannot keep",
            node=node.name,
            found=f"{node.op} {node.target}",
            expected=f"one of {', '.join(OPS)}, of a plain name",
            help="call operators, and name inputs and tensors plainly",
        )
    return str(node.target)


def _fits(op: Any, target: Any) -> bool:
    """Whether a node is of a kind that graph files keep; operators are judged by their names."""
    if op not in OPS or not isinstance(target, str):
        return False
    if op == "placeholder":
        return target.isidentifier()
    return op not in ("get_attr", "call_module") or _PATH.fullmatch(target) is not None


def graph_of(data: dict[str, Any], decoder: Decoder) -> fx.Graph:
    """The graph of its data, with its values."""
    graph = _In(data, decoder).graph
    if len(graph.nodes):
        remember_runs(graph)
    return graph


class _In:
    def __init__(self, data: dict[str, Any], decoder: Decoder) -> None:
        self.decoder = decoder
        self.graph, scrap = fx.Graph(), fx.Graph()
        self.nodes: list[fx.Node] = []
        for item in data["nodes"]:
            self.nodes.append(self._make(self.graph, item))
        self.erased = [self._make(scrap, item) for item in data["erased"]]
        pairs = [*zip(self.nodes, data["nodes"], strict=True)]
        for node, item in [*pairs, *zip(self.erased, data["erased"], strict=True)]:
            for tag, value in item["meta"].items():
                node.meta[tag] = decoder.decode(value, self._find)
        names = self.graph._graph_namespace
        names._used_names.update(data["names"])
        names._base_count.clear()
        names._base_count.update(data["counts"])

    def _make(self, graph: fx.Graph, item: dict[str, Any]) -> fx.Node:
        op, target = item["op"], item["target"]
        if not _fits(op, target):
            raise GraphFileNotReadable(
                "the graph file holds a node that no graph of ours has",
                node=item["name"],
                expected=f"one of {', '.join(OPS)}, of a plain name",
                found=f"{op} {target}",
                help="the file is damaged, or something else wrote it",
            )
        args = tuple(self.decoder.decode(item["args"], self._find))
        kwargs = self.decoder.decode(item.get("kwargs"), self._find) or {}
        called = target_of(target) if op == "call_function" else target
        made = graph.create_node(op, called, args, kwargs, item["name"])
        if graph is self.graph and made.name != item["name"]:
            raise GraphFileNotReadable(
                "two nodes of the graph file have one name",
                found=item["name"],
                help="the file is damaged",
            )
        return made

    def _find(self, kind: str, place: int) -> fx.Node:
        return (self.nodes if kind == "node" else self.erased)[place]
