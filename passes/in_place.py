"""Write operators that work in place as operators that return a new tensor.

That is the same only where nobody looks at the old memory again: the tensor was made by the model
itself, and neither it nor a view of it is read after the write, but through the write's result.
Every other write is refused, for a shared graph cannot repeat it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tlora_fx.errors import BaseNotTraceable
from tlora_fx.ir.graph import is_call

aten = torch.ops.aten


def functionalise(graph: fx.Graph, job: str) -> None:
    """Replace every operator that writes into an argument.

    job       whose graph it is, "" for the base
    raises    BaseNotTraceable, naming the operator and its source line
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if _writes(node)]:
        _replace(graph, node, order, job)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _replace(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], job: str) -> None:
    twin = _pure(node.target)
    written: Any = node.args[0] if node.args else None
    if twin is None or not isinstance(written, fx.Node):
        _refuse(node, job, "it has no form that returns a new tensor")
    owner = _memory(written)
    if owner.op != "call_function":
        _refuse(node, job, f"it writes into {owner.op} {owner.target}")
    place = order[node]
    for alias in _aliases(owner):
        old = alias is not written and order[alias] < place
        if old and any(order[user] > place for user in alias.users):
            _refuse(node, job, f"the memory that it writes is read again as {alias.name}")
    with graph.inserting_before(node):
        made = graph.call_function(twin, node.args, node.kwargs)
    made.meta = dict(node.meta)
    order[made] = place
    written.replace_all_uses_with(made, lambda user: order[user] > place)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _pure(target: Any) -> Any:
    """The operator that returns what this one writes: add_.Tensor is add.Tensor."""
    schema = target._schema
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, schema.overload_name or "default", None)
    if not name.endswith("_") or twin is None or twin._schema.is_mutable:
        return None
    names = [argument.name for argument in schema.arguments]
    return twin if [argument.name for argument in twin._schema.arguments] == names else None


def _memory(node: fx.Node) -> fx.Node:
    """The node that made the memory which this one may be a view of."""
    while _may_alias(node):
        node = node.all_input_nodes[0]
    return node


def _aliases(owner: fx.Node) -> set[fx.Node]:
    """A node and all that may be views of it."""
    found, stack = {owner}, [owner]
    while stack:
        for user in stack.pop().users:
            if user not in found and _may_alias(user) and user.all_input_nodes[0] in found:
                found.add(user)
                stack.append(user)
    return found


def _may_alias(node: fx.Node) -> bool:
    """Whether a node's result may share memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if schema is None or is_call(node, aten.dropout.default):
        return True  # getitem of a split; a dropout of rate 0 hands its input on
    return any(result.alias_info is not None for result in schema.returns)


def _refuse(node: fx.Node, job: str, found: str) -> Any:
    raise BaseNotTraceable(
        "the model writes into a tensor in place, which a shared graph cannot repeat",
        job=job or None,
        operator=node.target,
        module=node.meta.get("path") or None,
        source=node.meta.get("source"),
        found=found,
        help="write this line of the model without an in-place operator",
    )
