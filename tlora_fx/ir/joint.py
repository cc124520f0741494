"""The joint graph of a layer: its forward and its backward as one graph, as AOTAutograd traces it.

It is made of lowered code each time that the code is compiled. Passes of the stage `joint` rewrite
it; then it is cut into the forward and the backward that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from tlora_fx.ir.graph import Block, GroupGraph, is_call, output_of

#: Where torch's partitioner reads what is to become of a value.
POLICY = "recompute"


@dataclass(frozen=True, slots=True)
class JointGraph:
    """A joint graph.

    module     holds the graph: placeholders are the layer's inputs and tensors, then a tangent for
               each result that has a gradient; outputs are the results, then the gradients of all
               that came before the tangents, None where there is none
    block      the layer's block
    results    number of results
    """

    module: fx.GraphModule
    block: str
    results: int

    @property
    def graph(self) -> fx.Graph:
        """The graph, to be rewritten in place; new nodes get their values afterwards."""
        return self.module.graph

    @property
    def outputs(self) -> list[Any]:
        """The results, then the gradients."""
        return pytree.tree_leaves(output_of(self.graph).args[0], is_leaf=lambda one: one is None)

    def backward(self) -> set[fx.Node]:
        """The nodes that need a tangent: those of the backward alone."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                tangent = "tangents" in str(node.target)
            else:
                tangent = node.op != "output" and any(n in found for n in node.all_input_nodes)
            if tangent:
                found.add(node)
        return found

    def calls(self, *targets: Any) -> Iterator[fx.Node]:
        """The nodes that call one of these operators."""
        return (node for node in self.graph.nodes if is_call(node, *targets))

    def keep(self, node: fx.Node) -> None:
        """Keep a value from the forward to the backward, whatever the budget."""
        node.meta[POLICY] = CheckpointPolicy.MUST_SAVE

    def recompute(self, node: fx.Node) -> None:
        """Compute a value again in the backward, whatever the budget."""
        node.meta[POLICY] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = 0


def carried_inputs(group: GroupGraph, block: Block) -> tuple[int, ...]:
    """Positions of the inputs that the instances of a block get from layers before them.

    Of a block in which no job adapts anything there are none: it may need no gradient at all.
    """
    adapted = (path for job in group.jobs for path in job.sites)
    if not any(path.startswith(tuple(f"{name}." for name in block.instances)) for path in adapted):
        return ()
    layers = {name for each in group.blocks.values() for name in each.instances}
    behind: set[fx.Node] = set()
    found: set[int] = set()
    for node in group.root.nodes:
        if node.op == "call_module" and node.target in block.instances:
            given = enumerate(node.args)
            found.update(p for p, value in given if isinstance(value, fx.Node) and value in behind)
        is_layer = node.op == "call_module" and node.target in layers
        if is_layer or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    return tuple(sorted(found))


def bytes_of(node: fx.Node) -> int:
    """Bytes of a node's values; a size of the row counts as it was when the graph was traced."""
    from torch._functorch.partitioners import _size_of

    values = pytree.tree_leaves(node.meta.get("val"))
    return int(_size_of(node)) if any(isinstance(value, Tensor) for value in values) else 0
