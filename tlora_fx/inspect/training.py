"""What a training step costs: products of matrices and attention, forward and backward.

A product's backward has one product of the same size for each factor that needs a gradient: the
frozen base costs 4·P·T (forward 2·P·T, the gradient of its input 2·P·T), a job's own tensors
6·P·T. Which values need one is carried through the graph, layer by layer: below the first adapter
nothing does. Logits are counted once, though the loss computes them again to save memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tlora_fx.inspect.cost import Cost
from tlora_fx.inspect.flops import first_tensor
from tlora_fx.inspect.meter import Meter
from tlora_fx.inspect.rows import is_branch
from tlora_fx.ir.graph import HEAD, LOSS, GroupGraph, TensorRef, is_call, output_of, placeholders
from tlora_fx.ir.lora_sites import lowered_site

DETACH = torch.ops.aten.detach.default
BANK = (".lora.a", ".lora.b")


@dataclass(frozen=True, slots=True)
class _Walked:
    """One graph, for inputs of which some need gradients.

    cost     without the adapters of lowered sites
    slopes   lowered sites with their jobs, and what one more rank costs
    out      whether the graph's value needs a gradient
    """

    cost: Cost
    slopes: list[tuple[str, tuple[str, ...], Cost]]
    out: bool


def training_cost(group: GroupGraph, meter: Meter) -> Cost:
    """Forward and backward over a row, at equal shares of tokens for all jobs."""
    walker = _Walker(group, meter)
    walker.call("", group.root, [False] * len(placeholders(group.root)))
    return walker.cost


class _Walker:
    """Walks the root and the layers that it calls; a layer is walked once for each kind of call."""

    def __init__(self, group: GroupGraph, meter: Meter) -> None:
        self.group, self.meter = group, meter
        self.share = 1 / len(group.jobs)
        self.sites = {job.name: job.sites for job in group.jobs}
        self.cost = Cost()
        self.known: dict[tuple[int, tuple[bool, ...]], _Walked] = {}

    def call(self, layer: str, graph: fx.Graph, given: Sequence[bool]) -> bool:
        """Count a graph as this layer runs it; returns whether its value needs a gradient."""
        key = (id(graph), tuple(given))
        if key not in self.known:
            self.known[key] = self._walk(graph, given)
        walked = self.known[key]
        self.cost += walked.cost
        for site, jobs, slope in walked.slopes:
            path = f"{layer}.{site}" if layer else site
            rank = sum(self.sites[job][path].rank for job in jobs)
            self.cost += slope.times(rank).share(self.share)
        return walked.out

    def _walk(self, graph: fx.Graph, given: Sequence[bool]) -> _Walked:
        learning = {
            node for node, needs in zip(placeholders(graph).values(), given, strict=True) if needs
        }
        cost = Cost()
        slopes: list[tuple[str, tuple[str, ...], Cost]] = []
        reached = _reached(graph)
        for node in graph.nodes:
            if node.op == "call_module":
                needs = self._layer(node, learning)
            else:
                needs = _trains(node) or any(n in learning for n in node.all_input_nodes)
                cost += self._node(node, learning if node in reached else set())
            if lowered_site(node) is not None:
                one = self.meter.trained(node, learning, rank=1)
                slope = one - self.meter.trained(node, learning)
                slopes.append((str(node.meta["site"]), tuple(node.meta["jobs"]), slope))
            if needs and _is_floating(node) and not is_call(node, DETACH):
                learning.add(node)
        result: Any = output_of(graph).args[0]
        return _Walked(cost, slopes, result in learning)

    def _layer(self, node: fx.Node, learning: set[fx.Node]) -> bool:
        """A layer that the root calls, or the head, whose first input is the last hidden state."""
        needs = [source in learning for source in node.args]
        if node.target != LOSS:
            block = self.group.block_of(str(node.target))
            return self.call(str(node.target), block.graph, needs)
        head = self.group.blocks[HEAD].graph
        tables = [False] * (len(placeholders(head)) - 1)
        self.call("", head, [needs[0], *tables])
        return True

    def _node(self, node: fx.Node, learning: set[fx.Node]) -> Cost:
        cost = self.meter.trained(node, learning)
        return cost.share(self.share) if is_branch(node) else cost


def _reached(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the backward comes to from the graph's value; it ends at what is detached."""
    found = set(output_of(graph).all_input_nodes)
    for node in reversed(graph.nodes):
        if node in found and not is_call(node, DETACH):
            found.update(node.all_input_nodes)
    return found


def _trains(node: fx.Node) -> bool:
    """Whether a node reads a tensor that a job trains."""
    ref = node.meta.get("tensor")
    if node.op != "get_attr" or not isinstance(ref, TensorRef):
        return False
    return ref.owner == "job" or str(node.target).endswith(BANK)


def _is_floating(node: fx.Node) -> bool:
    value = first_tensor(node.meta.get("val"))
    return value is not None and value.dtype.is_floating_point
