"""Compute once what is computed twice.

Reads   operators, arguments and tags of all nodes.
Writes  one node in place of those that call the same operator on the same values, for the same
        jobs.
Keeps   every value to the bit; where two become one, the gradients of what they read add up in
        another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tlora_fx.ir.graph import GroupGraph
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
    target: Any = node.target
    if node.op != "call_function" or "val" not in node.meta:
        return False
    tags = getattr(target, "tags", ())
    schema = getattr(target, "_schema", None)
    drawn = torch.Tag.nondeterministic_seeded in tags
    return not drawn and (schema is None or not schema.is_mutable)


def _key(node: fx.Node) -> Hashable:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _Named(id(source)))  # type: ignore[arg-type, return-value]
    tags = tuple(str(node.meta.get(tag)) for tag in TAGS)
    return node.op, str(node.target), repr(args), repr(kwargs), tags


@dataclass(frozen=True, slots=True)
class _Named:
    """A node inside an argument list, by identity."""

    number: int
