"""Print graphs as Python that people read and the interpreter runs.

What is printed is what trains: the Shared Super-Model executes the very text of `ssm.py`.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import HEAD, LOSS, Block, GroupGraph, JobGraph, is_call, placeholders, under
from tlora_fx.ir.lora_sites import ADD, ONE, SCALE, is_lowered, lowered_arguments, serves_several
from tlora_fx.model.saved import Requirement, requirements

HEADER = '''"""Shared Super-Model of {jobs} on {base}, written by tlora-fx.

Each class is a graph: Root calls the layers, a layer class serves all layers of its structure.
Modules own their tensors; `tlora_fx.compile` builds them and hangs them into these classes.
T is the number of tokens in the row, T0 that of the first job's, and so on.

To load it takes {needs}: `tlora_fx.load(FOLDER)`.
"""

import torch
from torch import nn

import tlora_fx.ops
{imports}
aten = torch.ops.aten
tlora = torch.ops.tlora_fx
END = 2**63 - 1
'''
OPS = "import tlora_fx.ops\n"
# A statement may be this long with its comment; where it is not, its arguments fill WIDTH.
LONGEST = 140
WIDTH = 100
INDENT = "    "
BODY = 2 * INDENT
FORWARD = f"{INDENT}def forward("
SHORT = {
    "float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16",
    "int64": "i64", "int32": "i32", "bool": "b8",
}  # fmt: skip
END = 2**63 - 1
#: In code that is to be compiled it stands for a lowered linear and the gated activation before it.
GATED = torch.ops.tlora_fx.multi_lora_gated_linear.default
#: What multi_lora_gated_linear calls an activation: of which operator, with which options.
ACTIVATIONS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "silu": (torch.ops.aten.silu.default, {}),
    "gelu_tanh": (torch.ops.aten.gelu.default, {"approximate": "tanh"}),
}
#: In code that is to be compiled, the root's method with which the loss's chunks begin.
FINISH = "finish"
#: What does the same to every row, beside operators that torch calls pointwise.
_CASTS = (torch.ops.aten.to.dtype, torch.ops.aten.type_as.default)
_NORMS = (torch.ops.aten.layer_norm.default, torch.ops.aten.rms_norm.default)
INFIX = {operator.mul: "*", operator.add: "+", operator.sub: "-", operator.floordiv: "//"}


def class_name(block: Block) -> str:
    """The class of a block: "layers_0_31" is Layers_0_31."""
    return block.name[0].upper() + block.name[1:]


def group_source(group: GroupGraph, base: str, *, compiled: bool = False) -> str:
    """The whole fused model as one Python module with a class for each graph.

    compiled   as `SuperModel.compile` compiles it (see `gated` and `ending_of`)
    """
    # The title is whatever a user called a folder: it must stay inside the docstring.
    title = " ".join(base.replace("\\", "/").replace('"', "'").split())
    required = requirements(group.graphs())
    needs = ", ".join(["torch", "tlora_fx", *(item.module for item in required)])
    head = {"needs": needs, "imports": "".join(map(_import, required))}
    parts = [HEADER.format(jobs=f"{len(group.jobs)} jobs", base=title, **head)]
    told = "from token ids to each job's loss sum"
    parts.extend(_classes(group, told, compiled=compiled))
    needed = [name for name in ("math", "operator") if re.search(rf"[( ]{name}\.", "".join(parts))]
    imports = "".join(f"import {name}\n" for name in needed)
    blocks, more = group.blocks.values(), OPS
    if any(block.recompute for block in blocks):
        more += "from tlora_fx.model.compiled import recomputed\n"
    if any(block.is_staged for block in blocks):
        more += "from tlora_fx.pipeline.joint_stage import joint\n"
    parts[0] = parts[0].replace(OPS, more, 1)
    if imports:
        parts[0] = parts[0].replace("import torch\n", f"{imports}\nimport torch\n", 1)
    return "\n\n".join(parts)


def _import(item: Requirement) -> str:
    """The line that brings what a model calls; a script that ran cannot be imported again."""
    line = f"import {item.module}  # {', '.join(item.calls)}\n"
    return f"# {line}" if item.module == "__main__" else line


def graphs_source(graphs: JobGraph | GroupGraph) -> str:
    """The graphs of one job, or of a fused group, as classes for people to read."""
    whose = "all jobs" if isinstance(graphs, GroupGraph) else graphs.name or "the base"
    return "\n\n".join(_classes(graphs, f"the root of {whose}"))


def gated(graph: fx.Graph) -> fx.Graph:
    """A graph in which a lowered linear makes the gated activation that it alone reads.

    So its kernel makes, stores and shrinks what else would be read back. Passes, dumps and costs
    see the model's own operators; returns the graph itself where there is no such linear.
    """
    found = {node: parts for node in graph.nodes if (parts := gate_of(node)) is not None}
    if not found:
        return graph
    copied, known = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        new = known[node] = copied.node_copy(node, known.__getitem__)
        if node in found:
            activation, gate, up = found[node]
            new.target = GATED
            new.args = (known[gate], known[up], activation, *new.args[1:])
    for node in found:
        product = known[node.args[0]]
        made = [product, *product.all_input_nodes]
        for one in made:
            if not one.users:
                copied.erase_node(one)
    return copied


def gate_of(node: fx.Node) -> tuple[str, fx.Node, fx.Node] | None:
    """Activation, gate and up of a lowered linear that alone reads a gated activation, or None."""
    product = node.args[0] if is_call(node, ONE) else None
    if not isinstance(product, fx.Node) or not is_call(product, torch.ops.aten.mul.Tensor):
        return None
    left, right = product.args
    for opened, up in ((left, right), (right, left)):
        activation = _activation(opened)
        if activation is None or not isinstance(up, fx.Node):
            continue
        gate: Any = opened.args[0]  # type: ignore[union-attr]
        values = [each.meta["val"] for each in (gate, up, product)]
        kinds = {(value.dtype, tuple(map(str, value.shape))) for value in values}
        if len(kinds) == len(product.users) == len(opened.users) == 1:  # type: ignore[union-attr]
            return activation, gate, up
    return None


@dataclass(frozen=True, slots=True)
class Ending:
    """Code of a root for each row between its last layer and the loss, commonly a norm.

    first   what it begins with, commonly the layer's result
    nodes   what is computed from it, and from frozen tensors
    last    what the loss reads
    """

    first: fx.Node
    nodes: frozenset[fx.Node]
    last: fx.Node


def ending_of(graphs: JobGraph | GroupGraph) -> Ending | None:
    """The end of a root with layers, None where there is none that chunks of rows could do.

    Not where jobs train something there, and not what reads more than one value.
    """
    root = graphs.root
    loss = next((n for n in root.nodes if n.op == "call_module" and n.target == LOSS), None)
    if HEAD not in graphs.blocks or loss is None:
        return None
    last: Any = loss.args[0]
    nodes, firsts, left = set[fx.Node](), set[fx.Node](), [last]
    while left:
        node = left.pop()
        if node in nodes or _is_vector_of_base(node):
            continue
        if _is_rowwise(node):
            nodes.add(node)
            left.extend(node.all_input_nodes)
        else:
            firsts.add(node)
    inner = all(user in nodes for node in nodes - {last} for user in node.users)
    if not nodes or len(firsts) != 1 or not inner or len(last.users) > 1:
        return None
    (first,) = firsts
    before, after = first.meta.get("val"), last.meta["val"]
    if not isinstance(before, torch.Tensor):
        return None
    alike = before.shape == after.shape and before.dtype == after.dtype
    return Ending(first, frozenset(nodes), last) if alike else None


def _is_vector_of_base(node: fx.Node) -> bool:
    """Whether a node reads a frozen vector or number."""
    ref = node.meta.get("tensor") if node.op == "get_attr" else None
    return ref is not None and ref.owner in ("base", "constant") and len(ref.shape) < 2


def _is_rowwise(node: fx.Node) -> bool:
    """Whether an operator does the same to every row, whatever rows stand beside it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if is_call(node, torch.ops.aten.mean.dim):
        return list(node.args[1:]) == [[-1], True]
    if is_call(node, *_NORMS):
        return len(node.args[1]) == 1  # type: ignore[arg-type]
    if node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    same = isinstance(node.meta.get("val"), torch.Tensor)
    return same and (torch.Tag.pointwise in node.target.tags or is_call(node, *_CASTS))


