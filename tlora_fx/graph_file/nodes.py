"""One fx graph as data, and back, with the shapes that its values have."""

from __future__ import annotations

import builtins
import math
import operator
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tlora_fx.errors import GraphFileNotReadable, GraphNotStorable
from tlora_fx.graph_file.codec import Decoder, Encoder
from tlora_fx.ir.shapes import RUN, remember_runs

# What nodes call, as text, and back: operators only, looked up by name and never evaluated.


OPS_targets = "torch.ops."
# Operators that reach beyond their tensors: interpreters, profilers, other processes, files.
REFUSED_SPACES = ("prim", "debugprims", "profiler", "c10d", "symm_mem")
# Text arguments of these names tell an operator which file to read or write.
FILE_ARGUMENTS = ("file", "filename", "file_name", "path", "filepath", "file_path")
# What graphs call on sizes besides operators: nothing here reads a file or runs code.
BUILTINS = ("abs", "bool", "divmod", "float", "int", "len", "max", "min", "pow", "round", "sum")
# These make callables, call them, or change what they are given.
REFUSED = ("attrgetter", "itemgetter", "methodcaller", "call", "setitem", "delitem")


def target_text(target: Any, node: str) -> str:
    """An operator as text: "torch.ops.aten.linear.default", "operator.getitem".

    node      which node calls it, for the error
    raises    GraphNotStorable for what is no operator
    """
    if isinstance(target, torch._ops.OpOverload) and _is_pure(target):
        return OPS_targets + str(target)
    name = getattr(target, "__name__", "")
    for text in (f"{place}.{name}" for place in ("operator", "math", "builtins", "torch")):
        if _known(text) is target:
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
    found = _overload(text) if text.startswith(OPS_targets) else _known(text)
    if found is None:
        raise GraphFileNotReadable(
            "the graph calls an operator that is not there",
            found=text,
            help="install and import the package that registers it; operators that open files, "
            f"and those of {', '.join(REFUSED_SPACES)}, are never called"
            if text.startswith(OPS_targets)
            else "graph files name operators of torch.ops, operator and math only",
        )
    return found


def _overload(text: str) -> Callable[..., Any] | None:
    names = text.removeprefix(OPS_targets).split(".")
    if len(names) != 3:
        return None
    space, name, overload = names
    try:
        found = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, torch._ops.OpOverload) and _is_pure(found) else None


def _is_pure(found: torch._ops.OpOverload) -> bool:
    """Whether an operator keeps to the tensors that it is given, as far as its schema tells."""
    named = {item.name for item in found._schema.arguments if "str" in str(item.type)}
    return found.namespace not in REFUSED_SPACES and not named.intersection(FILE_ARGUMENTS)


def _known(text: str) -> Callable[..., Any] | None:
    """A function of operator, math or builtins that works on numbers, or torch's on sizes."""
    place, _, name = text.partition(".")
    homes: dict[str, types.ModuleType] = {"operator": operator, "math": math}
    found: Any = None
    if place in homes and not name.startswith("_") and name not in REFUSED:
        found = getattr(homes[place], name, None)
    elif place == "builtins" and name in BUILTINS:
        found = getattr(builtins, name)
    elif place == "torch" and name.startswith("sym_"):
        found = getattr(torch, name, None)
    return found if callable(found) else None


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
