"""One fx graph as data, and back, with the shapes that its values have."""

from __future__ import annotations

import builtins
import math
import operator
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.codec import Decoder, Encoder
from tlora_fx.ir.shapes import RUN, remember_runs

VALUE = "val"
# Methods would be looked up by name on whatever comes; traced graphs have none.
OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")
# Paths of tensors and layers: they become attributes of the generated code.
_PATH = re.compile(r"[\w-]+(\.[\w-]+)*")
OPERATORS = "torch.ops."
# Operators that reach beyond their tensors: interpreters, profilers, other processes, files.
REFUSED_SPACES = ("prim", "debugprims", "profiler", "c10d", "symm_mem")
# Text arguments of these names tell an operator which file to read or write.
FILE_ARGUMENTS = ("file", "filename", "file_name", "path", "filepath", "file_path")
# What graphs call on sizes besides operators: nothing here reads a file or runs code.
BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
# These make callables, call them, or change what they are given.
REFUSED = ("attrgetter", "itemgetter", "methodcaller", "call", "setitem", "delitem")


@dataclass(slots=True)
class NodeData:
    """A node; arguments and tags as `Encoder` writes them."""

    op: str
    name: str
    target: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class GraphData:
    """A graph.

    erased          nodes that a pass erased, of which tags still tell
    names, counts   names that were given and taken back, so that later passes make the same ones
    """

    nodes: list[NodeData]
    erased: list[NodeData]
    names: list[str]
    counts: dict[str, int]