def _activation(node: object) -> str | None:
    """What a node's operator is called where it may open a gate."""
    for name, (target, options) in ACTIVATIONS.items():
        if isinstance(node, fx.Node) and is_call(node, target) and len(node.args) == 1:
            return name if dict(node.kwargs) == options else None
    return None


def _classes(
    graphs: JobGraph | GroupGraph, told_root: str, *, compiled: bool = False
) -> Iterator[str]:
    names = size_names(graphs)
    for block in graphs.blocks.values():
        docstring = block.instances[0]
        graph = gated(block.graph) if compiled else block.graph
        if len(block.instances) > 1:
            docstring += f" to {block.instances[-1]}, {len(block.instances)} layers"
        code = class_source(class_name(block), docstring, graph, names)
        marks = [f"{INDENT}@recomputed\n"] if block.recompute else []
        if block.is_staged:
            given = [*map(repr, block.joint), f"budget={block.budget}"]
            marks.append(f"{INDENT}@joint({', '.join(given)})\n")
        yield code.replace(FORWARD, f"{''.join(marks)}{FORWARD}", 1)
    ending = ending_of(graphs) if compiled else None
    yield class_source("Root", told_root, graphs.root, names, ending)


def class_source(
    name: str,
    docstring: str,
    graph: fx.Graph,
    sizes: dict[str, str],
    ending: Ending | None = None,
) -> str:
    """One graph as a class with a forward.

    sizes    what the sizes of a row are called (see size_names)
    ending   becomes a method, FINISH, for the loss to call on its chunks
    """
    printer = _Printer(graph, sizes, ending)
    parameters = ["self", *(node.name for node in placeholders(graph).values())]
    head = _filled(FORWARD, parameters, "):")
    lines = [f"class {name}(nn.Module):", f'{INDENT}"""{docstring}"""', "", *head]
    lines.extend(BODY + line for line in printer.lines())
    if ending is not None:
        printer = _Printer(graph, sizes)
        printer.device = f"{ending.first.name}.device"
        lines += ["", f"{INDENT}def {FINISH}(self, {ending.first.name}):"]
        nodes = [node for node in graph.nodes if node in ending.nodes]
        lines.extend(BODY + line for line in printer.statements(nodes))
        lines.append(f"{BODY}return {ending.last.name}")
    return "\n".join(lines) + "\n"


