"""Write each node's FLOPs beside it."""

from dataclasses import dataclass
from typing import ClassVar

from tlora_fx.inspect.cost import cost_of
from tlora_fx.ir.graph import GroupGraph, note
from tlora_fx.pipeline import GroupPass, Numerics, count, register


@register
@dataclass(frozen=True, slots=True)
class CountFlops(GroupPass):
    """Note what each node costs."""

    name: ClassVar[str] = "count-flops"
    requires: ClassVar[frozenset[str]] = frozenset({"fuse-backbone"})
    preserves_numerics: ClassVar[Numerics] = "exact"
    statistics: ClassVar = {"noted": "nodes"}

    def run(self, group: GroupGraph) -> None:
        for graph in group.graphs():
            for node in graph.nodes:
                if node.op == "call_function":
                    note(node, "author's FLOP", str(cost_of(node, group).flop))
                    count("noted")