def graph_data(graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> GraphData:
    """A graph as data.

    left_out    tags that cannot be kept are added here: "add_1: hint (my_package.Hint)"
    raises      GraphNotStorable, naming the node
    """
    return _GraphWriter(graph, encoder, left_out).data()


class _GraphWriter:
    def __init__(self, graph: fx.Graph, encoder: Encoder, left_out: list[str]) -> None:
        self.graph, self.encoder, self.left_out = graph, encoder, left_out
        self.indices = {node: index for index, node in enumerate(graph.nodes)}
        self.erased: dict[fx.Node, int] = {}
        self.erased_data: list[NodeData] = []

    def data(self) -> GraphData:
        nodes = [self._node(node) for node in self.graph.nodes]
        names = self.graph._graph_namespace
        live = {node.name for node in self.graph.nodes}
        known = sorted(names._used_names - live)
        return GraphData(nodes, self.erased_data, known, dict(names._base_count))

    def _node(self, node: fx.Node) -> NodeData:
        data = NodeData(node.op, node.name, _target_out(node))
        try:
            data.args = self.encoder.encode(list(node.args), self._argument)
            if node.kwargs:
                data.kwargs = self.encoder.encode(dict(node.kwargs), self._argument)
        except GraphNotStorable as error:
            error.add_note(f"in the arguments of {node.name}")
            raise
        data.meta = self._meta(node)
        return data

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        tags: dict[str, Any] = {}
        for tag, value in node.meta.items():
            if tag == RUN:
                continue
            try:
                tags[tag] = self.encoder.encode(value, self._mentioned)
            except GraphNotStorable as error:
                if tag == VALUE:
                    error.add_note(f"in the value of {node.name}")
                    raise
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                self.left_out.append(f"{node.name}: {tag} ({kind})")
        return tags

    def _argument(self, node: fx.Node) -> Any:
        if node not in self.indices:
            raise GraphNotStorable(
                "a node reads a node of another graph", found=node.name, help="lint the graph"
            )
        return {"node": self.indices[node]}

    def _mentioned(self, node: fx.Node) -> Any:
        """A node in a tag: one of the graph, or one that a pass erased and still tells of."""
        if node in self.indices:
            return {"node": self.indices[node]}
        if node not in self.erased:
            data = NodeData(node.op, node.name, _target_out(node))
            self.erased[node] = len(self.erased_data)
            self.erased_data.append(data)
            data.meta = self._meta(node)
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


def graph_of(data: GraphData, decoder: Decoder) -> fx.Graph:
    """The graph of its data, with its values."""
    graph = _GraphReader(data, decoder).graph
    if len(graph.nodes):
        remember_runs(graph)
    return graph


class _GraphReader:
    def __init__(self, data: GraphData, decoder: Decoder) -> None:
        self.decoder = decoder
        self.graph, scrap = fx.Graph(), fx.Graph()
        self.nodes: list[fx.Node] = []
        for item in data.nodes:
            self.nodes.append(self._make(self.graph, item))
        self.erased = [self._make(scrap, item) for item in data.erased]
        pairs = zip([*self.nodes, *self.erased], [*data.nodes, *data.erased], strict=True)
        for node, item in pairs:
            for tag, value in item.meta.items():
                node.meta[tag] = decoder.decode(value, self._find)
        names = self.graph._graph_namespace
        names._used_names.update(data.names)
        names._base_count.clear()
        names._base_count.update(data.counts)

    def _make(self, graph: fx.Graph, item: NodeData) -> fx.Node:
        if not _fits(item.op, item.target):
            raise GraphFileNotReadable(
                "the graph file holds a node that no graph of ours has",
                node=item.name,
                expected=f"one of {', '.join(OPS)}, of a plain name",
                found=f"{item.op} {item.target}",
                help="the file is damaged, or something else wrote it",
            )
        args = tuple(self.decoder.decode(item.args, self._find))
        kwargs = self.decoder.decode(item.kwargs, self._find) or {}
        target = target_of(item.target) if item.op == "call_function" else item.target
        node = graph.create_node(item.op, target, args, kwargs, item.name)
        if graph is self.graph and node.name != item.name:
            raise GraphFileNotReadable(
                "two nodes of the graph file have one name",
                found=item.name,
                help="the file is damaged",
            )
        return node

    def _find(self, kind: str, index: int) -> fx.Node:
        return (self.nodes if kind == "node" else self.erased)[index]


# What nodes call, as text, and back: operators only, looked up by name and never evaluated.


def target_text(target: Any, node: str) -> str:
    """An operator as text: "torch.ops.aten.linear.default", "operator.getitem".

    node      which node calls it, for the error
    raises    GraphNotStorable for what is no operator
    """
    if isinstance(target, torch._ops.OpOverload) and _is_pure(target):
        return OPERATORS + str(target)
    name = getattr(target, "__name__", "")
    for text in (f"{home}.{name}" for home in ("operator", "math", "builtins", "torch")):
        if _plain_function(text) is target:
            return text
    raise GraphNotStorable(
        "a graph calls something that a graph file cannot name",
        node=node,
        found=target,
        expected="an operator of torch.ops that opens no files, or one of operator or math",
        help="register it with torch.library.custom_op and call the operator",
    )


def target_of(text: str) -> Callable[..., Any]:
    """The operator of a text.

    raises    GraphFileNotReadable for what is no operator, or is not there
    """
    target = _overload(text) if text.startswith(OPERATORS) else _plain_function(text)
    if target is None:
        raise GraphFileNotReadable(
            "the graph calls an operator that is not there",
            found=text,
            help="install and import the package that registers it; operators that open files, "
            f"and those of {', '.join(REFUSED_SPACES)}, are never called"
            if text.startswith(OPERATORS)
            else "graph files name operators of torch.ops, operator and math only",
        )
    return target


def _overload(text: str) -> Callable[..., Any] | None:
    names = text.removeprefix(OPERATORS).split(".")
    if len(names) != 3:
        return None
    space, name, overload = names
    try:
        overloaded = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return (
        overloaded
        if isinstance(overloaded, torch._ops.OpOverload) and _is_pure(overloaded)
        else None
    )


def _is_pure(operation: torch._ops.OpOverload) -> bool:
    """Whether an operator keeps to the tensors that it is given, as far as its schema tells."""
    named = {item.name for item in operation._schema.arguments if "str" in str(item.type)}
    return operation.namespace not in REFUSED_SPACES and not named.intersection(FILE_ARGUMENTS)


def _plain_function(text: str) -> Callable[..., Any] | None:
    """A function of operator, math or builtins that works on numbers, or torch's on sizes."""
    home, _, name = text.partition(".")
    homes: dict[str, types.ModuleType] = {"operator": operator, "math": math}
    function: Any = None
    if home in homes and not name.startswith("_") and name not in REFUSED:
        function = getattr(homes[home], name, None)
    elif home == "builtins" and name in BUILTINS:
        function = getattr(builtins, name)
    elif home == "torch" and name.startswith("sym_"):
        function = getattr(torch, name, None)
    return function if callable(function) else None
