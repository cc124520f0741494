"""Names of nodes: one name in code, dumps, errors, graph files and answers.

A name says the module and the operator: `q_proj`, `self_attn_transpose_2`, `rotary_emb_cos`; with
several jobs it begins with the job's number, as its tensors do: `j1_q_proj_lora_A`. Numbers count
equal operators of one module, so a change renames nothing far from it, and a node keeps its name
as long as it stays in its module.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import LOSS, Block, GroupGraph, JobGraph, is_call
from tlora_fx.ir.lora_sites import is_adapted, is_lowered

# Names that printed code, or fx's own, needs for something else.
TAKEN = frozenset(
    {"self", "torch", "nn", "aten", "tlora", "tlora_fx", "site", "END", "math", "operator",
     "recomputed", "absent", "inf", "nan", "NoneType", "device", "pytree", "fx_pytree"}
)  # fmt: skip
# What changes how a table is stored, not what it holds.
PASSED = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default, torch.ops.aten.mul.Tensor)
# Parts of paths that PEFT's wrappers add.
WRAPPED = ("default", "base_layer", "modules_to_save", "original_module")


def name_nodes(graphs: JobGraph | GroupGraph, anew: bool = False) -> None:
    """Name the nodes of a root and its blocks; those that are named after their module stay.

    anew    all of them, as after tracing
    """
    jobs = graphs.job_names if isinstance(graphs, GroupGraph) else []
    _name_graph(graphs.root, {}, jobs, anew)
    for block in graphs.blocks.values():
        _name_graph(block.graph, _input_names(graphs.root, block), jobs, anew)


def _name_graph(graph: fx.Graph, inputs: dict[str, str], jobs: list[str], anew: bool) -> None:
    nodes = list(graph.nodes)
    stems = [_stem(node, inputs, jobs) for node in nodes]
    kept = [
        not anew and _is_numbered(node.name, stem) for node, stem in zip(nodes, stems, strict=True)
    ]
    taken = {node.name for node, keep in zip(nodes, kept, strict=True) if keep}
    counts: dict[str, int] = {}
    for node, stem, keep in zip(nodes, stems, kept, strict=True):
        if keep:
            continue
        name, number = stem, counts.get(stem, 1)
        while name in taken:
            number += 1
            name = f"{stem}_{number}"
        counts[stem] = number
        taken.add(name)
        node.name = name
    hold_names(graph)


def _is_numbered(name: str, stem: str) -> bool:
    """Whether a name is a stem, or a stem and a number."""
    if name == stem:
        return True
    start, underscore, number = name.rpartition("_")
    return start == stem and bool(underscore) and number.isdecimal()


def hold_names(graph: fx.Graph) -> None:
    """Set a graph's used names to those of its nodes; forget names that no node has any more."""
    namespace = graph._graph_namespace
    namespace._used_names.clear()
    namespace._used_names.update(node.name for node in graph.nodes)
    namespace._base_count.clear()


def _stem(node: fx.Node, inputs: dict[str, str], jobs: list[str]) -> str:
    """A node's name but for its number, an identifier."""
    target = str(node.target)
    if node.op == "placeholder":
        plain = re.sub(r"_(default|tensor|int|dim|dtype)(_\d+)?$", r"\2", target)
        stem = inputs.get(target, plain)
    elif node.op == "get_attr":
        stem = target
    elif node.op == "call_module":
        last = target.rpartition(".")[2]
        stem = "losses" if target == LOSS else f"hidden_{last}" if last.isdigit() else last
    elif node.op == "output":
        return "output"
    else:
        stem = _called(node)
        role, names = node.meta.get("role"), list(node.meta.get("jobs") or ())
        if role == "adapter" and len(names) == 1 and names[0] in jobs and not is_lowered(node):
            stem = f"j{jobs.index(names[0])}_{stem}"
    return _identifier(stem)


@lru_cache(maxsize=4096)
def _identifier(stem: str) -> str:
    """A stem as Python takes it, and as no printed code uses it for something else."""
    stem = re.sub(r"\W", "_", stem, flags=re.ASCII) or "value"
    stem = f"v_{stem}" if stem[0].isdigit() else stem
    wrong = keyword.iskeyword(stem) or hasattr(builtins, stem) or stem in TAKEN
    return f"{stem}_" if wrong else stem


def _called(node: fx.Node) -> str:
    """An operator's value: of a linear the module's name, else module and operator."""
    operation = operation_of(node)
    linear = "linear" in operation or operation in ("embedding", "addmm")
    linear = linear or is_adapted(node)
    module = _module(_path_of(node))
    if linear and module and not module[-1].isdigit() and not operation.endswith("linears"):
        return module
    if operation.endswith("linears"):
        operation = "linears"
    return f"{module}_{operation}" if module else operation


def _path_of(node: fx.Node) -> str:
    """A node's module; of what reads a job's segment the site that it is read for."""
    own = node.meta.get("path") or node.meta.get("site")
    sites = (user.meta.get("site") for user in node.users)
    first = next(filter(None, sites), "") if node.meta.get("role") == "adapter" else ""
    return str(own or first)


@lru_cache(maxsize=4096)
def _module(path: str) -> str:
    """What a module is called: its last part, with numbers on the way and what they number."""
    return "_".join(_parts(path))


def _parts(path: str) -> Iterator[str]:
    parts = [part for part in path.split(".") if part and part not in WRAPPED]
    for index, part in enumerate(parts):
        numbered = index + 1 < len(parts) and parts[index + 1].isdigit()
        adapter = index == len(parts) - 2 and parts[-1].startswith("lora_")
        if part.isdigit() or numbered or adapter or index == len(parts) - 1:
            yield part


def operation_of(node: fx.Node) -> str:
    """Stem of a value's name: its operator; for a detached table what it holds (cos, sin)."""
    source: Any = node
    if is_call(node, torch.ops.aten.detach.default):
        source = node.args[0]
        while is_call(source, *PASSED) and not isinstance(source.args[1], fx.Node):
            source = source.args[0]
    if source.op != "call_function":
        source = node
    return str(getattr(source.target, "__name__", source.target)).partition(".")[0]


def _input_names(root: fx.Graph, block: Block) -> dict[str, str]:
    """What a layer's inputs are in the root: its running value, cos, sin."""
    calls = [n for n in root.nodes if n.op == "call_module" and n.target in block.instances]
    inputs = [node for node in block.graph.nodes if node.op == "placeholder"]
    wanted: dict[str, str] = {}
    for slot, node in enumerate(inputs):
        sources = [call.args[slot] for call in calls if slot < len(call.args)]
        if any(isinstance(n, fx.Node) and n.op == "call_module" for n in sources):
            wanted[str(node.target)] = "hidden"
        elif sources and isinstance(sources[0], fx.Node) and sources[0].op == "call_function":
            wanted[str(node.target)] = operation_of(sources[0])
    return wanted


def block_name(layers: tuple[str, ...]) -> str:
    """A readable identifier for a block: "layers_0_31", "layers_0_2_to_30"."""
    parent = layers[0].rpartition(".")[0].rpartition(".")[2]
    numbers = [layer.rpartition(".")[2] for layer in layers]
    tail = numbers[0] if len(numbers) == 1 else f"{numbers[0]}_{numbers[-1]}"
    if len(numbers) > 2 and int(numbers[-1]) - int(numbers[0]) + 1 != len(numbers):
        tail = f"{numbers[0]}_{numbers[1]}_to_{numbers[-1]}"
    return f"{parent}_{tail}"