def statements(graph: fx.Graph, sizes: dict[str, str]) -> dict[fx.Node, tuple[str, str]]:
    """Name of each node in the code, and its statement; "" for inputs and tensors.

    sizes    what the sizes of a row are called (see size_names)
    """
    printer = _Printer(graph, sizes)
    return {node: (node.name, "\n".join(printer.code(node))) for node in graph.nodes}


def size_names(group: JobGraph | GroupGraph) -> dict[str, str]:
    """Names for the symbols of a row: T tokens, or B lines of S tokens; one a job."""
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
                names[str(size)] = f"{letters[0] or letters[1]}{node.args[2]}"
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
    """Prints a graph's statements, those of an ending left out."""

    def __init__(
        self, graph: fx.Graph, sizes: dict[str, str], ending: Ending | None = None
    ) -> None:
        self.graph, self.sizes, self.ending = graph, sizes, ending
        first = next((n for n in graph.nodes if n.op == "placeholder"), None)
        self.device = f"{first.name}.device" if first is not None else "self.device"
        self.site = ""

    def lines(self) -> Iterator[str]:
        """The statements of forward, each with the shape of what it makes."""
        left_out = frozenset() if self.ending is None else self.ending.nodes
        yield from self.statements(node for node in self.graph.nodes if node not in left_out)

    def statements(self, nodes: Iterable[fx.Node]) -> Iterator[str]:
        """The statements of some nodes, with a line where they come from another module."""
        above = ""
        for node in nodes:
            here = _place(node)
            if here and here != above and node.op == "call_function":
                above = here
                yield f"# {here}"
            yield from self.code(node)

    def code(self, node: fx.Node) -> list[str]:
        """A node's statement, none for inputs and tensors."""
        if node.op in ("placeholder", "get_attr"):
            return []
        if node.op == "output":
            return [f"return {self.show(node.args[0])}"]
        self.site = _site_of(node)
        site = [f"site = {attribute('self', self.site)}"] if self.site else []
        return site + self._statement(node)

    def _statement(self, node: fx.Node) -> list[str]:
        """A node as an assignment, over several lines where it is long."""
        # What several sites share hands each its own result, which says its shape.
        shape = "" if serves_several(node) else describe(node.meta.get("val"), self.sizes)
        note = f"  # {shape}" if shape else ""
        target, call = node.name, self._called(node)
        if call is None:
            return [f"{target} = {self._expression(node)}{note}"]
        args = [self.show(arg) for arg in node.args]
        args += [f"{name}={self.show(value)}" for name, value in node.kwargs.items()]
        if self.ending is not None and self.ending.last in node.args:
            args.append(f"{FINISH}=self.{FINISH}")
        return _filled(f"{target} = {call}(", args, ")", note, len(BODY))

    def show(self, value: Any) -> str:
        """A value as an expression."""
        if isinstance(value, fx.Node):
            if self.ending is not None and value is self.ending.last:
                return self.ending.first.name
            return self._tensor(str(value.target)) if value.op == "get_attr" else value.name
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.show(item) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, torch.device):
            return self.device
        if isinstance(value, float) and math.isnan(value):
            return "float('nan')"
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f"float('{value}')"
        return "END" if type(value) is int and value == END else repr(value)

    def _tensor(self, path: str) -> str:
        """A tensor of the module; inside a site's call relative to the site."""
        if self.site and path.startswith(f"{self.site}."):
            return attribute("site", path[len(self.site) + 1 :])
        return attribute("self", path)

    def _called(self, node: fx.Node) -> str | None:
        """What a node calls, None for what Python has a sign for."""
        if node.op == "call_module":
            return attribute("self", str(node.target))
        signs = (operator.getitem, torch.ops.aten.sym_size.int, *INFIX)
        return None if node.target in signs else _operator(node.target)  # type: ignore[arg-type]

    def _expression(self, node: fx.Node) -> str:
        left, right = self.show(node.args[0]), self.show(node.args[1])
        if node.target is operator.getitem:
            return f"{left}[{right}]"
        if is_call(node, torch.ops.aten.sym_size.int):
            return f"{left}.shape[{right}]"
        return f"{left} {INFIX[node.target]} {right}"  # type: ignore[index]


