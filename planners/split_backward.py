"""A backward in halves: first the gradient of a stage's input, later those of its adapters.

Zero-bubble schedules fill waiting time with the second half. What torch 2.11 offers for it takes
operators of one result only, and calls no hooks of the leaves; this does the same for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = Sequence[Tensor | None]


@dataclass(slots=True, eq=False)
class Deferred:
    """Leaves whose gradients are yet to be computed.

    leaves   what is trained
    grads    for each operator at which their gradient leaves the way to the stage's input: the
             gradients of its results
    graph    of the outputs: operators written in Python do not keep it alive
    """

    leaves: list[Tensor]
    grads: dict[Node, Grads] = field(default_factory=dict)
    graph: Sequence[GradientEdge] = ()


def backward_of_input(
    outputs: Sequence[Tensor], grads: Grads | None, given: Tensor
) -> tuple[Tensor, list[Deferred]]:
    """The first half.

    outputs   what the stage computed
    grads     theirs; None for a loss
    given     the stage's input, a leaf that requires a gradient
    returns   its gradient, and what is left to do
    """
    graph = [get_gradient_edge(output) for output in outputs]
    parents = _parents([edge.node for edge in graph])
    way = _above(get_gradient_edge(given).node, parents)
    deferred = _grouped(parents, way, given)
    for group in deferred:
        group.graph = graph
    handles = [
        node.register_prehook(_keeping(group, node))
        for group in deferred
        for node in group.grads
    ]  # fmt: skip
    try:
        (found,) = torch.autograd.grad(outputs, [given], grads, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, deferred


def backward_of_weights(deferred: Iterable[Deferred]) -> None:
    """The second half: adds to the gradients of all leaves that were left."""
    for group in deferred:
        edges, grads = [], []
        for node, own in group.grads.items():
            for place, grad in enumerate(own):
                if grad is not None:
                    edges.append(GradientEdge(node, place))
                    grads.append(grad)
        # One operator may lie on the way from another: each starts from its own gradient alone.
        several = group.grads if len(group.grads) > 1 else {}
        handles = [node.register_prehook(_starting(own)) for node, own in several.items()]
        try:
            if edges:
                torch.autograd.backward(edges, grads, inputs=group.leaves)
        finally:
            for handle in handles:
                handle.remove()


def _keeping(group: Deferred, node: Node) -> Any:
    def keep(grads: Grads) -> None:
        group.grads[node] = grads

    return keep


def _starting(own: Grads) -> Any:
    return lambda _: tuple(own)


def _parents(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """For each operator below the roots those that its result went into."""
    found: dict[Node, list[Node]] = defaultdict(list)
    seen, left = set(roots), list(roots)
    while left:
        node = left.pop()
        for child, _ in node.next_functions:
            if child is None:
                continue
            found[child].append(node)
            if child not in seen:
                seen.add(child)
                left.append(child)
    return found


def _above(node: Node, parents: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """An operator and all that its result went into, at any distance."""
    found, left = {node}, [node]
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent not in found:
                found.add(parent)
                left.append(parent)
    return found


def _grouped(
    parents: Mapping[Node, Sequence[Node]], way: set[Node], given: Tensor
) -> list[Deferred]:
    """Leaves beside the way to the stage's input, together where they share an operator on it."""
    groups: list[Deferred] = []
    for node in list(parents):
        leaf = getattr(node, "variable", None)
        if not isinstance(leaf, Tensor) or leaf is given:
            continue
        made = Deferred([leaf], dict.fromkeys(_first_on(node, parents, way), ()))
        for group in [one for one in groups if one.grads.keys() & made.grads.keys()]:
            groups.remove(group)
            made = Deferred(group.leaves + made.leaves, group.grads | made.grads)
        groups.append(made)
    return groups


def _first_on(node: Node, parents: Mapping[Node, Sequence[Node]], way: set[Node]) -> list[Node]:
    """The operators on the way at which the ways to a leaf begin."""
    found: dict[Node, None] = {}
    seen, left = {node}, [node]
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent in way:
                found[parent] = None
            elif parent not in seen:
                seen.add(parent)
                left.append(parent)
    return list(found)
