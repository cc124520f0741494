"""Eliminate dead code: erase the nodes that nobody reads.

Reads   the readers of every node.
Writes  nothing.
Keeps   every number; inputs stay, and so do the results of a site that shares its operator.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tlora_fx.ir.graph import GroupGraph, is_call, is_writing
from tlora_fx.ir.lora_sites import serves_several
from tlora_fx.pipeline import GroupPass, Numerics, count, register, rewrite_allowed


@register
@dataclass(frozen=True, slots=True)
class Dce(GroupPass):
    """Erase dead code."""

    name: ClassVar[str] = "dce"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves: ClassVar[frozenset[str]] = frozenset({"token-parallel"})
    statistics: ClassVar[Mapping[str, str]] = {"erased": "nodes that nobody read"}
    preserves_numerics: ClassVar[Numerics] = "exact"

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            for node in reversed(list(graph.nodes)):
                if _is_dead(node) and rewrite_allowed(f"erase {node.name}"):
                    graph.erase_node(node)
                    count("erased")


def _is_dead(node: fx.Node) -> bool:
    if node.users or node.op in ("placeholder", "output", "call_module"):
        return False
    source = node.args[0] if is_call(node, operator.getitem) else None
    if isinstance(source, fx.Node) and serves_several(source):
        return False
    return not is_writing(node)
