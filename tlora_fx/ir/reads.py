"""How often a row reads each parameter of a Shared Super-Model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from tlora_fx.ir.graph import HEAD, GroupGraph

# Gradients do not come through these.
_CUT = frozenset({torch.ops.aten.detach.default})


def parameter_reads(group: GroupGraph) -> Counter[str]:
    """By path, how many arguments of a row's operators are this parameter.

    The head is left out, which may run once for each chunk of a row.
    """
    counts = _reads_of(group.root)
    calls = Counter(str(node.target) for node in group.root.nodes if node.op == "call_module")
    for block in group.blocks.values():
        if block.name == HEAD:
            continue
        inside = _reads_of(block.graph)
        for layer in block.instances:
            for name, count in inside.items():
                counts[f"{layer}.{name}"] += count * calls[layer]
    return counts


def _reads_of(graph: fx.Graph) -> Counter[str]:
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "get_attr":
            users = (user for user in node.users if user.target not in _CUT)
            counts[str(node.target)] += sum(_occurrences(user, node) for user in users)
    return counts


def _occurrences(user: fx.Node, node: fx.Node) -> int:
    found = []

    def note(argument: fx.Node) -> Any:
        found.append(argument is node)
        return argument

    fx.map_arg((user.args, user.kwargs), note)
    return sum(found)
