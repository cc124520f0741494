"""Which module or node a user means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from tlora_fx.errors import UnknownNode, nearest
from tlora_fx.fingerprint import named_graphs
from tlora_fx.ir.graph import GroupGraph, under
from tlora_fx.provenance import origin_of
from tlora_fx.tracing.export import PEFT_PREFIX

#: Modules that are named where nothing comes near.
SOME = 8
_TAIL = re.compile(r"\.(?:base_layer|lora_\w+|weight|bias)(?:\..*)?$")


@dataclass(frozen=True, slots=True)
class Found:
    """A module, and the node in it that was asked for.

    module   path in the base
    others   how many other modules the name fits as well
    node     None where a module was asked for
    block    whose graph the node stands in, "" for the root
    """

    module: str
    others: int = 0
    node: fx.Node | None = None
    block: str = ""


def find_name(asked: str, modules: Mapping[str, object], group: GroupGraph) -> Found:
    """The module that a name means: a path or the end of one, a node's name, or its origin's key.

    `layers.3.mlp.up_proj`, `model.layers[3].mlp.up_proj.weight`, `layers_0_31.mlp.up_proj` and
    `layers_0_31.linear_4` all are names.

    raises    UnknownNode, with the nearest name
    """
    path = _plain(asked, group)
    if path in modules and path:
        return Found(path)
    ends = [name for name in modules if name.endswith(f".{path}")]
    if ends:
        return Found(ends[0], len(ends) - 1)
    for block, node in _nodes(group):
        if asked in _names_of(block, node):
            return Found(_module_of(block, node, group), 0, node, block)
    raise _unknown(asked, path, modules, group)


def _plain(asked: str, group: GroupGraph) -> str:
    """A name as the base writes it: without PEFT's, with one layer where several are named."""
    path = re.sub(r"\[(\d+)\]", r".\1", asked.strip()).removeprefix(PEFT_PREFIX)
    path = re.sub(r"\.(\d+)-\d+(?=\.|$)", r".\1", _TAIL.sub("", path))
    for name, block in group.blocks.items():
        if under(path, name) and path != name:
            return f"{block.instances[0]}{path[len(name) :]}"
    return path


def _nodes(group: GroupGraph) -> Iterator[tuple[str, fx.Node]]:
    for block, graph in named_graphs(group):
        for node in graph.nodes:
            yield block, node


def _names_of(block: str, node: fx.Node) -> set[str]:
    origin = origin_of(node)
    return {node.name, f"{block}.{node.name}", *([origin.key] if origin else [])}


def _module_of(block: str, node: fx.Node, group: GroupGraph) -> str:
    """The module that a node belongs to, in the first layer that runs it."""
    path = str(node.meta.get("site") or node.meta.get("path") or "").removesuffix(".base_layer")
    layer = group.blocks[block].instances[0] if block in group.blocks else ""
    if block in group.blocks and group.base.plan and layer in group.base.plan.layers:
        return f"{layer}.{path}".removesuffix(".")
    return path


def _unknown(
    asked: str, path: str, modules: Mapping[str, object], group: GroupGraph
) -> UnknownNode:
    parts = {name.rpartition(".")[2] for name in modules}
    close = nearest(path, [name for name in modules if name])
    if close is None and path.rpartition(".")[2] not in parts:
        close = nearest(path.rpartition(".")[2], parts - {""})
    close = close or nearest(asked, [node.name for _, node in _nodes(group)])
    return UnknownNode(
        "the base has no such module, and the fused graph no such node",
        found=asked,
        nearest=close,
        modules=None if close else _some(modules),
        help="name a module, such as layers.0.self_attn.q_proj, or a node of ssm.py",
    )


def _some(modules: Mapping[str, object]) -> str:
    """The first modules that end differently: what a layer is made of."""
    ends: dict[str, str] = {}
    for name in modules:
        end = name.rpartition(".")[2]
        if end and not end.isdecimal():
            ends.setdefault(end, name)
    names = list(ends.values())
    more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
    return ", ".join(names[:SOME]) + more
