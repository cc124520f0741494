"""Eliminate common subexpressions: compute once what is computed twice.

Reads   operators, arguments and tags of all nodes.
Writes  one node in place of those that call the same operator on the same values, for the same
        jobs.
Keeps   every value to the bit; where two become one, the gradients of what they read add up in
        another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph, is_writing
from tlora_fx.pipeline import GroupPass, Numerics, count, register
from tlora_fx.rewriting import Rewriter

#: What tells nodes apart that compute alike.
TAGS = ("role", "jobs", "site", "part", "tensor")


@register
@dataclass(frozen=True, slots=True)
class Cse(GroupPass):
    """Eliminate common subexpressions."""

    name: ClassVar[str] = "cse"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves: ClassVar[frozenset[str]] = frozenset({"token-parallel"})
    statistics: ClassVar[Mapping[str, str]] = {"merged": "nodes that repeated another"}
    preserves_numerics: ClassVar[Numerics] = "bound"

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            known: dict[Hashable, fx.Node] = {}
            rewriter = Rewriter(graph)
            for node in list(graph.nodes):
                if not _repeatable(node):
                    continue
                first = known.setdefault(_key(node), node)
                if first is not node and rewriter.bypass(node, first, f"{node.name} once"):
                    count("merged")


def _repeatable(node: fx.Node) -> bool:
    """Whether a node gives the same each time that it runs, and changes nothing."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or "val" not in node.meta:
        return False
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not drawn and not is_writing(node)


def _key(node: fx.Node) -> Hashable:
    tags = tuple(str(node.meta.get(tag)) for tag in TAGS)
    # Nodes of a graph have names of their own.
    return node.op, str(node.target), repr(node.args), repr(node.kwargs), tags