def _place(node: fx.Node) -> str:
    """Where a node comes from: its module, or the site and the job that it serves alone."""
    jobs = node.meta.get("jobs") or ()
    if is_call(node, torch.ops.aten.sym_size.int):
        return ""
    if node.meta.get("role") != "adapter" or is_lowered(node) or is_call(node, GATED) or not jobs:
        return str(node.meta.get("path") or "between modules")
    users = (user.meta.get("site") for user in node.users)
    site = node.meta.get("site") or next(filter(None, users), "")
    return f"{site}, job {jobs[0]} alone"


def _site_of(node: fx.Node) -> str:
    """The module whose adapters a node applies, or that holds all of them; "" for all else."""
    if serves_several(node):
        path = str(node.meta.get("path") or "")
        banks = lowered_arguments(node)["a"]
        return path if path and all(under(str(bank.target), path) for bank in banks) else ""
    if not is_call(node, ONE, ADD, SCALE, GATED):
        return ""
    bank: Any = lowered_arguments(node)["a"]
    return str(bank.target).removesuffix(".lora.a") if bank.op == "get_attr" else ""


def _filled(head: str, words: list[str], tail: str, note: str = "", before: int = 0) -> list[str]:
    """A call on one line where it fits, else its arguments on lines of their own.

    before    columns that stand before every line
    """
    line = f"{head}{', '.join(words)}{tail}{note}"
    if before + len(line) <= LONGEST:
        return [line]
    margin = " " * (len(head) - len(head.lstrip()))
    lines = [margin + INDENT]
    for word in words:
        if lines[-1].strip() and before + len(lines[-1]) + len(word) + 1 > WIDTH:
            lines.append(margin + INDENT)
        lines[-1] += f"{word}, "
    return [head + note, *(line.rstrip() for line in lines), margin + tail]


def attribute(owner: str, path: str) -> str:
    """A module's or tensor's path below `owner` as Python: `layers.0` is `self.layers[0]`.

    Of an nn.Sequential, `0.weight` is `self._modules["0"].weight`. A name that Python does not take
    behind a dot, such as `in` of an nn.ModuleDict, is read by getattr.
    """
    first, *others = path.split(".")
    text = f'{owner}._modules["{first}"]' if first.isdecimal() else _member(owner, first)
    for name in others:
        text = f"{text}[{name}]" if name.isdecimal() else _member(text, name)
    return text


def _member(owner: str, name: str) -> str:
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{owner}.{name}" if plain else f"getattr({owner}, {name!r})"


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
