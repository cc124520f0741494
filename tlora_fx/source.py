"""Print graphs as Python that people read and the interpreter runs.

What is printed is what trains: the Shared Super-Model executes the very text of `ssm.py`.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tlora_fx.graph import Block, GroupGraph, is_call, placeholders

HEADER = '''"""Shared Super-Model of {jobs} on {base}, written by tlora-fx.

Each class is a graph: ROOT calls the layers, a layer class serves all layers of its structure.
Modules own their tensors; `tlora_fx.compile` builds them and hangs them into these classes.
"""

import torch
from torch import nn

import tlora_fx.ops

aten = torch.ops.aten
tlora = torch.ops.tlora_fx
'''
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16",
    "int64": "i64", "int32": "i32", "bool": "b8",
}  # fmt: skip
INFIX = {operator.mul: "*", operator.add: "+", operator.sub: "-", operator.floordiv: "//"}


def class_name(block: Block) -> str:
    """The class of a block: "layers_0_31" is Layers_0_31."""
    return block.name[0].upper() + block.name[1:]


def group_source(group: GroupGraph, base: str) -> str:
    """The whole fused model as one Python module with a class for each graph."""
    names = size_names(group)
    parts = [HEADER.format(jobs=f"{len(group.jobs)} jobs", base=base)]
    for block in group.blocks.values():
        told = block.instances[0]
        if len(block.instances) > 1:
            told += f" to {block.instances[-1]}, {len(block.instances)} layers"
        parts.append(class_source(class_name(block), told, block.graph, names))
    parts.append(class_source("Root", "from token ids to each job's loss sum", group.root, names))
    return "\n\n".join(parts)


def class_source(name: str, told: str, graph: fx.Graph, sizes: dict[str, str]) -> str:
    """One graph as a class with a forward."""
    printer = _Printer(graph, sizes)
    inputs = ", ".join(["self", *(printer.names[n] for n in placeholders(graph).values())])
    lines = [f"class {name}(nn.Module):", f'    """{told}"""', "", f"    def forward({inputs}):"]
    lines.extend("        " + line for line in printer.lines())
    return "\n".join(lines) + "\n"


def size_names(group: GroupGraph) -> dict[str, str]:
    """What people call the symbols of a row: T tokens, or B lines of S tokens; one a job."""
    names: dict[str, str] = {}
    tables = placeholders(group.root)
    shape = tables["input_ids"].meta["val"].shape
    letters = ("", "T") if group.form == "packed" else ("B", "S")
    for size, letter in zip(shape, letters, strict=True):
        if letter:
            names[str(size)] = letter
    for graph in group.graphs():
        for node in graph.nodes:
            if is_call(node, torch.ops.tlora_fx.segment_read.default):
                size = node.meta["val"].shape[node.args[3]]
                names[str(size)] = f"T{node.args[2]}" if group.form == "packed" else f"B{node.args[2]}"
    return names


def describe(value: Any, sizes: dict[str, str]) -> str:
    """Shape and dtype of a value: "[1, T, 4096] bf16"."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(sizes.get(str(size), str(size)) for size in value.shape)
        kind = str(value.dtype).removeprefix("torch.")
        return f"[{shape}] {SHORT.get(kind, kind)}"
    if isinstance(value, (tuple, list)):
        return ", ".join(describe(item, sizes) for item in value)
    return ""


class _Printer:
    """Names a graph's values and prints its statements."""

    def __init__(self, graph: fx.Graph, sizes: dict[str, str]) -> None:
        self.graph, self.sizes = graph, sizes
        self.taken: set[str] = {"self", "torch", "nn", "aten", "tlora", "tlora_fx"}
        self.names = {node: self._name(node) for node in graph.nodes}
        first = next((n for n in graph.nodes if n.op == "placeholder"), None)
        self.device = f"{self.names[first]}.device" if first is not None else "self.device"

    def lines(self) -> Iterator[str]:
        """The statements of forward, each with the shape of what it makes."""
        module = ""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                continue
            if node.op == "output":
                yield f"return {self.show(node.args[0])}"
                return
            here = node.meta.get("path", "")
            if here != module and node.op == "call_function":
                module = here
                yield f"# {here or 'root'}"
            text = f"{self.names[node]} = {self._call(node)}"
            shape = describe(node.meta.get("val"), self.sizes)
            yield f"{text}  # {shape}" if shape else text

    def show(self, value: Any) -> str:
        """A value as an expression."""
        if isinstance(value, fx.Node):
            return f"self.{attribute(str(value.target))}" if value.op == "get_attr" else self.names[value]
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.show(item) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, float) and value != value:
            return "float('nan')"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f"float('{value}')"
        return repr(value)

    def _call(self, node: fx.Node) -> str:
        args = [self.show(arg) for arg in node.args]
        if node.op == "call_module":
            return f"self.{attribute(str(node.target))}({', '.join(args)})"
        if node.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        if node.target in INFIX:
            return f"{args[0]} {INFIX[node.target]} {args[1]}"
        if is_call(node, torch.ops.aten.sym_size.int):
            return f"{args[0]}.shape[{args[1]}]"
        args += [f"{name}={self.show(value)}" for name, value in node.kwargs.items()]
        return f"{_operator(node.target)}({', '.join(args)})"

    def _name(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            wanted = re.sub(r"_(default|tensor|int|dim|dtype)(_\d+)?$", r"\2", str(node.target))
        elif node.op == "call_module":
            wanted = "hidden" if not str(node.target).startswith("loss") else "losses"
        else:
            module = str(node.meta.get("path", "")).rpartition(".")[2]
            operation = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
            linear = "linear" in operation or operation in ("embedding", "addmm")
            wanted = module if linear and module and not module.isdigit() else operation
        wanted = re.sub(r"\W", "_", wanted).strip("_") or "value"
        if wanted[0].isdigit() or keyword.iskeyword(wanted):
            wanted = f"v_{wanted}"
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}_{number}"
        self.taken.add(name)
        return name


def attribute(path: str) -> str:
    """A module or tensor path as Python: `model.layers.0` is `model.layers[0]`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", path)


def _operator(target: Callable[..., Any]) -> str:
    name = str(target)
    if name.startswith("aten."):
        return name
    if name.startswith("tlora_fx."):
        return "tlora." + name.removeprefix("tlora_fx.")
    module = getattr(target, "__module__", "")
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{name}"
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', name)}"
